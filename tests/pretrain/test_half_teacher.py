"""Check that a half-precision run keeps its teacher in half precision, with equal results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import drawn_batch, mean_coefficients, terms_of
from support.operators import Operators
from support.results import state
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM

import pretrain.evaluation.heads
import pretrain.train
from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.model.distillation import Distillation
from pretrain.model.teacher import parameters_sha256
from pretrain.objectives.distilbert import DistilBert
from pretrain.run import Run, build
from pretrain.train import train

CASTS = ("aten._to_copy.default", "aten.to.dtype")
Make = Callable[..., Any]


@pytest.fixture
def settings(teacher_folder: Path, make_settings: Make) -> dict[str, Any]:
    values: dict[str, Any] = make_settings(
        teacher_folder,
        student={"num_layers": 2},
        train={"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 4, "precision": "bf16"},
        evaluation={"every": 1},
    )()
    return values


@pytest.fixture
def batch(packed_ids: Tensor) -> Batch:
    return drawn_batch(packed_ids)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Return the runs that `train` built."""
    found: list[Run] = []

    def keeping(*arguments: Any, **keywords: Any) -> Run:
        found.append(build(*arguments, **keywords))
        return found[-1]

    monkeypatch.setattr(pretrain.train, "build", keeping)
    return found


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_teacher_has_the_runs_dtype_and_the_digest_of_its_folder(
    precision: str, dtype: torch.dtype, settings: dict[str, Any], runs: list[Run], tmp_path: Path
) -> None:
    settings["train"]["precision"] = precision
    config = RunConfig.model_validate(settings)
    train(config, stop_after=1)
    train(config)  # which refuses another teacher than the checkpoint's
    assert len(runs) == 2
    exact = parameters_sha256(BertForMaskedLM.from_pretrained(tmp_path / "teacher"))
    for step, run in enumerate(runs, 1):
        teacher = run.teacher
        assert teacher is not None and teacher.sha256 == exact
        assert {p.dtype for p in teacher.model.parameters()} == {dtype}
        assert {p.dtype for p in run.student.parameters()} == {torch.float32}
        assert teacher.model.cls.predictions.decoder.weight is (
            teacher.model.bert.embeddings.word_embeddings.weight
        )
        assert state(settings, step)["teacher"]["sha256"] == exact
        assert run.state.evaluation["kl"] > 0


def test_a_step_with_a_half_teacher_is_close_to_fp64(batch: Batch) -> None:
    """Compare with fp64 to 2e-2; most of the error is the student's autocast."""
    objective = DistilBert()

    def step(
        student: DistilBertForMaskedLM, teacher: BertForMaskedLM, *, autocast: bool
    ) -> tuple[Tensor, Tensor]:
        module = Distillation(student, teacher.requires_grad_(False), terms_of(objective), pad_id=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, sums = module(batch, mean_coefficients(module.terms, batch))
        loss.backward()
        gradients = [p.grad.double().flatten() for p in student.parameters() if p.grad is not None]
        return torch.cat([loss.detach()[None], sums]).double(), torch.cat(gradients)

    exact, true = step(tiny_distilbert().double(), tiny_bert().double(), autocast=False)
    half = tiny_bert().bfloat16()
    for autocast, tolerance in ((True, 2e-2), (False, 5e-3)):  # without, only the teacher rounds
        found, gradient = step(tiny_distilbert(), half, autocast=autocast)
        assert ((found - exact).abs() <= tolerance * exact.abs()).all()
        assert 0 < (gradient - true).norm() <= tolerance * true.norm()


def test_the_teacher_is_not_cast_during_a_step(batch: Batch) -> None:
    def casts(teacher: BertForMaskedLM | None) -> int:
        module = Distillation(tiny_distilbert(), teacher, terms_of(DistilBert()), pad_id=0)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Operators() as called:
            module.encode(batch)
        pairs = [(c.args[0], c.result) for c in called.calls if c.name in CASTS]
        floating = [pair for pair in pairs if all(x.is_floating_point() for x in pair)]
        return sum(given.dtype != result.dtype for given, result in floating)

    alone = casts(None)
    assert 0 < alone == casts(tiny_bert().bfloat16()) < casts(tiny_bert())


def test_evaluate_folder_computes_in_fp32(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(RunConfig.model_validate(settings))
    dtypes: list[torch.dtype] = []
    inner = pretrain.evaluation.heads.encode

    def noting(model: Any, *arguments: Any) -> Any:
        dtypes.append(model.dtype)
        return inner(model, *arguments)

    monkeypatch.setattr(pretrain.evaluation.heads, "encode", noting)
    run = settings["output"]
    found = pretrain.evaluation.heads.evaluate_heads(
        [run], Path(settings["shards"]), teacher=settings["teacher"], rows=8, warn=print
    )
    assert set(dtypes) == {torch.float32} and len(dtypes) >= 2
    known = state(settings, 2)["evaluation"]["loss"]
    assert found[run]["loss"].value == pytest.approx(known, rel=2e-2)

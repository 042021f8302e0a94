"""Hold every objective to one contract: its terms, an exact resume, ranks, and the export.

A new paper is a row of CASES, and its formula a function of one document's tokens in REFERENCES.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from support import rank_work, ranks, task_data
from support.batches import drawn_batch
from support.results import weights
from support.runs import RECIPE, history, start, step_folder
from support.task_data import run_of
from support.tiny import NARROW, as_teacher, save_teacher, tiny_bert
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from data_prep.disk.json_files import parse_object
from pretrain.config import RunConfig
from pretrain.contracts.terms import Sizes, VocabularyTerm
from pretrain.export.export import export
from pretrain.model.distillation import Distillation
from pretrain.model.families import shape_of
from pretrain.model.loading import reinitialise
from pretrain.model.model_config import Student
from pretrain.model.student import build_student
from pretrain.objectives.known import OBJECTIVES
from pretrain.objectives.minilm import MiniLM
from pretrain.objectives.objective import Objective
from pretrain.objectives.tinybert import TinyBert

ZERO = (pytest.mark.slow, ranks.needs_deepspeed)
CUT = {"architecture": "same", "init": [0, 1]}  # of a task's teacher of 4 layers
MODEL = {
    k.replace("num_layers", "num_hidden_layers"): v
    for k, v in NARROW.items()
    if v not in ("same", "random")
}


class Case(NamedTuple):
    """Hold the keys of a run, and what is true of it."""

    objective: dict[str, Any]
    student: dict[str, Any] | None = NARROW  # None: a run of `model:`
    task: bool = False
    exported: Any = AutoModel
    rows: int = 4  # of a step
    unreached: tuple[str, ...] = ()  # parts of the names of what no term reaches


CASES = {
    "distilbert": Case({"cosine": 0.5}, {"num_layers": 2}, exported=AutoModelForMaskedLM),
    "distilbert narrow": Case(
        {"name": "distilbert", "cosine": 0.0}, NARROW, exported=AutoModelForMaskedLM
    ),
    "minilm": Case({"relation_heads": 8}, unreached=("cls.", "layer.1.output")),
    "minilm 1": Case({"name": "minilm", "version": 1}, unreached=("cls.", "layer.1.output")),
    "tinybert": Case({"embedding": 2.0}, unreached=("cls.",)),
    "embedding": Case({"mse": 0.5}, rows=24, unreached=("cls.",)),
    "mlm": Case({}, None, exported=AutoModelForMaskedLM),
    "finetune": Case({}, None, True, AutoModelForSequenceClassification),
    "kd": Case({"soft": 0.7}, CUT, True, AutoModelForSequenceClassification),
    "pkd": Case({"patience": 10.0}, CUT, True, AutoModelForSequenceClassification),
    "theseus": Case({"steps": 3}, CUT, True, AutoModelForSequenceClassification),
    "insights": Case(
        {"logits": True, "hidden": True, "embedding": True, "layers": [1, 3]},
        CUT,
        True,
        AutoModelForSequenceClassification,
    ),
}


def test_the_table_has_every_objective() -> None:
    assert {str(kind.model_fields["name"].default) for kind in OBJECTIVES} <= CASES.keys()


def settings(case: str, folder: Path, run_config: Callable[..., Any]) -> dict[str, Any]:
    """Return the config of a run of four steps, each in one micro-batch."""
    found, teacher = CASES[case], folder / "teacher"
    sections: dict[str, Any] = {**RECIPE, "objective": {"name": case, **found.objective}}
    sections["evaluation"] = {"every": 2, "rows": 8}
    sections["train"] = {**RECIPE["train"], "global_batch_size": found.rows}
    sections["train"]["micro_batch_size"] = found.rows
    if found.task:
        task_data.make(folder, "classification")
        task_data.save_model(teacher, "bert", "classification", num_hidden_layers=4)
        made = run_of(folder, "classification", **sections | {"student": {}})
    else:
        save_teacher(teacher)
        made = run_config(folder / "run", **sections)
    del made["student"]
    if found.student is None:
        return made | {"model": {"init": str(teacher)} if found.task else MODEL}
    return made | {"teacher": str(teacher), "student": found.student}


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_config: Callable[..., Any],
) -> tuple[Case, dict[str, Any]]:
    """Return an undisturbed run of each case."""
    values = settings(request.param, tmp_path_factory.mktemp("whole"), run_config)
    start(values)
    return CASES[request.param], values


def shape(folder: Path | str) -> Any:
    sizes = Sizes.of(parse_object((Path(folder) / "config.json").read_bytes()))
    assert sizes is not None
    return sizes.shape._replace(vector_size=sizes.hidden_size)


def test_a_run_resumes_bit_for_bit_and_its_loss_is_that_of_its_parts(
    whole: tuple[Case, dict[str, Any]], tmp_path: Path
) -> None:
    _, values = whole
    halves = {**values, "output": str(tmp_path / "halves")}
    start(halves, stop_after=2)
    start(halves)
    entries = history(values["output"])
    assert history(halves["output"]) == entries
    folders = [step_folder(run["output"], 4) for run in (values, halves)]
    files = sorted(f.relative_to(folders[0]) for f in folders[0].rglob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        ours, theirs = (load_file(folder / file) for folder in folders)
        assert ours.keys() == theirs.keys()
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items()), file

    objective = RunConfig.model_validate(values).objective
    shapes = (
        shape(folders[0] / "student"),
        shape(values["teacher"]) if "teacher" in values else None,
    )
    terms, parts = objective.terms(*shapes), objective.parts
    assert [(t.over, t.needs_teacher) for t in terms] == [(p.over, p.teacher) for p in parts]
    needs = objective.needs
    assert needs.compares == any(term.needs_teacher for term in terms)
    assert needs.logits == any(isinstance(term, VocabularyTerm) for term in terms)
    assert [e["step"] for e in entries if e["kind"] == "train"] == [1, 2, 3, 4]
    # Validation of an LM head has figures of its own, and none of a term's.
    summed = [e for e in entries if all(term.name in e for term in terms) and "accuracy" not in e]
    assert len(summed) >= 4 and (len(summed) == 7 or needs.logits or needs.head)
    for entry in summed:
        loss = sum(term.weight(0) * entry[term.name] for term in terms)
        assert entry["loss"] == pytest.approx(loss, rel=1e-6)
    assert all(max(entry[term.name] for entry in summed) > 0 for term in terms)
    notes = [parse_object((f / "state.json").read_bytes())["notes"] for f in folders]
    assert notes[0] == notes[1]  # the second start added none

    # The modules that a term brings are trained: their tensors change, and AdamW knows them.
    adapters = objective.adapters(*shapes).state_dict()
    before, after = (
        load_file(step_folder(values["output"], step) / "adapters.safetensors") if adapters else {}
        for step in (3, 4)
    )
    assert adapters.keys() <= after.keys()
    for name in adapters:
        assert not before[name].equal(after[name])
        assert f"adapters.{name}/exp_avg" in weights(values, 4)


# Ranks differ in what they reduce: one objective of each kind is fast.
FAST = ("distilbert narrow", "tinybert", "minilm")
RANKS = [
    *(pytest.param(case, 0, marks=[] if case in FAST else pytest.mark.slow) for case in CASES),
    *(pytest.param(case, stage, marks=ZERO) for case in FAST for stage in (1, 2)),
]


@pytest.mark.parametrize(("case", "stage"), RANKS)
def test_two_ranks_train_as_one(
    case: str, stage: int, tmp_path: Path, run_config: Callable[..., Any]
) -> None:
    """Check the sums over ranks, and that neither optimizer waits for what no term reaches."""
    values = settings(case, tmp_path, run_config)
    values["train"] |= {"micro_batch_size": CASES[case].rows // 2}
    if CASES[case].student is not None:
        values["student"] = {**values["student"], "dropout": 0.0, "attention_dropout": 0.0}
    else:
        none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        values["model"] = {**values["model"], **none}
    two = {**values, "output": str(tmp_path / "two")}
    start(values)
    ranks.run(2, rank_work.once, two, environment=ranks.zero(stage))
    found = []
    for run in (values, two):
        adapters = step_folder(run["output"], 4) / "adapters.safetensors"
        found.append(weights(run, 4) | (load_file(adapters) if adapters.exists() else {}))
    one, other = found
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        stepped = "/" in name
        assert not (stepped and any(part in name for part in CASES[case].unreached)), name
        if not stepped and not name.endswith(("key.bias", "k_lin.bias")):  # whose gradient is 0
            size = tensor.abs().max().clamp(min=1e-3)
            assert (tensor - other[name]).abs().max() < 1e-5 * size, name


def test_an_export_loads_and_its_card_says_what_was_trained(
    whole: tuple[Case, dict[str, Any]], tmp_path: Path
) -> None:
    case, values = whole
    for name in ("exported", "again"):
        exported = export(Path(values["output"]), tmp_path / name, pytest.fail)
        assert exported.difference < 1e-6
    files = [tmp_path / name / "model.safetensors" for name in ("exported", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    load = case.exported
    model, report = load.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = weights(values, 4)
    prefix = f"{model.base_model_prefix}." if load is not AutoModel else ""
    for name, tensor in model.base_model.named_parameters():
        if "pooler" not in name:
            whole = next(n for n in (name, prefix + name) if n in trained)
            assert tensor.equal(trained[whole]), name
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    objective = RunConfig.model_validate(values).objective
    assert (objective.published or objective.sentence) in card


# The formulas, of one document alone: (student, teacher) and its tokens -> the sum of each term.
Pair = tuple[Any, Any]
Reference = Callable[[Pair, Tensor, nn.ModuleDict], list[Tensor]]


def inside(model: Any, ids: Tensor) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return query, key and value of each layer [n, D], and all hidden states [n, D]."""
    seen: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
    hooks = [
        getattr(layer.attention.self, kind).register_forward_hook(
            lambda _, __, output, kind=kind: seen[kind].append(output[0])
        )
        for layer in model.bert.encoder.layer
        for kind in seen
    ]
    found = model(input_ids=ids[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return seen, [x[0] for x in found.hidden_states]


def scores(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """Return X Y^T / sqrt(d) of each head [A, n, n]."""
    q, k = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (x, y))
    return q @ k.mT / math.sqrt(q.shape[-1])


def minilm(layer: int, heads: int, kinds: tuple[tuple[str, str], ...]) -> Reference:
    def terms(models: Pair, ids: Tensor, adapters: nn.ModuleDict) -> list[Tensor]:
        (ours, _), (theirs, _) = (inside(model, ids) for model in models)
        found = []
        for x, y in kinds:
            p = scores(theirs[x][layer], theirs[y][layer], heads).softmax(-1)
            q = scores(ours[x][1], ours[y][1], heads).softmax(-1)
            found.append((p * (p.log() - q.log())).sum() / heads)
        return found

    return terms


def tinybert(layers: tuple[int, ...]) -> Reference:
    def terms(models: Pair, ids: Tensor, adapters: nn.ModuleDict) -> list[Tensor]:
        """As the authors' loop over layers."""
        (s, h), (ts, th) = (inside(model, ids) for model in models)
        fit: Any = adapters["hidden"]
        n, mse = len(ids), nn.functional.mse_loss
        attention, hidden = torch.zeros(()).double(), torch.zeros(()).double()
        for ours, theirs in enumerate(layers):
            both = (
                scores(kinds["query"][i], kinds["key"][i], 4)
                for kinds, i in ((s, ours), (ts, theirs))
            )
            limited = (torch.where(x <= -1e2, 0.0, x) for x in both)
            attention = attention + mse(*limited) * n * n
            hidden = hidden + mse(fit(h[ours + 1]), th[theirs + 1]) * n
        return [attention, hidden, mse(fit(h[0]), th[0]) * n]

    return terms


SELF = tuple((kind, kind) for kind in ("query", "key", "value"))
FORMULAS: dict[str, tuple[Objective, Reference]] = {
    **{
        f"minilm {layer}": (
            MiniLM(relation_heads=8, teacher_layer=layer),
            minilm(layer % 4, 8, SELF),
        )
        for layer in (-1, 1, 3)
    },
    "minilm version 1": (
        MiniLM(version=1, teacher_layer=2),
        minilm(2, 4, (("query", "key"), ("value", "value"))),
    ),
    "tinybert": (TinyBert(attention=0.5, embedding=2), tinybert((1, 3))),
    "tinybert layers": (TinyBert(layers=(3, 0), attention=0.5, embedding=2), tinybert((3, 0))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradients_on_packed_rows_are_the_formula_of_documents_alone(
    name: str, packed_ids: Tensor, documents: list[list[list[int]]]
) -> None:
    objective, reference = FORMULAS[name]
    teacher = tiny_bert().requires_grad_(False)
    config = Student.model_validate({**NARROW, "dropout": 0, "attention_dropout": 0})
    student = build_student(config, as_teacher(teacher), seed=0)
    shapes = shape_of(student), shape_of(teacher)
    adapters = objective.adapters(*shapes)
    reinitialise(adapters, seed=1)
    with torch.no_grad():
        for parameter in (*student.parameters(), *adapters.parameters()):
            if parameter.dim() > 1:
                parameter.mul_(15)  # so that documents differ from one another
            parameter.add_(0.1 * torch.randn_like(parameter))
    alone = copy.deepcopy(student).double(), copy.deepcopy(teacher).double()
    exact: Any = copy.deepcopy(adapters).double()

    batch, sums = drawn_batch(packed_ids), list[Tensor]()
    counts = {"tokens": 0, "pairs": 0}
    for row, row_documents in enumerate(documents):
        begin = 0
        for n in map(len, row_documents):
            ids = batch.input_ids[row, begin : begin + n]
            begin += n
            counts = {"tokens": counts["tokens"] + n, "pairs": counts["pairs"] + n * n}
            of_document = reference(alone, ids, exact)
            sums = [a + b for a, b in zip(sums, of_document, strict=True)] if sums else of_document
    expected = torch.stack(sums)

    module = Distillation(student, teacher, objective.terms(*shapes), pad_id=0, adapters=adapters)
    assert [counts[term.over] for term in module.terms] == [
        batch.counts[term.over] for term in module.terms
    ]
    factors = torch.linspace(1, 3, len(sums))
    loss, found = module(batch, factors)
    assert expected.min() > 0.1
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=0)

    loss.backward()
    (expected @ factors.double()).backward()
    ours = dict(module.named_parameters())
    theirs = {f"student.{name}": p for name, p in alone[0].named_parameters()}
    theirs |= {f"adapters.{name}": p for name, p in exact.named_parameters()}
    assert ours.keys() == theirs.keys()
    compared = 0
    for of, parameter in theirs.items():
        gradient = ours[of].grad
        if parameter.grad is None:
            assert gradient is None, of  # what no term reaches
        elif not of.endswith("key.bias"):  # whose true gradient is 0
            assert gradient is not None
            assert (gradient - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), of
            compared += 1
    assert compared > 20

"""Compare MiniLM version 2 with its formula on Transformers' own outputs, and train with it."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import rank_work, ranks
from support.batches import drawn_batch
from support.results import difference, weights
from support.runs import RECIPE, history, refused, start
from support.said import Said
from support.tiny import as_teacher, tiny_bert
from torch import Tensor
from transformers import AutoModel

from pretrain.config import RunConfig
from pretrain.contracts.terms import Shape, Signal, SignalTerm
from pretrain.evaluation.heads import evaluate_heads
from pretrain.export.export import export
from pretrain.model.distillation import Distillation
from pretrain.model.families import shape_of
from pretrain.model.model_config import Student
from pretrain.model.student import build_student
from pretrain.objectives.minilm import MiniLM

NARROW = {
    "architecture": "same",
    "init": "random",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
OBJECTIVE = {"name": "minilm", "relation_heads": 8, "teacher_layer": 1}
ZERO = (pytest.mark.slow, ranks.needs_deepspeed)
Settings = Callable[..., dict[str, Any]]


def relations(model: Any, document: Tensor, layer: int, heads: int) -> dict[str, Tensor]:
    """Return softmax(X X^T / sqrt(d)) [heads, n, n] of the three projections of a layer."""
    seen: dict[str, Tensor] = {}
    part = model.bert.encoder.layer[layer].attention.self
    hooks = [
        getattr(part, kind).register_forward_hook(
            lambda _, __, output, kind=kind: seen.update({kind: output[0]})
        )
        for kind in ("query", "key", "value")
    ]
    model(input_ids=document[None])
    for hook in hooks:
        hook.remove()
    found = {}
    for kind, output in seen.items():
        split = output.unflatten(-1, (heads, -1)).transpose(0, 1)
        found[kind] = (split @ split.mT / math.sqrt(split.shape[-1])).softmax(-1)
    return found


@pytest.mark.parametrize("teacher_layer", [-1, 1, 3])
def test_the_loss_and_its_gradient_are_the_formula(
    teacher_layer: int, packed_ids: Tensor, documents: list[list[list[int]]]
) -> None:
    teacher = tiny_bert().requires_grad_(False)
    config = Student(**NARROW, dropout=0, attention_dropout=0)
    student = build_student(config, as_teacher(teacher), seed=0)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)  # so that relations differ from one another
    objective = MiniLM(relation_heads=8, teacher_layer=teacher_layer)
    terms = objective.terms(shape_of(student), shape_of(teacher))
    alone = copy.deepcopy(student).double(), copy.deepcopy(teacher).double()

    batch = drawn_batch(packed_ids)
    # The rows as the module sees them: cut as `documents`, with masks.
    rows, exact = batch.input_ids, {name: torch.zeros(()) for name in ("query", "key", "value")}
    for row, row_documents in enumerate(documents):
        begin = 0
        for length in map(len, row_documents):
            document = rows[row, begin : begin + length]
            begin += length
            ours = relations(alone[0], document, 1, 8)
            theirs = relations(alone[1], document, teacher_layer, 8)
            for kind in exact:
                kl = (theirs[kind] * (theirs[kind].log() - ours[kind].log())).sum()
                exact[kind] = exact[kind] + kl / 8
    module = Distillation(student, teacher, terms, pad_id=0)
    loss, sums = module(batch, torch.tensor([1.0, 2.0, 3.0]))
    expected = torch.stack([*exact.values()])
    assert [term.name for term in module.terms] == ["queries", "keys", "values"]
    assert expected.min() > 0.1
    assert (sums - expected).abs().max() < 1e-5 * expected.min()

    loss.backward()
    (expected * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    compared = 0
    for (name, one), other in zip(student.named_parameters(), alone[0].parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None, name  # the rest of the last layer, and the head
        elif not (name.endswith("key.bias") and ".0." in name):  # whose true gradient is 0
            assert one.grad is not None
            assert (one.grad - other.grad).norm() < 1e-4 * other.grad.norm(), name
            compared += 1
    assert compared > 20


def test_version_1_compares_attention_and_value_relations(
    packed_ids: Tensor, documents: list[list[list[int]]]
) -> None:
    """Compare with the attention that Transformers returns, each document alone, in fp64."""
    teacher = tiny_bert().requires_grad_(False)
    student = build_student(
        Student(architecture="same", num_layers=2, dropout=0, attention_dropout=0),
        as_teacher(teacher),
        seed=0,
    )
    objective = MiniLM(version=1, teacher_layer=2)
    module = Distillation(
        student, teacher, objective.terms(shape_of(student), shape_of(teacher)), pad_id=0
    )
    batch = drawn_batch(packed_ids)
    _, sums = module(batch, torch.ones(2))
    alone = copy.deepcopy(student).double(), copy.deepcopy(teacher).double()
    for model in alone:
        model.set_attn_implementation("eager")
    exact = torch.zeros(2, dtype=torch.float64)
    for row, row_documents in enumerate(documents):
        begin = 0
        for length in map(len, row_documents):
            ids = batch.input_ids[row, begin : begin + length][None]
            begin += length
            probabilities = [
                model(input_ids=ids, output_attentions=True).attentions[layer][0]
                for model, layer in zip(alone, (1, 2), strict=True)
            ]
            heads = shape_of(teacher).num_heads
            related = [
                relations(model, ids[0], layer, heads)["value"]
                for model, layer in zip(alone, (1, 2), strict=True)
            ]
            for i, (ours, theirs) in enumerate((probabilities, related)):
                exact[i] += (theirs * (theirs.log() - ours.log())).sum() / heads
    assert [term.name for term in module.terms] == ["attention", "values"]
    assert exact.min() > 1e-3
    assert (sums - exact).abs().max() < 1e-5 * exact.max()


def test_version_1_needs_as_many_heads() -> None:
    with refused("the student has 2, the teacher 4", "student.num_attention_heads: 4"):
        MiniLM(version=1).terms(Shape(2, 16, 2), Shape(4, 32, 4))
    with pytest.raises(ValueError, match="relation_heads is for version 2"):
        MiniLM(version=1, relation_heads=8)
    assert "2002.10957" in MiniLM(version=1).published and "attention" in MiniLM(version=1).sentence


def test_sizes_that_do_not_fit_are_refused() -> None:
    student, teacher = Shape(2, 16, 2), Shape(4, 32, 4)
    assert MiniLM().num_heads(Shape(6, 384, 12), Shape(12, 768, 12)) == 48
    assert MiniLM().num_heads(Shape(4, 312, 12), Shape(12, 768, 12)) == 24
    with refused("relation_heads 48", "the student's width 16", "take a divisor", "4, 8 or 16"):
        MiniLM(relation_heads=48).terms(student, teacher)
    with refused("relation_heads 12", "the teacher's width 32"):
        MiniLM(relation_heads=12).terms(Shape(2, 24, 2), teacher)
    for layer in (4, -5):
        with refused(f"teacher_layer {layer}", "layers 0 to 3, or -1"):
            MiniLM(relation_heads=8, teacher_layer=layer).terms(student, teacher)


def test_terms_name_the_last_layer_of_the_student() -> None:
    terms = MiniLM(relation_heads=8, teacher_layer=-2).terms(Shape(2, 16, 2), Shape(4, 32, 4))
    for term, kind in zip(terms, ("query", "key", "value"), strict=True):
        assert isinstance(term, SignalTerm) and term.over == "tokens" and term.needs_teacher
        assert term.student == {Signal(kind, 1)} and term.teacher == {Signal(kind, 2)}


@pytest.fixture
def values(tmp_path: Path, teacher_folder: Path, run_config: Settings) -> dict[str, Any]:
    changes = {**RECIPE, "student": NARROW, "objective": OBJECTIVE}
    return run_config(tmp_path / "run", teacher_folder, **changes)


def test_a_run_stops_and_resumes_as_if_it_never_had(values: dict[str, Any], tmp_path: Path) -> None:
    start(values, stop_after=2)
    start(values)
    whole = {**values, "output": str(tmp_path / "whole")}
    start(whole)
    entries = history(whole["output"])
    assert history(values["output"]) == entries
    assert difference(values, whole, 4) == 0
    steps = [entry for entry in entries if entry["kind"] == "train"]
    assert len(steps) == 4
    for entry in steps:  # each is a mean over tokens, with weight 1
        parts = entry["queries"], entry["keys"], entry["values"]
        assert entry["loss"] == pytest.approx(sum(parts), rel=1e-6) and min(parts) > 0


def test_training_brings_the_relations_together(values: dict[str, Any]) -> None:
    values["optimizer"] = {"learning_rate": 1e-2}
    values["student"] = {**NARROW, "dropout": 0.0, "attention_dropout": 0.0}
    values["train"] |= {"max_steps": 40, "global_batch_size": 16, "micro_batch_size": 16}
    values["checkpoint"] = {"every": 0}
    start(values)
    entries = history(values["output"])
    losses = [entry["loss"] for entry in entries if entry["kind"] == "train"]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("stage", [0, *(pytest.param(n, marks=ZERO) for n in (1, 2))])
def test_two_ranks_train_as_one(values: dict[str, Any], tmp_path: Path, stage: int) -> None:
    """Check that DDP and ZeRO do not wait for the parameters without gradient."""
    values["train"] |= {"micro_batch_size": 2}
    values["student"] = {**NARROW, "dropout": 0.0, "attention_dropout": 0.0}
    two = {**values, "output": str(tmp_path / "two")}
    start(values)
    ranks.run(2, rank_work.once, two, environment=ranks.zero(stage))
    found = [weights(run, 4) for run in (values, two)]
    # Neither optimizer has a state of what no term reaches: half of the last layer, and the head.
    assert found[0].keys() == found[1].keys()
    assert not [
        name for name in found[0] if "cls." in name or ("layer.1.output" in name and "/" in name)
    ]
    one, other = ({k: v for k, v in tensors.items() if "/" not in k} for tensors in found)
    assert one.keys() == other.keys() and len(one) > 30
    for name, tensor in one.items():
        if not name.endswith("layer.0.attention.self.key.bias"):  # whose true gradient is 0
            size = tensor.abs().max().clamp(min=1e-3)
            assert (tensor - other[name]).abs().max() < 1e-5 * size, name


def test_a_student_without_a_head_is_saved_and_exported_without_one(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Check what each command accepts: no masks, no masked figures, and no head on disk."""
    assert RunConfig.model_validate(values).masking.probability == 0.0
    values["evaluation"] = {"every": 2, "rows": 8}
    start(values)
    figures = [e for e in history(values["output"]) if e["kind"] == "evaluation"]
    assert [e["step"] for e in figures] == [0, 2, 4]
    for entry in figures:
        parts = [entry[name] for name in ("queries", "keys", "values")]
        assert entry["loss"] == pytest.approx(sum(parts)) and "accuracy" not in entry

    exported = export(Path(values["output"]), tmp_path / "exported", pytest.fail)
    assert exported.architecture == "BertModel" and exported.difference < 1e-6
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    assert not [name for name in tensors if "cls" in name]
    model, report = AutoModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = weights(values, 4)
    for name, tensor in model.named_parameters():
        assert "pooler" in name or tensor.equal(trained[name]), name
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "no language-model head" in card and "feature-extraction" in card
    assert "0.5 x" not in card and "| queries |" in card

    # It cannot teach tokens, but relations; and it can be continued.
    other = {**values, "output": str(tmp_path / "other"), "teacher": str(tmp_path / "exported")}
    with refused("has no trained masked-language-model head"):
        start({**other, "objective": {"name": "distilbert"}, "student": {"num_layers": 1}})
    same = {"architecture": "same", "num_layers": 1}
    start({**other, "objective": {"name": "minilm", "relation_heads": 4}, "student": same})
    said = Said()
    mlm = {"name": "mlm"}, {"init": str(tmp_path / "exported")}
    continued = {k: v for k, v in values.items() if k not in ("teacher", "student", "evaluation")}
    continued |= {"output": str(tmp_path / "mlm"), "objective": mlm[0], "model": mlm[1]}
    start(continued, progress=said)
    assert any("got a new one, tied to its embeddings" in line for line in said.lines)
    with refused("has no trained masked-language-model head"):
        evaluate_heads([values["output"]], Path(values["shards"]), warn=pytest.fail)

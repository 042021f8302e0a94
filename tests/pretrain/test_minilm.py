"""Compare MiniLM version 2 with its formula on Transformers' own outputs, and train with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.results import weights
from support.runs import RECIPE, history, refused, start
from support.said import Said
from transformers import AutoModel

from pretrain.config import RunConfig
from pretrain.contracts.terms import Shape, Signal, SignalTerm
from pretrain.evaluation.heads import evaluate_heads
from pretrain.export.export import export
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
Settings = Callable[..., dict[str, Any]]


def test_version_1_needs_as_many_heads() -> None:
    with refused("the student has 2, the teacher 4", "student.num_attention_heads: 4"):
        MiniLM(version=1).check(Shape(2, 16, 2), Shape(4, 32, 4))
    with pytest.raises(ValueError, match="relation_heads is for version 2"):
        MiniLM(version=1, relation_heads=8)
    assert "2002.10957" in MiniLM(version=1).published and "attention" in MiniLM(version=1).sentence


def test_sizes_that_do_not_fit_are_refused() -> None:
    student, teacher = Shape(2, 16, 2), Shape(4, 32, 4)
    assert MiniLM().num_heads(Shape(6, 384, 12), Shape(12, 768, 12)) == 48
    assert MiniLM().num_heads(Shape(4, 312, 12), Shape(12, 768, 12)) == 24
    with refused("relation_heads 48", "the student's width 16", "take a divisor", "4, 8 or 16"):
        MiniLM(relation_heads=48).check(student, teacher)
    with refused("relation_heads 12", "the teacher's width 32"):
        MiniLM(relation_heads=12).check(Shape(2, 24, 2), teacher)
    for layer in (4, -5):
        with refused(f"teacher_layer {layer}", "layers 0 to 3, or -1"):
            MiniLM(relation_heads=8, teacher_layer=layer).check(student, teacher)


def test_terms_name_the_last_layer_of_the_student() -> None:
    terms = MiniLM(relation_heads=8, teacher_layer=-2).terms(Shape(2, 16, 2), Shape(4, 32, 4))
    for term, kind in zip(terms, ("query", "key", "value"), strict=True):
        assert isinstance(term, SignalTerm) and term.over == "tokens" and term.needs_teacher
        assert term.student == {Signal(kind, 1)} and term.teacher == {Signal(kind, 2)}


@pytest.fixture
def values(tmp_path: Path, teacher_folder: Path, run_config: Settings) -> dict[str, Any]:
    changes = {**RECIPE, "student": NARROW, "objective": OBJECTIVE}
    return run_config(tmp_path / "run", teacher_folder, **changes)


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

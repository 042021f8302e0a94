"""Compare TinyBERT's distillation of layers with its formula on transformers' outputs; train."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import task_data
from support.families import build
from support.results import weights
from support.runs import RECIPE, history, refused, start, step_folder
from support.shipped import CONFIGS, SPECIAL
from support.task_data import run_of
from support.tiny import NARROW, save_teacher
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
)

from data_prep.shards import open_shards
from launch.config import load_config
from pretrain.config import RunConfig
from pretrain.contracts.terms import Shape
from pretrain.data.order import Order
from pretrain.export.export import export
from pretrain.model.families import FAMILIES
from pretrain.objectives.tinybert import TinyBert
from pretrain.tasks.labelled.examples import LabelledRows

Settings = Callable[..., dict[str, Any]]


def inside(
    model: Any, document: Tensor, types: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scores of each layer [A, n, n], and all hidden states [n, D], of one document."""
    types = types if types is None else types[None]
    seen: list[list[Tensor]] = [[], []]
    hooks = [
        getattr(layer.attention.self, kind).register_forward_hook(
            lambda _, __, output, into=into: into.append(output[0])
        )
        for layer in model.bert.encoder.layer
        for kind, into in zip(("query", "key"), seen, strict=True)
    ]
    found = model(input_ids=document[None], token_type_ids=types, output_hidden_states=True)
    hidden = found.hidden_states
    for hook in hooks:
        hook.remove()
    scores = []
    for query, key in zip(*seen, strict=True):
        q, k = (x.unflatten(-1, (4, -1)).transpose(0, 1) for x in (query, key))
        scores.append(q @ k.mT / math.sqrt(q.shape[-1]))
    return scores, [x[0] for x in hidden]


def test_sizes_that_do_not_fit_are_refused() -> None:
    student, teacher = Shape(2, 16, 4), Shape(4, 32, 4)
    with refused("the student has 2 heads, the teacher 4", "student.num_attention_heads: 4"):
        TinyBert().check(student._replace(num_heads=2), teacher)
    assert len(TinyBert(attention=0).terms(student._replace(num_heads=2), teacher)) == 2
    with refused("objective.layers is missing", "4 layers", "the student's 3", "list 3 layers"):
        TinyBert().check(student._replace(num_layers=3), teacher)
    with refused("objective.layers has 3 layers", "the student has 2"):
        TinyBert(layers=(0, 1, 2)).check(student, teacher)
    with refused("objective.layers 4", "layers 0 to 3"):
        TinyBert(layers=(1, 4)).check(student, teacher)
    with pytest.raises(ValueError, match="no term is left"):
        TinyBert(attention=0, hidden=0, embedding=0)
    assert not TinyBert(hidden=0, embedding=0).adapters(student, teacher)
    assert "1909.10351" in TinyBert().published and not TinyBert(layers=(1, 3)).published


def test_layers_are_evenly_spaced() -> None:
    base = Shape(12, 768, 12)
    for num_layers, expected in ((4, (2, 5, 8, 11)), (6, (1, 3, 5, 7, 9, 11)), (1, (11,))):
        found = TinyBert().layer_map(Shape(num_layers, 312, 12), base)
        assert found == tuple(enumerate(expected))


@pytest.mark.parametrize(
    ("overrides", "millions"),
    [
        ([], "14.35"),
        (["student={architecture: same, num_layers: 6}"], "66.96"),
    ],
)
def test_students_have_the_published_sizes(overrides: list[str], millions: str) -> None:
    """Count as the authors did: with token types, and with a pooler that is not trained."""
    config = load_config(RunConfig, CONFIGS / "tinybert-4x312.yaml", overrides)
    names = ("hidden_size", "num_attention_heads", "intermediate_size")
    sizes = {name: getattr(config.student, name) for name in names}
    changes = {"num_hidden_layers": config.student.num_layers}
    changes |= {name: size for name, size in sizes.items() if size is not None}
    settings = FAMILIES["bert"].student_config(BertConfig(), changes)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModel.from_config(settings).parameters())
    assert f"{count / 1e6:.2f}" == millions


@pytest.fixture
def values(tmp_path: Path, teacher_folder: Path, run_config: Settings) -> dict[str, Any]:
    changes = {**RECIPE, "student": NARROW, "objective": {"name": "tinybert"}}
    return run_config(tmp_path / "run", teacher_folder, **changes)


def adapters(values: dict[str, Any], step: int) -> dict[str, Tensor]:
    return load_file(step_folder(values["output"], step) / "adapters.safetensors")


def test_the_export_has_an_untrained_pooler_and_no_adapter(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Check that `AutoModel` finds every weight, that two exports are equal, and the card."""
    values["evaluation"] = {"every": 2, "rows": 8}
    start(values)
    figures = [e for e in history(values["output"]) if e["kind"] == "evaluation"]
    for entry in figures:
        parts = [entry[name] for name in ("attention", "hidden", "embedding")]
        assert entry["loss"] == pytest.approx(sum(parts))
    for name in ("exported", "again"):
        exported = export(Path(values["output"]), tmp_path / name, pytest.fail)
        assert exported.architecture == "BertModel" and exported.difference < 1e-6
    files = [tmp_path / name / "model.safetensors" for name in ("exported", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    model, report = AutoModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = weights(values, 4)
    assert "pooler.dense.weight" not in trained
    tensors = dict(model.named_parameters())
    assert 0.015 < tensors.pop("pooler.dense.weight").std() < 0.025
    assert not tensors.pop("pooler.dense.bias").any()
    assert all(tensor.equal(trained[name]) for name, tensor in tensors.items())
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "Its pooler is untrained" in card and "TinyBERT" in card


@pytest.mark.parametrize("kind", ["distilbert", "roberta", "modernbert"])
def test_other_families_train_and_their_body_misses_nothing(
    kind: str, tmp_path: Path, run_config: Settings
) -> None:
    special = SPECIAL | ({"cls_token_id": 2, "sep_token_id": 3} if kind == "modernbert" else {})
    save_teacher(tmp_path / "teacher", build(kind, **special))
    changes = {**RECIPE, "student": NARROW, "objective": {"name": "tinybert", "layers": [0, 1]}}
    changes["train"] = {**RECIPE["train"], "activation_checkpointing": True}
    values = run_config(tmp_path / "run", tmp_path / "teacher", **changes)
    start(values)
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    _, report = AutoModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    card = (tmp_path / "exported" / "README.md").read_text()
    assert ("pooler" in card) == (kind == "roberta")


def test_a_task_is_distilled_in_two_runs(tmp_path: Path) -> None:
    """Compare the loss of the first run with the formula, an example at a time; then go on."""
    task_data.make(tmp_path, "classification")
    task_data.save_model(tmp_path / "model", "bert", "classification", num_hidden_layers=4)
    student = {**NARROW, "dropout": 0.0, "attention_dropout": 0.0}
    base = {"teacher": str(tmp_path / "model"), "student": student}
    values = run_of(tmp_path, "classification", objective={"name": "tinybert"}, **base)
    still = values | {"optimizer": {"learning_rate": 1e-9}, "output": str(tmp_path / "still")}
    start(still, stop_after=1)
    folder = step_folder(still["output"], 1)
    models = [
        AutoModelForMaskedLM.from_pretrained(of).eval().double()
        for of in (folder / "student", tmp_path / "model")
    ]
    adapters = {n: t.double() for n, t in load_file(folder / "adapters.safetensors").items()}
    fit = adapters["hidden.weight"], adapters["hidden.bias"]
    rows = LabelledRows(open_shards(tmp_path / "shards"))
    numbers = Order(len(rows.shards), 12, 0).at(0)[1]
    sums, pairs, tokens = torch.zeros(3).double(), 0, 0
    for number, ids in zip(numbers, rows.shards.rows(numbers).astype("int64"), strict=True):
        document, second = torch.from_numpy(ids[ids != 0]), rows.columns["second"][number]
        types = (torch.arange(len(document)) >= second).long()
        (s, h), (ts, th) = (inside(model, document, types) for model in models)
        n, mse = len(document), nn.functional.mse_loss
        pairs, tokens = pairs + n * n, tokens + n
        adapted = [nn.functional.linear(x, *fit) for x in h]
        sums[0] += sum(mse(s[i], ts[2 * i + 1]) for i in (0, 1)) * n * n
        sums[1] += sum(mse(adapted[i + 1], th[2 * i + 2]) for i in (0, 1)) * n
        sums[2] += mse(adapted[0], th[0]) * n
    expected = (sums / torch.tensor([pairs, tokens, tokens])).sum().item()
    assert history(still["output"])[1]["loss"] == pytest.approx(expected, rel=1e-5)

    first = values | {"output": str(tmp_path / "layers"), "evaluation": {"every": 20, "rows": 24}}
    start(first)
    entries = history(first["output"])
    measured = [entry for entry in entries if entry["kind"] == "evaluation"]
    assert measured[-1]["loss"] < measured[0]["loss"] and "accuracy" not in measured[-1]
    soft = {"name": "kd", "temperature": 1.0, "soft": 1.0, "hard": 0.0}
    again = {"init": first["output"], "dropout": 0.0, "attention_dropout": 0.0}
    second = run_of(tmp_path, "classification", objective=soft, **base)
    second |= {"student": {"architecture": "same", **again}, "output": str(tmp_path / "second")}
    start(second)
    export(Path(second["output"]), tmp_path / "exported", warn=pytest.fail)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert found.config.hidden_size == 16 and found.config.num_labels == 3


@pytest.mark.parametrize("first", ["identity", "random"])
def test_a_student_with_all_layers_of_its_teacher_has_nothing_to_learn(
    first: str, tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    """Begin W as the identity where widths are equal; from random weights the loss is not 0."""
    student = {"architecture": "same", "num_layers": 4, "init": "teacher"}
    objective = {"name": "tinybert", "first": first}
    values = run_config(tmp_path / "run", teacher_folder, student=student, objective=objective)
    values["train"] |= {"max_steps": 1, "global_batch_size": 2}
    start(values)
    begun = next(entry for entry in history(values["output"]) if entry["kind"] == "evaluation")
    assert begun["step"] == 0 and begun["attention"] < 1e-9
    for part in ("hidden", "embedding"):
        assert begun[part] < 1e-9 if first == "identity" else begun[part] > 0.1


def test_a_new_head_of_a_score_begins_at_the_mean(tmp_path: Path) -> None:
    task_data.make(tmp_path, "regression")
    task_data.save_model(tmp_path / "model", "bert", "classification")  # its head fits no score
    values = run_of(tmp_path, "regression", model={"init": str(tmp_path / "model")})
    values |= {"optimizer": {"learning_rate": 1e-9}}
    values["train"] |= {"max_steps": 1}
    start(values)
    folder = step_folder(values["output"], 1)
    found = load_file(folder / "adapters.safetensors")
    (bias,) = [tensor for name, tensor in found.items() if name.endswith("classifier.bias")]
    with (tmp_path / "regression-0.csv").open(newline="") as file:
        scores = [float(row["label"]) for row in csv.DictReader(file)]
    assert float(bias) == pytest.approx(sum(scores) / len(scores))

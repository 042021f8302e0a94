"""Compare BERT-of-Theseus with a plain loop over the layers of transformers, and train with it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support import runs, task_data
from support.results import losses
from support.runs import step_folder
from support.shipped import CONFIGS
from support.task_data import run_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.contracts.terms import Shape
from pretrain.data.order import Order
from pretrain.objectives.theseus import Theseus
from pretrain.tasks.labelled.examples import LabelledRows

SAME = {"dropout": 0.0, "attention_dropout": 0.0, "architecture": "same", "init": [0, 1]}


def settings(folder: Path, family: str = "bert", **changes: Any) -> dict[str, Any]:
    """Return a run of 2 layers after a teacher of 4, which is written with the data."""
    task_data.make(folder, "classification")
    teacher = folder / "model"
    kinds = ["full_attention", "sliding_attention"] * 2
    sizes = {"num_hidden_layers": 4, **({"layer_types": kinds} if family == "modernbert" else {})}
    task_data.save_model(teacher, family, "classification", **sizes)
    objective = {"name": "theseus", "steps": 12, "rate": 0.2}
    values = {"teacher": str(teacher), "objective": objective, "student": SAME}
    return run_of(folder, "classification", **values, **changes)


def test_the_probability_grows_in_a_line_or_is_constant() -> None:
    linear = Theseus(steps=1000, rate=0.3)
    assert [linear.probability(s) for s in (0, 500, 1000)] == pytest.approx([0.3, 0.65, 1.0])
    constant = Theseus(steps=1000, rate=0.5, schedule="constant")
    assert [constant.probability(s) for s in (0, 999, 1000)] == [0.5, 0.5, 1.0]
    drawn = [constant.running(step, 7, 6) for step in range(1000)]
    share = sum(map(sum, drawn)) / 6000
    assert 0.47 < share < 0.53 and len({*drawn}) == 2**6
    assert drawn[3] == constant.running(3, 7, 6) != constant.running(3, 8, 6)
    assert constant.running(1000, 7, 6) == (True,) * 6


def test_a_run_that_never_trains_the_student_alone_warns() -> None:
    assert Theseus(steps=20).notes(21) == []
    assert "never trained alone" in Theseus(steps=20).notes(20)[0]


def plain_losses(values: dict[str, Any]) -> list[float]:
    """Train the first two layers of a BERT, each in the place of two, by transformers' modules."""
    shards, batch = open_shards(values["shards"]), values["train"]["global_batch_size"]
    columns, order = LabelledRows(shards).columns, Order(len(shards), batch, 0)
    teacher, student = (
        AutoModelForSequenceClassification.from_pretrained(values["teacher"]).eval()
        for _ in range(2)
    )
    objective = Theseus.model_validate(values["objective"])
    layers = student.bert.encoder.layer[:2]
    trained = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
    found = []
    for step in range(values["train"]["max_steps"]):
        numbers = order.at(step)[1]
        ids = torch.from_numpy(shards.rows(numbers).astype("int64"))
        mask, place = (ids != 0).long(), torch.arange(ids.shape[1])
        second = torch.from_numpy(columns["second"][numbers])[:, None]
        types = ((place >= second) & (second > 0) & (mask > 0)).long()
        hidden = teacher.bert.embeddings(input_ids=ids, token_type_ids=types)
        padding = (1 - mask)[:, None, None] * -1e30
        for i, own in enumerate(objective.running(step, 0, 2)):
            for layer in [layers[i]] if own else teacher.bert.encoder.layer[2 * i : 2 * i + 2]:
                hidden = layer(hidden, padding)
                hidden = hidden if isinstance(hidden, torch.Tensor) else hidden[0]
        logits = teacher.classifier(teacher.bert.pooler(hidden))
        loss = cross_entropy(logits, torch.from_numpy(columns["label"][numbers]).long())
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)  # a layer that did not run has gradient 0
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        rate = 1e-3 * min((step + 1) / 2, (20 - step) / 18)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found.append(loss.item())
    return found


def test_twenty_steps_equal_a_plain_loop(tmp_path: Path) -> None:
    values = settings(tmp_path)
    runs.start(values)
    found = losses(values)
    assert [found[step + 1] for step in range(20)] == pytest.approx(plain_losses(values), rel=1e-5)
    # The shipped setting, at tiny size.
    shipped = yaml.safe_load((CONFIGS / "bert-of-theseus.yaml").read_text(encoding="utf-8"))
    own = {key: values[key] for key in ("shards", "teacher", "student", "train", "evaluation")}
    runs.start(shipped | own | {"output": str(tmp_path / "shipped")}, stop_after=2)
    # Only layers are trained; embeddings and head stay the teacher's.
    weights = load_file(step_folder(values["output"], 20) / "student" / "model.safetensors")
    teacher = load_file(Path(values["teacher"]) / "model.safetensors")
    same = {
        name for name, tensor in weights.items() if torch.equal(tensor, teacher[f"bert.{name}"])
    }
    layers = {name for name in weights if name.startswith("encoder.layer.")}
    assert len(layers) == 2 * 16 and {*weights} - layers == same
    head = load_file(step_folder(values["output"], 20) / "adapters.safetensors")
    for name, tensor in head.items():
        assert any(torch.equal(tensor, theirs) for theirs in teacher.values()), name


# The walks of the two slow ones are test_families'.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("distilbert", marks=pytest.mark.slow),
        pytest.param("roberta", marks=pytest.mark.slow),
        "modernbert",
    ],
)
def test_other_families_train_and_resume(family: str, tmp_path: Path) -> None:
    values = settings(tmp_path, family)
    if family == "modernbert":  # layers of one kind, after a teacher with two
        values["student"] = {**SAME, "init": [0, 2]}
    runs.start(values)
    resumed = values | {"output": str(tmp_path / "resumed")}
    runs.start(resumed, stop_after=5)
    runs.start(resumed)
    whole, parts = (losses(each) for each in (values, resumed))
    assert whole == parts and len(whole) == 20


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        (Shape(4, 8, 2), Shape(6, 8, 2), "no multiple of the student's 4"),
        (Shape(8, 8, 2), Shape(4, 8, 2), "student's 8 layers replace the teacher's, which has 4"),
        (Shape(2, 8, 2), Shape(4, 16, 2), "8 numbers in 2 heads, the teacher's 16"),
    ],
)
def test_models_that_do_not_fit_are_refused(student: Shape, teacher: Shape, message: str) -> None:
    with pytest.raises(RunError, match=message):
        Theseus(steps=1).check(student, teacher)


def test_runs_that_cannot_replace_are_refused(tmp_path: Path) -> None:
    values = settings(tmp_path)
    with pytest.raises(RunError, match=r"student\.architecture: same"):
        runs.start(values | {"student": {"num_layers": 2}})
    for other in ({"student": {**SAME, "init": values["teacher"]}}, {"model": {"init": "x"}}):
        with pytest.raises(ValueError, match=r"set student\.init to teacher or a list"):
            runs.start({**values, **({"student": {}} if "model" in other else {}), **other})
    # A body without a head would leave a random one, frozen.
    body = AutoModelForSequenceClassification.from_pretrained(values["teacher"]).bert
    shutil.copytree(values["teacher"], tmp_path / "body")
    body.save_pretrained(tmp_path / "body")
    with pytest.raises(RunError, match="fine-tune the teacher"):
        runs.start(values | {"teacher": str(tmp_path / "body")})
    assert not Path(values["output"], "metrics.jsonl").exists()

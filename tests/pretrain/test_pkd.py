"""Compare BERT-PKD with its formula, and train with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support import runs, task_data
from support.results import losses
from support.shipped import CONFIGS
from support.task_data import run_of

from pretrain import RunError
from pretrain.contracts.batch import PLACES, Batch
from pretrain.contracts.terms import Encoded, Shape, Signal
from pretrain.objectives.pkd import PatientDistillation


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("average", ["all", "examples"])
def test_the_loss_of_layers_equals_its_formula(normalise: bool, average: str) -> None:
    """Two examples in a packed row, and one that was left out: layers 0 and 1 of 3 learn."""
    draw = np.random.default_rng(3)
    hidden = draw.normal(size=(2, 6, 1, 9, 4))  # of student and teacher, by layer
    places = np.array([[0, 1, 2, 3], [4, 5, 6, -1], [-1, -1, -1, -1]])
    expected = 0.0
    for cls in (0, 4):
        for ours, theirs in ((0, 1), (1, 3)):
            x, y = hidden[0, ours, 0, cls], hidden[1, theirs, 0, cls]
            if normalise:
                x, y = x / np.sqrt(x @ x), y / np.sqrt(y @ y)
            expected += 100 * float((x - y) @ (x - y)) / (2 * 4 if average == "all" else 1)
    given = {"normalise": normalise, "average": average, "soft": 0, "hard": 0}
    objective = PatientDistillation.model_validate(given)
    [term] = objective.terms(Shape(3, 4, 2), Shape(6, 4, 2))
    models = (
        Encoded(torch.zeros(0), {Signal("hidden", i): torch.from_numpy(x) for i, x in enumerate(h)})
        for h in hidden
    )
    nothing = torch.zeros(0)
    labels = {PLACES: torch.from_numpy(places)}
    batch = Batch(nothing, nothing, 0, labels, {}, np.zeros((0, 2), np.int64))
    found = term.weight(0) * term.total(*models, batch, torch.nn.ModuleDict())  # type: ignore[operator,call-arg]
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("layers", "student", "teacher", "expected"),
    [
        ("skip", 6, 12, [1, 3, 5, 7, 9]),  # the paper's, counted from 0
        ("last", 6, 12, [6, 7, 8, 9, 10]),
        ("skip", 3, 12, [3, 7]),
        ("last", 3, 12, [9, 10]),
        ((0, 4), 3, 7, [0, 4]),
    ],
)
def test_layers_are_those_of_the_paper(
    layers: Any, student: int, teacher: int, expected: list[int]
) -> None:
    objective = PatientDistillation(layers=layers)
    pairs = objective.pairs(Shape(student, 8, 2), Shape(teacher, 8, 2))
    assert pairs == list(enumerate(expected))


@pytest.mark.parametrize(
    ("layers", "student", "teacher", "message"),
    [
        ("skip", Shape(4, 8, 2), Shape(6, 8, 2), "no multiple of the student's 4; list 3"),
        ("last", Shape(4, 8, 2), Shape(2, 8, 2), "has 1 layers, and the student has 4"),
        ((1,), Shape(4, 8, 2), Shape(8, 8, 2), "has 1 layers, and the student has 4"),
        ((1, 8, 2), Shape(4, 8, 2), Shape(8, 8, 2), "8: the teacher has layers 0 to 7"),
        ("skip", Shape(1, 8, 2), Shape(4, 8, 2), "give it 2 layers or more"),
        ("skip", Shape(2, 8, 2), Shape(4, 16, 2), "student.hidden_size: 16"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    layers: Any, student: Shape, teacher: Shape, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        PatientDistillation(layers=layers).check(student, teacher)


def test_a_student_learns_its_teachers_layers(tmp_path: Path) -> None:
    """Cut a student of all layers: it is its teacher, so the loss begins at 0."""
    task_data.make(tmp_path, "classification")
    task_data.save_model(tmp_path / "model", "bert", "classification", num_hidden_layers=4)
    objective = {"name": "pkd", "hard": 0.0}
    teacher = str(tmp_path / "model")
    none = {"dropout": 0.0, "attention_dropout": 0.0, "architecture": "same"}
    values = run_of(tmp_path, "classification", teacher=teacher, objective=objective)
    whole = values | {"student": {**none, "init": [0, 1, 2, 3]}}
    runs.start(whole, stop_after=1)
    assert losses(whole)[1] == pytest.approx(0.0, abs=1e-9)
    half = values | {"student": {**none, "init": [0, 1]}, "output": str(tmp_path / "half")}
    runs.start(half)
    first, last = losses(half)[1], losses(half)[20]
    assert 0 < last < first / 2
    # The shipped setting, at tiny size.
    shipped = yaml.safe_load((CONFIGS / "bert-pkd.yaml").read_text(encoding="utf-8"))
    own = {key: half[key] for key in ("shards", "teacher", "student", "train", "evaluation")}
    runs.start(shipped | own | {"output": str(tmp_path / "shipped")}, stop_after=2)
    kept = {"task": {"name": "classification", "logits": str(tmp_path / "logits")}}
    with pytest.raises(ValueError, match=r"remove task\.logits"):
        runs.start(half | kept | {"output": str(tmp_path / "kept")})
    alone = {key: value for key, value in half.items() if key not in ("teacher", "student")}
    with pytest.raises(ValueError, match="name `teacher:`"):
        runs.start(alone | {"model": {"init": teacher}, "output": str(tmp_path / "alone")})

"""Cut a student out of a wider teacher; compare with loops over numpy arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import VOCAB_SIZE, save_teacher
from transformers import AutoModelForMaskedLM

from data_prep.shards import load_manifest
from pretrain import RunError
from pretrain.model.families import FAMILIES
from pretrain.model.model_config import Student
from pretrain.model.student import build_student, project
from pretrain.model.teacher import Teacher, load_teacher

WIDE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
NARROW = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


def model_of(family: str, sizes: dict[str, int], seed: int = 0) -> Any:
    known = FAMILIES[family]
    named = {known.own_names.get(name, name): size for name, size in sizes.items()}
    layers = known.own_names.get("num_hidden_layers", "num_hidden_layers")
    more = {layers: 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 80}
    config = known.new_config({**named, **more}, {"pad": 0, "cls": 2, "sep": 3})
    model = known.architecture(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def largest(values: Any, num: int) -> list[int]:
    return sorted(np.argsort(-np.asarray(values))[:num].tolist())


def test_a_bert_keeps_its_largest_weights() -> None:
    teacher, student = model_of("bert", WIDE), model_of("bert", NARROW, 1)
    project(teacher, student)
    theirs = {name: t.detach().numpy() for name, t in teacher.named_parameters()}
    ours = {name: t.detach().numpy() for name, t in student.named_parameters()}
    layer = "bert.encoder.layer.{}."
    inner = ("attention.self.query", "attention.self.key", "attention.self.value")
    out, up, down = "attention.output.dense", "intermediate.dense", "output.dense"
    stream = np.zeros(32)
    for i in range(2):
        at = layer.format(i)
        for name in (*inner, up):
            stream += (theirs[f"{at}{name}.weight"] ** 2).sum(0)
        for name in (out, down):
            stream += (theirs[f"{at}{name}.weight"] ** 2).sum(1)
    hidden = largest(stream, 16)
    for i in range(2):
        at = layer.format(i)
        weights = [theirs[f"{at}{name}.weight"] for name in inner]
        each = sum((w**2).sum(1) for w in weights) + (theirs[f"{at}{out}.weight"] ** 2).sum(0)
        heads = largest([each[h * 8 : h * 8 + 8].sum() for h in range(4)], 2)
        rows = [h * 8 + j for h in heads for j in range(8)]
        neurons = (theirs[f"{at}{up}.weight"] ** 2).sum(1)
        neurons = neurons + (theirs[f"{at}{down}.weight"] ** 2).sum(0)
        chosen = largest(neurons, 24)
        for name, left in ((inner[0], rows), (inner[2], rows), (up, chosen)):
            expected = theirs[f"{at}{name}.weight"][left][:, hidden]
            assert (ours[f"{at}{name}.weight"] == expected).all()
            assert (ours[f"{at}{name}.bias"] == theirs[f"{at}{name}.bias"][left]).all()
        for name, left in ((out, rows), (down, chosen)):
            expected = theirs[f"{at}{name}.weight"][hidden][:, left]
            assert (ours[f"{at}{name}.weight"] == expected).all()
    words = "bert.embeddings.word_embeddings.weight"
    assert (ours[words] == theirs[words][:, hidden]).all()
    dense = "cls.predictions.transform.dense.weight"
    assert (ours[dense] == theirs[dense][hidden][:, hidden]).all()
    assert (ours["cls.predictions.bias"] == theirs["cls.predictions.bias"]).all()


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert"])
def test_a_student_of_the_same_sizes_is_its_teacher(family: str) -> None:
    teacher, same = model_of(family, WIDE), model_of(family, WIDE, 1)
    project(teacher, same)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(teacher(input_ids=ids).logits, same(input_ids=ids).logits)
    narrow = model_of(family, NARROW, 2)
    before = [p.clone() for p in narrow.parameters()]
    project(teacher, narrow)
    kept = {float(x) for t in teacher.parameters() for x in t.flatten()}
    for old, new in zip(before, narrow.parameters(), strict=True):
        assert (old != new).any() and {float(x) for x in new.flatten()} <= kept


def test_heads_whose_numbers_are_turned_keep_their_width() -> None:
    teacher = model_of("modernbert", WIDE)
    student = model_of("modernbert", {**WIDE, "hidden_size": 16})
    with pytest.raises(RunError, match="heads have 4 numbers, the teacher's 8"):
        project(teacher, student)


# The two differ in the family that is built, which the tests above compare for each.
@pytest.mark.parametrize("architecture", ["same", pytest.param(None, marks=pytest.mark.slow)])
def test_a_run_begins_from_a_cut_teacher(
    architecture: str | None, tmp_path: Path, corpus: Path, run_config: Any, distil: Any
) -> None:
    teacher = tmp_path / "teacher"
    save_teacher(teacher)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_layers": 2}
    values = run_config(tmp_path / "run", teacher, train={"global_batch_size": 8})
    values["student"] = {**sizes, "architecture": architecture, "init": {"project": "teacher"}}
    values["objective"] = {"name": "distilbert", "kl": 5.0, "mlm": 2.0, "cosine": 0.0}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values, default=str), encoding="utf-8")
    code, out, err = distil("pretrain", path)
    assert code == 0, out + err
    assert "cut to the largest weights for its width" in " ".join(out.split())
    # What it began as is measured beside it, and the card has the table.
    code, out, err = distil("evaluate", tmp_path / "run", values["shards"])
    assert code == 0 and "the same layers, untrained" in out, out + err
    code, out, err = distil("export", tmp_path / "run", tmp_path / "exported")
    assert code == 0, out + err
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    table = card.partition(
        "On masked tokens of at most 1,024 validation rows, with 95 % intervals:"
    )[2]
    names = [line.split("|")[1].strip() for line in table.splitlines()[4:] if "|" in line][:4]
    assert {"teacher", "student", "guessing", "the same layers, untrained"} <= set(names)
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "exported").config
    assert config.hidden_size == 16 and config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "student.hidden_size 64: is more than the teacher's 32"),
        ({"intermediate_size": 640}, "student.intermediate_size 640: is more than"),
        ({"num_layers": 40}, "is more than the teacher's"),
        ({"hidden_size": 15}, "not a multiple"),
    ],
)
def test_a_wider_student_is_refused(
    changes: dict[str, int], message: str, tmp_path: Path, corpus: Path
) -> None:
    save_teacher(tmp_path / "teacher")
    teacher: Teacher = load_teacher(str(tmp_path / "teacher"), load_manifest(corpus), corpus)
    config = Student.model_validate({"init": {"project": "teacher"}, **changes})
    with pytest.raises(RunError, match=message):
        build_student(config, teacher, 0)

"""Prune heads and neurons; compare with weight gradients of plain transformers, one text a time."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import yaml
from scipy import stats
from support import task_data, warm
from support.processes import finished
from support.shipped import CONFIGS
from support.tiny import save_teacher
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from data_prep.shards import open_shards
from pretrain.model.cut import cut_zero_heads
from pretrain.shrink.prune import (
    Calibration,
    Units,
    best,
    best_heads,
    calibration,
    magnitudes,
    pruned_model,
    scores,
)

# What reads the heads of a layer, and what reads its neurons.
READERS = {
    "bert": ("bert.encoder.layer.{}.attention.output.dense", "bert.encoder.layer.{}.output.dense"),
    "distilbert": (
        "distilbert.transformer.layer.{}.attention.out_lin",
        "distilbert.transformer.layer.{}.ffn.lin2",
    ),
    "roberta": (
        "roberta.encoder.layer.{}.attention.output.dense",
        "roberta.encoder.layer.{}.output.dense",
    ),
    "modernbert": ("model.layers.{}.attn.Wo", "model.layers.{}.mlp.Wo"),
}
CASES = [
    *((family, "classification") for family in READERS),
    *(("bert", kind) for kind in task_data.CLASSES if kind != "classification"),
]
HEADS, NEURONS, LAYERS = 4, 64, 2


def save(folder: Path, family: str, kind: str = "classification") -> Any:
    """Write a tiny model with a head."""
    sizes = {"hidden_dim": NEURONS} if family == "distilbert" else {}
    return task_data.save_model(folder, family, kind, **sizes)


def some_kept(rows: Calibration | None = None) -> Units:
    """Return two heads less in each layer, and 22 neurons."""
    shapes = (LAYERS, HEADS), (LAYERS, NEURONS)
    if rows is not None:
        shapes = tuple(part.shape for part in magnitudes(rows.model))  # type: ignore[assignment]
    heads, neurons = (torch.ones(shape, dtype=torch.bool) for shape in shapes)
    heads[0, [0, 3]] = heads[1, [1, 2]] = False
    neurons[0, : 3 * 22 : 3] = neurons[1:, 5:27] = False
    return Units(heads, neurons)


def without(model: Any, family: str, kept: Units) -> Any:
    """Return a copy in which nothing reads what is not kept."""
    model = copy.deepcopy(model)
    for i in range(LAYERS):
        for name, stay in zip(READERS[family], (kept.heads[i], kept.neurons[i]), strict=True):
            weight = model.get_submodule(name.format(i)).weight
            with torch.no_grad():
                weight.mul_(stay.repeat_interleave(weight.shape[1] // len(stay)))
    return model


def plain_loss(kind: str, task: str, labels: dict[str, Any], ours: Any, theirs: Any) -> Tensor:
    """Return the loss of one text by formulas of torch."""
    if task == "question_answering":
        pairs = [(ours.start_logits[0], theirs.start_logits[0], "start")]
        pairs += [(ours.end_logits[0], theirs.end_logits[0], "end")]
        rows = [(p[None], q[None], torch.tensor([labels[name]])) for p, q, name in pairs]
    else:
        names = {"classification": "label", "token_classification": "tags", "regression": "score"}
        given = torch.tensor(np.atleast_1d(labels[names[task]]))
        p, q = (x.logits[0] for x in (ours, theirs))
        if task != "token_classification":
            p, q = p[None], q[None]
        rows = [(p, q, given[: len(p)])]
    total = torch.zeros((), dtype=torch.float64)
    for p, q, given in rows:
        if task == "regression":
            total = total + ((p - given).square() if kind == "labels" else (p - q) ** 2 / 2).sum()
        elif kind == "labels":
            total = total + F.cross_entropy(p, given.long(), reduction="sum", ignore_index=-100)
        else:
            q = q.softmax(-1)
            total = total + (q * (q.log() - p.softmax(-1).log())).sum()
    return total


def plain_scores(model: Any, family: str, rows: Calibration, kept: Units, kind: str) -> Units:
    """Return |sum of gradient x weight of what reads a unit|, a mean over texts."""
    task = rows.examples.kind  # type: ignore[attr-defined]
    small = without(model, family, kept).requires_grad_(True)
    sums = Units(torch.zeros(LAYERS, HEADS), torch.zeros(LAYERS, NEURONS))
    columns = rows.examples.columns  # type: ignore[attr-defined]
    for number in rows.numbers.tolist():
        ids = rows.examples.shards.rows(np.array([number]))[0].astype(np.int64)
        ids = ids[ids != 0]
        second = int(columns["second"][number])
        given = {"input_ids": torch.from_numpy(ids)[None]}
        if model.config.model_type == "bert":
            types = (torch.arange(len(ids)) >= second).long() * (second > 0)
            given["token_type_ids"] = types[None]
        with torch.no_grad():
            theirs = model(**given)
        small.zero_grad()
        labels = {name: values[number] for name, values in columns.items()}
        plain_loss(kind, task, labels, small(**given), theirs).backward()
        for i in range(LAYERS):
            for name, total in zip(READERS[family], sums, strict=True):
                weight = small.get_submodule(name.format(i)).weight
                effect = (weight * weight.grad).sum(0).view(total.shape[1], -1).sum(1)
                total[i] += effect.abs().detach()
    return Units(*(total / len(rows.numbers) for total in sums))


def prepared(folder: Path, family: str, kind: str) -> tuple[Any, Calibration]:
    task_data.make(folder, kind)
    model = save(folder / "model", family, kind)
    rows, _ = calibration(str(folder / "model"), open_shards(folder / "shards"), 20, 3)
    return model.double(), replace(rows, model=rows.model.double(), head=rows.head.double())  # type: ignore[union-attr]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_scores_are_weight_times_gradient_of_each_text(
    family: str, kind: str, tmp_path: Path
) -> None:
    model, rows = prepared(tmp_path, family, kind)
    assert len(rows.numbers) == 20
    for loss, kept in (
        ("labels", some_kept()),
        ("divergence", some_kept()),
    ):
        expected = plain_scores(model, family, rows, kept, loss)
        found = scores(rows, kept, loss)  # type: ignore[arg-type]
        for ours, theirs, stay in zip(found, expected, kept, strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-9)
            assert (ours[~stay] == 0).all() and (ours[stay] > 0).all()


@pytest.mark.parametrize("kind", ["classification", "token_classification", "regression", ""])
def test_scores_do_not_depend_on_the_batch(kind: str, tmp_path: Path, corpus: Path) -> None:
    if kind:
        _, rows = prepared(tmp_path, "bert", kind)
    else:
        rows = masked_lm(tmp_path, corpus)
    for loss in ("labels", "drawn", "divergence"):
        one, other = (
            scores(replace(rows, together=together), some_kept(rows), loss)  # type: ignore[arg-type]
            for together in (1, 7)
        )
        for a, b in zip(one, other, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-12) and a.abs().max() > 1e-6


def masked_lm(folder: Path, corpus: Path) -> Calibration:
    save_teacher(folder / "teacher")
    rows, _ = calibration(str(folder / "teacher"), open_shards(corpus), 9, 0)
    return replace(rows, model=rows.model.double())


def test_of_a_corpus_a_document_is_scored_by_its_masked_tokens(
    tmp_path: Path, corpus: Path
) -> None:
    rows = masked_lm(tmp_path, corpus)
    kept = Units(*(torch.ones_like(part) for part in some_kept(rows)))
    found = scores(rows, kept, "labels")
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / "teacher").eval().double()
    batch, _ = next(rows.batches())
    ids, labels = batch.input_ids, torch.full_like(batch.input_ids, -100)
    labels.scatter_(1, batch.labels["positions"].long(), batch.labels["masked"].long())
    assert (labels != -100).any() and len(batch.documents) > len(ids)
    total = torch.zeros_like(found.neurons, dtype=torch.float64)
    for begin, length in batch.documents.tolist():
        part = slice(begin, begin + length)
        plain.zero_grad()
        logits = plain(input_ids=ids.flatten()[None, part]).logits[0]
        F.cross_entropy(logits, labels.flatten()[part], reduction="sum").backward()
        for i, layer in enumerate(plain.bert.encoder.layer):
            weight = layer.output.dense.weight
            total[i] += (weight * weight.grad).sum(0).abs().detach()
    expected = total / len(batch.documents)
    assert torch.allclose(found.neurons.double(), expected, rtol=1e-5, atol=1e-10)


def test_the_first_divergence_has_no_gradient_and_drawn_labels_are_the_model_s(
    tmp_path: Path,
) -> None:
    _, rows = prepared(tmp_path, "bert", "classification")
    every = Units(*(torch.ones_like(mask) for mask in some_kept()))
    assert all((part < 1e-12).all() for part in scores(rows, every, "divergence"))
    assert all((part > 1e-6).any() for part in scores(rows, every, "drawn"))

    rows = replace(rows, numbers=rows.numbers[:1])
    batch, _ = next(rows.batches())
    q = rows.outputs(batch)
    counts: Counter[int] = Counter()
    for seed in range(2000):
        _, drawn = next(replace(rows, seed=seed).batches())
        loss = rows.loss("drawn", q, q, batch, drawn)
        counts[int((-q.log_softmax(-1)[0] - loss).abs().argmin())] += 1
    expected = 2000 * q.softmax(-1)[0]
    found = [counts[i] for i in range(3)]
    assert stats.chisquare(found, expected.numpy()).pvalue > 1e-4


def test_the_best_stay(tmp_path: Path) -> None:
    values = torch.tensor([[5.0, 1.0, 3.0, 4.0], [0.4, 0.1, 0.2, 0.3]])
    kept = torch.ones_like(values, dtype=torch.bool)
    kept[0, 0] = False  # already out, whatever it scores now
    assert best(values, kept, 2).tolist() == [
        [False, False, True, True],
        [True, False, False, True],
    ]
    assert best_heads(values, kept, 4, even=False).tolist() == [
        [False, True, True, True],
        [True, False, False, False],  # one of a layer stays
    ]
    assert best_heads(values, kept, 4, even=True).sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("family", READERS)
def test_a_pruned_model_is_one_in_which_nothing_reads_what_went(
    family: str, tmp_path: Path
) -> None:
    task_data.make(tmp_path, "classification")
    model = save(tmp_path / "model", family)
    kept = some_kept()
    small = pruned_model(model, kept)
    ids = torch.randint(5, 25, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = without(model, family, kept)(input_ids=ids).logits
        assert torch.allclose(small(input_ids=ids).logits, expected, atol=1e-5)
        sizes = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
        assert cut_zero_heads(small) == 4
        assert torch.allclose(small(input_ids=ids).logits, expected, atol=1e-5)
    sizes.append(sum(p.numel() for p in small.parameters()))
    bias = {"modernbert": 0}.get(family, 1)
    # Its feed-forward part has a gate, and no bias.
    gone = LAYERS * 22 * (32 * (3 if family == "modernbert" else 2) + bias)
    assert sizes[0] - sizes[1] == gone
    assert sizes[1] - sizes[2] == 4 * 8 * (4 * 32 + 3 * bias)


def recipe(folder: Path, kind: str, **keys: Any) -> Path:
    stage = {"stage": "prune", "output": "small", "model": "model", "shards": "shards"}
    stage |= {"documents": 30, "rounds": 3, **keys}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"runs": [stage]}), encoding="utf-8")
    return path


def check_file(folder: Path, model: Any) -> None:
    """Compare a folder's ONNX file, in which four heads of eight numbers are left out."""
    file = folder / "onnx" / "model.onnx"
    weights = onnx.load(file).graph.initializer
    num = sum(int(np.prod(tensor.dims)) for tensor in weights if len(tensor.dims) == 2)
    whole = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    types = sum(p.numel() for n, p in model.named_parameters() if "token_type" in n)
    assert abs(whole - 4 * 8 * 4 * 32 - num) <= types + 80  # constants of the graph
    session = onnxruntime.InferenceSession(str(file))
    names = [given.name for given in session.get_inputs()]
    ids = torch.randint(5, 25, (3, 20), generator=torch.Generator().manual_seed(1)).numpy()
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    given |= {"token_type_ids": np.zeros_like(ids)} if "token_type_ids" in names else {}
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    assert np.abs(session.run(["logits"], given)[0] - expected).max() < 1e-4


def pruned(folder: Path, family: str, distil: Any) -> Path:
    """Prune a model of two layers in the working directory; return the recipe."""
    task_data.make(folder, "classification")
    save(folder / "model", family)
    path = recipe(folder, "classification", heads=2, intermediate_size=24)
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    assert "4 of 8 heads and 48 of 128 neurons" in out
    small = task_data.CLASSES["classification"].from_pretrained("small")
    assert small.get_submodule(READERS[family][1].format(0)).in_features == 24
    assert "4 of 8 heads" in Path("small/README.md").read_text(encoding="utf-8")
    return path


def test_a_pruned_folder_is_planned_compared_evaluated_and_exported(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = pruned(tmp_path, "bert", distil)
    code, out, err = distil("recipe", path, "runs.0.output=other", "--dry-run")
    assert code == 0, out + err
    assert "64 -> 24 neurons in each layer: a smaller folder" in " ".join(out.split())
    assert "4 -> 2 heads in a layer: zeros in the folder" in " ".join(out.split())
    assert not Path("other").exists()
    code, out, err = distil("recipe", path)
    assert code == 0 and "small: up to date" in out, out + err
    code, out, err = distil("recipe", path, "runs.0.seed=1")
    assert code == 0 and "small: done" in out, out + err
    code, out, err = distil("evaluate", "small", "--data", "shards", "--teacher", "model")
    assert code == 0 and "retention" in out, out + err
    code, out, err = distil("export", "small", "small-onnx", "--onnx")
    assert code == 0, out + err
    small = task_data.CLASSES["classification"].from_pretrained("small").eval()
    check_file(Path("small-onnx"), small)


@pytest.mark.parametrize(
    "family",
    # What differs by family is tested for all of them by the test of a pruned model.
    [f if f == "bert" else pytest.param(f, marks=pytest.mark.slow) for f in READERS],
)
def test_a_pruned_folder_is_continued_and_exported(
    family: str, tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train on: heads that went stay zeros, and the file of ONNX has not got them."""
    monkeypatch.chdir(tmp_path)
    pruned(tmp_path, family, distil)
    load = task_data.CLASSES["classification"]
    small = load.from_pretrained("small").eval()
    teacher = {"teacher": "model", "model": None, "objective": {"name": "kd"}}
    student = {"init": "small", "architecture": "same"}
    values = task_data.run_of(tmp_path, "classification", student=student, **teacher)
    values |= {"optimizer": {**values["optimizer"], "weight_decay": 0.01}}
    del values["model"]
    Path("run.yaml").write_text(json.dumps(values), encoding="utf-8")
    code, out, err = distil("pretrain", "run.yaml")
    assert code == 0, out + err
    code, out, err = distil("export", "run", "exported", "--onnx")
    assert code == 0, out + err
    trained = load.from_pretrained("exported").eval()
    zeros = 0
    for i in range(LAYERS):
        for model in (small, trained):
            weight = model.get_submodule(READERS[family][0].format(i)).weight
            empty = weight.view(32, HEADS, 8).ne(0).any(2).any(0).logical_not()
            zeros += int(empty.sum())
    assert zeros == 8
    changed = [
        (a != b).any() for a, b in zip(small.parameters(), trained.parameters(), strict=True)
    ]
    assert any(changed)
    check_file(Path("exported"), trained)


def test_a_masked_language_model_is_pruned_on_a_corpus(
    tmp_path: Path, corpus: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_teacher(Path("model"))
    before = AutoModelForMaskedLM.from_pretrained("model").config
    path = recipe(tmp_path, "", shards=str(corpus), intermediate_size=8)
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    after = AutoModelForMaskedLM.from_pretrained("small").config
    assert (before.intermediate_size, after.intermediate_size) != (8, before.intermediate_size)
    assert after.intermediate_size == 8


@pytest.mark.slow
def test_the_shipped_recipe(tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it with a tiny body, a table of two classes, one sample and one seed."""
    monkeypatch.chdir(tmp_path)
    save_teacher(tmp_path / "body")
    data = task_data.write_data(tmp_path, "classification")
    rows = data.read_text(encoding="utf-8").splitlines()[1:]
    for name, some in (("train", rows[:-24]), ("dev", rows[-24:])):
        path = tmp_path / "glue" / "SST-2" / f"{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{row.split(',')[0]}\t{i % 2}" for i, row in enumerate(some)]
        path.write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    values = yaml.safe_load((CONFIGS / "pruning.yaml").read_text(encoding="utf-8"))
    values["defaults"]["train"] = {"max_steps": 2, "global_batch_size": 8, "precision": "fp32"}
    for run in values["runs"]:
        if run.get("stage") == "prune":
            run |= {"heads": 1, "intermediate_size": 16}
            if "importance" not in run:  # the others read no rows
                run |= {"documents": 20, "rounds": min(run.get("rounds", 16), 2)}
    layers = values["runs"][-3]["sweep"]
    layers["layers"]["student"] = {"architecture": "same", "num_layers": 2, "init": [0, 1]}
    layers["train.seed"] = [0]
    values["runs"][0]["tokenizer"] = values["runs"][1]["model"]["init"] = "body"
    others = ("-1", "-2")  # samples
    values["runs"] = [run for run in values["runs"] if not run["output"].endswith(others)]
    figures = values["runs"][-2]
    figures["models"] = [name for name in figures["models"] if not name.endswith(others)]
    Path("recipe.json").write_text(json.dumps(values), encoding="utf-8")
    for options in (["--dry-run"], []):
        code, out, err = distil("recipe", "recipe.json", *options)
        assert code == 0, out + err
    assert "retention" in out and "student rounds16" in out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "nothing would go: set heads or intermediate_size"),
        ({"intermediate_size": 30}, "is not a multiple of 8: take 24 or 32, or set multiple_of: 1"),
        ({"intermediate_size": 72}, "intermediate_size 72: model has 64"),
        ({"intermediate_size": [24, 32]}, "intermediate_size: must be a valid integer"),
        ({"heads": 5}, "heads 5: model has 4"),
        ({"heads": 4, "intermediate_size": 64}, "nothing would go"),
        ({"heads": 2, "importance": "random", "rounds": 3}, "reads no rows: remove documents"),
        ({"heads": 2, "model": "body"}, "body: it is a BertModel, which has no head for"),
        ({"heads": 2, "model": "body", "shards": "corpus"}, "give a masked language model"),
        ({"heads": 2, "shards": "corpus"}, "holds a corpus: give a masked language model"),
        ({"heads": 2, "output": "model"}, "output model holds config.json"),
        ({"heads": 2, "output": "model/small"}, "is model, or one lies in the other"),
        ({"heads": 2, "importance": "best"}, "importance"),
        ({"heads": 2, "model": "nowhere/model"}, "nowhere/model"),
        ({"heads": 2, "model": "shards"}, "holds shards, not a model"),
    ],
)
def test_what_cannot_be_pruned_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, corpus: Path, distil: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    task_data.make(tmp_path, "classification")
    save(tmp_path / "model", "bert")
    Path("corpus").symlink_to(corpus)
    save(tmp_path / "body", "bert").bert.save_pretrained(tmp_path / "body")
    path = recipe(tmp_path, "classification", **keys)
    # All but a hub's answer is known before the first stage starts.
    for options in ([] if "nowhere" in message else ["--dry-run"], []):
        code, out, err = distil("recipe", path, *options)
        assert code == 2, out + err
    assert code == 2 and message in " ".join(err.split()), out + err
    assert not Path("small").exists() and "Traceback" not in err
    assert Path("model/config.json").is_file()


def test_a_quantised_model_is_refused(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task_data.make(tmp_path, "classification")
    save(tmp_path / "model", "bert")
    config = Path("model/config.json")
    values = json.loads(config.read_bytes()) | {"quantization_config": {"load_in_8bit": True}}
    config.write_text(json.dumps(values), encoding="utf-8")
    code, out, err = distil("recipe", recipe(tmp_path, "classification", heads=2))
    assert code == 2 and "quantization_config" in err, out + err


def test_baselines_choose_by_weights_and_by_chance(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "bert")
    found = magnitudes(model)
    layer: Any = model.bert.encoder.layer[1]
    attention = layer.attention.self
    parts = [x.weight[16:24] for x in (attention.query, attention.key, attention.value)]
    parts.append(layer.attention.output.dense.weight[:, 16:24])
    expected = torch.cat([part.flatten() for part in parts]).norm()
    assert torch.allclose(found.heads[1, 2], expected)
    up, down = layer.intermediate.dense.weight[7], layer.output.dense.weight[:, 7]
    assert torch.allclose(found.neurons[1, 7], torch.cat([up, down]).norm())
    assert isinstance(layer, nn.Module)


def test_a_killed_stage_is_made_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End it without a word at three moments: what is left never stands in the way."""
    monkeypatch.chdir(tmp_path)
    task_data.make(tmp_path, "classification")
    save(tmp_path / "model", "bert")
    path = recipe(tmp_path, "classification", heads=2)
    for moment in (
        "import pretrain.shrink.prune as m; m.compare = end",  # chosen, not written
        "import launch.stages.stage as m; m.seal = end",  # written, without its record
        "import launch.stages.stage as m; s = m.seal; m.seal = lambda *a, **k: (s(*a, **k), end())",
    ):
        program = f"import os, sys\ndef end(*_, **__): os._exit(9)\n{moment}\n"
        program += f"sys.argv[1:] = ['recipe', {str(path)!r}]\nfrom launch.cli import main\nmain()"
        ended = finished(warm.python(), "-c", program)
        assert ended.returncode == 9, ended.stdout + ended.stderr
        assert not Path("small").exists()
    ended = finished(warm.python(), "-m", "launch", "recipe", path)
    assert ended.returncode == 0 and Path("small/prune.json").is_file(), ended.stderr
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_was_made_stays_until_something_else_is(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse wrong shards, a user's own file and the model as output; heads of zeros are gone."""
    monkeypatch.chdir(tmp_path)
    task_data.make(tmp_path, "classification")
    task_data.make(tmp_path / "other", "regression")
    save(tmp_path / "model", "bert")
    path = recipe(tmp_path, "classification", heads=2)
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    before = Path("small/model.safetensors").read_bytes()
    for wrong, message in (
        (["runs.0.shards=other/shards"], "the task is a score"),
        (["runs.0.model=small", "runs.0.seed=1"], "is model, or one lies in the other"),
    ):
        code, _, err = distil("recipe", path, *wrong)
        assert code == 2 and message in err
        assert Path("small/model.safetensors").read_bytes() == before
    again = ("recipe", path, "runs.0.model=small", "runs.0.output=less")
    code, _, err = distil(*again, "runs.0.heads=3")
    assert code == 2 and "small has 4 of 8 heads left, 2 in a layer; take no more" in err
    code, out, err = distil(*again, "runs.0.heads=1")
    assert code == 0 and "2 of 8 heads" in out, out + err
    Path("small/notes.txt").write_text("mine", encoding="utf-8")
    code, _, err = distil("recipe", path, "runs.0.seed=1")
    assert code == 2 and "holds notes.txt, which no stage prune has written" in err
    assert Path("small/notes.txt").read_text(encoding="utf-8") == "mine"


def test_labels_that_are_not_there_are_not_a_choice(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse the loss of labels where the data have only probabilities."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"{w} {w}", "p": [0.2, 0.3, 0.5]} for w in task_data.WORDS[:40]]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    task = {"name": "classification", "labels": ["a", "b", "c"], "probabilities": "p"}
    files = {"train": str(data), "validation": 0.5}
    task_data.make(tmp_path, "classification", task=task, **files)
    save(tmp_path / "model", "bert")
    code, out, err = distil("recipe", recipe(tmp_path, "", heads=2, importance="labels"))
    assert code == 2 and "has no labels; take importance self-supervised" in err, out + err
    code, out, err = distil("recipe", recipe(tmp_path, "", heads=2))
    assert code == 0, out + err

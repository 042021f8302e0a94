"""Compare every loaded tensor with the bytes of the file that it came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import CONFIGS, build, every_family
from support.runs import RECIPE, refused, start, step_folder
from support.said import Said
from support.tiny import save_teacher
from torch import Tensor

from data_prep.shards import Manifest
from pretrain.export.export import export
from pretrain.model.families import FAMILIES, family_of
from pretrain.model.folder import load_model
from pretrain.model.teacher import load_teacher

Settings = Callable[..., dict[str, Any]]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}  # of the shards
ROWS = {"max_position_embeddings": 40}


def built(kind: str, **changes: Any) -> Any:
    """Build a random model of a family that reads the shards."""
    more = {"cls_token_id": 2, "sep_token_id": 3} if kind.startswith("modernbert") else {}
    return build(kind, **{**SPECIAL, **ROWS, **more, **changes})


def assert_as_in_the_file(model: Any, file: Path, prefix: str = "") -> None:
    """Compare a model's tensors with a file whose names lack `prefix`; no tensor is left out."""
    own, seen = model.state_dict(), 0
    for name, tensor in load_file(file).items():
        if prefix + name in own:
            assert torch.equal(own[prefix + name], tensor), name
            seen += 1
        else:
            assert "pooler" in name, name
    assert seen > 20


# --- issue 31.2 --------------------------------------------------------------------------------


@every_family
def test_a_body_without_a_head_is_loaded_as_its_file_has_it(kind: str, tmp_path: Path) -> None:
    """Save the encoder only, as a sentence encoder is: its word embeddings must not be drawn."""
    model = built(kind)
    model.base_model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, needs_head=False)
    assert_as_in_the_file(loaded, tmp_path / "model.safetensors", f"{model.base_model_prefix}.")
    # The head is random, and the same at every start.
    again = load_model(tmp_path, needs_head=False)
    assert all(
        torch.equal(tensor, again.state_dict()[n]) for n, tensor in loaded.named_parameters()
    )
    family = family_of(loaded)
    drawn = {n for n, _ in loaded.named_parameters(remove_duplicate=False)} - {
        model.base_model_prefix + "." + name for name in load_file(tmp_path / "model.safetensors")
    }
    assert all(name.startswith(family.head) for name in drawn)


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.attends])
def test_a_run_that_trains_no_head_resumes_and_exports_its_files_tensors(
    kind: str, tmp_path: Path, run_config: Settings
) -> None:
    """Distil with MiniLM, stop, and compare resume and export with an uninterrupted run's files."""
    save_teacher(tmp_path / "teacher", built(kind))
    objective = {"name": "minilm", "version": 1}
    same = {"student": {"num_layers": 2, "architecture": "same"}}
    settings = RECIPE | same | {"objective": objective}
    values = run_config(tmp_path / "run", tmp_path / "teacher", **settings)
    start(values, stop_after=2)
    start(values)
    whole = {**values, "output": str(tmp_path / "whole")}
    start(whole)
    student = Path("student", "model.safetensors")
    files = [step_folder(run["output"], 4) / student for run in (values, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, tensor in load_file(files[0]).items():
        assert torch.equal(exported[name], tensor), name


# --- issue 31.3 --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, None])
@every_family
def test_a_head_that_is_not_the_embeddings_is_refused(
    kind: str, tied: bool | None, tmp_path: Path, manifest: Manifest
) -> None:
    model = built(kind)
    save_teacher(tmp_path, model)
    tensors = model.state_dict()
    name = next(n for n in tensors if n.endswith(("decoder.weight", "vocab_projector.weight")))
    tensors = {n: tensor.clone() for n, tensor in tensors.items()}
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    values = json.loads(config.read_text())
    values.pop("tie_word_embeddings", None)
    config.write_text(json.dumps(values | ({} if tied is None else {"tie_word_embeddings": tied})))
    # The same matrix under both names is an old file, which stays usable.
    save_file(tensors, path, metadata={"format": "pt"})
    loaded: Any = load_teacher(str(tmp_path), manifest).model
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    save_file(tensors | {name: 3 * tensors[name]}, path, metadata={"format": "pt"})
    with refused("its LM head and its embeddings differ"):
        load_teacher(str(tmp_path), manifest)


@pytest.mark.parametrize("kind", ["bert", "roberta", "camembert"])
def test_a_head_with_two_biases_is_refused(kind: str, tmp_path: Path, manifest: Manifest) -> None:
    model = built(kind)
    save_teacher(tmp_path, model)
    tensors = {n: tensor.clone() for n, tensor in model.state_dict().items()}
    name = next(n for n in tensors if n.endswith("decoder.bias"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_teacher(str(tmp_path), manifest)
    tensors[name] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused("two biases", name):
        load_teacher(str(tmp_path), manifest)


# --- issue 31.11 -------------------------------------------------------------------------------


def sharded(folder: Path, tensors: dict[str, Tensor], stray: dict[str, Tensor]) -> None:
    """Write two shards and their index; the second also holds `stray`, which the index denies."""
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        held = {name: tensors[name].clone() for name in own}
        save_file(held | (stray if file[0] == "b" else {}), folder / file)
    table = {name: file for file, own in parts.items() for name in own}
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink(missing_ok=True)


def test_a_tensor_comes_from_the_shard_that_the_index_names(tmp_path: Path) -> None:
    model = built("bert")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = sorted(tensors)[0]
    sharded(tmp_path, tensors, {name: 2 * tensors[name]})
    loaded = load_model(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["bert.more"] = "a.safetensors"
    index.write_text(json.dumps(table))
    with refused("a.safetensors", "bert.more", "index"):
        load_model(tmp_path)


@every_family
def test_tensors_that_no_layer_takes_are_refused_or_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built(kind)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, prefix = load_file(file), model.base_model_prefix
    width = model.config.hidden_size
    # Known and unused: nothing is said.
    usual = {f"{prefix}.pooler.dense.weight": torch.ones(width, width)}
    if kind == "bert":
        usual |= {"cls.seq_relationship.weight": torch.ones(2, width)}
    save_file(tensors | usual, file, metadata={"format": "pt"})
    load_model(tmp_path)
    assert "warning" not in capsys.readouterr().err
    # A part of the encoder that this family does not have shapes its output.
    extra = {f"{prefix}.embeddings.more.weight": torch.ones(3)}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    with refused("do not fit its config.json", next(iter(extra))):
        load_model(tmp_path)
    for wrapped in ("_orig_mod.", "module."):  # of torch.compile, and of DDP
        renamed = {f"{wrapped}{name}": tensor for name, tensor in tensors.items()}
        save_file(renamed, file, metadata={"format": "pt"})
        with refused("those of a wrapped model", f"remove '{wrapped}' from the names"):
            load_model(tmp_path)
    # A head of a task is not used here, and that is said.
    save_file(tensors | {"qa_outputs.weight": torch.ones(2, width)}, file, {"format": "pt"})
    load_model(tmp_path)
    assert "qa_outputs.weight" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NaN", "-1e-12", "0", "Infinity", '"small"'])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_an_epsilon_that_is_not_a_small_positive_number_is_refused(
    kind: str, value: str, tmp_path: Path
) -> None:
    built(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    key = "norm_eps" if kind == "modernbert" else "layer_norm_eps"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {key: "HERE"}).replace('"HERE"', value))
    with refused(key):
        load_model(tmp_path)


def test_a_teacher_whose_tokenizer_cannot_be_read_is_no_other_vocabulary(
    tmp_path: Path, manifest: Manifest, corpus: Path
) -> None:
    """With `model:` a teacher may have a different tokenizer, but not a broken one."""
    save_teacher(tmp_path, built("bert"))
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer.json").write_text("{")
    with refused("tokenizer cannot be read"):
        load_teacher(str(tmp_path), manifest, corpus, any_vocabulary=True)


def test_an_unfinished_run_as_a_teacher_is_noted(
    tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    settings = RECIPE | {"student": {"num_layers": 2, "architecture": "same"}}
    first = run_config(tmp_path / "first", teacher_folder, **settings)
    start(first, stop_after=2)
    said = Said()
    second = run_config(tmp_path / "second", Path(first["output"]), **RECIPE)
    start({**second, "student": {"num_layers": 1}}, progress=said)
    assert "note: the teacher is an unfinished run, at step 2 of 4" in said.lines
    start(first)
    said = Said()
    third = {**second, "output": str(tmp_path / "third"), "student": {"num_layers": 1}}
    start(third, progress=said)
    assert not any("unfinished run" in line for line in said.lines)


def test_every_family_of_the_tests_is_here() -> None:
    attending = {kind for kind, family in FAMILIES.items() if family.attends}
    assert {kind.removesuffix("-biases") for kind in CONFIGS} == attending


@pytest.mark.parametrize("key", ["teacher", "model.init", "student.init"])
def test_every_model_of_a_run_must_read_the_shards_ids(
    key: str, tmp_path: Path, run_config: Settings
) -> None:
    """Give each place a model with the shards' vocabulary that keeps case: its ids differ."""
    save_teacher(tmp_path / "good", built("bert"))
    other = tmp_path / "other"
    save_teacher(other, built("bert"))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    changes: dict[str, Any] = dict(RECIPE)
    teacher: Path | None = tmp_path / "good"
    if key == "teacher":
        teacher = other
    elif key == "student.init":
        changes["student"] = {"init": str(other), "architecture": "same"}
    else:
        teacher = None
        changes |= {"objective": {"name": "mlm"}, "model": {"init": str(other)}}
        del changes["student"]
    with refused(key, str(other), "it splits text differently from the shards: it keeps case"):
        start(run_config(tmp_path / "run", teacher, **changes))

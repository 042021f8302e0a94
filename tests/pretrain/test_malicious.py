"""Load models that run code when loaded carelessly: none of them does here.

The first tests let each trap spring with a careless reader, so that one gone dead is noticed.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.runs import refused
from support.tiny import tiny_distilbert
from support.traps import (
    array_of_objects,
    code,
    edit,
    escaping_tar,
    pickled,
    torch_saved,
    yaml_that_applies,
)
from transformers import AutoConfig

from data_prep import CorpusError
from data_prep.shards import Manifest
from data_prep.tokens import load as load_tokenizer
from pretrain import RunError
from pretrain.model.folder import load_model
from pretrain.model.teacher import load_teacher

# --- careless readers, to show that the fixtures are live -----------------------------------------


@pytest.mark.parametrize(
    ("build", "read"),
    [
        (pickled, lambda data: pickle.loads(data)),
        (torch_saved, lambda data: torch.load(io.BytesIO(data), weights_only=False)),
        (array_of_objects, lambda data: np.load(io.BytesIO(data), allow_pickle=True)),
        (yaml_that_applies, lambda text: yaml.unsafe_load(text)),
    ],
    ids=["pickle", "torch", "npy", "yaml"],
)
def test_a_careless_reader_runs_it(
    build: Callable[[Path], Any], read: Callable[[Any], object], tmp_path: Path
) -> None:
    read(build(tmp_path / "canary"))
    assert (tmp_path / "canary").exists()


def test_the_archives_escape_a_plain_extraction(tmp_path: Path) -> None:
    escaping_tar(tmp_path / "a.tar")
    (tmp_path / "inside").mkdir()
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extraction_filter = lambda member, path: member  # 3.14 would refuse by itself
        archive.extractall(tmp_path / "inside")
    assert (tmp_path / "canary").exists()


def test_careless_auto_classes_import_it(
    tmp_path: Path, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (teacher_folder / "evil.py").write_text(code(tmp_path / "canary"), encoding="utf-8")
    edit(teacher_folder / "config.json", model_type="evil", auto_map=EVIL_CONFIG)
    AutoConfig.from_pretrained(teacher_folder, trust_remote_code=True)
    assert (tmp_path / "canary").exists()


# --- teachers ----------------------------------------------------------------------------------


EVIL_CONFIG = {"AutoConfig": "evil.EvilConfig"}


def only(teacher: Path, canary: Path, name: str, build: Callable[[Path], bytes]) -> None:
    """Put these weights in place of the true ones."""
    (teacher / "model.safetensors").unlink()
    (teacher / name).write_bytes(build(canary))


def index(teacher: Path, canary: Path, name: str, part: str) -> None:
    (teacher / part).write_bytes(torch_saved(canary))
    weights = load_file(teacher / "model.safetensors")
    (teacher / "model.safetensors").unlink()
    table = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, part)}
    (teacher / f"{name}.index.json").write_text(json.dumps(table), encoding="utf-8")


def tensorflow_and_flax_names(teacher: Path, canary: Path) -> None:
    only(teacher, canary, "flax_model.msgpack", pickled)
    (teacher / "tf_model.h5").write_bytes(pickled(canary))
    (teacher / "model.pt").write_bytes(torch_saved(canary))


def header_of_many_exabytes(canary: Path) -> bytes:
    return struct.pack("<Q", 2**63) + b"{}"


def header_in_deep_brackets(canary: Path) -> bytes:
    return struct.pack("<Q", 200_000) + b"[" * 200_000


def header_of_a_gigabyte(teacher: Path, canary: Path) -> None:
    path = teacher / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**30) + b"{")
    os.truncate(path, 8 + 2**30)  # sparse: takes no room


def config_in_deep_brackets(teacher: Path, canary: Path) -> None:
    (teacher / "config.json").write_text("[" * 200_000, encoding="utf-8")


def code_for_the_tokenizer(teacher: Path, canary: Path) -> None:
    (teacher / "evil.py").write_text(code(canary), encoding="utf-8")
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", None]}
    settings = teacher / "tokenizer_config.json"
    edit(settings, tokenizer_class="EvilTokenizer", auto_map=auto_map)


PART = "model-00001-of-00001"
NOT_TENSORS = "cannot be read (damaged, or not only tensors)"
NO_BIN = "which is not a *.bin file of this folder"
NO_TENSORS = "which is not a *.safetensors file"
RUNS_CODE = "holds 'auto_map', which could run code"
UNREADABLE = "model.safetensors cannot be read"
REFUSED = [
    ("pickle", f"pytorch_model.bin {NOT_TENSORS}", only, "pytorch_model.bin", pickled),
    ("zip", f"pytorch_model.bin {NOT_TENSORS}", only, "pytorch_model.bin", torch_saved),
    ("part", f"of-00001.bin {NOT_TENSORS}", index, "pytorch_model.bin", f"pytorch_{PART}.bin"),
    ("outside", f"lists '../evil.bin', {NO_BIN}", index, "pytorch_model.bin", "../evil.bin"),
    ("as-safetensors", UNREADABLE, only, "model.safetensors", pickled),
    ("other-part", f"lists 'evil.bin', {NO_TENSORS}", index, "model.safetensors", "evil.bin"),
    (
        "capital-part",
        f"SAFETENSORS', {NO_TENSORS}",
        index,
        "model.safetensors",
        f"{PART}.SAFETENSORS",
    ),
    ("capital", "there is no", only, "model.SAFETENSORS", torch_saved),
    ("tensorflow-and-flax", "there is no", tensorflow_and_flax_names),
    ("exabytes", UNREADABLE, only, "model.safetensors", header_of_many_exabytes),
    ("gigabyte", UNREADABLE, header_of_a_gigabyte),
    ("brackets", UNREADABLE, only, "model.safetensors", header_in_deep_brackets),
    ("config-brackets", "config.json is not valid JSON", config_in_deep_brackets),
    ("tokenizer", f"tokenizer_config.json {RUNS_CODE}", code_for_the_tokenizer),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_a_teacher_is_refused(
    case: tuple[Any, ...], teacher_folder: Path, canary: Path, manifest: Manifest
) -> None:
    _, message, spoil, *arguments = case
    spoil(teacher_folder, canary, *arguments)
    with refused(message) as error:
        load_teacher(str(teacher_folder), manifest)
    assert str(error.value).startswith(f"teacher {teacher_folder}: ")


KERNEL = "someone/kernel"


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("auto_map", {"auto_map": {"AutoModelForMaskedLM": "evil.EvilModel"}}),
        ("auto_map", {"auto_map": EVIL_CONFIG, "model_type": "evil"}),
        ("auto_map", {"text_config": {"auto_map": EVIL_CONFIG}}),
        ("_attn_implementation", {"_attn_implementation": KERNEL}),
        ("_attn_implementation", {"text_config": {"_attn_implementation": KERNEL}}),
        ("_attn_implementation_internal", {"_attn_implementation_internal": KERNEL}),
        ("attn_implementation", {"attn_implementation": KERNEL}),
        ("quantization_config", {"quantization_config": {"quant_method": "torchao"}}),
    ],
)
def test_a_teacher_whose_config_could_run_code_is_refused(
    key: str, changes: dict[str, Any], teacher_folder: Path, canary: Path, manifest: Manifest
) -> None:
    (teacher_folder / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(teacher_folder / "config.json", **changes)
    with refused(f"teacher {teacher_folder}: config.json holds '{key}', which could run code"):
        load_teacher(str(teacher_folder), manifest)


def test_files_beside_the_weights_are_not_opened(
    teacher_folder: Path, canary: Path, manifest: Manifest
) -> None:
    """Add what peft, torch's distributed checkpoints and the generation of text would look at."""
    before = load_teacher(str(teacher_folder), manifest).sha256
    (teacher_folder / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    for name in ("adapter_model.bin", "pytorch_model.bin", ".metadata", "training_args.bin"):
        (teacher_folder / name).write_bytes(torch_saved(canary))
    (teacher_folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(pickled(canary))
    (teacher_folder / "custom_generate").mkdir()
    (teacher_folder / "custom_generate" / "generate.py").write_text(code(canary))
    (teacher_folder / "modeling_bert.py").write_text(code(canary))
    assert load_teacher(str(teacher_folder), manifest).sha256 == before


def test_a_torch_that_unpickles_unsafely_is_not_used(
    teacher_folder: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(teacher_folder / "model.safetensors")
    (teacher_folder / "model.safetensors").unlink()
    torch.save(weights, teacher_folder / "pytorch_model.bin")
    load_teacher(str(teacher_folder), manifest)  # plain tensors, and today's torch
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(RunError, match=r"torch 2\.9\.1\+cu126 .* \(CVE-2026-24747\)"):
        load_teacher(str(teacher_folder), manifest)


@pytest.fixture
def hub(tmp_path: Path, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the teacher as `some/bert`, as a hub's download would have left it."""
    repository = tmp_path / "cache" / "models--some--bert"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(teacher_folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return snapshot


def test_a_teacher_from_a_hub_is_checked_like_a_folder(
    hub: Path, canary: Path, manifest: Manifest
) -> None:
    found = load_teacher("some/bert", manifest)
    assert (found.name, found.local, found.revision) == ("some/bert", False, "a" * 40)
    assert len(load_tokenizer("some/bert").vocabulary) == 200
    code_for_the_tokenizer(hub, canary)
    with pytest.raises(
        RunError, match=r"teacher some/bert: tokenizer_config\.json holds 'auto_map"
    ):
        load_teacher("some/bert", manifest)
    with pytest.raises(CorpusError, match=r"tokenizer_config\.json holds 'auto_map'"):
        load_tokenizer("some/bert")


def test_our_own_students_are_never_pickles(tmp_path: Path, canary: Path) -> None:
    """Refuse even one without a trap: what this project writes is safetensors."""
    model = tiny_distilbert()
    model.save_pretrained(tmp_path / "student")
    (tmp_path / "student" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "student" / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"pytorch_model\.bin is a pickle, .* save_pretrained"):
        load_model(tmp_path / "student")
    (tmp_path / "student" / "pytorch_model.bin").write_bytes(torch_saved(canary))
    with pytest.raises(RunError, match=r"pytorch_model\.bin is a pickle"):
        load_model(tmp_path / "student")

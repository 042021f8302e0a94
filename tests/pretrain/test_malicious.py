"""Models that run code when loaded carelessly: none of them does here.

The first tests let each trap spring with a careless reader, so that one gone dead is noticed.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, BertForMaskedLM, DistilBertForMaskedLM
from traps import (
    array_of_objects,
    code,
    edit,
    escaping_tar,
    pickled,
    torch_saved,
    yaml_that_applies,
)

from data_prep import CorpusError
from data_prep.shards import load_manifest
from data_prep.tokens import load as load_tokenizer
from pretrain import RunError
from pretrain.model.loading import load_model
from pretrain.model.teacher import load_teacher

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """Where a trap leaves its trace."""
    return tmp_path / "canary"


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Where a trap leaves its trace; there is none after the test."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


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
    build: Callable[[Path], Any], read: Callable[[Any], object], sprung: Path
) -> None:
    read(build(sprung))
    assert sprung.exists()


def test_a_careless_extraction_escapes(tmp_path: Path, sprung: Path) -> None:
    escaping_tar(tmp_path / "a.tar")
    (tmp_path / "inside").mkdir()
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extraction_filter = lambda member, path: member  # 3.14 would refuse by itself
        archive.extractall(tmp_path / "inside")
    assert sprung.exists()


def test_careless_auto_classes_import_it(
    tmp_path: Path,
    sprung: Path,
    save_teacher: Callable[..., BertForMaskedLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    save_teacher(folder)
    (folder / "evil.py").write_text(code(sprung), encoding="utf-8")
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert sprung.exists()


# --- teachers ----------------------------------------------------------------------------------


@pytest.fixture
def teacher(tmp_path: Path, save_teacher: Callable[..., BertForMaskedLM]) -> Path:
    folder = tmp_path / "teacher"
    save_teacher(folder)
    return folder


def only(teacher: Path, name: str, data: bytes) -> None:
    """These weights in place of the true ones."""
    (teacher / "model.safetensors").unlink()
    (teacher / name).write_bytes(data)


def index(teacher: Path, name: str, part: str) -> None:
    weights = load_file(teacher / "model.safetensors")
    (teacher / "model.safetensors").unlink()
    table = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, part)}
    (teacher / f"{name}.index.json").write_text(json.dumps(table), encoding="utf-8")


def plain_pickle(teacher: Path, canary: Path) -> None:
    only(teacher, "pytorch_model.bin", pickled(canary))


def zipped_pickle(teacher: Path, canary: Path) -> None:
    only(teacher, "pytorch_model.bin", torch_saved(canary))


def pickle_in_parts(teacher: Path, canary: Path) -> None:
    index(teacher, "pytorch_model.bin", "pytorch_model-00001-of-00001.bin")
    (teacher / "pytorch_model-00001-of-00001.bin").write_bytes(torch_saved(canary))


def pickle_outside_the_folder(teacher: Path, canary: Path) -> None:
    index(teacher, "pytorch_model.bin", "../evil.bin")
    (teacher.parent / "evil.bin").write_bytes(torch_saved(canary))


def pickle_as_safetensors(teacher: Path, canary: Path) -> None:
    only(teacher, "model.safetensors", pickled(canary))


def pickle_in_a_safetensors_index(teacher: Path, canary: Path) -> None:
    index(teacher, "model.safetensors", "evil.bin")
    (teacher / "evil.bin").write_bytes(torch_saved(canary))


def pickle_in_capital_letters(teacher: Path, canary: Path) -> None:
    index(teacher, "model.safetensors", "model-00001-of-00001.SAFETENSORS")
    (teacher / "model-00001-of-00001.SAFETENSORS").write_bytes(torch_saved(canary))


def only_in_capital_letters(teacher: Path, canary: Path) -> None:
    only(teacher, "model.SAFETENSORS", torch_saved(canary))


def tensorflow_and_flax_names(teacher: Path, canary: Path) -> None:
    only(teacher, "flax_model.msgpack", pickled(canary))
    (teacher / "tf_model.h5").write_bytes(pickled(canary))
    (teacher / "model.pt").write_bytes(torch_saved(canary))


def header_of_many_exabytes(teacher: Path, canary: Path) -> None:
    only(teacher, "model.safetensors", struct.pack("<Q", 2**63) + b"{}")


def header_of_a_gigabyte(teacher: Path, canary: Path) -> None:
    path = teacher / "model.safetensors"
    only(teacher, path.name, struct.pack("<Q", 2**30) + b"{")
    with path.open("r+b") as file:
        file.truncate(8 + 2**30)  # sparse: takes no room


def header_in_deep_brackets(teacher: Path, canary: Path) -> None:
    only(teacher, "model.safetensors", struct.pack("<Q", 200_000) + b"[" * 200_000)


def config_in_deep_brackets(teacher: Path, canary: Path) -> None:
    (teacher / "config.json").write_text("[" * 200_000, encoding="utf-8")


def code_for_the_model(teacher: Path, canary: Path) -> None:
    (teacher / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(teacher / "config.json", auto_map={"AutoModelForMaskedLM": "evil.EvilModel"})


def code_for_the_config(teacher: Path, canary: Path) -> None:
    (teacher / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(teacher / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})


def code_one_level_down(teacher: Path, canary: Path) -> None:
    (teacher / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(teacher / "config.json", text_config={"auto_map": {"AutoConfig": "evil.EvilConfig"}})


def attention_from_a_hub(teacher: Path, canary: Path) -> None:
    edit(teacher / "config.json", _attn_implementation_internal="someone/kernel")


def attention_one_level_down(teacher: Path, canary: Path) -> None:
    edit(teacher / "config.json", text_config={"_attn_implementation": "someone/kernel"})


def attention_by_its_public_name(teacher: Path, canary: Path) -> None:
    edit(teacher / "config.json", attn_implementation="someone/kernel")


def quantised_by_another_package(teacher: Path, canary: Path) -> None:
    edit(teacher / "config.json", quantization_config={"quant_method": "torchao"})


def code_for_the_tokenizer(teacher: Path, canary: Path) -> None:
    (teacher / "evil.py").write_text(code(canary), encoding="utf-8")
    names = ["evil.EvilTokenizer", None]
    edit(
        teacher / "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": names},
    )


REFUSED = [
    (plain_pickle, "pytorch_model.bin cannot be read (damaged, or not only tensors)"),
    (zipped_pickle, "pytorch_model.bin cannot be read (damaged, or not only tensors)"),
    (pickle_in_parts, "of-00001.bin cannot be read (damaged, or not only tensors)"),
    (pickle_outside_the_folder, "lists '../evil.bin', which is no *.bin file of this folder"),
    (pickle_as_safetensors, "model.safetensors cannot be read"),
    (pickle_in_a_safetensors_index, "lists 'evil.bin', which is no *.safetensors file"),
    (pickle_in_capital_letters, "SAFETENSORS', which is no *.safetensors file"),
    (only_in_capital_letters, "there is no"),
    (tensorflow_and_flax_names, "there is no"),
    (header_of_many_exabytes, "model.safetensors cannot be read"),
    (header_of_a_gigabyte, "model.safetensors cannot be read"),
    (header_in_deep_brackets, "model.safetensors cannot be read"),
    (config_in_deep_brackets, "config.json is not valid JSON"),
    (code_for_the_model, "config.json holds 'auto_map', which could run code"),
    (code_for_the_config, "config.json holds 'auto_map', which could run code"),
    (code_one_level_down, "config.json holds 'auto_map', which could run code"),
    (attention_from_a_hub, "config.json holds '_attn_implementation_internal'"),
    (attention_one_level_down, "config.json holds '_attn_implementation'"),
    (attention_by_its_public_name, "config.json holds 'attn_implementation'"),
    (quantised_by_another_package, "config.json holds 'quantization_config'"),
    (code_for_the_tokenizer, "tokenizer_config.json holds 'auto_map', which could run code"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0].__name__)
def test_a_teacher_is_refused(
    case: tuple[Callable[[Path, Path], None], str], teacher: Path, canary: Path, corpus: Path
) -> None:
    spoil, message = case
    spoil(teacher, canary)
    with pytest.raises(RunError) as error:
        load_teacher(str(teacher), load_manifest(corpus))
    text = str(error.value)
    assert text.startswith(f"teacher {teacher}: ") and message in text and "\n" not in text


def test_files_beside_the_weights_are_not_opened(teacher: Path, canary: Path, corpus: Path) -> None:
    """What peft, torch's distributed checkpoints and the generation of text would look at."""
    before = load_teacher(str(teacher), load_manifest(corpus)).sha256
    (teacher / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    for name in ("adapter_model.bin", "pytorch_model.bin", ".metadata", "training_args.bin"):
        (teacher / name).write_bytes(torch_saved(canary))
    (teacher / "shard-00001-model-00001-of-00001.safetensors").write_bytes(pickled(canary))
    (teacher / "custom_generate").mkdir()
    (teacher / "custom_generate" / "generate.py").write_text(code(canary))
    (teacher / "modeling_bert.py").write_text(code(canary))
    assert load_teacher(str(teacher), load_manifest(corpus)).sha256 == before


def test_a_torch_that_unpickles_unsafely_is_not_used(
    teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(teacher / "model.safetensors")
    (teacher / "model.safetensors").unlink()
    torch.save(weights, teacher / "pytorch_model.bin")
    load_teacher(str(teacher), load_manifest(corpus))  # plain tensors, and today's torch
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(RunError, match=r"torch 2\.9\.1\+cu126 .* \(CVE-2026-24747\)"):
        load_teacher(str(teacher), load_manifest(corpus))


@pytest.fixture
def hub(tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The teacher as `some/bert`, as a hub's download would have left it."""
    repository = tmp_path / "cache" / "models--some--bert"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(teacher, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return snapshot


def test_names_of_a_hub_are_looked_at_alike(hub: Path, canary: Path, corpus: Path) -> None:
    manifest = load_manifest(corpus)
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


def test_our_own_students_are_never_pickles(
    tmp_path: Path, canary: Path, tiny_distilbert: Callable[..., DistilBertForMaskedLM]
) -> None:
    """Not even one without a trap: what this project writes is safetensors."""
    model = tiny_distilbert()
    model.save_pretrained(tmp_path / "student")
    (tmp_path / "student" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "student" / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"pytorch_model\.bin is a pickle, .* save_pretrained"):
        load_model(tmp_path / "student")
    (tmp_path / "student" / "pytorch_model.bin").write_bytes(torch_saved(canary))
    with pytest.raises(RunError, match=r"pytorch_model\.bin is a pickle"):
        load_model(tmp_path / "student")

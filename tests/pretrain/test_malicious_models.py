"""Check that model folders that fill the memory or block are refused in one line."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.runs import refused
from support.tiny import tiny_distilbert
from support.traps import edit

from data_prep import CorpusError
from data_prep.shards import Manifest, load_manifest
from data_prep.tokens import load as load_tokenizer
from pretrain import RunError, checkpoint
from pretrain.model.folder import load_model
from pretrain.model.teacher import load_teacher

pytestmark = pytest.mark.usefixtures("limits")

LIMIT = 60  # seconds, for what takes none
ROOM = 4 * 2**30  # bytes beyond what this process has


@pytest.fixture
def limits() -> Iterator[None]:
    """Fail a test that blocks or allocates without end."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("blocked")

    handler = signal.signal(signal.SIGALRM, late)
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = psutil.Process().memory_info().vms
    if sys.platform == "linux":  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


def configure(folder: Path, key: str, value: Any) -> None:
    edit(folder / "config.json", **{key: value})


def replace(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    """Put what `make` makes in the place of a file."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


def resize(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)  # what is added takes no disk space


def shorten(folder: Path, name: str, kept: float) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(kept * len(data))])


def shorten_pickle(folder: Path, kept: float) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    shorten(folder, "pytorch_model.bin", kept)


def break_tokenizer_json(folder: Path) -> None:
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_bytes(b"{broken")


def index(folder: Path, make: Callable[[Path], object], *parts: Any) -> None:
    """Divide the weights into parts, which `make` makes."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    table = {name: parts[i % len(parts)] for i, name in enumerate(weights)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": table}), encoding="utf-8")
    for part in parts:
        if isinstance(part, str):
            make(folder / part)


def tensor_of_terabytes(folder: Path) -> None:
    """Write a valid header and 8 TB of zeros that take no disk space."""
    entry = {"dtype": "F32", "shape": [2**31, 2**10], "data_offsets": [0, 2**43]}
    header = json.dumps({"bert.embeddings.word_embeddings.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**43)


SETTINGS = "tokenizer_config.json"
HOSTILE = [
    ("layers", "num_hidden_layers is 1000000000", configure, "num_hidden_layers", 10**9),
    ("no-layers", "config.json", configure, "num_hidden_layers", -1),
    ("width", "config.json describes", configure, "hidden_size", 2**29),
    ("words", "config.json describes", configure, "vocab_size", 2**40),
    ("positions", "config.json describes", configure, "max_position_embeddings", 2**40),
    ("types", "config.json describes", configure, "type_vocab_size", 2**40),
    ("intermediate", "config.json describes", configure, "intermediate_size", 2**40),
    ("other-width", "[64] there, [65] by config.json", configure, "intermediate_size", 65),
    ("labels", "", configure, "num_labels", 10**10),
    ("heads", "config.json", configure, "num_attention_heads", 2**40),
    ("no-heads", "config.json", configure, "num_attention_heads", 0),
    ("odd-width", "config.json", configure, "hidden_size", 33),
    ("float", "config.json", configure, "hidden_size", 1e300),
    ("text", "config.json", configure, "hidden_size", "wide"),
    ("null", "config.json", configure, "hidden_size", None),
    ("list", "config.json", configure, "num_hidden_layers", [4]),
    ("activation", "'nonsense'", configure, "hidden_act", "nonsense"),
    ("activation-list", "config.json", configure, "hidden_act", ["gelu"]),
    ("kind-list", "supported are bert", configure, "model_type", ["bert"]),
    ("config-fifo", "there is no", replace, "config.json", os.mkfifo),
    ("config-link", "there is no", replace, "config.json", dangling),
    ("config-folder", "there is no", replace, "config.json", Path.mkdir),
    ("config-sparse", "config.json has 1,099,511,627,776 bytes", resize, "config.json", 2**40),
    ("config-half", "config.json", shorten, "config.json", 0.5),
    ("config-empty", "config.json", write, "config.json", b""),
    ("config-list", "config.json", write, "config.json", b"[1, 2]"),
    ("config-null", "config.json", write, "config.json", b"null"),
    ("weights-empty", "model.safetensors", shorten, "model.safetensors", 0.0),
    ("weights-half", "model.safetensors", shorten, "model.safetensors", 0.5),
    ("weights-most", "model.safetensors", shorten, "model.safetensors", 0.99),
    ("pickle-empty", "pytorch_model.bin", shorten_pickle, 0.0),
    ("pickle-half", "pytorch_model.bin", shorten_pickle, 0.5),
    ("pickle-most", "pytorch_model.bin", shorten_pickle, 0.99),
    ("weights-fifo", "there is no", replace, "model.safetensors", os.mkfifo),
    ("weights-link", "there is no", replace, "model.safetensors", dangling),
    ("weights-folder", "there is no", replace, "model.safetensors", Path.mkdir),
    ("weights-huge", "than the memory", tensor_of_terabytes),
    ("part-fifo", "is not a file", index, os.mkfifo, "part.safetensors"),
    ("part-missing", "is not a file", index, lambda path: None, "part.safetensors"),
    ("part-folder", "is not a file", index, Path.mkdir, "part.safetensors"),
    ("part-number", "lists 7", index, Path.touch, 7),
    ("part-list", "lists ['a']", index, Path.touch, ["a"]),
    ("words-fifo", "vocab.txt is not a file", replace, "vocab.txt", os.mkfifo),
    ("words-link", "vocab.txt is not a file", replace, "vocab.txt", dangling),
    ("words-folder", "vocab.txt is not a file", replace, "vocab.txt", Path.mkdir),
    ("words-sparse", "vocab.txt has 1,099,511,627,776 bytes", resize, "vocab.txt", 2**40),
    ("words-bytes", "vocab.txt is not UTF-8 text", write, "vocab.txt", b"\xff\xfe[PAD]"),
    ("tokenizer-broken", "tokenizer cannot be read", break_tokenizer_json),
    ("settings-fifo", f"{SETTINGS} is not a file", replace, SETTINGS, os.mkfifo),
]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case[0])
def test_a_hostile_teacher_is_refused_in_a_line(
    teacher_folder: Path, manifest: Manifest, case: tuple[Any, ...]
) -> None:
    _, message, spoil, *arguments = case
    spoil(teacher_folder, *arguments)
    if not message:  # of no concern to a language model
        load_teacher(str(teacher_folder), manifest)
        return
    with refused(message) as error:
        load_teacher(str(teacher_folder), manifest)
    text = str(error.value)
    assert text.startswith(f"teacher {teacher_folder}: "), text
    assert "blocked" not in text and "report" not in text and len(text) < 600, text


STUDENT = [
    ("layers", "n_layers is 1000000000", configure, "n_layers", 10**9),
    ("width", "config.json describes", configure, "dim", 2**29),
    ("positions", "config.json describes", configure, "max_position_embeddings", 2**40),
    ("labels", "", configure, "num_labels", 10**10),
    ("activation", "nonsense", configure, "activation", "nonsense"),
    ("kind", "supported are bert, distilbert, roberta", configure, "model_type", ["distilbert"]),
    ("config-fifo", "there is no", replace, "config.json", os.mkfifo),
    ("weights-fifo", "there is no", replace, "model.safetensors", os.mkfifo),
]


@pytest.mark.parametrize("case", STUDENT, ids=lambda case: case[0])
def test_a_hostile_student_is_refused_in_a_line(tmp_path: Path, case: tuple[Any, ...]) -> None:
    _, message, spoil, *arguments = case
    tiny_distilbert().save_pretrained(tmp_path / "student")
    spoil(tmp_path / "student", *arguments)
    if not message:
        load_model(tmp_path / "student")
        return
    with refused(message):
        load_model(tmp_path / "student")


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["fifo", "directory"])
def test_a_hostile_tokenizer_is_refused_in_a_line(
    corpus: Path, tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    source = "vocab.txt" if name == "vocab.txt" else "tokenizer.json"
    (folder / source).write_bytes((corpus / "tokenizer" / source).read_bytes())
    replace(folder, name, make)
    path = folder / name if name == "vocab.txt" else folder
    with refused(name, kind=CorpusError):
        load_tokenizer(path)


def test_settings_that_are_no_object_are_refused_in_a_line(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((corpus / "tokenizer/tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_checkpoint_or_shards_of_pipes_do_not_block(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(RunError, match="no checkpoint verifies"):
        checkpoint.newest(tmp_path / "checkpoints", lambda text: None)
    (tmp_path / "shards").mkdir()
    os.mkfifo(tmp_path / "shards" / "manifest.json")
    with pytest.raises(CorpusError, match=r"manifest\.json: not found"):
        load_manifest(tmp_path / "shards")


def test_evaluate_refuses_a_hostile_model_with_exit_code_2(
    teacher_folder: Path, corpus: Path, distil: Any
) -> None:
    edit(teacher_folder / "config.json", hidden_size=2**40)
    code, _, err = distil("evaluate", teacher_folder, corpus)
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith("error: ")

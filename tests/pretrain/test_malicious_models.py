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
from safetensors.torch import load_file
from transformers import BertForMaskedLM, DistilBertForMaskedLM
from traps import edit

from data_prep import CorpusError
from data_prep.shards import load_manifest
from data_prep.tokens import load as load_tokenizer
from launch.cli import main
from pretrain import RunError, checkpoint
from pretrain.model.loading import load_model
from pretrain.model.teacher import load_teacher

pytestmark = pytest.mark.usefixtures("one_thread", "limits")

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
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def teacher(tmp_path: Path, save_teacher: Callable[..., BertForMaskedLM]) -> Path:
    save_teacher(tmp_path / "teacher")
    return tmp_path / "teacher"


def number(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **{key: value})


def fifo(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def dangling(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "nothing")

    return spoil


def directory(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def index(*parts: Any, make: Callable[[Path], object] = Path.touch) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        table = {name: parts[i % len(parts)] for i, name in enumerate(weights)}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": table}), encoding="utf-8")
        for part in parts:
            if isinstance(part, str):
                make(folder / part)

    return spoil


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(size)

    return spoil


def tensor_of_terabytes(folder: Path) -> None:
    """Write a valid header and 8 TB of zeros that take no disk space."""
    entry = {"dtype": "F32", "shape": [2**31, 2**10], "data_offsets": [0, 2**43]}
    header = json.dumps({"bert.embeddings.word_embeddings.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**43)


HOSTILE: list[tuple[str, Callable[[Path], None], str]] = [
    ("layers", number("num_hidden_layers", 10**9), "num_hidden_layers is 1000000000"),
    ("some-layers", number("num_hidden_layers", 5), "do not fit its config.json"),
    ("no-layers", number("num_hidden_layers", -1), "config.json"),
    ("width", number("hidden_size", 2**29), "config.json describes"),
    ("words", number("vocab_size", 2**40), "config.json describes"),
    ("positions", number("max_position_embeddings", 2**40), "config.json describes"),
    ("types", number("type_vocab_size", 2**40), "config.json describes"),
    ("intermediate", number("intermediate_size", 2**40), "config.json describes"),
    ("other-width", number("intermediate_size", 65), "[64] there, [65] by config.json"),
    ("labels", number("num_labels", 10**10), ""),
    ("heads", number("num_attention_heads", 2**40), "config.json"),
    ("no-heads", number("num_attention_heads", 0), "config.json"),
    ("float", number("hidden_size", 1e300), "config.json"),
    ("text", number("hidden_size", "wide"), "config.json"),
    ("null", number("hidden_size", None), "config.json"),
    ("list", number("num_hidden_layers", [4]), "config.json"),
    ("activation", number("hidden_act", "nonsense"), "'nonsense'"),
    ("activation-list", number("hidden_act", ["gelu"]), "config.json"),
    ("kind-list", number("model_type", ["bert"]), "cannot be a teacher here"),
    ("config-fifo", fifo("config.json"), "there is no"),
    ("config-link", dangling("config.json"), "there is no"),
    ("config-folder", directory("config.json"), "there is no"),
    ("config-sparse", sparse("config.json", 2**40), "config.json has 1,099,511,627,776 bytes"),
    ("weights-fifo", fifo("model.safetensors"), "there is no"),
    ("weights-link", dangling("model.safetensors"), "there is no"),
    ("weights-folder", directory("model.safetensors"), "there is no"),
    ("weights-huge", tensor_of_terabytes, "than the memory"),
    ("part-fifo", index("part.safetensors", make=os.mkfifo), "is no file"),
    ("part-missing", index("part.safetensors", make=lambda path: None), "is no file"),
    ("part-folder", index("part.safetensors", make=Path.mkdir), "is no file"),
    ("part-number", index(7), "lists 7"),
    ("part-list", index(["a"]), "lists ['a']"),
    ("words-fifo", fifo("vocab.txt"), "vocab.txt is no file"),
    ("words-link", dangling("vocab.txt"), "vocab.txt is no file"),
    ("words-folder", directory("vocab.txt"), "vocab.txt is no file"),
    ("words-sparse", sparse("vocab.txt", 2**40), "vocab.txt has 1,099,511,627,776 bytes"),
    ("settings-fifo", fifo("tokenizer_config.json"), "tokenizer_config.json is no file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "message"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_a_hostile_teacher_is_refused_in_a_line(
    teacher: Path, corpus: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(teacher)
    manifest = load_manifest(corpus)
    if not message:  # of no concern to a language model
        load_teacher(str(teacher), manifest)
        return
    with pytest.raises(RunError) as error:
        load_teacher(str(teacher), manifest)
    text = str(error.value)
    assert message in text and "\n" not in text and "blocked" not in text, text
    assert "report" not in text and len(text) < 600, text


STUDENT = [
    ("layers", number("n_layers", 10**9), "n_layers is 1000000000"),
    ("width", number("dim", 2**29), "config.json describes"),
    ("positions", number("max_position_embeddings", 2**40), "config.json describes"),
    ("labels", number("num_labels", 10**10), ""),
    ("activation", number("activation", "nonsense"), "nonsense"),
    ("kind", number("model_type", ["distilbert"]), "model; only bert and distilbert"),
    ("config-fifo", fifo("config.json"), "there is no"),
    ("weights-fifo", fifo("model.safetensors"), "there is no"),
]


@pytest.mark.parametrize(
    ("spoil", "message"), [case[1:] for case in STUDENT], ids=[case[0] for case in STUDENT]
)
def test_a_hostile_student_is_refused_in_a_line(
    tmp_path: Path,
    tiny_distilbert: Callable[..., DistilBertForMaskedLM],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    tiny_distilbert().save_pretrained(tmp_path / "student")
    spoil(tmp_path / "student")
    if not message:
        load_model(tmp_path / "student")
        return
    with pytest.raises(RunError) as error:
        load_model(tmp_path / "student")
    assert message in str(error.value) and "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("spoil", [fifo, directory], ids=["fifo", "directory"])
def test_a_hostile_tokenizer_is_refused_in_a_line(
    corpus: Path, tmp_path: Path, name: str, spoil: Callable[[str], Callable[[Path], None]]
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    source = "vocab.txt" if name == "vocab.txt" else "tokenizer.json"
    (folder / source).write_bytes((corpus / "tokenizer" / source).read_bytes())
    spoil(name)(folder)
    path = folder / name if name == "vocab.txt" else folder
    with pytest.raises(CorpusError, match=name) as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


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
    teacher: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit(teacher / "config.json", hidden_size=2**40)
    monkeypatch.setattr(sys, "argv", ["distil", "evaluate", str(teacher), str(corpus)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(said) == 1 and said[0].startswith("error: ")

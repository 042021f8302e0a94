"""Check mistakes at the terminal: one clear line, the right exit code, no traceback."""

import bz2
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
import yaml
from support.processes import assert_refused, file_size_limit, in_a_process, python
from support.small_corpora import LETTERS, corpus_values, write

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import load_manifest

WORDS = [*LETTERS, *(f"##{letter}" for letter in ascii_lowercase)]
Config = dict[str, Any]
Distil = Callable[..., Any]


@pytest.fixture
def corpus(tmp_path: Path) -> Config:
    """Return a corpus config over one text file."""
    (tmp_path / "text").mkdir()
    text = "\n\n".join(f"some words of a paragraph {chr(97 + i % 26) * 3}" for i in range(200))
    (tmp_path / "text" / "good.txt").write_text(text, encoding="utf-8")
    source = {"kind": "text", "path": str(tmp_path / "text"), "document": "paragraph"}
    return corpus_values(tmp_path, WORDS, source, row_length=32)


def prepared(tmp_path: Path, corpus: Config) -> Path:
    write(tmp_path / "corpus.yaml", corpus)
    prepare(CorpusConfig.model_validate(corpus))
    return Path(corpus["output"])


def run_file(tmp_path: Path, shards: Path, teacher: object) -> Path:
    train = {"max_steps": 2, "global_batch_size": 4, "precision": "fp32", "micro_batch_size": 4}
    values = {"output": f"{tmp_path}/run", "shards": str(shards), "teacher": str(teacher)}
    return write(tmp_path / "run.yaml", {**values, "train": train})


def test_help_shows_an_example_for_every_command(distil: Distil) -> None:
    _, listing, _ = in_a_process("--help")
    for command in (
        *("prepare", "verify", "inspect", "replay"),
        *("pretrain", "evaluate", "export", "demo"),
    ):
        assert command in listing
        assert f"Example: distil {command}" in distil(command, "--help").out


def test_debug_shows_the_traceback(distil: Distil, tmp_path: Path) -> None:
    code, _, err = distil("prepare", tmp_path / "none.yaml", "--debug")
    assert code == 2
    assert "Traceback" in err and "no such file" in err.splitlines()[-1]


def test_missing_files_are_named(distil: Distil, tmp_path: Path, corpus: Config) -> None:
    assert_refused(in_a_process("prepare", tmp_path / "none.yaml"), "none.yaml: no such file")
    assert_refused(distil("verify", tmp_path / "none"), "none")
    assert_refused(distil("inspect", tmp_path / "none"), "none")
    assert_refused(distil("export", tmp_path / "none", tmp_path / "out"), "none: no checkpoint")
    corpus["sources"][0]["path"] = str(tmp_path / "nothing")
    assert_refused(distil("prepare", write(tmp_path / "c.yaml", corpus)), "nothing")


def test_an_empty_corpus_is_refused(distil: Distil, tmp_path: Path, corpus: Config) -> None:
    (tmp_path / "text" / "good.txt").write_text("\n\n  \n", encoding="utf-8")
    assert_refused(distil("prepare", write(tmp_path / "c.yaml", corpus)), "no training row")
    assert not (Path(corpus["output"]) / "manifest.json").exists()


def test_a_truncated_dump_is_refused(distil: Distil, tmp_path: Path, corpus: Config) -> None:
    page = "<page><title>T{0}</title><ns>0</ns><id>{0}</id><revision><text>word {0}</text>"
    pages = "".join(page.format(i) + "</revision></page>" for i in range(20000))
    whole = bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode())
    dump = tmp_path / "dump.xml.bz2"
    dump.write_bytes(whole[: len(whole) * 2 // 3])
    corpus["sources"] = [{"kind": "mediawiki", "path": str(dump)}]
    assert_refused(distil("prepare", write(tmp_path / "c.yaml", corpus)), "dump.xml.bz2", "again")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_document_of_one_50_mb_line_stays_within_a_gigabyte(
    tmp_path: Path, corpus: Config
) -> None:
    # Random letters in words of 150: each becomes one [UNK], which keeps tokenising short.
    letters = bytes(97 + i % 26 for i in range(256))
    line = bytearray(random.Random(0).randbytes(50 * 2**20).translate(letters))
    line[150::151] = b" " * len(line[150::151])
    (tmp_path / "text" / "long.txt").write_bytes(line)
    corpus["sources"][0]["document"] = "file"
    path = write(tmp_path / "corpus.yaml", corpus)
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "prepare", str(path), "max_unknown=1"]
    )
    anonymous = [0]  # KiB; mapped files do not count
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        anonymous += [int(kib) for kib in re.findall(r"RssAnon:\s+(\d+) kB", status)]
        time.sleep(0.02)
    assert process.returncode == 0
    assert 0 < max(anonymous) < 2**20
    splits = load_manifest(Path(corpus["output"])).splits.values()
    words = sum(split.tokens - 2 * split.segments for split in splits)
    assert words >= 50 * 2**20 // 151


def test_a_flipped_bit_in_a_shard_is_found(
    distil: Distil, tmp_path: Path, corpus: Config, save_teacher: Any
) -> None:
    folder = prepared(tmp_path, corpus)
    shard = folder / load_manifest(folder).splits["train"].shards[0].file
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    assert_refused(distil("verify", folder), shard.name, "again")
    run = run_file(tmp_path, folder, save_teacher(tmp_path / "teacher", WORDS, positions=64))
    assert_refused(distil("pretrain", run), shard.name)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_teachers_that_do_not_fit_are_refused(
    distil: Distil, tmp_path: Path, corpus: Config, save_teacher: Any
) -> None:
    folder = prepared(tmp_path, corpus)
    other = save_teacher(tmp_path / "other", [*WORDS[:-2], WORDS[-1], WORDS[-2]], positions=64)
    short = save_teacher(tmp_path / "short", WORDS, positions=16)
    for teacher, *parts in (
        (other, "vocabulary"),
        (short, "row_length: 16", "max_position"),
        (tmp_path / "nobody" / "here", "nobody/here"),
    ):
        assert_refused(distil("pretrain", run_file(tmp_path, folder, teacher)), *parts)


def test_a_full_disk_names_the_place_and_loses_nothing(
    distil: Distil, tmp_path: Path, corpus: Config
) -> None:
    folder = prepared(tmp_path, corpus)
    before = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    long = " ".join(f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in WORDS[5:31])
    (tmp_path / "text" / "more.txt").write_text("\n\n".join(f"{long} {i}" for i in range(40)))
    elsewhere = write(tmp_path / "c.yaml", {**corpus, "output": str(tmp_path / "elsewhere")})
    ended = in_a_process("prepare", elsewhere, prefix=file_size_limit(64))
    assert_refused(ended, "elsewhere", "file-size limit")
    assert not (tmp_path / "elsewhere" / "manifest.json").exists()
    assert distil("prepare", elsewhere).code == 0  # the same command, with room
    assert before == {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_read_only_output_is_refused(distil: Distil, tmp_path: Path, corpus: Config) -> None:
    # A file where the folder's parent should be: root may write anywhere modes forbid it.
    (tmp_path / "file").write_text("", encoding="utf-8")
    corpus["output"] = str(tmp_path / "file" / "shards")
    assert_refused(distil("prepare", write(tmp_path / "c.yaml", corpus)), "file")


def test_a_finished_corpus_is_up_to_date_and_never_overwritten(
    distil: Distil, tmp_path: Path, corpus: Config
) -> None:
    folder = prepared(tmp_path, corpus)
    before = (folder / "manifest.json").read_bytes()
    assert distil("prepare", tmp_path / "corpus.yaml").code == 0
    changed = write(tmp_path / "changed.yaml", {**corpus, "row_length": 64})
    assert_refused(distil("prepare", changed), "row_length", "output")
    assert (folder / "manifest.json").read_bytes() == before


def test_a_mistake_in_training_is_one_line(
    distil: Distil, tmp_path: Path, corpus: Config, save_teacher: Any
) -> None:
    folder = prepared(tmp_path, corpus)
    run = run_file(tmp_path, folder, save_teacher(tmp_path / "teacher", WORDS, positions=64))
    assert_refused(distil("pretrain", run, "train.micro_batch_size=3"), "take 3 or 6")
    assert_refused(distil("pretrain", run, "student.init=[0,5]"), "layers 0 to 1, not 5")
    assert_refused(distil("pretrain", run, "student.init=nowhere"), "nowhere")
    if not torch.cuda.is_available():
        assert_refused(distil("pretrain", run, "train.precision=fp16"), "use bf16 or fp32")


def test_the_list_of_commands_needs_no_large_package() -> None:
    """Each worker of `distil prepare` reads it again: half a second were for evaluations' code."""
    code = "import sys, launch.cli; print(*sys.modules)"
    found = {name.partition(".")[0] for name in python("-c", code).stdout.split()}
    large = {"numpy", "pyarrow", "pydantic", "torch", "transformers", "datasets", "yaml", "psutil"}
    assert not large & found


@pytest.mark.parametrize(
    "names",
    [
        ("evaluate", "export"),
        pytest.param(("recipe", "verify", "inspect", "report", "replay"), marks=pytest.mark.slow),
    ],
)
def test_commands_run_in_new_processes(distil: Distil, run: Path, names: tuple[str, ...]) -> None:
    """Start some without what other tests have loaded; a forked process has it, too.

    Tests of `prepare`, `pretrain`, `launch` and, among the slow ones, `doctor` do the same.
    """
    assert distil("pretrain", run).code == 0
    values = yaml.safe_load(run.read_text(encoding="utf-8"))
    out, shards, recipe = run.parent / "out", values["shards"], run.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"runs": [values]}), encoding="utf-8")
    commands: dict[str, tuple[tuple[object, ...], str]] = {
        "verify": (("verify", shards), "are whole"),
        "inspect": (("inspect", shards), "tokens"),
        "report": (("report", out), "finished"),
        "replay": (("replay", out, "--step", "1"), "step 1"),
        "evaluate": (("evaluate", out, shards), "accuracy"),
        "export": (("export", out, run.parent / "exported"), "exported"),
        "recipe": (("recipe", recipe), "up to date"),
    }
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "launch", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, (arguments, _) in commands.items()
        if name in names
    }
    for name, process in started.items():
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and commands[name][1] in said, (name, said)

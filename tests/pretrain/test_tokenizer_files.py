"""Check the tokenizer next to the weights: only files of the shards' manifest."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import refused, reseal_checkpoint, start, step_folder
from support.tiny import tiny_distilbert
from support.traps import edit
from transformers import AutoTokenizer, DistilBertForMaskedLM

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.inspect import decoded
from data_prep.prepare import prepare
from pretrain.export.export import export
from pretrain.replay import replay

Values = dict[str, Any]
EVIL = {"AutoTokenizer": ["tokenizer.Evil", None]}
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}


@pytest.fixture
def values(tmp_path: Path, corpus: Path, teacher_folder: Path, run_config: Any) -> Values:
    """Return a run of two steps over shards of its own."""
    shutil.copytree(corpus, tmp_path / "shards")
    return run_config(
        tmp_path / "run",
        teacher_folder,
        shards=str(tmp_path / "shards"),
        student={"num_layers": 1},
        train={"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 4},
        evaluation={"rows": 4},
        checkpoint={"every": 1, "keep": 2},
    )


def student(folder: Path, step: int) -> Path:
    return step_folder(folder / "run", step) / "student"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return DistilBertForMaskedLM.from_pretrained(folder).state_dict()


def test_the_settings_are_those_that_every_transformers_reads(
    values: Values, tmp_path: Path
) -> None:
    """Check the length of the model, 64 positions, not of the rows, 32 tokens."""
    start(values)
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    for folder in (student(tmp_path, 2), tmp_path / "exported"):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert settings["model_input_names"] == ["input_ids", "attention_mask"]
        assert settings["model_max_length"] == 64
        assert set(AutoTokenizer.from_pretrained(folder)("a")) == {"input_ids", "attention_mask"}


def test_an_export_of_an_older_checkpoint_has_these_settings(
    values: Values, tmp_path: Path
) -> None:
    start(values)
    path = student(tmp_path, 2) / "tokenizer_config.json"
    edit(path, tokenizer_class="BertTokenizer", model_max_length=32)
    reseal_checkpoint(path.parents[1])
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    settings = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_max_length"] == 64


@pytest.fixture
def planted(values: Values, tmp_path: Path) -> Path:
    """Put files that must not be copied, also another model's, next to the shards' tokenizer."""
    folder = tmp_path / "shards" / "tokenizer"
    tiny_distilbert(1, seed=9).save_pretrained(folder)
    plant_code_and_link(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": "[SEP]"}))
    return tmp_path


def plant_code_and_link(folder: Path) -> None:
    secret = folder.parents[1] / "secret"
    secret.write_text("a secret")
    (folder / "tokenizer.py").write_text("raise SystemExit('executed')\n")
    (folder / "link.txt").symlink_to(secret)


def test_other_files_of_the_tokenizer_folder_are_not_copied(values: Values, planted: Path) -> None:
    values["output"] = str(planted / "clean")
    values["shards"], shards = str(planted / "whole"), values["shards"]
    shutil.copytree(shards, planted / "whole")
    for path in (planted / "whole" / "tokenizer").iterdir():
        if path.name not in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            path.unlink()
    start(values)
    clean = weights(step_folder(planted / "clean", 2) / "student")
    values |= {"output": str(planted / "run"), "shards": shards}
    start(values, stop_after=1)
    start(values)  # resumed
    export(planted / "run", planted / "exported", pytest.fail)
    assert {path.name for path in (planted / "exported").iterdir()} == FILES | {"README.md"}
    for folder in (student(planted, 1), student(planted, 2), planted / "exported"):
        assert {path.name for path in folder.iterdir()} - {"README.md"} <= FILES
        assert not any(path.is_symlink() for path in folder.iterdir())
        assert AutoTokenizer.from_pretrained(folder).mask_token == "[MASK]"
    for folder in (student(planted, 2), planted / "exported"):
        found = weights(folder)
        assert all(torch.equal(tensor, found[name]) for name, tensor in clean.items())


def test_files_in_a_checkpoint_are_not_exported(values: Values, tmp_path: Path) -> None:
    start(values)
    folder = student(tmp_path, 2)
    plant_code_and_link(folder)
    edit(folder / "tokenizer_config.json", auto_map=EVIL)
    reseal_checkpoint(folder.parent)
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    assert {path.name for path in (tmp_path / "exported").iterdir()} == FILES | {"README.md"}
    assert "auto_map" not in (tmp_path / "exported" / "tokenizer_config.json").read_text()


def altered_vocabulary(path: Path) -> None:
    """Swap two tokens of the vocabulary."""
    model = json.loads(path.read_text())["model"]
    words = model["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    edit(path, model=model)


def altered_settings(path: Path) -> None:
    edit(path, auto_map=EVIL)


def altered_counts(path: Path) -> None:
    counts = json.loads(path.read_text())["counts"]
    counts[10] += 1
    edit(path, counts=counts)


def link_to_another_tokenizer(path: Path) -> None:
    moved = path.rename(path.parents[2] / "elsewhere.json")
    moved.write_text(moved.read_text().replace("[MASK]", "[MUSK]"))
    path.symlink_to(moved)


@pytest.mark.parametrize(
    ("alter", "name"),
    [
        (altered_vocabulary, "tokenizer/tokenizer.json"),
        (altered_settings, "tokenizer/tokenizer_config.json"),
        (altered_counts, "token_counts.json"),
        (Path.unlink, "tokenizer/tokenizer.json"),
        (link_to_another_tokenizer, "tokenizer/tokenizer.json"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_altered_files_are_refused_before_training(
    alter: Callable[[Path], None], name: str, values: Values, tmp_path: Path
) -> None:
    path = tmp_path / "shards" / name
    alter(path)
    with refused(f"{path}: ", "distil prepare", kind=CorpusError):
        start(values)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_replay_refuses_an_altered_tokenizer(values: Values, tmp_path: Path) -> None:
    start(values)
    altered_vocabulary(tmp_path / "shards" / "tokenizer" / "tokenizer.json")
    with pytest.raises(CorpusError, match=r"tokenizer\.json: .* manifest"):
        replay(tmp_path / "run", 1).token(10)
    with pytest.raises(CorpusError, match=r"tokenizer\.json: .* manifest"):
        decoded(tmp_path / "shards")


@pytest.fixture
def private() -> Iterator[None]:
    """Set a umask of owner and group."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_all_files_have_the_mode_that_the_user_asked_for(
    values: Values, tmp_path: Path, corpus: Path, private: None
) -> None:
    texts = {"kind": "text", "path": str(corpus.parent / "texts"), "document": "paragraph"}
    words = {"tokenizer": str(corpus.parent / "vocab.txt"), "row_length": 32, "workers": 1}
    made = {"output": tmp_path / "made", "sources": [texts]} | words
    prepare(CorpusConfig.model_validate(made))
    start(values | {"shards": str(tmp_path / "made")})
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    for folder in map(tmp_path.joinpath, ("made", "run", "exported")):
        modes = {
            str(path.relative_to(folder)): oct(stat.S_IMODE(path.stat().st_mode))
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert set(modes.values()) == {"0o640"}, modes

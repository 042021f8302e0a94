"""Provide a small corpus that every stage can be tried on."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from support.shard_folders import SPECIAL

from data_prep.config import CorpusConfig

LITERALS = "a literal [MASK] and [SEP] and [PAD] and [CLS] stay text"


def words() -> list[str]:
    """Return a vocabulary of plain words, none of them part of another."""
    draw = random.Random(3)
    return sorted({"".join(draw.choices("abcdefghij", k=5)) for _ in range(60)})


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let Ray's workers import the project; return the engine's name, or skip without Ray."""
    pytest.importorskip("ray", reason="Ray is an extra: pip install '.[ray]'")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((root, *sys.path[1:])))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return "ray"


@pytest.fixture
def known(make_config: Any) -> list[str]:
    """Return the plain words of the vocabulary that `make_config` wrote."""
    return words()


@pytest.fixture
def make_config(tmp_path: Path) -> Any:
    """Return a function from changed keys to the config of 60 documents in 6 files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = random.Random(4)
    known = words()
    shared = " ".join(known[:40])
    for number in range(6):
        documents = [" ".join(draw.choices(known, k=draw.randint(3, 90))) for _ in range(10)]
        documents[3] = LITERALS
        documents[4] = shared
        (folder / f"{number}.txt").write_text("\n\n".join(documents) + "\n")
    literal = ["a", "literal", "[", "]", "mask", "sep", "pad", "cls", "and", "stay", "text"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *literal, *known]) + "\n")

    def make(**changes: Any) -> CorpusConfig:
        values: dict[str, Any] = {
            "output": tmp_path / "out",
            "tokenizer": str(vocabulary),
            "sources": [{"kind": "text", "path": str(folder), "document": "paragraph"}],
            "row_length": 32,
            "validation": 0.2,
            "workers": 1,
            "max_unknown": 1,  # of most texts these few words know nothing
        }
        return CorpusConfig.model_validate(values | changes)

    return make

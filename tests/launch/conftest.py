"""Provide a corpus and a run so small that starting the processes takes longer than training."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import yaml
from support.processes import ROOT
from support.small_corpora import LETTERS, corpus_values, write

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards: rows of 16 single letters, a tenth for validation."""
    folder = tmp_path_factory.mktemp("letters")
    draw = random.Random(6)
    lines = [" ".join(draw.choices(ascii_lowercase, k=draw.randint(4, 30))) for _ in range(200)]
    (folder / "letters.txt").write_text("\n\n".join(lines), encoding="utf-8")
    source = {"kind": "text", "path": str(folder / "letters.txt"), "document": "paragraph"}
    values = corpus_values(folder, LETTERS, source, row_length=16, min_characters=1)
    write(folder / "letters.yaml", values)
    prepare(CorpusConfig.model_validate(values))
    return folder / "shards"


@pytest.fixture(scope="session")
def run_values(shards: Path) -> dict[str, Any]:
    """Return the config of four steps of 8 rows for a BERT of one layer."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    batches = {"global_batch_size": 8, "micro_batch_size": 2, "num_workers": 0}
    return {
        "shards": str(shards),
        "objective": {"name": "mlm"},
        "model": {**sizes, "intermediate_size": 32, "max_position_embeddings": 16},
        "train": {"max_steps": 4, "precision": "fp32", **batches},
        "evaluation": {"every": 0, "rows": 4},
        "logging": {"every": 1},
    }


@pytest.fixture
def run(tmp_path: Path, run_values: dict[str, Any]) -> Path:
    """Write the config of the tiny run, whose output is `out`."""
    return write(tmp_path / "run.yaml", {"output": str(tmp_path / "out"), **run_values})


@pytest.fixture
def own_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the shipped recipe at tiny size; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "configs" / "own-encoder.yaml"
    values: dict[str, Any] = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    prepare, teacher, *_ = values["runs"]
    prepare["sources"][0] |= {"packages": ["python"], "max_megabytes": 0.05}
    prepare |= {"tokenizer": {"train": {"kind": "wordpiece", "vocab_size": 400}}, "workers": 1}
    teacher["model"] |= {"hidden_size": 16, "intermediate_size": 32}
    values["defaults"]["train"] = {"max_steps": 2, "global_batch_size": 4, "precision": "fp32"}
    return values


@pytest.fixture
def save_teacher() -> Callable[..., Path]:
    """Return a function that writes a BERT of two layers, by default over LETTERS."""

    def write(folder: Path, words: Sequence[str] = LETTERS, positions: int = 16) -> Path:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=len(words),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=positions,
        )
        BertForMaskedLM(config).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        return folder

    return write

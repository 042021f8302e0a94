"""Provide a corpus and a run so small that starting the processes takes longer than training."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards: rows of 16 single letters, a tenth for validation."""
    folder = tmp_path_factory.mktemp("letters")
    draw = random.Random(6)
    lines = [" ".join(draw.choices(WORDS[5:], k=draw.randint(4, 30))) for _ in range(200)]
    (folder / "letters.txt").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    source = {"kind": "text", "path": str(folder / "letters.txt"), "document": "paragraph"}
    values = {
        "output": folder / "shards",
        "tokenizer": str(folder / "vocab.txt"),
        "row_length": 16,
        "sources": [source],
        "validation": 0.1,
        "min_characters": 1,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(values))
    return folder / "shards"


@pytest.fixture
def run(tmp_path: Path, shards: Path) -> Path:
    """Write the config of four steps of 8 rows for a BERT of one layer."""
    values = {
        "output": str(tmp_path / "out"),
        "shards": str(shards),
        "objective": {"name": "mlm"},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
        },
        "train": {
            "max_steps": 4,
            "global_batch_size": 8,
            "precision": "fp32",
            "micro_batch_size": 2,
            "num_workers": 0,
        },
        "evaluation": {"every": 0, "rows": 4},
        "logging": {"every": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture
def save_teacher() -> Callable[..., Path]:
    """Return a function that writes a BERT of two layers, by default over WORDS."""

    def write(folder: Path, words: Sequence[str] = WORDS, positions: int = 16) -> Path:
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

"""Compare a loss curve with the committed one, which no refactoring moves.

Weights, text, rows and masks come from integer hashes and dropout is 0, so only the order of
floating-point sums may differ between processors: hence 1e-4, not equality.

To change it on purpose run `python -m tests.pretrain.test_golden`, and give the reason in
docs/LOG.md.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from pretrain.config import RunConfig
from pretrain.data.hashing import derive, root
from pretrain.monitor import metrics
from pretrain.train import train

GOLDEN = Path(__file__).parents[1] / "golden" / "distilbert.txt"
WORDS = [f"{a}{b}{c}" for a in "bdfglmn" for b in "aeiou" for c in "kprst"]


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of 20 steps of 4 -> 2 layers over hashed text."""
    text = folder / "text.txt"
    text.write_text("\n".join(_line(i) for i in range(400)) + "\n", encoding="utf-8")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    corpus: dict[str, Any] = {
        "output": folder / "shards",
        "tokenizer": str(folder / "vocab.txt"),
        "row_length": 32,
        "sources": [{"kind": "text", "path": str(text), "document": "line"}],
        "validation": 0,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(corpus))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    teacher = BertForMaskedLM(config)
    _fill(teacher)
    teacher.save_pretrained(folder / "teacher")
    shutil.copy(folder / "vocab.txt", folder / "teacher")
    run: dict[str, Any] = {
        "output": folder / "run",
        "shards": folder / "shards",
        "teacher": str(folder / "teacher"),
        "student": {"init": [0, 2], "dropout": 0.0, "attention_dropout": 0.0},
        "optimizer": {"learning_rate": 1e-3},
        "train": {
            "max_steps": 20,
            "global_batch_size": 8,
            "precision": "fp32",
            "micro_batch_size": 4,
            "num_workers": 0,
        },
        "checkpoint": {"every": 0},
        "logging": {"every": 1},
    }
    train(RunConfig.model_validate(run))
    return [(e["step"], e["loss"]) for e in metrics.read_metrics(folder / "run" / "metrics.jsonl")]


def _line(number: int) -> str:
    """Return 3 to 34 words, low numbers more often."""
    key = root(7, number)
    length = 3 + derive(key, 0) % 32
    draws = [derive(key, 1 + i) % 65536 / 65536 for i in range(length)]
    return " ".join(WORDS[int(draw * draw * len(WORDS))] for draw in draws)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Set weights uniform in +-0.2 (LayerNorm weights about 1), exact multiples of 2**-16."""
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        index = torch.arange(parameter.numel())
        draw = (derive(root(8, number), index) >> 16).double() / 65536 - 0.5
        value = (draw * 0.4).reshape(parameter.shape)
        parameter.copy_(value + float(name.endswith("LayerNorm.weight")))


def test_the_loss_curve_is_the_committed_one(tmp_path: Path) -> None:
    golden = [line.split() for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert len(golden) == 20
    ours = curve(tmp_path)
    assert [step for step, _ in ours] == [int(step) for step, _ in golden]
    assert [loss for _, loss in ours] == pytest.approx(
        [float(loss) for _, loss in golden], rel=1e-4
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{step} {loss:.9f}\n" for step, loss in curve(Path(folder))]
    GOLDEN.write_text("".join(lines), encoding="utf-8")

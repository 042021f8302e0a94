"""Compare losses and weights of four runs with the committed ones, which no refactoring moves.

Weights, text, rows and masks come from integer hashes and dropout is 0, so only the order of
floating-point sums may differ between processors: hence 1e-4, not equality.

To change it on purpose run `python -m tests.pretrain.test_golden`, and give the reason in
docs/log.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from data_prep.config import CorpusConfig
from data_prep.examples.examples_config import ExamplesConfig
from data_prep.examples.making import make_examples
from data_prep.prepare import prepare
from pretrain.config import RunConfig
from pretrain.data.hashing import derive, root
from pretrain.monitor import metrics
from pretrain.train import train

GOLDEN = Path(__file__).parents[1] / "golden" / "curves.json"
STUDENT = {"init": [0, 2], "dropout": 0.0, "attention_dropout": 0.0}
SAME = {**STUDENT, "architecture": "same"}
RUNS: dict[str, dict[str, Any]] = {
    "distilbert": {"student": STUDENT},
    "embedding": {"student": SAME, "objective": {"name": "embedding"}},
    "minilm": {"student": SAME, "objective": {"name": "minilm", "relation_heads": 4}},
    "classification": {
        "teacher": None,
        "objective": {"name": "finetune"},
        "task": {"name": "classification"},
    },
}
RATE = {"learning_rate": 1e-3, "warmup_ratio": 0.05, "max_grad_norm": 5.0, "weight_decay": 0.0}
WORDS = [f"{a}{b}{c}" for a in "bdfglmn" for b in "aeiou" for c in "kprst"]


def curve(folder: Path, name: str) -> dict[str, Any]:
    """Return losses and norms of weights of 20 steps of 4 -> 2 layers over hashed text."""
    file, lines = folder / "text.txt", [_line(i) for i in range(400)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    common = {"output": folder / "shards", "tokenizer": str(folder / "vocab.txt")}
    if name == "classification":
        labels = ["abc"[derive(root(9, i), 0) % 3] for i in range(len(lines))]
        pairs = zip(lines, labels, strict=True)
        examples = [json.dumps({"text": text, "label": label}) for text, label in pairs]
        file = folder / "examples.jsonl"
        file.write_text("\n".join(examples) + "\n", encoding="utf-8")
        task: dict[str, Any] = {**common, "task": {"name": name}, "train": str(file)}
        task |= {"max_length": 32, "longer": "cut"}
        make_examples(ExamplesConfig.model_validate(task), print)
    else:
        corpus: dict[str, Any] = {
            **common,
            "row_length": 32,
            "sources": [{"kind": "text", "path": str(file), "document": "line"}],
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
        "optimizer": RATE,
        "train": {
            "max_steps": 20,
            "global_batch_size": 8,
            "precision": "fp32",
            "micro_batch_size": 4,
            "num_workers": 0,
        },
        "checkpoint": {"every": 0},
        "logging": {"every": 1},
        **RUNS[name],
    }
    if name == "classification":
        rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        run["model"] = {"init": str(folder / "teacher"), **rates}
    train(RunConfig.model_validate(run))
    entries = list(metrics.read_metrics(folder / "run" / "metrics.jsonl"))
    (last,) = (folder / "run" / "checkpoints").glob("step-*")
    norms = {}
    for file in sorted(last.rglob("*.safetensors")):
        if file.name in ("model.safetensors", "adapters.safetensors"):
            # A bias of keys has no gradient but rounding, which Adam makes large.
            for name, tensor in sorted(load_file(file).items()):
                if not name.endswith(("key.bias", "k_lin.bias")):
                    norms[name] = float(f"{tensor.double().norm():.8g}")
    losses = [float(f"{e['loss']:.8g}") for e in entries if e["kind"] == "train"]
    return {"losses": losses, "norms": norms}


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


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_the_committed_ones(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_bytes())[name]
    ours = curve(tmp_path, name)
    assert len(golden["losses"]) == 20
    assert ours["losses"] == pytest.approx(golden["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(golden["norms"], rel=1e-4)


if __name__ == "__main__":
    import tempfile

    found = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = curve(Path(folder), name)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

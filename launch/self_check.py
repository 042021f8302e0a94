"""Check an installation on its hardware: `distil bench --self-check`.

1. Curves: 6 steps of objectives and families on text, compared with `curves.json`, made on a CPU.
2. Resume: a run that is killed and continued, compared with one that was not.

Models are tiny; their weights, rows and masks come from integer hashes. To make the curves
again on purpose: `python -m launch.self_check`, on a CPU, with the reason in docs/log.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from data_prep.config import CorpusConfig
from data_prep.disk.replacing import replace_json
from data_prep.prepare import prepare
from pretrain.config import RunConfig
from pretrain.data.hashing import derive, root
from pretrain.model.families import FAMILIES
from pretrain.monitor.metrics import read_metrics
from pretrain.train import train

ATTENDING = {name: family for name, family in FAMILIES.items() if family.attends}
CURVES = Path(__file__).with_name("curves.json")
TOLERANCE = 1e-3  # relative difference of a loss: TF32 rounds factors to 10 bits
STEPS = 6
_RATE = {"learning_rate": 1e-4, "warmup_ratio": 0.05, "max_grad_norm": 5.0, "weight_decay": 0.0}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "distilbert": {"name": "distilbert", "hidden_mse": 1.0},
    "minilm 1": {"name": "minilm", "version": 1},
    "minilm 2": {"name": "minilm", "relation_heads": 4},
    "tinybert": {"name": "tinybert", "first": "random"},
    "embedding": {"name": "embedding", "mse": 0.5},
    "mlm": {"name": "mlm"},
}
_WORDS = [f"{a}{b}{c}" for a in "bdfgl" for b in "aeiou" for c in "kprst"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Steps of the run that is killed after its checkpoint at step 10. A GPU takes 5 ms per step: a run
# of 40 steps ended before it could be killed.
_KILLED = 120


class Check(NamedTuple):
    """Hold a result: the difference of a curve, or why there is none."""

    name: str
    difference: float | None  # the largest, relative
    failed: bool
    note: str = ""


def checks() -> Iterator[Check]:
    """Yield the results; each takes seconds."""
    curves = json.loads(CURVES.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="distil-self-check-") as name:
        folder = Path(name)
        write_inputs(folder)
        for case, values in runs(folder).items():
            yield compared(case, curves[case], lambda values=values: curve(values))  # type: ignore[misc]
        first = next(iter(runs(folder)))
        values = runs(folder)[first]
        values["train"] |= {"max_steps": _KILLED}
        values["checkpoint"] = {"every": 10}
        output = values["output"]
        whole = curve({**values, "output": f"{output}-whole"})
        killed = {**values, "output": f"{output}-killed"}
        yield compared("resumed after a kill", whole, lambda: killed_curve(killed))


def compared(name: str, expected: list[float], run: Callable[[], list[float]]) -> Check:
    """Compare the losses of a run; an error of it is a failed check, and the next one follows."""
    try:
        found = run()
    except Exception as error:
        return Check(name, None, True, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if len(found) != len(expected):
        return Check(name, None, True, f"{len(found)} of {len(expected)} steps")
    far = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return Check(name, far, not far <= TOLERANCE)


def curve(values: dict[str, Any]) -> list[float]:
    """Return the losses of a run that is made in this process."""
    train(RunConfig.model_validate(values))
    entries = read_metrics(Path(values["output"]) / "metrics.jsonl")
    return [entry["loss"] for entry in entries if entry["kind"] == "train"]


def killed_curve(values: dict[str, Any]) -> list[float]:
    """Return the losses of a run that a signal kills after its first checkpoint.

    Raises:
        RuntimeError: the run ended before it could be killed.
    """
    config, output = Path(values["output"] + ".json"), Path(values["output"])
    replace_json(config, values)
    with open(os.devnull, "wb") as nothing:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", "pretrain", str(config)],
            stdout=nothing,
            stderr=nothing,
        )
        # The run writes its metrics step by step. Nothing else tells that it is in the middle.
        while process.poll() is None and not list(output.glob("checkpoints/step-*/manifest.json")):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError("the run ended before it was killed")
    return curve(values)


def write_inputs(folder: Path) -> None:
    """Write a corpus and a teacher of each family."""
    lines = []
    for number in range(120):
        key = root(11, number)
        draws = [derive(key, i) % 65536 / 65536 for i in range(4 + number % 20)]
        lines.append(" ".join(_WORDS[int(draw * draw * len(_WORDS))] for draw in draws))
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [*_SPECIAL, *_WORDS]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    corpus: dict[str, Any] = {
        "output": folder / "shards",
        "tokenizer": str(folder / "vocab.txt"),
        "row_length": 32,
        # A machine that is only checked may lack the packages for near duplicates.
        "deduplicate": {"documents": "none"},
        "sources": [{"kind": "text", "path": str(folder / "text.txt"), "document": "line"}],
        "validation": 0,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(corpus))
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 32,
    }
    special = {name: words.index(f"[{name.upper()}]") for name in ("pad", "cls", "sep")}
    for name, family in ATTENDING.items():
        model = family.architecture(family.new_config(sizes, special))
        fill(model)
        model.save_pretrained(folder / name)
        shutil.copy(folder / "vocab.txt", folder / name)


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the runs whose curves are compared: each objective, and each family."""
    found: dict[str, dict[str, Any]] = {}
    for name, objective in OBJECTIVES.items():
        found[f"objective {name}"] = {"objective": objective, "teacher": str(folder / "bert")}
    for name in ATTENDING:
        found[f"family {name}"] = {"teacher": str(folder / name)}
    none = {"dropout": 0.0, "attention_dropout": 0.0}
    for name, run in found.items():
        run |= {
            "output": str(folder / f"run-{name.replace(' ', '-')}"),
            "shards": str(folder / "shards"),
            "student": {"architecture": "same", "num_layers": 2, **none},
            "teacher_vocabulary": "same",  # families keep their vocabularies in different files
            "optimizer": _RATE,
            "train": {
                "max_steps": STEPS,
                "global_batch_size": 16,
                "micro_batch_size": 8,
                "precision": "fp32",
                "num_workers": 0,
            },
            "checkpoint": {"every": 0},
            "logging": {"every": 1},
        }
    mlm = found["objective mlm"]
    for key in ("teacher", "student", "teacher_vocabulary"):
        del mlm[key]
    nothing_dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    mlm["model"] = {"init": str(folder / "bert"), **nothing_dropped}
    return found


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Set weights uniform in +-0.2 (of norms about 1), exact multiples of 2**-16."""
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        index: Any = torch.arange(parameter.numel())
        draw = (derive(root(12, number), index) >> 16).double() / 65536 - 0.5
        norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_((draw * 0.4).reshape(parameter.shape) + float(norm))


def main() -> None:
    """Write `curves.json` again."""
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        found = {case: curve(values) for case, values in runs(Path(name)).items()}
    CURVES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Check that a long run does not gain memory, threads or file handles.

    python benchmarks/soak.py [--steps 5000] [--ranks 1] [--json FILE]

The script takes about five minutes. It trains a student of 2 layers x 32 from a teacher of 4 on
rows of 32 with one loader worker, and evaluates and saves every `--every` steps. Half-way between
two saves it counts over all processes of the run: anonymous memory, threads, file handles, and
temporary files in the output folder. It prints these counts and a summary.

The exit code is 1 if memory grows by more than 1 MB in 1,000 steps after the first fifth, if
threads or handles have grown, or if a temporary file is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import psutil
import torch
from transformers import BertConfig, BertForMaskedLM

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from pretrain.config import RunConfig
from pretrain.monitor.metrics import Silent
from pretrain.train import train

LIMIT = 1.0  # MB in 1,000 steps


class Sample(NamedTuple):
    """Hold the counts over all processes of the run."""

    step: int
    seconds: float
    anonymous_mb: float
    threads: int
    handles: int
    processes: int
    temporary: int


class Sampler(Silent):
    """Write a line of JSON every `every` steps, half-way between two saves."""

    def __init__(self, path: Path, output: Path, ancestor: int, every: int) -> None:
        self.path, self.output, self.ancestor, self.every = path, output, ancestor, every
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        if step % self.every != self.every // 2:
            return
        ancestor = psutil.Process(self.ancestor)
        anonymous = threads = handles = processes = 0
        for process in (ancestor, *ancestor.children(recursive=True)):
            with suppress(psutil.Error), process.oneshot():  # it may end meanwhile
                memory = process.memory_info()
                anonymous += memory.rss - memory.shared
                threads += process.num_threads()
                handles += process.num_fds()
                processes += 1
        seconds = round(time.monotonic() - self.start, 1)
        counts = (round(anonymous / 1e6, 3), threads, handles, processes)
        sample = Sample(step, seconds, *counts, len(temporary_files(self.output)))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample) + "\n")


def main() -> None:
    """Train, print the samples and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=250, help="steps between saves, and samples")
    parser.add_argument("--ranks", type=int, default=1, help="processes, joined by gloo")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to each rank
    options = parser.parse_args()
    if options.folder:
        soak(options.folder, options.steps, options.every, os.getppid(), options.ranks)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder)
        make_teacher(folder)
        if options.ranks == 1:
            soak(folder, options.steps, options.every, os.getpid(), 1)
        else:
            start_ranks(folder, options.ranks)
        lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        samples = [Sample(*json.loads(line)) for line in lines]
        left = temporary_files(folder / "run")
    result = verdict(samples, left)
    print("step   seconds   anonymous MB   threads   handles   processes   temporary files")
    for s in samples:
        print(
            f"{s.step:<7}{s.seconds:<10}{s.anonymous_mb:<15.1f}{s.threads:<10}{s.handles:<10}"
            f"{s.processes:<12}{s.temporary}"
        )
    print(json.dumps(result, indent=1))
    if options.json:
        figures = {"ranks": options.ranks, **result, "samples": [s._asdict() for s in samples]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(1 if result["failures"] else 0)


def soak(folder: Path, steps: int, every: int, ancestor: int, ranks: int) -> None:
    """Train as one rank of the run."""
    torch.set_num_threads(1)
    batches = {"global_batch_size": 4 * ranks, "micro_batch_size": 2, "num_workers": 1}
    values: dict[str, Any] = {
        "output": folder / "run",
        "shards": folder / "shards",
        "teacher": str(folder / "teacher"),
        "train": {"max_steps": steps, "precision": "fp32", **batches},
        "evaluation": {"every": every, "rows": 32},
        "checkpoint": {"every": every},
    }
    sampler = Sampler(folder / "samples.jsonl", folder / "run", ancestor, every)
    train(RunConfig.model_validate(values), progress=sampler)


def start_ranks(folder: Path, num_ranks: int) -> None:
    """Start several ranks on this machine, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    ranks = []
    for rank in map(str, range(num_ranks)):
        environment = os.environ | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen(command, env=environment))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def verdict(samples: list[Sample], left: list[Path]) -> dict[str, Any]:
    """Return the memory's slope after the first fifth, the ranges of the counts, and failures."""
    settled = samples[len(samples) // 5 :]
    steps = np.array([sample.step for sample in settled])
    memory = np.array([sample.anonymous_mb for sample in settled])
    slope = 1000 * float(np.polyfit(steps, memory, 1)[0])
    failures = [f"memory: {slope:.2f} MB in 1,000 steps"] if slope > LIMIT else []
    quarter = max(1, len(settled) // 4)
    result: dict[str, Any] = {"mb_per_1000_steps": round(slope, 3)}
    result["anonymous_mb"] = [float(memory.min()), float(memory.max())]
    for name in ("threads", "handles", "processes"):
        counts = [getattr(sample, name) for sample in settled]
        result[name] = [min(counts), max(counts)]
        # The loaders' queues add some for moments. A leak stays above the first quarter's maximum.
        if min(counts[-quarter:]) > max(counts[:quarter]):
            failures.append(f"{name}: {max(counts[:quarter])}, later {min(counts[-quarter:])}")
    result["temporary_files"] = max(sample.temporary for sample in samples)
    failures += [f"left behind: {path.name}" for path in left]
    return result | {"failures": failures}


def temporary_files(output: Path) -> list[Path]:
    """Return the files of a save that is in progress or was interrupted."""
    return [path for path in output.rglob("*") if ".tmp" in path.name or path.name[0] == "."]


def make_corpus(folder: Path) -> None:
    """Prepare 2,000 lines of Zipf-like words, one in twenty of them for validation."""
    draw = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfglmn" for b in "aeiou" for c in "kprst"]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    lines = (" ".join(draw.choices(words, weights, k=draw.randint(3, 60))) for _ in range(2000))
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    source = {"kind": "text", "path": str(folder / "text.txt"), "document": "line"}
    values = {
        "output": folder / "shards",
        "tokenizer": str(folder / "vocab.txt"),
        "row_length": 32,
        "sources": [source],
        "validation": 0.05,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(values))


def make_teacher(folder: Path) -> None:
    """Write an untrained BERT of 4 layers x 32 with the corpus's vocabulary."""
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8")
    config = BertConfig(
        vocab_size=len(vocabulary.splitlines()),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertForMaskedLM(config).save_pretrained(folder / "teacher")
    (folder / "teacher" / "vocab.txt").write_text(vocabulary, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure how long a save interrupts training, compared with a plain copy of the same tensors.

    python benchmarks/checkpointing.py [--folder FOLDER] [--repeats 9] [--device cpu] [--threads 1]

The script takes about two minutes and prints JSON for two students with AdamW's state, DistilBERT
and a small one. It makes a plain copy into memory that is already allocated (pinned, for a GPU) and
a save in turn:

- `stall`: seconds of `save`, in which training waits
- `committed`: seconds until the checkpoint is complete on disk
- `pause`: the longest time for which writing, hashing and flushing stopped a loop of plain Python
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DistilBertConfig, DistilBertForMaskedLM
from transformers.utils import logging

from pretrain.checkpoint import Writer

CONFIGS = {
    "distilbert": DistilBertConfig(),
    "small": DistilBertConfig(vocab_size=8000, dim=256, n_layers=2, n_heads=4, hidden_dim=1024),
}


def main() -> None:
    """Print how long a save stops training and how long it takes, for both students."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    results = {}
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            student = DistilBertForMaskedLM(config).to(options.device)
            results[name] = measure(student, Path(folder), options.repeats)
    print(json.dumps(results, indent=1))


def measure(student: DistilBertForMaskedLM, folder: Path, repeats: int) -> dict[str, Any]:
    """Return medians in seconds, without the first save, which allocates memory."""
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    for parameter in student.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = {
        f"{name}/{key}": value
        for name, parameter in student.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    tensors = [p.detach() for p in student.parameters()] + list(state.values())
    buffers = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in tensors]
    written = threading.Event()

    def phase(name: str) -> None:
        if name == "save:rotate":
            written.set()

    options: dict[str, Any] = {"phase": phase, "fence": lambda: None, "warn": print}
    writer = Writer(folder / "checkpoints", tokenizer={}, keep=1, **options)
    copies, stalls, committed, pauses = [], [], [], []
    for step in range(repeats + 1):
        if step % 2:  # in turn, because the first of the two has colder caches
            copies.append(copy(tensors, buffers))
        written.clear()
        start = time.perf_counter()
        stall = writer.save(
            step, student=student, weights=None, adapters={}, optimizer=state, state={}
        )
        stalls.append(stall)
        longest, last = 0.0, time.perf_counter()
        while not written.is_set():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        pauses.append(longest)
        writer.finish()
        committed.append(time.perf_counter() - start)
        if not step % 2:
            copies.append(copy(tensors, buffers))
    size = sum(t.nbytes for t in tensors)
    ratios = [a / b for a, b in zip(stalls[1:], copies[1:], strict=True)]
    return {
        "parameters": sum(p.numel() for p in student.parameters()),
        "megabytes": round(size / 1e6, 1),
        "copy": round(median(copies[1:]), 5),
        "stall": round(median(stalls[1:]), 5),
        "stall / copy": round(median(stalls[1:]) / median(copies[1:]), 2),
        "stall / copy, each": [round(ratio, 2) for ratio in ratios],
        "first stall": round(stalls[0], 3),
        "committed": round(median(committed[1:]), 2),
        "pause": round(median(pauses[1:]), 4),
    }


def copy(tensors: list[Tensor], buffers: list[Tensor]) -> float:
    """Return the seconds of a plain copy."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

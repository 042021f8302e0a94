"""How long a save holds training up, against a plain copy of the same tensors in memory.

    python benchmarks/checkpointing.py [--folder FOLDER] [--repeats 9] [--device cpu] [--threads 1]

Two students with AdamW's state, DistilBERT and a small one. In turn, on the same tensors: a plain
copy into memory that was there before (pinned, for a GPU), and a save. `stall` is what `save` takes
from training, `committed` the time until the checkpoint is whole on disk, and `pause` the longest
that the file's writing, hashing and flushing kept a loop of plain Python waiting.
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
    """Measure and print JSON."""
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
    """Medians over the repeats, in seconds; the first save, which allocates, apart."""
    moments = adamw_state(student)
    tensors = [p.detach() for p in student.parameters()] + list(moments.values())
    buffers = [
        torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda) for t in tensors
    ]
    written = threading.Event()

    def phase(name: str) -> None:
        if name == "save:rotate":
            written.set()

    writer = Writer(
        folder / "checkpoints",
        tokenizer={},
        keep=1,
        phase=phase,
        fence=lambda: None,
        warn=print,
    )
    copies, stalls, committed, pauses = [], [], [], []
    for step in range(repeats + 1):
        if step % 2:  # whoever comes first finds colder caches
            copies.append(copy(tensors, buffers))
        written.clear()
        start = time.perf_counter()
        stall = writer.save(step, student=student, weights=None, optimizer=moments, state={})
        stalls.append(stall)
        pauses.append(longest_pause(written))
        writer.finish()
        committed.append(time.perf_counter() - start)
        if not step % 2:
            copies.append(copy(tensors, buffers))
    size = sum(t.nbytes for t in tensors)
    return {
        "parameters": sum(p.numel() for p in student.parameters()),
        "megabytes": round(size / 1e6, 1),
        "copy": round(median(copies[1:]), 5),
        "stall": round(median(stalls[1:]), 5),
        "stall / copy": round(median(stalls[1:]) / median(copies[1:]), 2),
        "stall / copy, each": [
            round(a / b, 2) for a, b in zip(stalls[1:], copies[1:], strict=True)
        ],
        "first stall": round(stalls[0], 3),
        "committed": round(median(committed[1:]), 2),
        "pause": round(median(pauses[1:]), 4),
    }


def adamw_state(student: DistilBertForMaskedLM) -> dict[str, Tensor]:
    """The moments of a real AdamW after one step."""
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    for parameter in student.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {
        f"{name}/{key}": value
        for name, parameter in student.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def copy(tensors: list[Tensor], buffers: list[Tensor]) -> float:
    """Seconds of a plain copy."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def longest_pause(written: threading.Event) -> float:
    """The longest time between two turns of a loop, until the event."""
    longest, last = 0.0, time.perf_counter()
    while not written.is_set():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


if __name__ == "__main__":
    main()

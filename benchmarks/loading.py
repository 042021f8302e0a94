"""Measure how fast rows become masked batches on one core, and what batches cost the training.

    python benchmarks/loading.py [--json FILE]

The script takes about two minutes and prints three tables:

- Loading: `loader(StepDataset(...))` without workers (row order, rows from memory-mapped shards,
  masks, tensors), in tokens per second of CPU time in one thread, the median of several rounds.
- Receiving: CPU time of the training process for a batch that a worker made.
- Resuming: wall time from `loader(...)` to its first batch, with shards newly opened and thus
  unverified.

Targets: 20 M tokens/s, and 1 s at any step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from data_prep.pipeline.smoothing import smoothing
from data_prep.shards import open_shards, write_shard
from data_prep.shards.manifest import SpecialIds, manifest_bytes, seal
from pretrain.config import MaskingConfig
from pretrain.data.order import Order
from pretrain.data.rows import StepDataset, loader, split
from pretrain.tasks.mlm.examples import MaskedRows, build_masking

V, LENGTH = 30522, 512
SPECIAL = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)


def main() -> None:
    """Print three tables, and write them as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000, help="rows of 512 in the shards")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder, options.rows)
        result: dict[str, Any] = {
            "loading": [
                loading(folder, mode, rows, options.repeats)
                for mode in ("uniform", "smoothed")
                for rows in (32, 128, 512, 4096)
            ],
            "receiving": receiving(folder, options.repeats),
            "resuming": [
                resuming(folder, step, workers, options.repeats)
                for workers in (0, 1)
                for step in (0, 10**6, 10**9)
            ],
        }
    received = result["receiving"]
    print("\nmasking   rows a step   M tokens/s   of it order / read / mask, ns a token")
    for line in result["loading"]:
        parts = " / ".join(f"{line[part]:.1f}" for part in ("order", "read", "mask"))
        print(f"{line['masking']:10}{line['rows']:11}{line['rate']:13.1f}   {parts}")
    print("\nreceived from a worker, 4,096 rows a step: ", end="")
    print("{mb:.1f} MB, {ms:.1f} ms".format(**received))
    print("a micro-batch of 64 rows of it, ready for the device: {us:.0f} us".format(**received))
    print("\nworkers   step         seconds to the first batch of 512 rows (median, largest)")
    for line in result["resuming"]:
        print("{workers:7}   {step:<13}{median:.4f}  {largest:.4f}".format(**line))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def make_shards(folder: Path, num_rows: int) -> None:
    """Write rows of three documents of Zipf-like ids, in four shards with a sealed manifest."""
    draw = np.random.default_rng(0)
    counts = np.zeros(V, np.int64)
    records = []
    for shard in range(4):
        rows = num_rows // 4
        ids = (1000 + (V - 1000) * draw.random((rows, LENGTH), dtype=np.float32) ** 4).astype("u2")
        every = np.arange(rows)[:, None]
        ends = np.array([LENGTH // 3, 2 * LENGTH // 3]) + draw.integers(-90, 90, (rows, 2))
        ids[:, 0] = ids[every, ends + 1] = SPECIAL.cls
        ids[:, -1] = ids[every, ends] = SPECIAL.sep
        counts += np.bincount(ids.reshape(-1), minlength=V)
        records.append(write_shard(folder / f"train-{shard:05d}.arrow", ids, SPECIAL.pad))
    table = {"counts": counts.tolist(), "smoothing": smoothing(counts, SPECIAL)}
    data = json.dumps(table).encode()
    (folder / "token_counts.json").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    listed = {"file": "token_counts.json", "bytes": len(data), "sha256": sha256}
    total = sum(record.rows for record in records)
    shards = [record.model_dump() for record in records]
    train = {"rows": total, "tokens": total * LENGTH, "segments": 3 * total, "shards": shards}
    tokenizer = dict.fromkeys(("fingerprint", "vocabulary_sha256"), "0" * 64)
    fields: dict[str, Any] = {
        "tokenizer": {**tokenizer, "vocab_size": V, "special_ids": SPECIAL.model_dump()},
        "row_length": LENGTH,
        "dtype": "uint16",
        "splits": {"train": train},
        "files": [listed],
        "sources": [],
        "content": {},
        "code_version": "benchmark",
        "created_by": {},
    }
    (folder / "manifest.json").write_bytes(manifest_bytes(seal(fields)))


def opened(
    folder: Path, num_rows: int, mode: str = "uniform", rank: int = 0, world: int = 1
) -> StepDataset:
    """Open the shards for steps of so many rows."""
    shards = open_shards(folder)
    config = MaskingConfig.model_validate({"mode": mode})
    masking = build_masking(config, folder, shards.manifest, 0)
    return StepDataset(
        shards,
        Order(len(shards), num_rows, seed=0),
        MaskedRows(shards, masking),
        rank=rank,
        world=world,
    )


def loading(folder: Path, mode: str, num_rows: int, repeats: int) -> dict[str, Any]:
    """Return M tokens/s, and the nanoseconds of each part."""
    dataset = opened(folder, num_rows, mode)
    shards, order = dataset.shards, dataset.order
    assert isinstance(dataset.examples, MaskedRows)
    masking = dataset.examples.masking
    shards.rows(np.arange(len(shards)))  # hashing each block once is not a part of a step
    steps = range(max(2, 8192 // num_rows))
    tokens = len(steps) * num_rows * LENGTH
    at = [order.at(step) for step in steps]
    ids = [shards.rows(rows) for _, rows in at]

    def load() -> None:
        with loader(dataset, 0, len(steps), 0) as batches:
            for _ in batches:
                pass

    ways: dict[str, Callable[[], object]] = {
        "rate": load,
        "order": lambda: [order.at(step) for step in steps],
        "read": lambda: [shards.rows(rows) for _, rows in at],
        "mask": lambda: [masking(i, *epochs_rows) for i, epochs_rows in zip(ids, at, strict=True)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if repeat:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    figures = {name: 1e9 * median(times) / tokens for name, times in seconds.items()}
    figures["rate"] = 1000 / figures["rate"]
    rounded = {name: round(value, 2) for name, value in figures.items()}
    return {"masking": mode, "rows": num_rows, **rounded}


def receiving(folder: Path, repeats: int) -> dict[str, float]:
    """Return a step's megabytes, ms to receive them, us to make a micro-batch of 64 rows."""
    dataset = opened(folder, 4096)
    received, made = [], []
    start = time.process_time()
    with loader(dataset, 0, repeats + 2, 1) as batches:
        for item in batches:
            received.append(time.process_time() - start)
            start = time.process_time()
            parts = [*split(item, 64)]
            for part in parts:
                dataset.examples.batch(part)
            made.append((time.process_time() - start) / len(parts))
            start = time.process_time()
    return {
        "mb": sum(tensor.nbytes for tensor in item.values()) / 1e6,
        "ms": round(1e3 * median(received[2:]), 2),  # the first also starts the worker
        "us": round(1e6 * median(made[2:]), 1),
    }


def resuming(folder: Path, step: int, workers: int, repeats: int) -> dict[str, Any]:
    """Return seconds to the first batch of a rank with 512 of 4,096 rows."""
    seconds = []
    for _ in range(repeats):
        dataset = opened(folder, 4096, rank=3, world=8)
        start = time.perf_counter()
        with loader(dataset, step, step + 1000, workers) as batches:
            first = next(batches)
            seconds.append(time.perf_counter() - start)
        assert len(first["input_ids"]) == 512
    figures = {"median": round(median(seconds), 4), "largest": round(max(seconds), 4)}
    return {"step": step, "workers": workers, **figures}


if __name__ == "__main__":
    main()

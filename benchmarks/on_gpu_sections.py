"""Measure one section of `benchmarks.on_gpu.plan` in this process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from benchmarks import on_gpu
from benchmarks.on_gpu_gates import attention_error, head_error
from benchmarks.on_gpu_steps import Answer, Subjects, agreement, describe, guarded, syncs, times
from pretrain.bench import host
from pretrain.bench.measure import Step, ratio, timed
from pretrain.bench.sizes import Sizes
from pretrain.bench.subjects import batch, ids, masking
from pretrain.device.precision import PRECISIONS
from pretrain.kernels.attention.dispatch import usable
from pretrain.kernels.head import Backend, vocabulary_losses

MOST_ROWS = 1 << 14  # that a search for the largest micro-batch tries


def main(options: argparse.Namespace, sizes: Sizes) -> None:
    """Write facts, a section's rows, or an error to `options.answers`, a line of JSON each."""
    section = options.section
    gpu = torch.cuda.is_available() and not options.rehearse
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    if options.rehearse:
        torch.set_num_threads(1)  # matrices are so small that threads only wait for one another
    if gpu or options.compile:  # one process measures more shapes and precisions than a run has
        torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    alone: dict[str, Callable[[Sizes, torch.device], Iterator[Answer]]] = {
        "machine": machine,
        "attention": attention,
        **{f"head {name}": partial(head, name) for name in on_gpu.HEADS},
    }
    with_models: dict[str, Callable[[Subjects], Iterator[Answer]]] = {
        "step": step,
        "time bf16": partial(heads_timed, precision="bf16", rows=[sizes.rows], kls=on_gpu.KL),
        **{f"capacity {cap}": partial(capacity, cap=cap) for cap in on_gpu.CAPS},
        "compiled step": compiled_step,
        "compiled trunks": compiled_trunks,
        "checkpointing": partial(variant_timed, name="checkpointing", checkpointing=True),
        "time fp16": partial(heads_timed, precision="fp16", rows=[sizes.rows], kls=on_gpu.KL),
        "fewer rows": partial(heads_timed, precision="bf16", rows=sizes.fewer_rows, kls=["all"]),
        "deterministic": deterministic,
    }
    with options.answers.open("w", encoding="utf-8", buffering=1) as file:
        if section == "machine":
            print(json.dumps({"facts": facts(device)}), file=file)
            if not gpu and not options.rehearse:
                return
        try:
            if section in alone:
                answers = alone[section](sizes, device)
            else:
                # Without dropout all is compiled again, for a gate alone: few layers are enough.
                subjects_sizes = replace(sizes, layers=2) if section == "compiled step" else sizes
                answers = with_models[section](Subjects(subjects_sizes, device, options.heads))
            for answer in answers:
                print(json.dumps({"row": answer}), file=file)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": describe(error)}), file=file)


def facts(device: torch.device) -> dict[str, Any]:
    """Return the GPU with its driver, the host, the versions and the commit."""
    hardware = host.hardware(device)
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            hardware["driver"] = result.stdout.splitlines()[0].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            hardware["driver"] = "unknown"
    return {
        "commit": os.environ.get("COMMIT") or host.commit() or "unknown",
        "hardware": hardware,
        "versions": host.versions(),
    }


def machine(sizes: Sizes, device: torch.device) -> Iterator[Answer]:
    """Measure a large matrix product, a copy, a micro-batch's way to the device, and masking."""

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        return median(timed(work, device) for _ in range(10)) / 1000

    n = sizes.matmul
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    yield Answer("ceiling/bf16 product", 2 * n**3 / seconds(lambda: a @ b) / 1e12)
    source = torch.randint(0, 127, (sizes.copied,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    rate = 2 * sizes.copied / seconds(lambda: target.copy_(source)) / 1e9
    yield Answer("ceiling/copy", rate, "read and written")

    host = batch(sizes, sizes.rows)
    host.to(device)
    took = []
    for _ in range(sizes.repeats):
        began = time.perf_counter()
        host.to(device)
        took.append(time.perf_counter() - began)  # without a sync: the host's time delays a step
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    yield Answer("loader/copy", 1000 * median(took), "the host's time, pinning included")

    rows, numbers = ids(sizes, sizes.rows), np.arange(sizes.rows)
    inputs, mask = (rows, np.zeros_like(numbers), numbers), masking(sizes)
    rate = rows.size / seconds(lambda: mask(*inputs)) / 1e6
    yield Answer("loader/masking on host", rate)


def head(backend: str, sizes: Sizes, device: torch.device) -> Iterator[Answer]:
    """Check one backend of the LM head."""
    lacks = ""
    if backend == "triton" and torch.cuda.get_device_capability(device) < (8, 0):
        lacks = "it needs compute capability 8.0"
    for precision in on_gpu.PRECISIONS:
        name, dtype = f"gate/head/{backend}/{precision}", PRECISIONS[precision].dtype
        losses = partial(vocabulary_losses, backend=cast(Backend, backend))
        error = partial(head_error, losses, dtype, device, sizes)
        yield Answer(name, None, lacks) if lacks else guarded(name, error)


def attention(sizes: Sizes, device: torch.device) -> Iterator[Answer]:
    """Check each attention kernel that is used on this device."""
    for precision in on_gpu.PRECISIONS:
        dtype = PRECISIONS[precision].dtype
        kernels = {kernel.__name__: kernel for kernel in usable(device, dtype, 64)}
        for name in on_gpu.ATTENTION:
            row = f"gate/attention/{name}/{precision}"
            if name in kernels:
                yield guarded(row, partial(attention_error, kernels[name], dtype, device, sizes))
            else:
                yield Answer(row, None, f"not for {precision} on this device")


def step(subjects: Subjects) -> Iterator[Answer]:
    """Check our step, and whether a micro-step waits for the device."""
    for precision in on_gpu.PRECISIONS:
        for kl in on_gpu.KL:
            yield from agreement(subjects, "step", precision, kl)
    yield syncs(subjects, "syncs/eager", subjects.sizes.fewer_rows[0])


def heads_timed(
    subjects: Subjects, *, precision: str, rows: Sequence[int], kls: Sequence[str]
) -> Iterator[Answer]:
    """Time the baseline and our step with each backend of the LM head."""
    for num_rows, kl in product(rows, kls):
        make = partial(subjects.ours, precision, kl, num_rows)
        ours = {name: partial(make, head=name) for name in subjects.heads}
        yield from times(subjects, ours, precision, kl, num_rows)
        for name in on_gpu.HEADS:
            if name not in ours:
                row = f"time/{precision}/{num_rows}/{kl}/{name}"
                yield Answer(row, None, "its gate is not ok")


def compiled_step(subjects: Subjects) -> Iterator[Answer]:
    """Check our step with compiled encoders."""
    for kl in on_gpu.KL:
        yield from agreement(subjects, "step, compiled trunks", "bf16", kl, compiled=True)


def compiled_trunks(subjects: Subjects) -> Iterator[Answer]:
    """Time the first step with compiled encoders, which compiles them, and later steps."""
    name, rows = "compiled trunks", subjects.sizes.rows
    began = time.perf_counter()
    subjects.ours("bf16", "all", rows, compiled=True)()
    if subjects.device.type == "cuda":
        torch.cuda.synchronize()
    yield Answer("compile/trunks", time.perf_counter() - began, "the first step")
    yield syncs(subjects, f"syncs/{name}", rows, compiled=True)
    yield from variant_timed(subjects, name=name, compiled=True)


def variant_timed(subjects: Subjects, *, name: str, **options: Any) -> Iterator[Answer]:
    """Time a variant of our step; the baseline is timed with it, for the ratio alone."""
    rows = subjects.sizes.rows
    for kl in on_gpu.KL:
        ours = {name: partial(subjects.ours, "bf16", kl, rows, **options)}
        for answer in times(subjects, ours, "bf16", kl, rows):
            if answer.name.endswith(f"/{name}"):
                yield answer


def capacity(subjects: Subjects, *, cap: int) -> Iterator[Answer]:
    """Find the largest micro-batches that fit a smaller card's memory, in fp16 as on a V100.

    The cap is on torch's allocator, in units of 10^9 bytes: a card sold as 16 GB has 16.9, and the
    rest is left for the driver and the libraries. AdamW's state is in memory, as in training.
    """
    device, folder = subjects.device, f"capacity/{cap} GB"
    # The guesses only save tries.
    guesses = {"usual": cap // 2, "ours": 6 * cap}
    guesses |= {"ours, checkpointing": 18 * cap} if cap == on_gpu.CAPS[0] else {}
    total = torch.cuda.get_device_properties(device).total_memory
    if cap * 10**9 > total:
        for name in (*guesses, "ratio"):
            yield Answer(f"{folder}/{name}", None, f"this GPU has {total / 1e9:.1f} GB")
        return
    state = [torch.zeros_like(p) for p in subjects.student.parameters() for _ in range(2)]
    torch.cuda.set_per_process_memory_fraction(cap * 10**9 / total, device)
    found: dict[str, int] = {}
    for name, guess in guesses.items():
        # Converted in place: a copy of the teacher would take memory from the step.
        nn.Module.to(subjects.teacher, torch.float32 if name == "usual" else torch.float16)
        options = {"checkpointing": True} if name.endswith("checkpointing") else {}
        build: Callable[..., Step] = subjects.baseline if name == "usual" else subjects.ours
        build = partial(build, "fp16", "all", **options)
        found[name] = largest(partial(subjects.tried, build), guess)
        yield Answer(f"{folder}/{name}", found[name])
    del state
    times_as_many = found["ours"] / found["usual"] if found["usual"] else None
    yield Answer(f"{folder}/ratio", times_as_many, "" if found["usual"] else "usual fits no row")


def largest(fits: Callable[[int], object], start: int = 1, *, share: float = 1 / 32) -> int:
    """Return the largest number that `fits`, at most `share` of it too small; 0 if 1 does not.

    `fits` must be true for all numbers below one for which it is. `start` is a first guess.
    """
    low, high = 0, max(1, start)
    while fits(high):
        low, high = high, 2 * high
        if low >= MOST_ROWS:
            return low
    while high - low > max(1, int(low * share)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def deterministic(subjects: Subjects) -> Iterator[Answer]:
    """Measure how many times as long a step takes with deterministic algorithms only."""
    # cuBLAS needs this for them, and reads it when it starts; nothing used it in this process yet.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    step = subjects.ours("bf16", "all", subjects.sizes.rows)
    took: dict[bool, list[float]] = {False: [], True: []}
    try:
        for repeat in range(subjects.sizes.repeats + 1):
            for only, milliseconds in took.items():
                torch.use_deterministic_algorithms(only)
                step.student.zero_grad(set_to_none=True)
                spent = timed(step, subjects.device)
                if repeat:  # the first round warms up
                    milliseconds.append(spent)
        yield Answer("deterministic/step", ratio(took[True], took[False]))
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        yield Answer("deterministic/step", None, str(error).splitlines()[0])

"""Measure the GPU memory of a micro-step by making one and discarding its gradients."""

from __future__ import annotations

import torch

from pretrain.data.batch import MicroBatch, micro_batch
from pretrain.data.rows import special_ids
from pretrain.device.memory import Memory
from pretrain.device.precision import PRECISIONS
from pretrain.run import Run


def gpu_memory(device: torch.device) -> Memory:
    """Return what this process may take of its GPU; what it has already counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # torch 2.6 has no such function
        free = min(free, int(total * torch.cuda.get_per_process_memory_fraction(device)))
    return Memory(total, free)


def on_gpu(run: Run, rows: int) -> int:
    """Return the bytes of the GPU that torch holds after a real micro-step of full rows.

    Gradients are computed and discarded: no parameter gets one, no process hears of it (DDP and
    DeepSpeed act when gradients are added up, which they are not), and torch's random streams are
    put back. Compiled code runs uncompiled: that takes more, and no compilation per size.

    Raises:
        torch.OutOfMemoryError: they do not fit.
    """
    device = run.accelerator.device
    parameters = [p for p in run.module.parameters() if p.requires_grad]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    inputs = full_rows(run, rows).to(device)
    nothing = torch.zeros(len(run.module.terms), device=device)
    with torch.random.fork_rng([device]), torch.compiler.set_stance("force_eager"):
        with PRECISIONS[run.config.train.precision].autocast(device):
            loss, _ = run.module(*inputs, nothing)
        torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cuda.max_memory_reserved(device)


def full_rows(run: Run, rows: int) -> MicroBatch:
    """Build the rows that take most memory: no padding, and every mask slot used."""
    manifest, special = run.manifest, run.manifest.tokenizer.special_ids
    length, slots = manifest.row_length, run.dataset.masking.num_slots(manifest.row_length)
    word = min(set(range(manifest.tokenizer.vocab_size)) - {*special_ids(manifest)})
    ids = torch.full((rows, length), word)
    ids[:, 0], ids[:, -1] = special.cls, special.sep
    positions = torch.arange(slots).expand(rows, slots)
    labels = torch.full((rows, slots), word)
    return micro_batch(ids, positions, labels, cls_id=special.cls, pad_id=special.pad)

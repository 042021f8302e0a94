"""The memory of a micro-step: made on a GPU, to no effect, or predicted for the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pretrain.batch import MicroBatch, micro_batch
from pretrain.build import Run
from pretrain.distillation import Distillation
from pretrain.footprint import of_micro_step
from pretrain.memory import Memory
from pretrain.rows import special_ids

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What a process takes for a byte that is alive: malloc keeps what was freed, in pieces that may not
# fit what comes next (1.7 to 2.1 seen with glibc; less where tensors are larger than 32 MB).
_KEPT = 2.1
_POSITIONS = 512  # from here on the vocabulary head has whole chunks, and memory is a straight line


def gpu_memory(device: torch.device) -> Memory:
    """What this process may take of its GPU; what it has already counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # torch 2.6 has no such function
        free = min(free, int(total * torch.cuda.get_per_process_memory_fraction(device)))
    return Memory(total, free)


def on_gpu(run: Run, rows: int) -> int:
    """Bytes that torch has taken of the GPU by the end of a real micro-step of full rows.

    Gradients are asked for and dropped: no parameter gets one, no process hears of it (DDP and
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
        with run.parallel.autocast():
            loss, _ = run.module(*inputs, nothing)
        torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cuda.max_memory_reserved(device)


def on_host(run: Run) -> Callable[[int], float]:
    """A function from rows to the bytes that a micro-step will take, beyond what is taken now."""
    teacher = run.teacher.model if run.teacher else None
    # Of its own: what wraps the run's module has hooks and a precision in it.
    module = Distillation(run.student, teacher, run.module.terms, pad_id=run.module.pad_id)
    length = run.manifest.row_length
    few = -(-_POSITIONS // length)
    with torch.compiler.set_stance("force_eager"):
        one, two = (
            of_micro_step(
                module,
                n * few,
                length,
                autocast=_HALF.get(run.config.train.precision),
                masked=run.config.masking.probability,
            ).peak
            for n in (1, 2)
        )
    return lambda rows: _KEPT * (one + (two - one) * (rows - few) / few)


def full_rows(run: Run, rows: int) -> MicroBatch:
    """The rows that take most: no padding, and every mask slot used."""
    manifest, special = run.manifest, run.manifest.tokenizer.special_ids
    length, slots = manifest.row_length, run.dataset.masking.num_slots(manifest.row_length)
    word = min(set(range(manifest.tokenizer.vocab_size)) - {*special_ids(manifest)})
    ids = torch.full((rows, length), word)
    ids[:, 0], ids[:, -1] = special.cls, special.sep
    positions = torch.arange(slots).expand(rows, slots)
    labels = torch.full((rows, slots), word)
    return micro_batch(ids, positions, labels, cls_id=special.cls, pad_id=special.pad)

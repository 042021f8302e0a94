"""Resolve `micro_batch_size: auto` on a GPU: find the most rows that fit, before the first step.

The effective batch stays `global_batch_size`: the sizes tried are the divisors of a rank's share.
Each trial is a real micro-step whose gradients are discarded. The result is the same on all ranks
and is kept in the checkpoint, because a resumed run repeats its bits only with the same
micro-batches. On a CPU `auto` is a fixed number, see `config.with_defaults`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from pretrain import RunError
from pretrain.contracts.batch import Batch
from pretrain.data.rows import StepDataset
from pretrain.device.fitting import Found, largest, measured, sizes
from pretrain.device.memory import Memory, out_of_memory
from pretrain.device.precision import PRECISIONS
from pretrain.distributed.processes import any_process, jointly
from pretrain.run import Run

MULTIPLE_ON_GPU = 8  # rows; matrix units are faster with multiples of 8
_MARGIN = 0.08  # share of the memory that is left free
_PLACES, _TOGETHER = 64, 64  # a trial's sample: that many rows at each of so many places
_SAME_MEMORY = 0.02  # relative; the total of one machine varies a little between starts


def resolve_micro_batch(run: Run, state: Mapping[str, Any] | None) -> None:
    """Replace `auto` by a number in the run's config; all ranks call it.

    Args:
        run: as built, before its first step.
        state: of the checkpoint to continue from.

    Raises:
        RunError: not even the smallest micro-batch fits.
    """
    if run.config.train.micro_batch_size != "auto":
        return
    accelerator, share = run.accelerator, run.share
    memory = gpu_memory(accelerator.device)
    total = torch.tensor([memory.total], device=accelerator.device)
    # What the answer depends on. If any of it changed, a checkpoint's record does not apply.
    where = {
        "processes": accelerator.num_processes,
        "device": torch.cuda.get_device_name(accelerator.device),
        "memory": int(accelerator.gather(total).min()),
        "activation_checkpointing": run.config.train.activation_checkpointing,
    }
    recorded = recorded_rows((state or {}).get("micro_batch"), where, share)
    # Ranks may have different devices. Only the first one has written the record.
    if any_process(accelerator, accelerator.is_main_process and recorded is None):
        found = jointly(accelerator, lambda: _find(run, share))
        assert found is not None
        fits, text = found
        each = accelerator.gather(torch.tensor([fits.rows], device=accelerator.device))
        rows = int(each.min())  # all ranks use the size that fits the smallest device
        text = f"{rows} rows{text}" if rows == fits.rows else f"{rows} rows, as another process has"
    else:
        rows = int((state or {})["micro_batch"]["rows"])
        text = f"{rows} rows, as in the checkpoint"
    run.micro_batch = {"rows": rows, **where}
    run.config = run.config.with_train(micro_batch_size=rows)
    run.progress.say(f"micro_batch_size auto: {text}")


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the fix.

    Raises:
        RunError: instead of the error of torch, Python or the system.
    """
    try:
        yield
    except Exception as error:
        on_gpu = run.accelerator.device.type == "cuda"
        # A host's memory has other remedies than a GPU's.
        if not out_of_memory(error) or (on_gpu and not isinstance(error, RuntimeError)):
            raise
        rows, kind = run.micro_batch_size, "GPU memory" if on_gpu else "memory"
        auto = "" if run.micro_batch is None else ", which auto expected to fit"
        text = f"step {run.state.step + 1}: out of {kind} with micro_batch_size {rows}{auto}; "
        if smaller := sizes(run.share, rows // 2)[-1:]:
            or_auto = "" if run.micro_batch else " (or auto)"
            text += f"take train.micro_batch_size={smaller[0]}{or_auto}, which trains the same"
            if not run.config.train.activation_checkpointing:
                text += "; train.activation_checkpointing=true takes less, too"
        else:
            text += _less(run)
        raise RunError(text) from error


def recorded_rows(record: Any, where: Mapping[str, Any], share: int) -> int | None:
    """Return the rows that a checkpoint records, if it was made on the same kind of device."""
    if not isinstance(record, dict) or record.keys() != {"rows", *where}:
        return None
    rows, memory = record["rows"], record["memory"]
    if not (isinstance(rows, int) and isinstance(memory, int)) or rows < 1 or share % rows:
        return None
    same = all(record[key] == where[key] for key in where.keys() - {"memory"})
    same &= abs(memory - where["memory"]) <= _SAME_MEMORY * where["memory"]
    return rows if same else None


def gpu_memory(device: torch.device) -> Memory:
    """Return the memory of the GPU; what this process holds already counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # torch 2.6 has no such function
        free = min(free, int(total * torch.cuda.get_per_process_memory_fraction(device)))
    return Memory(total, free)


def micro_step_memory(run: Run, rows: int) -> int:
    """Return the bytes of the GPU that torch holds after a real micro-step of the fullest rows.

    The gradients are returned by autograd and discarded. No parameter gets one, so neither DDP nor
    DeepSpeed communicates. torch's random states are restored.

    Raises:
        torch.OutOfMemoryError: the rows do not fit.
    """
    device, batch = run.accelerator.device, fullest(run.dataset, rows)
    parameters = [p for p in run.module.parameters() if p.requires_grad]
    # Blocks cached by an earlier trial would count as this one's.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    inputs = batch.to(device)
    nothing = torch.zeros(len(run.module.terms), device=device)
    running = run.config.objective.heaviest(run.student.config.num_hidden_layers)
    # So that a run with a trial draws the same dropout masks as one without.
    with torch.random.fork_rng([device]):
        with PRECISIONS[run.config.train.precision].autocast(device):
            loss, _ = run.module(inputs, nothing, running)
        torch.autograd.grad(loss, parameters, allow_unused=True)
    # Reserved and not allocated: what torch holds cannot be used by anyone else.
    return torch.cuda.max_memory_reserved(device)


def fullest(dataset: StepDataset, rows: int) -> Batch:
    """Return a micro-batch that takes about the most memory of any of the corpus.

    Attention takes memory for each document and for the longest one. So these are the rows with the
    most documents of a sample, whose longest one counts, too. Rows without padding and with every
    mask slot used take the most memory, so padding becomes one document more.
    """
    shards, manifest = dataset.shards, dataset.shards.manifest
    special = manifest.tokenizer.special_ids
    token = min(set(range(manifest.tokenizer.vocab_size)) - {*special.model_dump().values()})
    # Neighbours from all over the corpus: a block of a file is hashed when it is first read.
    places = np.linspace(0, max(len(shards) - _TOGETHER, 0), _PLACES).astype(np.int64)
    sample = np.unique((places[:, None] + np.arange(_TOGETHER)).clip(max=len(shards) - 1))
    ids = shards.rows(sample)
    padding = ids == special.pad
    ids[padding] = token
    ids[:, 1:][padding[:, 1:] > padding[:, :-1]] = special.cls
    most = np.argsort(-(ids[:, 1:] == special.cls).sum(1), kind="stable")
    # The same rows again where the sample has too few.
    chosen = np.resize(most, rows)
    found = dataset.examples.fullest(ids[chosen], sample[chosen], token)
    return found._replace(max_length=dataset.examples.fullest(ids, sample, token).max_length)


def _find(run: Run, share: int) -> tuple[Found, str]:
    """Return what fits on this rank, and its description."""
    device, measure = run.accelerator.device, partial(micro_step_memory, run)
    measured(measure, 1)  # libraries allocate memory at their first use
    free = gpu_memory(device).free
    # The first step allocates a gradient of each parameter and, in a new run, AdamW's two tensors
    # in fp32. ZeRO has allocated its optimizer state, but not its buckets.
    weights = sum(4 * p.numel() for p in run.module.parameters() if p.requires_grad)
    ahead = weights * (1 if run.state.step else 3)
    found = largest(sizes(share), measure, free * (1 - _MARGIN) - ahead, multiple=MULTIPLE_ON_GPU)
    torch.cuda.empty_cache()
    if found is None:
        raise RunError(
            f"micro_batch_size auto: not even 1 row fits into {free / 1e9:.1f} GB of GPU memory: "
            f"{_less(run)}"
        )
    return found, f" ({(found.used + ahead) / 1e9:.1f} of {free / 1e9:.1f} GB)"


def _less(run: Run) -> str:
    first = (
        "" if run.config.train.activation_checkpointing else "train.activation_checkpointing=true, "
    )
    return (
        f"{first}half precision (train.precision), shorter rows and fewer processes at a time take "
        "less"
    )

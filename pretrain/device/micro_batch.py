"""`micro_batch_size: auto` on a GPU: the most rows at a time that fit, found before the start.

The effective batch stays `global_batch_size`: the sizes tried are the divisors of a rank's share.
Real micro-steps are made and discarded. What was found is the same on all ranks, and kept in the
checkpoint: only with the same micro-batches does a resumed run repeat bit for bit. On a CPU `auto`
is a fixed number, see `precision.with_defaults`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pretrain import RunError
from pretrain.device import trial
from pretrain.device.fitting import Found, largest, measured, sizes
from pretrain.device.memory import out_of_memory
from pretrain.distributed.processes import any_process, jointly
from pretrain.run import Run

MULTIPLE_ON_GPU = 8  # rows, which its matrix units like
_MARGIN = 0.08  # of the memory, left free
_SAME_MEMORY = 0.02  # what one machine may differ by from start to start


def resolve(run: Run, state: Mapping[str, Any] | None) -> None:
    """Put a number in the place of `auto` in the run's config; all processes call it.

    Args:
        run: as built, before its first step.
        state: of the checkpoint that is continued.

    Raises:
        RunError: not even the smallest micro-batch fits.
    """
    if run.config.train.micro_batch_size != "auto":
        return
    accelerator, share = run.accelerator, run.share
    memory = trial.gpu_memory(accelerator.device)
    total = torch.tensor([memory.total], device=accelerator.device)
    where = {
        "processes": accelerator.num_processes,
        "device": torch.cuda.get_device_name(accelerator.device),
        "memory": int(accelerator.gather(total).min()),
        "activation_checkpointing": run.config.train.activation_checkpointing,
    }
    recorded = _recorded((state or {}).get("micro_batch"), where, share)
    # Processes may have unlike devices; the first has written what was recorded.
    if any_process(accelerator, accelerator.is_main_process and recorded is None):
        found = jointly(accelerator, lambda: _find(run, share))
        assert found is not None
        fits, text = found
        each = accelerator.gather(torch.tensor([fits.rows], device=accelerator.device))
        rows = int(each.min())
        text = f"{rows} rows{text}" if rows == fits.rows else f"{rows} rows, as another process has"
    else:
        rows = int((state or {})["micro_batch"]["rows"])
        text = f"{rows} rows, as in the checkpoint"
    run.micro_batch = {"rows": rows, **where}
    run.config = run.config.with_train(micro_batch_size=rows)
    run.progress.say(f"micro_batch_size auto: {text}")


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """An error for want of memory becomes one that names the fix.

    Raises:
        RunError: instead of torch's, Python's or the system's.
    """
    try:
        yield
    except Exception as error:
        on_gpu = run.accelerator.device.type == "cuda"
        # A host's memory has other remedies than a GPU's.
        if not out_of_memory(error) or (on_gpu and not isinstance(error, RuntimeError)):
            raise
        raise RunError(_advice(run)) from error


def _find(run: Run, share: int) -> tuple[Found, str]:
    """Return what fits in this process, and the words for it."""
    device, measure = run.accelerator.device, partial(trial.on_gpu, run)
    measured(measure, 1)  # libraries take memory of their own when they are first used
    free = trial.gpu_memory(device).free
    # The first step will take a gradient and, in a new run, AdamW's two moments of each parameter
    # in fp32. ZeRO has made its moments, but not its buckets.
    weights = sum(4 * p.numel() for p in run.student.parameters() if p.requires_grad)
    ahead = weights * (1 if run.state.step else 3)
    found = largest(sizes(share), measure, free * (1 - _MARGIN) - ahead, multiple=MULTIPLE_ON_GPU)
    torch.cuda.empty_cache()
    if found is None:
        raise RunError(
            f"micro_batch_size auto: not even 1 row fits into {_gb(free)} GB of GPU memory: "
            f"{_less(run)}"
        )
    return found, f" ({_gb(found.used + ahead)} of {_gb(free)} GB)"


def _recorded(record: Any, where: Mapping[str, Any], share: int) -> int | None:
    """Return the rows that a checkpoint records for the same kind of device."""
    if not isinstance(record, dict) or record.keys() != {"rows", *where}:
        return None
    rows, memory = record["rows"], record["memory"]
    if not (isinstance(rows, int) and isinstance(memory, int)) or rows < 1 or share % rows:
        return None
    alike = all(record[key] == where[key] for key in where.keys() - {"memory"})
    alike &= abs(memory - where["memory"]) <= _SAME_MEMORY * where["memory"]
    return rows if alike else None


def _advice(run: Run) -> str:
    rows = run.micro_batch_size
    smaller = sizes(run.share, rows // 2)[-1:]
    auto = "" if run.micro_batch is None else ", which auto expected to fit"
    text = f"step {run.state.step + 1}: out of {_kind(run)} with micro_batch_size {rows}{auto}; "
    if not smaller:
        return text + _less(run)
    or_auto = "" if run.micro_batch else " (or auto)"
    text += f"take train.micro_batch_size={smaller[0]}{or_auto}, which trains the same"
    if run.config.train.activation_checkpointing:
        return text
    return f"{text}; train.activation_checkpointing=true takes less, too"


def _less(run: Run) -> str:
    first = (
        "" if run.config.train.activation_checkpointing else "train.activation_checkpointing=true, "
    )
    return (
        f"{first}half precision (train.precision), shorter rows and fewer processes at a time take "
        "less"
    )


def _kind(run: Run) -> str:
    return "GPU memory" if run.accelerator.device.type == "cuda" else "memory"


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f}"

"""Time and memory of our step in all its variants, in turn with the usual step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median

import torch

from benchmarks.gpu.plan import HEADS
from benchmarks.gpu.supervise import Answer, guarded
from benchmarks.gpu.variants import Subjects, free
from pretrain.bench.baseline import UsualStep
from pretrain.bench.cost import peak_flops
from pretrain.bench.measure import OurStep, Step, flops, memory, ratio, timings

_GB = 1e9


def compare(
    subjects: Subjects,
    steps: Mapping[str, OurStep],
    *,
    precision: str,
    kl: str,
    rows: int,
    with_usual: bool = True,
) -> Iterator[Answer]:
    """The rows `time/PRECISION/ROWS/KL/...` of our variants, and with `with_usual` the usual one's.

    All are timed in turn. Where the usual step does not fit, it is measured at the largest
    micro-batch at which it does: tokens a second are what is compared.
    """
    folder, device = f"time/{precision}/{rows}/{kl}", subjects.device
    usual, usual_rows = _largest_usual(subjects, precision, kl, rows)
    together: dict[str, Step] = {} if usual is None else {"usual": usual}
    for name, ours in steps.items():
        ran = guarded(f"{folder}/{name}", partial(runs, ours))
        if ran.value:
            together[name] = ours
        else:
            yield ran if ran.failed else ran._replace(value=None, note="out of memory")
    if usual is None and with_usual:
        yield Answer(f"{folder}/usual", None, "out of memory at one row")
    taken = {name: memory(step, device) for name, step in together.items() if _bears(step, device)}
    peak = peak_flops(device, precision) if device.type == "cuda" else 0.0
    times = timings(together, subjects.sizes.repeats, device)
    for name, step in together.items():
        middle = median(times[name])
        num_rows = rows if isinstance(step, OurStep) else usual_rows
        detail: dict[str, float] = {}
        if isinstance(step, OurStep):
            if usual is not None:
                detail["ratio"] = rows / usual_rows * ratio(times["usual"], times[name])
            if device.type == "cuda":
                share = flops(step, middle) / peak
                detail |= {"mfu_pct": 100 * share} if share <= 1 else {}
                detail["peak_tflops"] = peak / 1e12
        elif not with_usual:
            continue
        detail["tokens_s"] = 1000 * num_rows * subjects.sizes.length / middle
        if name in taken:
            detail["peak_gb"] = taken[name].peak / _GB
        if name in taken and name in (
            *HEADS,
            "usual",
        ):  # others have other trunks than the one that is subtracted
            detail["above_gb"] = taken[name].above_trunk / _GB
        note = "" if num_rows == rows else f"of {num_rows} rows: out of memory at {rows}"
        yield Answer(f"{folder}/{name}", middle, note, detail)


def _bears(step: Step, device: torch.device) -> bool:
    """Whether memory can be measured: on a CPU by seeing operators, which compiled code hides."""
    compiled = isinstance(step, OurStep) and (
        step.module.backend == "compiled" or step.module.compiled
    )
    return device.type == "cuda" or not compiled


def runs(step: Step) -> bool:
    """Make a step, which also warms it up; False where it does not fit."""
    ran = _ran(step)
    free()  # outside the handler: its error holds what the step had
    return ran


def _ran(step: Step) -> bool:
    try:
        step()
        synchronize()
    except torch.OutOfMemoryError:
        return False
    finally:
        step.student.zero_grad(set_to_none=True)
    return True


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _largest_usual(
    subjects: Subjects, precision: str, kl: str, rows: int
) -> tuple[UsualStep | None, int]:
    while rows:
        step = subjects.usual(precision, kl, rows)
        if runs(step):
            return step, rows
        rows //= 2
    return None, 0

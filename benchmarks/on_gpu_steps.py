"""Build our step and the baseline's around the same weights, compare them and time them."""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from benchmarks import on_gpu
from pretrain.bench.baseline import TRIPLE_LOSS, BaselineStep, padded, triple_loss, twin
from pretrain.bench.cost import peak_flops
from pretrain.bench.measure import OurStep, Step, compare, flops, memory, ratio, timings
from pretrain.bench.sizes import Sizes
from pretrain.bench.subjects import PAD, batch, models
from pretrain.device.precision import PRECISIONS
from pretrain.kernels.head import Backend
from pretrain.model.distillation import Distillation
from pretrain.model.families import MaskedLM
from pretrain.objectives.terms import Term, cosine_term, kl_term, mlm_term

GATE_ROWS = 9  # 9 x 512 positions are more than a chunk of the head


class Answer(NamedTuple):
    """Hold the arguments of `Report.put`."""

    name: str
    value: float | None
    note: str = ""
    failed: bool = False
    detail: Mapping[str, Any] = {}


def describe(error: Exception) -> str:
    """Return an error as one line."""
    return traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[0][:300]


def guarded(name: str, work: Callable[[], float]) -> Answer:
    """Return a row's answer; after an error the section goes on with its next row."""
    try:
        return Answer(name, work())
    except Exception as error:
        traceback.print_exc()
        return Answer(name, None, describe(error), failed=True)


class Subjects:
    """Build steps around one student and one teacher.

    The baseline's teacher is in fp32 under autocast. Ours is in the step's precision.

    Args:
        sizes: of models and rows.
        device: a GPU, or the CPU for a rehearsal.
        heads: backends of the LM head that passed their gates, the fastest last.
    """

    def __init__(self, sizes: Sizes, device: torch.device, heads: Sequence[str]) -> None:
        self.sizes, self.device, self.heads = sizes, device, heads
        self.teachers: dict[torch.dtype, MaskedLM] = {}
        self.student, self.teacher = models(sizes)
        for model in (self.student, self.teacher):
            nn.Module.to(model, device)
        gc.freeze()  # every figure begins with a collection, which is faster without the imports

    def ours(
        self,
        precision: str,
        kl: str,
        rows: int,
        *,
        head: str = "",
        compiled: bool = False,
        checkpointing: bool = False,
    ) -> OurStep:
        """Build our step, by default with the fastest head."""
        student, dtype = self.student, PRECISIONS[precision].dtype
        teacher: MaskedLM = self.teacher
        if teacher.dtype != dtype:
            if dtype not in self.teachers:
                self.teachers[dtype] = nn.Module.to(copy.deepcopy(teacher), dtype)
            teacher = self.teachers[dtype]
        over = kl_term(5.0, temperature=2.0, over="tokens" if kl == "all" else "masked")
        terms: list[Term] = [over, mlm_term(2.0), cosine_term(1.0)]
        backend = cast(Backend, head or (self.heads[-1] if self.heads else "torch"))
        module = Distillation(
            student,
            teacher,
            terms,
            pad_id=PAD,
            backend=backend,
            compiled=compiled,
            recompute=checkpointing,
        )
        moved = batch(self.sizes, rows).to(self.device)
        return OurStep(module, moved, PRECISIONS[precision])

    def baseline(self, precision: str, kl: str, rows: int) -> BaselineStep:
        """Build the baseline's step on the same rows and masks."""
        moved = padded(batch(self.sizes, rows).to(self.device), pad_id=PAD)
        student, teacher = twin(self.student), twin(self.teacher)
        losses = partial(triple_loss, weights=TRIPLE_LOSS, positions=kl)
        return BaselineStep(student, teacher, moved, losses, TRIPLE_LOSS, PRECISIONS[precision])

    def tried(self, build: Callable[..., Step], *arguments: int) -> Step | None:
        """Return a step after one call, which warms it up, or None if it does not fit."""
        step: Step | None = None
        try:
            step = build(*arguments)
            step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            step = None
        finally:
            self.student.zero_grad(set_to_none=True)
        # Outside of the handler, because the error's traceback holds the step's tensors.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return step


def agreement(
    subjects: Subjects, gate: str, precision: str, kl: str, **options: Any
) -> Iterator[Answer]:
    """Compare our step with the baseline's; an error fails both rows."""
    found: list[float] = []

    def losses() -> float:
        ours = subjects.ours(precision, kl, GATE_ROWS, **options)
        found.extend(compare(ours, subjects.baseline(precision, kl, GATE_ROWS), precision))
        return found[0]

    name = f"gate/{gate}/{precision}/{kl}"
    first = guarded(f"{name}/losses", losses)
    yield first
    gradients = f"{name}/gradients"
    yield first._replace(name=gradients) if first.failed else Answer(gradients, found[1])


def syncs(subjects: Subjects, name: str, rows: int, **options: Any) -> Answer:
    """Check that no micro-step, with the copy of its rows, waits for the device."""
    if subjects.device.type != "cuda":
        return Answer(name, None, "no GPU")
    host = batch(subjects.sizes, rows)
    step = subjects.ours("bf16", "all", rows, **options)
    for _ in range(2):  # compilation, tuning and the first allocations may wait
        step.batch = host.to(subjects.device)
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.batch = host.to(subjects.device)
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return Answer(name, 1, str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        step.student.zero_grad(set_to_none=True)
    return Answer(name, 0)


def times(
    subjects: Subjects,
    ours: Mapping[str, Callable[[], OurStep]],
    precision: str,
    kl: str,
    rows: int,
) -> Iterator[Answer]:
    """Time our variants and the baseline in turn.

    Where the baseline does not fit, it is measured at the largest micro-batch that does, because
    tokens a second are compared.
    """
    folder, device = f"time/{precision}/{rows}/{kl}", subjects.device
    steps: dict[str, Step] = {}
    usual_rows, baseline = rows, partial(subjects.baseline, precision, kl)
    while usual_rows:
        if usual := subjects.tried(baseline, usual_rows):
            steps["usual"] = usual
            break
        usual_rows //= 2
    else:
        yield Answer(f"{folder}/usual", None, "out of memory at one row")
    for name, build in ours.items():
        try:
            if step := subjects.tried(build):
                steps[name] = step
            else:
                yield Answer(f"{folder}/{name}", None, "out of memory")
        except Exception as error:
            traceback.print_exc()
            yield Answer(f"{folder}/{name}", None, describe(error), failed=True)

    gpu = device.type == "cuda"
    # On a CPU memory is counted by operator, and compiled code has none to count.
    counted = steps if gpu or subjects.heads == ["torch"] else {}
    taken = {name: memory(step, device) for name, step in counted.items()}
    peak = peak_flops(device, precision) if gpu else 0.0
    found = timings(steps, subjects.sizes.repeats, device)
    for name, step in steps.items():
        middle, num_rows, detail = median(found[name]), usual_rows, {}
        if isinstance(step, OurStep):
            num_rows = rows
            if "usual" in steps:
                detail["ratio"] = rows / usual_rows * ratio(found["usual"], found[name])
            if gpu:
                share = flops(step, middle) / peak
                detail |= {"mfu_pct": 100 * share} if share <= 1 else {}
                detail["peak_tflops"] = peak / 1e12
        detail["tokens_s"] = 1000 * num_rows * subjects.sizes.length / middle
        if name in taken:
            detail["peak_gb"] = taken[name].peak / 1e9
            if name in ("usual", *on_gpu.HEADS):  # the others have other encoders to subtract
                detail["above_gb"] = taken[name].above_trunk / 1e9
        note = "" if num_rows == rows else f"of {num_rows} rows: out of memory at {rows}"
        yield Answer(f"{folder}/{name}", middle, note, detail=detail)

"""What each section of the plan does, in the worker's process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

import torch

from benchmarks.gpu import attention, capacity, heads, machine, plan, timings
from benchmarks.gpu.supervise import Answer, Work, guarded
from benchmarks.gpu.variants import Subjects, free
from pretrain.bench.measure import DTYPES, OurStep, compare, ratio, timed
from pretrain.bench.sizes import Sizes
from pretrain.bench.subjects import batch
from pretrain.kernels.head import Backend

_GATE_ROWS = 9  # 9 x 512 positions are more than a chunk of the head
_NO_GPU = "no GPU"
_LEFT_OUT = "the compiler was left out"


class Measurements:
    """All sections, for one device; models are made when the first section wants them.

    Args:
        sizes: of models and rows.
        device: a GPU, or the CPU to rehearse.
        compiles: whether what needs torch's compiler is measured.
    """

    def __init__(self, sizes: Sizes, device: torch.device, *, compiles: bool) -> None:
        self.sizes, self.device, self.compiles = sizes, device, compiles
        self.gpu = device.type == "cuda"
        self._subjects: Subjects | None = None
        if compiles:  # one process measures more shapes and precisions than a run has
            torch._dynamo.config.recompile_limit = 64
        gc.freeze()  # what was imported stays, and need not be looked through before every figure

    @property
    def subjects(self) -> Subjects:
        """The models on the device."""
        if self._subjects is None:
            self._subjects = Subjects(self.sizes, self.device)
        return self._subjects

    def sections(self) -> Mapping[str, Work]:
        """By name, as the plan has them."""
        full, fewer = self.sizes.rows, self.sizes.fewer_rows
        found: dict[str, Work] = {
            "ceilings": lambda failed: machine.ceilings(self.sizes, self.device),
            **{f"head {head}": partial(self.head, head) for head in plan.HEADS},
            "attention": self.attention_kernels,
            "step": self.step,
            "syncs": self.syncs,
            "time bf16": partial(self.heads_timed, "bf16", full, plan.KL),
            "compiled step": self.compiled_step,
            "compiled trunks": self.compiled_trunks,
            "checkpointing": self.checkpointing,
            "time fp16": partial(self.heads_timed, "fp16", full, plan.KL),
            **{f"capacity {cap}": partial(self.capacity, cap) for cap in plan.CAPS},
            **{f"time {rows}": partial(self.heads_timed, "bf16", rows, ("all",)) for rows in fewer},
            "loader": self.loader,
            "deterministic": self.deterministic,
        }
        return {name: partial(self._cleanly, work) for name, work in found.items()}

    def head(self, backend: str, failed: Sequence[str]) -> Iterator[Answer]:
        """The gate of one of the head's backends."""
        lacks = self._lacks(backend)
        sizes = heads.sizes(self.sizes)
        head = heads.with_backend(cast(Backend, backend))
        for precision in plan.PRECISIONS:
            name = f"gate/head/{backend}/{precision}"
            dtype = DTYPES[precision] or torch.float32
            error = partial(heads.head_error, head, dtype, self.device, sizes)
            yield Answer(name, None, lacks) if lacks else guarded(name, error)

    def attention_kernels(self, failed: Sequence[str]) -> Iterator[Answer]:
        """The gate of each attention kernel that is used on this device."""
        sizes = attention.sizes(self.sizes)
        for precision in plan.PRECISIONS:
            dtype = DTYPES[precision] or torch.float32
            kernels = attention.offered(self.device, dtype, sizes.D)
            for name in plan.ATTENTION:
                row = f"gate/attention/{name}/{precision}"
                if name in kernels:
                    kernel = (kernels[name], dtype, self.device, sizes)
                    yield guarded(row, partial(attention.attention_error, *kernel))
                else:
                    yield Answer(row, None, f"not for {precision} on this device")

    def step(self, failed: Sequence[str]) -> Iterator[Answer]:
        """The gate of the whole step, with the head that is timed first."""
        for precision in plan.PRECISIONS:
            for kl in plan.KL:
                ours = partial(self._ours, precision, kl, _GATE_ROWS, failed)
                yield from _agreement("step", self.subjects, ours, precision, kl)

    def syncs(self, failed: Sequence[str]) -> Iterator[Answer]:
        """Of the eager step."""
        if not self.gpu:
            yield Answer("syncs/eager", None, _NO_GPU)
            return
        ours = self._ours("bf16", "all", self.sizes.fewer_rows[0], failed)
        yield machine.syncs(ours, batch(self.sizes, self.sizes.fewer_rows[0]), "syncs/eager")

    def heads_timed(
        self, precision: str, rows: int, kls: Sequence[str], failed: Sequence[str]
    ) -> Iterator[Answer]:
        """The usual step and ours with each backend of the head that is right."""
        for kl in kls:
            folder = f"time/{precision}/{rows}/{kl}"
            if _step_failed(failed, "step", precision, kl):
                for name in ("usual", *plan.HEADS):
                    yield Answer(f"{folder}/{name}", None, "its gate FAILED")
                continue
            steps = {}
            for head in plan.HEADS:
                lacks = self._lacks(head)
                if _any(failed, f"gate/head/{head}/"):
                    lacks = "its gate FAILED"
                if lacks:
                    yield Answer(f"{folder}/{head}", None, lacks)
                else:
                    steps[head] = self.subjects.ours(precision, kl, rows, head=cast(Backend, head))
            yield from timings.compare(self.subjects, steps, precision=precision, kl=kl, rows=rows)

    def compiled_step(self, failed: Sequence[str]) -> Iterator[Answer]:
        """The gate of the step with both trunks compiled.

        Of few layers, since dropout 0 is another function, which is compiled on its own.
        """
        if not self.compiles:
            for kl, what in product(plan.KL, ("losses", "gradients")):
                yield Answer(f"gate/step, compiled trunks/bf16/{kl}/{what}", None, _LEFT_OUT)
            return
        subjects, head = Subjects(replace(self.sizes, layers=2), self.device), self._head(failed)
        for kl in plan.KL:
            make = partial(subjects.ours, "bf16", kl, _GATE_ROWS, head=head, compiled=True)
            yield from _agreement("step, compiled trunks", subjects, make, "bf16", kl)

    def compiled_trunks(self, failed: Sequence[str]) -> Iterator[Answer]:
        """Syncs and times with both trunks compiled."""
        name, rows = "compiled trunks", self.sizes.rows
        lacks = "" if self.compiles else _LEFT_OUT
        if _any(failed, f"gate/step, {name}/"):
            lacks = "its gate FAILED"
        if lacks:
            names = ["compile/trunks", f"syncs/{name}"]
            names += [f"time/bf16/{rows}/{kl}/{name}" for kl in plan.KL]
            yield from (Answer(name, None, lacks) for name in names)
            return
        began = time.perf_counter()
        ours = self._ours("bf16", "all", rows, failed, compiled=True)
        ours()
        timings.synchronize()
        yield Answer("compile/trunks", time.perf_counter() - began, "the first step")
        if self.gpu:
            yield machine.syncs(ours, batch(self.sizes, rows), f"syncs/{name}")
        else:
            yield Answer(f"syncs/{name}", None, _NO_GPU)
        yield from self._timed_variant(name, failed, compiled=True)

    def checkpointing(self, failed: Sequence[str]) -> Iterator[Answer]:
        """Times with the student's activations computed again in the backward pass."""
        yield from self._timed_variant("checkpointing", failed, checkpointing=True)

    def _timed_variant(self, name: str, failed: Sequence[str], **options: bool) -> Iterator[Answer]:
        rows = self.sizes.rows
        for kl in plan.KL:
            if _step_failed(failed, "step", "bf16", kl):
                yield Answer(f"time/bf16/{rows}/{kl}/{name}", None, "its gate FAILED")
                continue
            steps = {name: self._ours("bf16", kl, rows, failed, **options)}
            yield from timings.compare(
                self.subjects, steps, precision="bf16", kl=kl, rows=rows, with_usual=False
            )

    def capacity(self, cap: int, failed: Sequence[str]) -> Iterator[Answer]:
        """The largest micro-batches under a cap on memory."""
        if self.gpu:
            yield from capacity.micro_batches(self.subjects, cap, self._head(failed))
        else:
            for what in (*plan.capacities(cap), "ratio"):
                yield Answer(f"capacity/{cap} GB/{what}", None, _NO_GPU)

    def loader(self, failed: Sequence[str]) -> Iterator[Answer]:
        """A micro-batch's way to the device."""
        yield from machine.copies(self.sizes, self.device)
        yield from machine.masking_speed(self.sizes, self.device)

    def deterministic(self, failed: Sequence[str]) -> Iterator[Answer]:
        """How many times as long a step takes with deterministic algorithms only."""
        step = self._ours("bf16", "all", self.sizes.rows, failed)
        times: dict[bool, list[float]] = {False: [], True: []}
        try:
            for repeat in range(self.sizes.repeats + 1):
                for deterministic, found in times.items():
                    torch.use_deterministic_algorithms(deterministic)
                    step.student.zero_grad(set_to_none=True)
                    milliseconds = timed(step, self.device)
                    if repeat:
                        found.append(milliseconds)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            yield Answer("deterministic/step", None, str(error).splitlines()[0])
            return
        finally:
            torch.use_deterministic_algorithms(False)
        yield Answer("deterministic/step", ratio(times[True], times[False]))

    def is_well(self) -> bool:
        """Whether the GPU still answers: after a kernel's fault it never does in this process."""
        try:
            timings.synchronize()
        except RuntimeError:
            return False
        return True

    def _cleanly(self, work: Work, failed: Sequence[str]) -> Iterator[Answer]:
        torch.manual_seed(0)
        try:
            yield from work(failed)
        finally:
            if self._subjects is not None:
                self._subjects.student.zero_grad(set_to_none=True)
            free()

    def _ours(
        self, precision: str, kl: str, rows: int, failed: Sequence[str], **options: bool
    ) -> OurStep:
        head = self._head(failed)
        return self.subjects.ours(precision, kl, rows, head=head, **options)

    def _head(self, failed: Sequence[str]) -> Backend:
        """The one that should be fastest of those that are right."""
        backends: tuple[Backend, ...] = ("triton", "compiled")
        for head in backends:
            if not self._lacks(head) and not _any(failed, f"gate/head/{head}/"):
                return head
        return "torch"

    def _lacks(self, head: str) -> str:
        """Why a backend cannot run here; "" if it can."""
        if head == "triton" and not self.gpu:
            return _NO_GPU
        if head == "triton" and torch.cuda.get_device_capability(self.device) < (8, 0):
            return "it needs compute capability 8.0"
        if head == "compiled" and not self.compiles:
            return _LEFT_OUT
        return ""


def _agreement(
    gate: str, subjects: Subjects, make: Callable[[], OurStep], precision: str, kl: str
) -> Iterator[Answer]:
    """Of our step with the usual one; an error is that of both rows, and of no others."""
    name = f"gate/{gate}/{precision}/{kl}"
    found: list[float] = []

    def terms() -> float:
        found.extend(compare(make(), subjects.usual(precision, kl, _GATE_ROWS), precision))
        return found[0]

    first = guarded(f"{name}/losses", terms)
    yield first
    name = f"{name}/gradients"
    yield first._replace(name=name) if first.failed else Answer(name, found[1])


def _any(failed: Sequence[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in failed)


def _step_failed(failed: Sequence[str], step: str, precision: str, kl: str) -> bool:
    return _any(failed, f"gate/{step}/{precision}/{kl}/")

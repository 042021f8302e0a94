"""Compare our micro-step with the baseline: first their values, then time and memory.

Both steps take the same weights, rows and masks. With dropout 0 their loss terms and gradients must
agree. Then they are timed in turn in one process, with dropout, forward and backward.

Shapes: T terms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain import NumericalError
from pretrain.bench.baseline import BaselineStep
from pretrain.bench.cost import flops_per_token
from pretrain.bench.footprint import Counter
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.model.distillation import Distillation, MicroBatch, parameters_by_name
from pretrain.model.families import MaskedLM


@dataclass
class OurStep:
    """Compute the micro-step of `pretrain.train`, with the counts of its own micro-batch.

    Args:
        module: student, teacher and terms.
        batch: on their device.
        precision: of the forward pass; its loss scale multiplies the loss.
    """

    module: Distillation
    batch: MicroBatch
    precision: Precision = PRECISIONS["fp32"]
    student: MaskedLM = field(init=False)
    teacher: MaskedLM | None = field(init=False)
    adapters: nn.ModuleDict = field(init=False)
    _counts: list[int] = field(init=False)
    _factors_T: Tensor = field(init=False)
    _sums_T: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.student, self.teacher = self.module.student, self.module.teacher
        self.adapters = self.module.adapters
        batch, terms = self.batch, self.module.terms
        self._counts = [batch.counts[term.over] for term in terms]
        factors = [
            term.weight(0) * batch.counts["tokens"] / max(count, 1)
            for term, count in zip(terms, self._counts, strict=True)
        ]
        self._factors_T = torch.tensor(factors, device=batch.input_ids.device)

    def __call__(self) -> None:
        """Run forward and backward of one micro-batch; gradients add up."""
        with self.precision.autocast(self.batch.input_ids.device):
            loss, self._sums_T = self.module(*self.batch, self._factors_T)
        (loss * (self.precision.loss_scale / self.batch.counts["tokens"])).backward()

    def encoders(self) -> Any:
        """Return the encoders' outputs alone, which keeps all that their graph holds alive."""
        with self.precision.autocast(self.batch.input_ids.device):
            ids, _, _, cu_seqlens, max_length, *_ = self.batch
            return self.module.encode(ids, cu_seqlens, max_length)

    @property
    def terms(self) -> dict[str, float]:
        """Return the mean of each term in the last call."""
        assert self._sums_T is not None
        sums = zip(self.module.terms, self._sums_T.tolist(), self._counts, strict=True)
        return {term.name: total / max(count, 1) for term, total, count in sums}


Step = OurStep | BaselineStep


class Agreement(NamedTuple):
    """Hold the differences of two steps with dropout 0."""

    term: float  # the largest relative difference of a loss term
    gradient: float  # the largest difference of a gradient, see `compare`


class Memory(NamedTuple):
    """Hold the memory of one step in bytes."""

    peak: int  # weights of both models, activations, gradients; no optimizer state
    above_trunk: int  # above weights and what the encoders' forward passes leave alive


def check(ours: Step, baseline: Step, precision: str) -> Agreement:
    """Compare two steps, and raise NumericalError if they are not the same function."""
    found = compare(ours, baseline, precision)
    for what, error, limit in zip(
        found._fields, found, PRECISIONS[precision].tolerances, strict=True
    ):
        if not error <= limit:  # NaN included
            raise NumericalError(
                f"our step and the baseline differ: a {what} by {error:.1e} in {precision}, at "
                f"most {limit:.0e} is rounding; nothing was timed"
            )
    return found


def compare(ours: Step, baseline: Step, precision: str) -> Agreement:
    """Make both steps with dropout 0 and return the differences of their terms and gradients.

    The difference of a term is relative to the sum of terms: the KL of a student that is near its
    teacher is the difference of nearly equal numbers. In fp32 each parameter counts for itself: the
    largest difference of its gradient, relative to its largest entry. In half precision it is the
    norm of the difference relative to the norm, over all parameters. `k_lin.bias` does not count in
    fp32: softmax ignores it, so its true gradient is 0.
    """
    gradients: list[dict[str, Tensor]] = []  # by parameter, unscaled
    with without_dropout(ours.student, baseline.student):
        for step in (ours, baseline):
            forget(step)
            step()
            found = {}
            for name, parameter in parameters_by_name(step.student, step.adapters).items():
                made = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[name] = made.float() / step.precision.loss_scale
            gradients.append(found)
            forget(step)
    expected, total = baseline.terms, sum(map(abs, baseline.terms.values()))
    terms = [abs(ours.terms[name] - value) / max(total, 1e-30) for name, value in expected.items()]
    differences = {name: gradients[0][name] - theirs for name, theirs in gradients[1].items()}
    if precision == "fp32":
        errors = [
            float(difference.abs().max() / gradients[1][name].abs().max().clamp(min=1e-30))
            for name, difference in differences.items()
            if not name.endswith(("k_lin.bias", "key.bias"))
        ]
    else:
        apart, size = (
            torch.stack([tensor.norm() for tensor in tensors.values()]).norm()
            for tensors in (differences, gradients[1])
        )
        errors = [float(apart / size)]
    # `max` of a tensor is NaN if one of the numbers is; Python's may leave a NaN out.
    term, error = (float(torch.tensor(e, dtype=torch.float64).max()) for e in (terms, errors))
    return Agreement(term, error)


def forget(step: Step) -> None:
    """Free the gradients that a step has made."""
    for module in (step.student, step.adapters):
        module.zero_grad(set_to_none=True)


def timings(
    steps: Mapping[str, Step], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of each step, in turn `repeats` times after one warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            forget(step)
            milliseconds = timed(step, device)  # in turn, so that a slow moment hits all steps
            if repeat:
                found[name].append(milliseconds)
    for step in steps.values():
        forget(step)
    return found


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call; on a GPU by its own clock, without the wait for it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Device sync: earlier work must not count.
    torch.cuda.synchronize(device)
    begin_event.record()
    work()
    end_event.record()
    # Device sync: the events have a time only when the GPU has passed them.
    torch.cuda.synchronize(device)
    return float(begin_event.elapsed_time(end_event))


def ratio(slow: list[float], fast: list[float]) -> float:
    """Return how many times as long: the median over pairs that ran one after the other."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def memory(step: Step, device: torch.device) -> Memory:
    """Return the peak memory of a step. Shared weights are counted once."""
    forget(step)
    # A parameter that both share is one allocation.
    models = [m for m in (step.student, step.adapters, step.teacher) if m is not None]
    tensors = {id(t): t for m in models for t in chain(m.parameters(), m.buffers())}
    weights = sum(t.numel() * t.element_size() for t in tensors.values())
    _, encoders = _allocated(step.encoders, device)
    peak, _ = _allocated(step, device)
    forget(step)
    return Memory(weights + peak, peak - encoders)


def _allocated(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return (peak bytes, bytes left while the result is held), both above the bytes before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        # Held until memory is read: the graph of a forward pass lives as long as its result.
        result = work()
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return peak - before, left - before
    with Counter() as counter:
        result = work()
        left = counter.live
    del result
    return counter.peak, left


def flops(step: OurStep, milliseconds: float) -> float:
    """Return the FLOP/s of the work that the loss needs, for rows of one document.

    It is 0 without a term on logits: what relations take is not a part of the cost model.
    """
    if not step.module.vocabulary_terms:
        return 0.0
    everywhere = any(t.over == "tokens" for t in step.module.vocabulary_terms)
    share = 1.0 if everywhere else step.batch.counts["masked"] / step.batch.counts["tokens"]
    work = flops_per_token(step.student, step.teacher, step.batch.input_ids.shape[1], share)
    return 1000 * work * step.batch.counts["tokens"] / milliseconds


@contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """Set dropout to 0 inside the block, also in attention."""
    # ModernBERT's attention has no layer for it, but a number.
    layers: list[tuple[Any, str]] = []
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, nn.Dropout):
            layers.append((module, "p"))
        if isinstance(getattr(module, "attention_dropout", None), float):
            layers.append((module, "attention_dropout"))
    before = [getattr(layer, name) for layer, name in layers]
    for layer, name in layers:
        setattr(layer, name, 0.0)
    try:
        yield
    finally:
        for (layer, name), p in zip(layers, before, strict=True):
            setattr(layer, name, p)

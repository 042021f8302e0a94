"""Compare our micro-step with two baselines: first their values, then time and memory.

All take the same weights, rows and masks. With dropout 0 their loss terms and gradients must
agree. Then they are timed in turn in one process, with dropout, forward and backward. A step that
does not fit into memory is reported as such, and the others are still measured.

Shapes: T terms.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain import NumericalError
from pretrain.bench.baseline import BaselineStep, baseline_step, padded, shapes_of, twin
from pretrain.contracts.batch import Batch
from pretrain.contracts.terms import Shape
from pretrain.device.hardware import head_kernel
from pretrain.device.memory import out_of_memory
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.model.distillation import Distillation, parameters_by_name
from pretrain.model.families import MaskedLM
from pretrain.objectives.objective import Objective
from pretrain.tasks.folders import TASKS


@dataclass
class OurStep:
    """Compute the micro-step of `pretrain.train`, with the counts of its own micro-batch.

    Args:
        module: student, teacher and terms.
        batch: on their device.
        precision: of the forward pass; its loss scale multiplies the loss.
    """

    module: Distillation
    batch: Batch
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
            loss, self._sums_T = self.module(self.batch, self._factors_T)
        (loss * (self.precision.loss_scale / self.batch.counts["tokens"])).backward()

    def encoders(self) -> Any:
        """Return the encoders' outputs alone, which keeps all that their graph holds alive."""
        with self.precision.autocast(self.batch.input_ids.device):
            return self.module.encode(self.batch)

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
    with Alive() as alive:
        result = work()
        left = alive.live
    del result
    return alive.peak, left


class Alive(TorchDispatchMode):
    """Count the bytes that are alive on a CPU, as torch's allocator does on a GPU.

    A piece of memory is alive from the operator that returns it until its last tensor or view is
    freed. The memory inside a kernel is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0  # bytes above what was alive before
        self.sizes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        self.add(t for t in tensors_in(result) if storage_key(t) not in known)
        return result

    def add(self, made: Iterable[Tensor]) -> None:
        """Count tensors whose memory an operator has returned."""
        for tensor in made:
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Return what tells pieces of memory apart."""
    return tensor.untyped_storage()._cdata


def flops_per_token(
    student: MaskedLM, teacher: MaskedLM | None, row_length: int, head_share: float
) -> float:
    """Return the work of the loss a token: teacher forward, student forward and backward (x 3).

    A layer's forward is 8 D^2 + 4 D F + 4 S D. The head's is 2 D^2 + 2 D V at `head_share` of the
    positions (1 with KL over all tokens, else the masked share).
    """
    total = 0.0
    for model, times in ((student, 3), (teacher, 1)):
        if model is not None:
            config = model.config
            width, layers = config.hidden_size, config.num_hidden_layers
            inner = getattr(config, "intermediate_size", None) or config.hidden_dim
            layer = 8 * width**2 + 4 * width * inner + 4 * row_length * width
            head = head_share * (2 * width**2 + 2 * width * config.vocab_size)
            total += times * (layers * layer + head)
    return total


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


Result = TypeVar("Result")
BASELINES = ("usual", "careful")  # see `pretrain.bench.baseline`
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Pair:
    """Hold one set of weights on a device, from which the steps are made.

    Our teacher is in the precision of its step, as in a run. The baselines' computes in it under
    autocast.
    """

    student: MaskedLM
    teachers: Mapping[str, MaskedLM]  # ours, by precision
    baselines: Mapping[str, tuple[MaskedLM, MaskedLM | None]]  # student and teacher of `BASELINES`
    adapters: nn.ModuleDict  # of the objective, trained by all
    device: torch.device
    pad_id: int
    compiled: bool
    recompute: bool

    @classmethod
    def of(
        cls,
        student: MaskedLM,
        teacher: MaskedLM | None,
        device: torch.device,
        precisions: Sequence[str],
        *,
        pad_id: int,
        adapters: nn.ModuleDict | None = None,
        compiled: bool = False,
        recompute: bool = False,
    ) -> Pair:
        """Move both models to the device and make the baselines' twins."""
        adapters = adapters or nn.ModuleDict()
        for module in (student, adapters, *([teacher] if teacher is not None else [])):
            nn.Module.to(module, device)
        teachers = {}
        for dtype, name in ((PRECISIONS[name].dtype, name) for name in precisions):
            if teacher is not None:
                # A copy only where the precision differs: the weights are the largest part of the
                # memory.
                same = dtype == torch.float32
                teachers[name] = teacher if same else nn.Module.to(copy.deepcopy(teacher), dtype)
        baselines = {}
        for name in BASELINES:
            copied = partial(twin, torch_layers=name == "usual")
            baselines[name] = copied(student), None if teacher is None else copied(teacher)
        return cls(student, teachers, baselines, adapters, device, pad_id, compiled, recompute)

    @property
    def teacher(self) -> MaskedLM | None:
        """Return the teacher with torch's layers."""
        return self.baselines["usual"][1]

    @property
    def shapes(self) -> tuple[Shape, Shape | None]:
        """Return the sizes of both models, for an objective."""
        return shapes_of(self.student, self.teacher)

    def ours(self, objective: Objective, batch: Batch, precision: str) -> OurStep:
        """Return our step on a micro-batch in the host's memory."""
        weight, task = next(self.student.parameters()), objective.tasks[0]
        width = (self.teacher or self.student).config.hidden_size
        batch, labels = TASKS[task](name=task).drawn(batch, width, pad_id=self.pad_id)
        module = Distillation(
            self.student,
            self.teachers.get(precision),
            objective.terms(*self.shapes),
            pad_id=self.pad_id,
            adapters=self.adapters,
            teacher_labels=labels,
            backend="compiled" if head_kernel(weight, self.compiled) == "compiled" else "auto",
            compiled=self.compiled,
            recompute=self.recompute,
        )
        return OurStep(module, batch.to(self.device), PRECISIONS[precision])

    def baseline(
        self, name: str, objective: Objective, batch: Batch, precision: str
    ) -> BaselineStep:
        """Return the step of one of `BASELINES` on the same data."""
        return baseline_step(
            *self.baselines[name],
            padded(batch.to(self.device), pad_id=self.pad_id),
            objective,
            PRECISIONS[precision],
            self.adapters,
            careful=name == "careful",
        )


def agreement(pair: Pair, objective: Objective, batch: Batch, precision: str) -> dict[str, Any]:
    """Return the largest differences between our step and a baseline.

    Raises:
        NumericalError: they are larger than rounding explains.
    """
    ours, worst = pair.ours(objective, batch, precision), Agreement(0.0, 0.0)
    for name in BASELINES:
        step = pair.baseline(name, objective, batch, precision)
        found = attempt(lambda step=step: check(ours, step, precision))  # type: ignore[misc]
        if found is None:
            return {"error": OUT_OF_MEMORY}
        worst = Agreement(*map(max, worst, found))
    return worst._asdict()


def rows(
    pair: Pair, objective: Objective, batch: Batch, precision: str, repeats: int
) -> dict[str, Any]:
    """Measure the steps on rows of one document each: the gain of head and encoder."""
    ours = pair.ours(objective, batch, precision)
    all_steps: dict[str, Step] = {"ours": ours}
    for name in BASELINES:
        all_steps[name] = pair.baseline(name, objective, batch, precision)
    taken = {}
    for name, step in all_steps.items():
        fits = attempt(lambda step=step: memory(step, pair.device))  # type: ignore[misc]
        if fits is not None:
            taken[name] = fits
        forget(step)
    times = timings({name: all_steps[name] for name in taken}, repeats, pair.device)

    steps: dict[str, dict[str, Any]] = {name: {"error": OUT_OF_MEMORY} for name in all_steps}
    for name, milliseconds in times.items():
        steps[name] = {
            **rates(milliseconds, batch.counts["tokens"]),
            "peak_bytes": taken[name].peak,
            "above_trunk_bytes": taken[name].above_trunk,
        }
        # All are credited with the same work, that of the loss.
        steps[name]["flops"] = flops(ours, steps[name]["milliseconds"])
    for name in BASELINES:
        if name in times and "ours" in times:
            above = [steps[key]["above_trunk_bytes"] for key in ("ours", name)]
            steps[name]["ratio"] = ratio(times[name], times["ours"])
            steps[name]["above_trunk_share"] = above[0] / above[1]
    return {"tokens": batch.counts["tokens"], "steps": steps}


def documents(
    pair: Pair,
    objective: Objective,
    batches: Mapping[str, Batch],
    precision: str,
    repeats: int,
) -> dict[str, Any]:
    """Measure the gain of packing, in real tokens a second.

    `batches` have one shape: documents "packed" into rows, one document a row and "padded", and
    rows "full" of one document. Packed rows are fuller than padded ones, and the fill promises as
    many times the tokens a second. `kept` is the share of that which is reached, compared with our
    own step on padded rows (which computes no padding in the head) and with the baseline. Compared
    with full rows, it shows the cost of a position in packed rows.
    """
    steps: dict[str, Step] = {
        f"ours {name}": pair.ours(objective, batch, precision) for name, batch in batches.items()
    }
    steps["usual padded"] = pair.baseline("usual", objective, batches["padded"], precision)
    fills = {
        name: batch.counts["tokens"] / batch.input_ids.numel() for name, batch in batches.items()
    }
    found: dict[str, Any] = {"fills": fills, "promised": fills["packed"] / fills["padded"]}
    found["steps"] = {}
    runnable = {}
    for name, step in steps.items():
        once = attempt(lambda step=step: timings({"": step}, 0, pair.device))  # type: ignore[misc]
        if once is not None:
            runnable[name] = step
    times = timings(runnable, repeats, pair.device)
    for name in steps:
        if name not in times:
            found["steps"][name] = {"error": OUT_OF_MEMORY}
            continue
        tokens = batches[name.split()[1]].counts["tokens"]
        found["steps"][name] = rates(times[name], tokens)
    for name in ("ours padded", "usual padded", "ours full"):
        if name in times and "ours packed" in times:
            promised = fills["packed"] / fills[name.split()[1]]
            gain = promised * ratio(times[name], times["ours packed"])
            found[f"against {name}"] = {"ratio": gain, "kept": gain / promised}
    return found


def attempt(work: Callable[[], Result]) -> Result | None:
    """Return the result, or None if memory ran out."""
    result = None
    try:
        result = work()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
    if result is None:  # outside the handler, whose error keeps the tensors of the step alive
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return result


def rates(milliseconds: list[float], tokens: int) -> dict[str, float]:
    """Return what is reported of a step's times."""
    middle = median(milliseconds)
    return {
        "milliseconds": middle,
        "fastest": min(milliseconds),
        "slowest": max(milliseconds),
        "tokens_per_second": 1000 * tokens / middle,
    }

"""Measure one cell of the table that `distil bench` prints.

A step that does not fit into memory is reported as such, and the others are still measured.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from pretrain.bench.baseline import BaselineStep, padded, shapes_of, twin
from pretrain.bench.measure import OurStep, Step, check, flops, forget, memory, ratio, timings
from pretrain.bench.plain import baseline_step
from pretrain.contracts.batch import Sequences
from pretrain.contracts.terms import Shape
from pretrain.device.memory import out_of_memory
from pretrain.device.precision import PRECISIONS
from pretrain.kernels.head.triton_support import use_triton
from pretrain.model.distillation import Distillation, MicroBatch
from pretrain.model.families import MaskedLM, shape_of
from pretrain.model.pooling import SentenceHead
from pretrain.objectives.objective import Objective

Result = TypeVar("Result")
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Pair:
    """Hold one set of weights on a device, from which both steps are made.

    Our teacher is in the precision of its step, as in a run. The baseline's computes in it under
    autocast.
    """

    student: MaskedLM
    teachers: Mapping[str, MaskedLM]  # ours, by precision
    usual_student: MaskedLM
    usual_teacher: MaskedLM | None
    adapters: nn.ModuleDict  # of the objective, trained by both
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
        """Move both models to the device and make the baseline's twins."""
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
        twins = twin(student), None if teacher is None else twin(teacher)
        return cls(student, teachers, *twins, adapters, device, pad_id, compiled, recompute)

    @property
    def shapes(self) -> tuple[Shape, Shape | None]:
        """Return the sizes of both models, for an objective."""
        return shapes_of(self.student, self.usual_teacher)

    def ours(self, objective: Objective, batch: MicroBatch, precision: str) -> OurStep:
        """Return our step on a micro-batch in the host's memory."""
        weight, head = next(self.student.parameters()), None
        if objective.compares_documents:
            batch = with_sequences(batch, pad_id=self.pad_id)
            head = SentenceHead(shape_of(self.student).hidden_size)
        module = Distillation(
            self.student,
            self.teachers.get(precision),
            objective.terms(*self.shapes),
            pad_id=self.pad_id,
            adapters=self.adapters,
            head=head,
            backend="compiled" if self.compiled and not use_triton("auto", weight) else "auto",
            compiled=self.compiled,
            recompute=self.recompute,
        )
        return OurStep(module, batch.to(self.device), PRECISIONS[precision])

    def usual(self, objective: Objective, batch: MicroBatch, precision: str) -> BaselineStep:
        """Return the baseline step on the same data."""
        return baseline_step(
            self.usual_student,
            self.usual_teacher,
            padded(batch.to(self.device), pad_id=self.pad_id),
            objective,
            PRECISIONS[precision],
            self.adapters,
        )


def with_sequences(batch: MicroBatch, *, pad_id: int) -> MicroBatch:
    """Return a micro-batch in which every document is a whole one."""
    ids, length, places = batch.input_ids, batch.input_ids.shape[1], Counter[int]()
    documents = torch.full(ids.shape, -1, dtype=torch.int16)
    sizes = torch.zeros(len(ids), len(batch.cu_seqlens), dtype=torch.int16)
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        row, column = divmod(begin, length)
        if begin < end and ids[row, column] != pad_id:
            documents[row, column : column + end - begin] = places[row]
            sizes[row, places[row]] = end - begin
            places[row] += 1
    sequences = Sequences(documents, sizes[:, : max(places.values(), default=1)])
    counts = dict(batch.counts)
    counts["sequences"] = sum(places.values())
    counts["sequence_pairs"] = sum(num * (num - 1) for num in places.values())
    return batch._replace(sequences=sequences, counts=counts)


def agreement(
    pair: Pair, objective: Objective, batch: MicroBatch, precision: str
) -> dict[str, Any]:
    """Return the differences between the two steps.

    Raises:
        NumericalError: they are larger than rounding explains.
    """
    ours, usual = pair.ours(objective, batch, precision), pair.usual(objective, batch, precision)
    found = attempt(lambda: check(ours, usual, precision))
    return {"error": OUT_OF_MEMORY} if found is None else found._asdict()


def rows(
    pair: Pair, objective: Objective, batch: MicroBatch, precision: str, repeats: int
) -> dict[str, Any]:
    """Measure both steps on rows of one document each: the gain of head and encoder."""
    ours = pair.ours(objective, batch, precision)
    both: dict[str, Step] = {"ours": ours, "usual": pair.usual(objective, batch, precision)}
    taken = {}
    for name, step in both.items():
        fits = attempt(lambda step=step: memory(step, pair.device))  # type: ignore[misc]
        if fits is not None:
            taken[name] = fits
        forget(step)
    times = timings({name: both[name] for name in taken}, repeats, pair.device)

    steps: dict[str, dict[str, Any]] = {name: {"error": OUT_OF_MEMORY} for name in both}
    for name, milliseconds in times.items():
        steps[name] = {
            **rates(milliseconds, batch.counts["tokens"]),
            "peak_bytes": taken[name].peak,
            "above_trunk_bytes": taken[name].above_trunk,
        }
        # Both are credited with the same work, that of the loss.
        steps[name]["flops"] = flops(ours, steps[name]["milliseconds"])
    found: dict[str, Any] = {"tokens": batch.counts["tokens"], "steps": steps, "ratio": None}
    if len(times) == 2:
        found["ratio"] = ratio(times["usual"], times["ours"])
        above = [steps[name]["above_trunk_bytes"] for name in ("ours", "usual")]
        found["above_trunk_share"] = above[0] / above[1]
    return found


def documents(
    pair: Pair,
    objective: Objective,
    batches: Mapping[str, MicroBatch],
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
    steps["usual padded"] = pair.usual(objective, batches["padded"], precision)
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

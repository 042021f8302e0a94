"""What tells a sick run: a hash of the parameters, spikes of the curves, a post-mortem.

Pure functions of plain values: the loop gathers what they need and acts on what they say.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from pretrain.data.hashing import mix, root

_HASH = 4  # names this use of `root`
_CHUNK = 1 << 17  # elements hashed at a time: their int64 copies stay in a core's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size

_SHOWN = 16  # rows named in a message


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """Return a 64-bit hash [] (int64) of every bit of the parameters and of their order, on their
    device.

    The sum, modulo 2**64, of each element's bits as an integer times an odd weight of its own: one
    flipped bit therefore always changes it, and no order of summation does. Nothing is read back
    from the device; at most a few chunks of extra memory are taken (and a copy of a parameter that
    is not contiguous). All parameters are on one device; of none, the hash is 0.
    """
    total = weights = torch.zeros((), dtype=torch.int64)
    chunks = 0
    for parameter in parameters:
        bits = parameter.detach().reshape(-1).view(_INTEGERS[parameter.element_size()])
        if chunks == 0:
            total = total.to(bits.device)
            weights = 2 * mix(torch.arange(_CHUNK, device=bits.device)) + 1
        for chunk in bits.split(_CHUNK):
            chunks += 1
            of_chunk = 2 * root(0, _HASH, chunks) + 1
            total = total + (chunk * weights[: len(chunk)]).sum() * of_chunk
    return total


def differing(fingerprints: Sequence[int]) -> list[int]:
    """Return the ranks whose fingerprint is not the most frequent one; all of them where two
    are."""
    ranked = Counter(fingerprints).most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        return list(range(len(fingerprints)))
    return [rank for rank, value in enumerate(fingerprints) if value != ranked[0][0]]


class Spikes:
    """Warns of a loss or gradient norm that leaps out of its last 128 steps.

    A loss beyond the limit is entered as the limit: one spike then hides none that follow, and a
    step to a new level is accepted after a few dozen values. A gradient norm is compared with the
    median, which one value hardly moves. What is not finite is neither judged nor entered. Nothing
    of this is saved: a run that continues is judged again after its first 32 steps.
    """

    window = 128  # steps
    least = 32  # values before anything is judged, and steps between two warnings of a kind
    deviations = 6.0  # of the loss, above its mean
    floor = 1e-3  # of the mean: a curve this flat would warn of rounding
    times = 10.0  # of the gradient norm, above its median

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.window)
        self._norms: deque[float] = deque(maxlen=self.window)
        self._warned: dict[str, int] = {}

    def seen(self, step: int, loss: float, grad_norm: float) -> list[str]:
        """Judge a step's values by those before it, then enter them; a line for each warning.

        Args:
            step: as the log counts it, for the text and the pause between warnings.
            loss: of the same rows' share at every call, so that values can be compared.
            grad_norm: before clipping.
        """
        warnings = []
        if math.isfinite(loss):
            if len(self._losses) >= self.least:
                mean = fmean(self._losses)
                spread = math.sqrt(fmean((x - mean) ** 2 for x in self._losses))
                deviation = max(spread, self.floor * abs(mean), 1e-9)
                limit = mean + self.deviations * deviation
                if loss > limit and self._due("loss", step):
                    warnings.append(
                        f"step {step}: the loss is {loss:.4g}, {(loss - mean) / deviation:.1f} "
                        f"deviations above {mean:.4g}, its mean over the last "
                        f"{len(self._losses)} steps"
                    )
                loss = min(loss, limit)
            self._losses.append(loss)
        if math.isfinite(grad_norm):
            if len(self._norms) >= self.least:
                usual = median(self._norms)
                if grad_norm > self.times * usual > 0 and self._due("norm", step):
                    warnings.append(
                        f"step {step}: the gradient norm is {grad_norm:.4g}, "
                        f"{grad_norm / usual:.1f} times {usual:.4g}, its median over the last "
                        f"{len(self._norms)} steps"
                    )
            self._norms.append(grad_norm)
        return warnings

    def _due(self, kind: str, step: int) -> bool:
        if kind in self._warned and step - self._warned[kind] < self.least:
            return False
        self._warned[kind] = step
        return True


@dataclass(frozen=True)
class Culprit:
    """A micro-batch whose loss is not finite."""

    rank: int
    micro_batch: int  # of its rank, from 0
    rows: tuple[int, ...]  # row numbers in the train split
    loss: float
    terms: Mapping[str, float]  # sum of each term over the micro-batch


def culprits(
    rows: Sequence[Sequence[int]],
    losses: Sequence[Sequence[float]],
    sums: Sequence[Sequence[Sequence[float]]],
    names: Sequence[str],
) -> list[Culprit]:
    """Return every micro-batch of a step whose loss is not finite, from what the ranks gathered.

    Args:
        rows: [W, R] row numbers of each rank, in the order of its micro-batches.
        losses: [W, A] of each micro-batch.
        sums: [W, A, T] of each term.
        names: [T] of the terms.
    """
    found = []
    for rank, (numbers, of_rank, terms) in enumerate(zip(rows, losses, sums, strict=True)):
        size = len(numbers) // len(of_rank)
        for i, (loss, values) in enumerate(zip(of_rank, terms, strict=True)):
            if not math.isfinite(loss):
                mine = tuple(numbers[i * size : (i + 1) * size])
                found.append(Culprit(rank, i, mine, loss, dict(zip(names, values, strict=True))))
    return found


def post_mortem(
    *,
    step: int,
    rows: Sequence[int],
    culprits: Sequence[Culprit],
    grad_norm: float,
    learning_rate: float,
    loss_scale: float | None,
    metrics: Mapping[str, Any] | None,
    shards: Path,
    file: Path,
) -> tuple[dict[str, Any], str]:
    """(what is written to `file` as JSON, one line for the screen) of a non-finite step.

    Args:
        step: as the log counts it: the first is 1.
        rows: all of the step; named where no loss but only the gradient is not finite.
        culprits: the micro-batches whose loss is not finite, of all ranks.
        grad_norm: of the whole gradient, before clipping.
        learning_rate: of this step.
        loss_scale: fp16's, None in other precisions.
        metrics: the last entry of metrics.jsonl before the step.
        shards: the folder that the rows are in.
        file: where the caller writes the dictionary.
    """
    bad = [row for culprit in culprits for row in culprit.rows] or list(rows)
    ranks = sorted({culprit.rank for culprit in culprits})
    what = f"loss is {culprits[0].loss}" if culprits else f"gradient norm is {grad_norm}"
    where = f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    shown = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
    remedies = [
        "lower optimizer.learning_rate",
        f"look at a row: distil audit {shards} --row {bad[0]}",
        f"leave rows out: --skip-rows {bad[0]}:{bad[0] + 1}",
        "go on over up to N such steps: train.skip_non_finite=N",
    ]
    if culprits and set(bad) == set(rows):
        remedies.insert(0, "no row is spared: look at the weights that it started from")
    report = {
        "step": step,
        "what": what,
        "ranks": ranks,
        "rows": bad,
        "micro_batches": [asdict(culprit) for culprit in culprits],
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": loss_scale,
        "last_metrics": dict(metrics) if metrics is not None else None,
        "shards": str(shards),
        "file": str(file),
        "remedies": remedies,
    }
    message = (
        f"step {step}: the {what} over rows {shown}{where} ({shards}); the update was not made, "
        f"and no checkpoint was touched; {file} says more. To mend it: {'; '.join(remedies)}"
    )
    return _strict(report), message


def _strict(value: Any) -> Any:
    """Return the value with "nan", "inf" and "-inf" for the numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

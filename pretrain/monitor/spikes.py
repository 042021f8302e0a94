"""Warn of a loss or a gradient norm that leaves its usual range."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median


class SpikeDetector:
    """Warn of a loss or gradient norm far outside its last 128 values.

    A loss beyond the limit is stored as the limit: then one spike hides no later one, and a new
    level is accepted after a few dozen values. A gradient norm is compared with the median, which
    one value hardly moves. Values that are not finite are neither judged nor stored. Nothing is
    saved: a resumed run is judged again after its first 32 steps.
    """

    window = 128  # steps
    least = 32  # values before anything is judged, and steps between two warnings of a kind
    deviations = 6.0  # a loss so many deviations above its mean is a spike
    floor = 1e-3  # relative to the mean; without it, rounding of a flat curve would warn
    times = 10.0  # a gradient norm so many times its median is a spike

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.window)
        self._norms: deque[float] = deque(maxlen=self.window)
        self._warned: dict[str, int] = {}

    def warnings(self, step: int, loss: float, grad_norm: float) -> list[str]:
        """Compare a step's values with earlier ones, store them, and return the warnings.

        Args:
            step: counted as in the log, for the text and the pause between warnings.
            loss: weighted the same way at every call, so that values can be compared.
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
                middle = median(self._norms)
                if grad_norm > self.times * middle > 0 and self._due("norm", step):
                    warnings.append(
                        f"step {step}: the gradient norm is {grad_norm:.4g}, "
                        f"{grad_norm / middle:.1f} times {middle:.4g}, its median over the last "
                        f"{len(self._norms)} steps"
                    )
            self._norms.append(grad_norm)
        return warnings

    def _due(self, kind: str, step: int) -> bool:
        if kind in self._warned and step - self._warned[kind] < self.least:
            return False
        self._warned[kind] = step
        return True

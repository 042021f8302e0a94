"""Write the metrics of a run to metrics.jsonl, the console and the configured trackers.

A loss or a gradient norm that leaves its usual range is a warning.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from data_prep.disk.replacing import writing_to
from pretrain.device.memory import in_use


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


class Progress(Protocol):
    """Receive what a run reports. `launch` shows a bar, or plain lines."""

    def say(self, text: str) -> None:
        """Show a line that stays."""
        return

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Show an optimizer step; `values` has its metrics where they are logged, else nothing."""
        return

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Show validation figures."""
        return


class Silent(Progress):
    """Show nothing, for ranks other than the first and for use from Python."""


class Metrics:
    """Append to metrics.jsonl.

    `fence` is called before each line, and raises if another process has taken the run over.
    """

    def __init__(self, path: Path, accelerator: Accelerator, fence: Callable[[], None]) -> None:
        self.path, self.accelerator, self.fence = path, accelerator, fence
        self.last: dict[str, Any] | None = None

    def open(self, step: int) -> None:
        """Drop the entries that a run continued after `step` writes again; the first rank calls it.

        Those are all later steps, and the entries of this step that precede the next one: the
        evaluation at step 0, and rows that are left out. Only the end of the file is parsed.
        """
        self.last = None
        if not self.path.exists():
            return
        with writing_to(self.path), self.path.open("r+b") as file:
            data = file.read()
            end = len(data)
            # From the end backwards, line by line, up to the last entry that stays.
            while end and self.last is None:
                start = data.rfind(b"\n", 0, end - 1) + 1
                try:
                    entry: dict[str, Any] = json.loads(data[start:end])
                    again = step == 0 or entry["kind"] == "skip_rows"
                    whole = data[end - 1] == ord("\n")
                except (ValueError, KeyError, TypeError):  # incomplete: its process was killed
                    whole = False
                if whole and (entry["step"] < step or (entry["step"] == step and not again)):
                    self.last = entry
                else:
                    end = start
            # In place: a copy of a long file could fail on a full disk.
            file.truncate(end)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line and close the file, so that `tail -f` shows it and a crash keeps it."""
        # JSON has no NaN, and strict readers reject the one that Python writes.
        figures = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.last = {"kind": kind, "step": step, **figures}
        if self.accelerator.is_main_process:
            self.fence()
            with writing_to(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.last) + "\n")
        # Trackers take NaN as it is.
        self.accelerator.log({f"{kind}/{name}": value for name, value in values.items()}, step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl, without an incomplete last line."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


class Clock:
    """Measure tokens per second, waiting for data, CPU seconds and memory of this process.

    Args:
        tokens: seen before.
        device: whose memory counts.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._began = self._start = time.perf_counter()
        self._waited, self._tokens, self._device = 0.0, tokens, device
        self._cpu = time.process_time()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def rates(self, tokens: int) -> dict[str, float]:
        """Return those of `figures.RATES`, given the number of tokens seen so far.

        `time` is in seconds since 1970, `elapsed` since this start; `memory` in bytes, of a GPU the
        most that was allocated. The others are since the last call.
        """
        now, cpu = time.perf_counter(), time.process_time()
        seconds = max(now - self._start, 1e-9)
        rate = (tokens - self._tokens) / seconds
        values = {
            "time": round(time.time(), 1),
            "elapsed": round(now - self._began, 1),
            "memory": float(in_use(self._device)),
            "tokens_per_second": round(rate, 1),
            "data_wait": round(self._waited / seconds, 4),
            "cpu_seconds": round(cpu - self._cpu, 2),
        }
        self._start, self._waited, self._tokens, self._cpu = now, 0.0, tokens, cpu
        return values

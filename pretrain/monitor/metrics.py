"""Write the metrics of a run to metrics.jsonl, the console and the configured trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from pretrain.device.memory import in_use
from pretrain.files import writing_to


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

    def pace(self, steps: int, tokens_per_second: float, left: float) -> None:
        """Show what the first steps of a start measured, and the seconds that are left."""
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

"""Show lines, tables and progress on a terminal or in a log."""

from __future__ import annotations

import io
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from data_prep.disk import Busy
from data_prep.disk.credentials import masked
from data_prep.messages import error_line, one_line, printable
from pretrain.contracts.process import LOGS
from pretrain.monitor.figures import RATES, label

RUN_LOG = "logs/pretrain.log"  # in the folder of a run that no launcher has started
_COLUMNS = 80
_FIGURE = 24  # characters of a cell that is not broken
_WAITS = 0.01  # share of the time that waiting for data is worth a word

_wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 10_000  # a log file has no width: nothing is cut off there


def show(*lines: str) -> None:
    """Print lines without markup or wrapping, control characters escaped."""
    for line in map(printable, lines):
        # A terminal would break a number. A command stays whole, to be pasted.
        wraps = console.is_terminal and not line.startswith("  distil")
        parts = [line]
        if wraps and len(line) > console.width:  # a comment of a shell stays one
            indent = "#   " if line.startswith("# ") else "  "
            parts = _wrap(line, console.width, subsequent_indent=indent)
        for part in parts:
            console.print(part, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: the first column left-aligned, the others right-aligned.

    Columns that a terminal has no room for follow in tables of their own, below.
    """
    cells = [[one_line(str(cell)) for cell in row] for row in rows]

    def width(i: int) -> int:  # a figure stays whole, a text breaks between its words
        texts = [row[i] for row in cells]
        words = [word for text in texts if len(text) > _FIGURE for word in text.split()]
        whole = [text for text in texts if len(text) <= _FIGURE]
        return max(map(len, [*columns[i].replace("-", "- ").split(), *words, *whole, ""])) + 3

    groups, room = [list[int]()], console.width - 1 - min(width(0), console.width // 2)
    for i in range(1, len(columns)):
        if groups[-1] and sum(map(width, [*groups[-1], i])) > room:
            groups.append([])
        groups[-1].append(i)
    for group in groups:
        table = Table()
        for i in (0, *group):
            justify: Literal["left", "right"] = "right" if i else "left"
            whole = i > 0 and len(group) > 1 and all(len(row[i]) <= _FIGURE for row in cells)
            # Broken here, so that a column is as wide as was counted.
            title = columns[i] if len(groups) == 1 else textwrap.fill(columns[i], width(i) - 3)
            table.add_column(title, justify=justify, overflow="fold", no_wrap=whole)
        for row in cells:
            table.add_row(*(Text(row[i]) for i in (0, *group)))  # Text: brackets are not markup
        console.print(table)


def counts(label: str, values: Mapping[str, int]) -> str:
    """Return "; LABEL: 3 this, 4 that", or "" if there are no values."""
    shown = ", ".join(f"{count:,} {name}" for name, count in values.items())
    return f"; {label}: {shown}" if shown else ""


def progress_bar(count: ProgressColumn | None = None) -> Progress:
    """Return a bar with a description, a count (by default of steps) and both times."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        count or MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def stages() -> Iterator[Callable[[str, int, int, str], None]]:
    """Yield a callback (stage, done, total, text) for what is done in stages.

    On a terminal one bar shows the stage at work. Elsewhere a line is printed when a stage begins
    and ends, and at most one every ten seconds in between.
    """
    began, last = time.monotonic(), dict[str, tuple[float, float]]()  # stage: begun, last shown

    def line(stage: str, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        begun, shown = last.get(stage, (now, -math.inf))
        # A log file keeps every line.
        if done == total or now - shown >= 10:
            last[stage] = begun, now
            left = (now - begun) / done * (total - done) if 0 < done < total else 0.0
            eta = f"  eta {_clock(left)}" if left else ""
            show(f"{time.strftime('%H:%M:%S')} +{_clock(now - began)}  {stage}  {text}{eta}")

    if not console.is_terminal:
        yield line
        return
    with progress_bar(TextColumn("{task.fields[text]}")) as bar:
        task = bar.add_task("", total=1, text="")
        current = ""

        def move(stage: str, done: int, total: int, text: str) -> None:
            nonlocal current
            if stage != current:
                bar.reset(task, description=stage, total=total)
                current = stage
            bar.update(task, completed=done, text=text)
            if done == total:
                line(stage, done, total, text)  # stays above the bar

        yield move


class Training:
    """Show a training run: a bar on a terminal, a line for each log interval elsewhere.

    Implements `pretrain.monitor.metrics.Progress`. `log` is a file that gets the lines, too, from
    the first step on, when the run's folder is this process's own; not where a launcher has one.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.bar = progress_bar() if console.is_terminal else None
        self.task: TaskID | None = None
        self.first: tuple[int, float] | None = None
        self.log = None if LOGS in os.environ else log
        self.is_ours = False  # is the log's folder this run's, and no other's?
        # A job's keys may hold a secret, in its lines of setup.
        command = [word for word in sys.argv[1:] if not word.startswith("slurm.")]
        self.lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}"]

    def __enter__(self) -> Training:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.bar:
            self.bar.stop()
        if error is not None and not isinstance(error, Busy):
            self.is_ours |= self.log is not None and any(
                self.log.parent.parent.glob("pretrain.*.lock")
            )
            self._keep(f"error: {error_line(error)}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        show(text)
        self._keep(text)

    def _keep(self, text: str) -> None:
        if self.log is None:
            return
        self.lines.append(printable(text))
        if not self.is_ours:
            return
        with suppress(OSError):  # a full disk ends a run at its checkpoint, and not here
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("a", encoding="utf-8") as file:
                file.writelines(masked(line) + "\n" for line in self.lines)
        self.lines.clear()

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Move the bar; print a line if there are values, with an ETA if there is no bar."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.is_ours = (step, now), True
        if self.bar:
            if self.task is None:
                self.task = self.bar.add_task("training", total=total)
            self.bar.update(self.task, completed=step)
        if not values:
            return
        others = ("grad_norm", "learning_rate", "epoch", "tokens", *RATES)
        loss, *terms = (
            f"{label(name)} {value:.3f}" for name, value in values.items() if name not in others
        )
        parts = [loss]
        first, start = self.first
        if not self.bar and step > first:
            parts.append(f"eta {_clock((now - start) / (step - first) * (total - step))}")
        parts.append(f"{values['tokens_per_second']:,.0f} tok/s")
        if values["data_wait"] > _WAITS:
            parts.append(f"wait {values['data_wait']:.0%}")
        parts += [*terms, f"lr {values['learning_rate']:.2e}", f"norm {values['grad_norm']:.2f}"]
        # What does not fit is in the log, and in metrics.jsonl.
        line = f"{time.strftime('%H:%M:%S')} +{_clock(now - start)}  step {step}/{total}"
        whole = "  ".join([line, *parts])
        for part in parts:
            if len(line) + 2 + len(part) <= _COLUMNS:
                line += f"  {part}"
        show(line)
        self._keep(whole)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print the validation figures on a line."""
        head, line = "unigram_loss" in values, f"validation, step {step}:"
        shown = {label(k, of_head=head): v for k, v in values.items() if not k.endswith("tokens")}
        for term in (f" {name} {value:.3f}" for name, value in shown.items()):
            if len(line) + 1 + len(term) > _COLUMNS:
                self.say(line)
                line = " "
            line += term if line.endswith(":") else f" {term}"
        self.say(line)


def _clock(seconds: float) -> str:
    """Return 1:02:03, or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _LossyOutput(io.FileIO):
    """Write to a file descriptor and drop what cannot be written."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def tolerant(number: int, encoding: str) -> TextIO:
    """Return a text stream over file descriptor `number` that drops what cannot be written."""
    return io.TextIOWrapper(
        _LossyOutput(number, "w", closefd=False),
        encoding=encoding,
        # A character that the terminal's encoding lacks must not end a run.
        errors="backslashreplace",
        write_through=True,
    )


def keep_going() -> None:
    """Let this process go on when its output cannot be written: a full disk, a closed pipe.

    For commands that work for hours and print only their progress. A command that prints its
    result must fail when that is lost. A stream that Python did not open itself is left as it is.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when this process started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout = tolerant(1, sys.stdout.encoding)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = tolerant(2, sys.stderr.encoding)

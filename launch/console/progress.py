"""What a person sees: a bar on a terminal, one line a log interval elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from data_prep.messages import printable

console = Console(highlight=False)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A callback (stage, done, total) for the corpus stage."""
    if not console.is_terminal:
        yield _StageLines()
        return
    with _bar() as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


class _StageLines:
    """A line when a stage begins and ends, and at most one every ten seconds between."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Print where it is time to."""
        now = time.monotonic()
        if done == total or stage not in self.last or now - self.last[stage] >= 10:
            self.last[stage] = now
            console.print(f"{stage} {done}/{total}", soft_wrap=True)


class Training:
    """Shows a training run; satisfies `pretrain.monitor.metrics.Progress`."""

    def __init__(self) -> None:
        self.bar = _bar() if console.is_terminal else None
        self.task: TaskID | None = None
        self.first: tuple[int, float] | None = None

    def __enter__(self) -> Training:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        console.print(printable(text), soft_wrap=True, markup=False)

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Move the bar; a line where there are values, with an ETA where there is no bar."""
        now = time.monotonic()
        if self.first is None:
            self.first = (step, now)
        if self.bar:
            if self.task is None:
                self.task = self.bar.add_task("training", total=total)
            self.bar.update(self.task, completed=step)
        if values:
            line = f"step {step}/{total}  {_training_line(values)}"
            first, start = self.first
            if not self.bar and step > first:
                line += f"  eta {_minutes((now - start) / (step - first) * (total - step))}"
            self.say(line)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Held-out figures on a line."""
        text = f"held out, step {step}: loss {values['loss']:.3f} (unigram "
        text += f"{values['unigram_loss']:.3f})  accuracy "
        text += f"{values['accuracy']:.1%} (best constant {values['constant_accuracy']:.1%}"
        if "teacher_accuracy" in values:
            text += f", teacher {values['teacher_accuracy']:.1%})  kl {values['kl']:.3f}  "
            text += f"agreement {values['agreement']:.1%}"
        else:
            text += ")"
        self.say(text)


def _training_line(values: Mapping[str, float]) -> str:
    rates = ("grad_norm", "learning_rate", "tokens", "tokens_per_second", "data_wait")
    terms = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if name not in rates)
    return (
        f"{terms}  lr {values['learning_rate']:.2e}  norm {values['grad_norm']:.2f}  "
        f"{values['tokens_per_second']:,.0f} tok/s  wait {values['data_wait']:.0%}"
    )


def _minutes(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )

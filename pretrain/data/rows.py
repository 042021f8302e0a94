"""Load the examples of each optimizer step: one loader item per step and rank.

Shapes: R rows of this rank in a step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data_prep.shards import CorpusError, ShardSet
from data_prep.shards.reading import check_size
from pretrain import RunError
from pretrain.contracts.batch import Rows
from pretrain.contracts.process import SUPERVISOR, TIMEOUT, Interrupted, Signals, stop_signals
from pretrain.data.order import Order
from pretrain.tasks.task import Examples


class Skip(NamedTuple):
    """Leave out a range of rows from an optimizer step on.

    Their tokens become padding, so they add no token, no mask and no loss. Every other row keeps
    its step, place, rank and mask.
    """

    first: int  # in the train split, as `distil replay` and `distil inspect` number rows
    last: int  # exclusive
    step: int  # from 0


class StepDataset(Dataset[Rows]):
    """Return the rows of a step as a pure function of the step, so that any worker can do it."""

    def __init__(
        self,
        shards: ShardSet,
        order: Order,
        examples: Examples,
        *,
        rank: int = 0,
        world: int = 1,
        skips: Sequence[Skip] = (),
    ) -> None:
        """Raise RunError if `skips` name rows that are not there."""
        for skip in skips:
            if not 0 <= skip.first < skip.last <= len(shards):
                raise RunError(
                    f"--skip-rows {skip.first}:{skip.last}: not all of these rows are there: the "
                    f"training split of {shards.folder} has {len(shards)} rows, 0 to "
                    f"{len(shards) - 1}; give a range 0 <= a < b <= {len(shards)}"
                )
        # A rank takes a block of the step's rows, so the global batch is the same for any number of
        # ranks.
        share = order.global_batch_size // world
        self.shards, self.order, self.examples, self.skips = shards, order, examples, tuple(skips)
        self.mine = slice(rank * share, (rank + 1) * share)

    def __getitem__(self, step: int) -> Rows:
        """Return this rank's rows of optimizer step `step`, counted from 0."""
        epochs, numbers = (values[self.mine] for values in self.order.at(step))
        left_out = skipped(numbers, step, self.skips)
        return self.examples.rows(self.shards.rows(numbers), epochs, numbers, step, left_out)


def split(rows: Rows, size: int) -> Iterator[Rows]:
    """Yield `size` rows at a time."""
    for parts in zip(*(tensor.split(size) for tensor in rows.values()), strict=True):
        yield dict(zip(rows, parts, strict=True))


def skipped(rows: NDArray[np.int64], step: int, skips: Sequence[Skip]) -> NDArray[np.bool_]:
    """Return which of `rows` [R] are left out of optimizer step `step`, counted from 0 [R]."""
    result = np.zeros(rows.shape, dtype=bool)
    for skip in skips:
        if step >= skip.step:
            result |= (rows >= skip.first) & (rows < skip.last)
    return result


def with_skip(skips: Sequence[Skip], skip: Skip) -> tuple[Skip, ...]:
    """Return `skips` with one more, unless one of them covers it: a command may be given again."""
    for old in skips:
        if old.first <= skip.first and skip.last <= old.last and old.step <= skip.step:
            return tuple(skips)
    return (*skips, skip)


@contextmanager
def loader(
    dataset: StepDataset, first: int, last: int, num_workers: int
) -> Iterator[Iterator[Rows]]:
    """Yield an iterator over steps `first` to `last` - 1, loaded ahead by `num_workers` processes.

    The processes end with the block.
    """
    # With a generator of its own, `iter(DataLoader)` does not draw its base seed from the global
    # stream, which would change every later dropout mask of a resumed run.
    generator = torch.Generator().manual_seed(0)
    batches = iter(
        DataLoader(
            dataset,
            # The dataset returns a whole step's share, which needs no collating.
            batch_size=None,
            sampler=range(first, last),
            num_workers=num_workers,
            generator=generator,
            worker_init_fn=_ignore_signals if num_workers else None,
        )
    )
    try:
        yield batches
    finally:
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            # An error's traceback may keep the loader alive, and a worker ignores the SIGTERM with
            # which Python ends its children: Python would wait for it without end.
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()  # still alive only if it was stopped or hangs


def next_rows(batches: Iterator[Rows], signals: Signals, seconds: float) -> Rows | None:
    """Wait for the rows of the next step; return None as soon as a signal has come.

    Args:
        batches: of `loader`; not usable after None.
        signals: the signals so far.
        seconds: how long to wait; without limit under a supervisor, which has its own.

    Raises:
        RunError: no rows came in that time.
    """
    try:
        # The alarm interrupts torch's wait for a worker, which may never answer if the worker is
        # stopped.
        with signals.interrupt_after(0 if SUPERVISOR in os.environ else seconds):
            return next(batches)
    except Interrupted:
        if signals:
            return None
    # torch's private list of workers; with `num_workers: 0` there is none.
    workers = getattr(batches, "_workers", [])
    who = f"loader worker {', '.join(str(worker.pid) for worker in workers)}"
    raise RunError(
        f"no rows for {seconds:g} s ({TIMEOUT}): {who if workers else 'this process'} is "
        "stopped, or the disk of the shards does not answer; run the same command again, which "
        "goes on after the newest checkpoint"
    )


@contextmanager
def explained_workers(shards: ShardSet) -> Iterator[None]:
    """Raise the true error where a loader worker dies; wrap the loop in it.

    torch puts a worker's traceback before its error, and reports every SIGBUS as a lack of shared
    memory. A file that is cut off while it is mapped ends a process the same way.

    Raises:
        CorpusError: damaged shards, as without workers.
        RuntimeError: a worker ended for another reason.
    """
    try:
        yield
    except CorpusError as error:
        lines = str(error).splitlines()
        raise CorpusError(lines[-1].removeprefix("data_prep.CorpusError: ")) from error
    except (RuntimeError, ConnectionError, EOFError) as error:
        crash: Exception = error
        # The connection broke because its worker ended. Wait for torch's own error about that
        # worker. On its own, a broken connection would look like a mistake of the user.
        if not isinstance(error, RuntimeError):
            crash = RuntimeError(f"a loader worker ended while it sent rows ({error})")
            try:
                time.sleep(1)
            except RuntimeError as died:
                crash = died
        # Check the size of each shard: a file that was cut off is the cause that a user can do
        # something about.
        if crash is not error or "DataLoader worker" in str(error):
            for record in shards.manifest.splits[shards.split].shards:
                check_size(shards.folder, record)
        if crash is error:
            raise
        raise crash from error


def _ignore_signals(worker: int) -> None:
    # Ctrl-C, a closed terminal, and the signals of a scheduler or torchrun reach the whole process
    # group. The main process finishes its step and saves; a worker ends with its queue, or when its
    # parent has ended.
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    # torch's handler would print that shared memory is short; see `explained_workers`.
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    sys.excepthook = _but_connections


def _but_connections(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error of a worker, but not that its run has ended while rows were on their way."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)

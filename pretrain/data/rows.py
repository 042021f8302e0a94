"""Load the masked rows of each optimizer step: one loader item per step and rank.

Shapes: R rows of this rank in a step, L row length, K mask slots a row.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data_prep.shards import CorpusError, Manifest, ShardSet, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from data_prep.shards.reading import check_size
from pretrain import RunError
from pretrain.config import MaskingConfig
from pretrain.contracts.batch import Sequences
from pretrain.data.order import Order
from pretrain.environment import SUPERVISOR, TIMEOUT
from pretrain.signals import Interrupted, Signals, stop_signals
from pretrain.tasks.embedding.documents import Documents
from pretrain.tasks.mlm.masking import Masking
from pretrain.tasks.mlm.words import Borders, borders

_FEW_UNSPACED = 0.01  # share of the tokens that a note is not worth
_SOCKET = len("/pymp-12345678/listener-12345678")  # the socket that a worker creates in TMPDIR
_LONGEST_SOCKET = 103  # bytes of a socket's path on macOS; 107 on Linux


@dataclass(frozen=True)
class Skip:
    """Leave out a range of rows from an optimizer step on.

    Their tokens become padding, so they add no token, no mask and no loss. Every other row keeps
    its step, place, rank and mask.
    """

    first: int  # in the train split, as `distil replay` and `distil audit` number rows
    last: int  # exclusive
    step: int  # from 0


class StepRows(NamedTuple):
    """Hold the rows of a rank in a step, as tensors of the narrowest types."""

    input_ids: Tensor  # [R, L] uint16 or uint32 as in the shards, corrupted
    positions: Tensor  # [R, K] int16, where the slots point
    labels: Tensor  # [R, K] int32, original id, or IGNORE in an unused slot
    sequences: Sequences | None = None  # of objectives that compare vectors of documents

    @property
    def masked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the corrupted ids, the slots and their labels."""
        return self.input_ids, self.positions, self.labels

    def split(self, size: int) -> Iterator[StepRows]:
        """Yield `size` rows at a time."""
        sequences = self.sequences.split(size) if self.sequences else repeat(None)
        masked = (tensor.split(size) for tensor in self.masked)
        for ids, positions, labels, part in zip(*masked, sequences, strict=False):
            yield StepRows(ids, positions, labels, part)


class StepDataset(Dataset[StepRows]):
    """Return the rows of a step as a pure function of the step, so that any worker can do it."""

    def __init__(
        self,
        shards: ShardSet,
        order: Order,
        masking: Masking,
        *,
        rank: int = 0,
        world: int = 1,
        skips: Sequence[Skip] = (),
        documents: Documents | None = None,
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
        self.shards, self.order, self.masking, self.skips = shards, order, masking, tuple(skips)
        self.documents = documents
        self.mine = slice(rank * share, (rank + 1) * share)

    def __getitem__(self, step: int) -> StepRows:
        """Return this rank's rows of optimizer step `step`, counted from 0."""
        epochs, rows = (values[self.mine] for values in self.order.at(step))
        left_out = skipped(rows, step, self.skips)
        return corrupt(self.shards, self.masking, epochs, rows, left_out, step, self.documents)


def corrupt(
    shards: ShardSet,
    masking: Masking,
    epochs: Any,
    rows: Any,
    skipped: NDArray[np.bool_] | None = None,
    step: int = 0,
    documents: Documents | None = None,
) -> StepRows:
    """Read rows [R], pad those `skipped` [R], and mask the others by their epochs [R] and the step.

    With `documents`, the whole documents of the rows come with them.

    The host makes the masks, not the GPU: one core masks tens of millions of tokens a second, ahead
    of the step that needs them, and no GPU trains on two million a second.
    """
    ids = shards.rows(rows)
    sequences = documents(ids, rows, skipped) if documents is not None else None
    if skipped is not None:
        # Padding is special, so masking selects nothing there.
        ids[skipped] = shards.manifest.tokenizer.special_ids.pad
    masked = masking(ids, epochs, rows, step)
    return StepRows(
        torch.from_numpy(masked.input_ids),
        torch.from_numpy(masked.positions.astype(np.int16)),
        torch.from_numpy(masked.labels.astype(np.int32)),
        sequences,
    )


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
) -> Iterator[Iterator[StepRows]]:
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


def next_rows(batches: Iterator[StepRows], signals: Signals, seconds: float) -> StepRows | None:
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


def check_workers(num_workers: int) -> None:
    """Refuse loader workers where TMPDIR is too long for the sockets they send rows through."""
    folder = tempfile.gettempdir()
    if num_workers and len(os.fsencode(folder)) + _SOCKET > _LONGEST_SOCKET:
        raise RunError(
            f"TMPDIR {folder}: too long a path for the sockets of loader workers; set TMPDIR to a "
            f"folder of at most {_LONGEST_SOCKET - _SOCKET} bytes, or train.num_workers to 0"
        )


def build_masking(
    config: MaskingConfig, folder: Path, manifest: Manifest, seed: int, num_steps: int = 1
) -> Masking:
    """Return the masking of a training run of `num_steps`, over the shards' vocabulary.

    Raises:
        CorpusError: a file of the shards is damaged.
        RunError: mode whole_word or span, and the tokenizer does not mark where words begin.
    """
    smoothing, words = None, None
    if config.mode == "smoothed":
        table = json.loads(read_listed(folder, manifest, TOKEN_COUNTS))
        smoothing = np.asarray(table["smoothing"], dtype=np.int64)
    if config.mode in ("whole_word", "span"):
        try:
            words = borders_of(folder, manifest)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"masking.mode {config.mode}: {folder} holds no words: {error}; take mode uniform"
            ) from None
    first, final = config.ends
    return replace(
        masking_over(manifest, first, seed),
        smoothing=smoothing,
        final=final,
        num_steps=num_steps,
        words=words,
        spans=config.mode == "span",
    )


def borders_of(folder: Path, manifest: Manifest) -> Borders:
    """Return the borders of words in the shards' rows.

    Raises:
        CorpusError: the tokenizer of the shards is damaged.
        ValueError: it does not mark where words begin.
    """
    found = borders(read_listed(folder, manifest, "tokenizer/tokenizer.json"))
    # Tokens that were added to the vocabulary later are words.
    later = max(0, manifest.tokenizer.vocab_size - len(found.goes_on))
    return Borders(*(np.pad(marks, (0, later)) for marks in found))


def unspaced_note(config: MaskingConfig, folder: Path, manifest: Manifest) -> str:
    """Return what screen and card should say about words in scripts without spaces, or ""."""
    if config.mode not in ("whole_word", "span"):
        return ""
    try:
        marks = borders_of(folder, manifest).unspaced
    except (ValueError, KeyError, TypeError):
        return ""  # refused where the masks are built
    counts = np.array(json.loads(read_listed(folder, manifest, TOKEN_COUNTS))["counts"])
    share = counts[marks[: len(counts)]].sum() / max(1, counts.sum())
    if share < _FEW_UNSPACED:
        return ""
    return (
        f"{share:.0%} of the tokens are in a script without spaces between words: there "
        f"masking.mode {config.mode} masks the pieces of the tokenizer, not words"
    )


def masking_over(manifest: Manifest, probability: float, seed: int) -> Masking:
    """Return uniform masking over the shards' vocabulary."""
    return Masking(
        probability=probability,
        special_ids=special_ids(manifest),
        mask_id=manifest.tokenizer.special_ids.mask,
        vocab_size=manifest.tokenizer.vocab_size,
        seed=seed,
    )


def special_ids(manifest: Manifest) -> tuple[int, ...]:
    """Return the ids that masking never selects or inserts: [PAD], [UNK], [CLS], [SEP], [MASK]."""
    special = manifest.tokenizer.special_ids
    return special.pad, special.unk, special.cls, special.sep, special.mask


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
        # worker. A broken connection alone would be taken for a mistake that the user can fix.
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

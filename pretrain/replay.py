"""What an optimizer step was fed: rows, masks, and which rank held them.

Reads the newest checkpoint that verifies, never OUTPUT/config.json, which nothing seals; and goes
through the same `StepDataset`, `Order` and `Masking` as training. Needs neither teacher nor GPU.
Steps count from 1, as the training log and `metrics.jsonl` do: step K is the update after which
the log says "step K".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer

from data_prep.shards import ShardSet, open_shards, read_listed
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.data.masking import IGNORE, Masking
from pretrain.data.order import Order
from pretrain.data.rows import Skip, StepDataset, build_masking, skipped, with_skip

if TYPE_CHECKING:
    from pretrain.checkpoint import Saved


@dataclass(frozen=True)
class ReplayedRow:
    """One row as the student saw it; M masked positions, L row length."""

    index: int  # in the global batch: 0 to G - 1
    rank: int
    micro_batch: int  # of its rank, from 0
    epoch: int  # from 0
    row: int  # in the train split of the shards
    input_ids: NDArray[np.int64]  # [L], corrupted
    positions: NDArray[np.int64]  # [M], ascending
    labels: NDArray[np.int64]  # [M], the ids that stood there
    skipped: bool  # left out by --skip-rows: padding alone, no masks

    @property
    def shown(self) -> NDArray[np.int64]:
        """Return what stands at the masked positions now [M]: [MASK], a random id or the same."""
        return self.input_ids[self.positions]

    def as_json(self, step: int) -> dict[str, Any]:
        """Plain values, one object a row."""
        masks = zip(self.positions.tolist(), self.labels.tolist(), self.shown.tolist(), strict=True)
        return {
            "step": step,
            "position": self.index,
            "rank": self.rank,
            "micro_batch": self.micro_batch,
            "epoch": self.epoch,
            "row": self.row,
            "skipped": self.skipped,
            "masks": [{"position": p, "label": label, "shown": s} for p, label, s in masks],
            "input_ids": self.input_ids.tolist(),
        }


@dataclass(frozen=True)
class Replay:
    """Optimizer step `step` (from 1) of a run, laid out for `world_size` ranks."""

    step: int
    num_steps: int
    world_size: int
    micro_batch_size: int
    shards: ShardSet
    order: Order
    masking: Masking
    skips: Sequence[Skip] = ()

    @property
    def num_rows(self) -> int:
        """G, of all ranks."""
        return self.order.global_batch_size

    def rows(self, rank: int | None = None) -> Iterator[ReplayedRow]:
        """Yield the rows of one rank, or of all, in the order of the global batch.

        Raises:
            RunError: there is no such rank.
        """
        if rank is not None and not 0 <= rank < self.world_size:
            raise RunError(f"rank {rank}: the ranks of this layout are 0 to {self.world_size - 1}")
        return self._rows(range(self.world_size) if rank is None else [rank])

    def _rows(self, ranks: Iterable[int]) -> Iterator[ReplayedRow]:
        epochs, numbers = self.order.at(self.step - 1)
        left_out = skipped(numbers, self.step - 1, self.skips)
        for r in ranks:
            dataset = StepDataset(
                self.shards,
                self.order,
                self.masking,
                rank=r,
                world=self.world_size,
                skips=self.skips,
            )
            fed = dataset[self.step - 1]
            arrays = (fed.rows, fed.input_ids, fed.positions, fed.labels)
            first = dataset.mine.start
            for i, (row, ids, positions, labels) in enumerate(
                zip(*(tensor.long().numpy() for tensor in arrays), strict=True)
            ):
                used = labels != IGNORE
                in_order = np.argsort(positions[used])
                yield ReplayedRow(
                    index=first + i,
                    rank=r,
                    micro_batch=i // self.micro_batch_size,
                    epoch=int(epochs[first + i]),
                    row=int(row),
                    input_ids=ids,
                    positions=positions[used][in_order],
                    labels=labels[used][in_order],
                    skipped=bool(left_out[first + i]),
                )

    def token(self, id: int) -> str:
        """Return the vocabulary's entry for an id."""
        return self._tokenizer.id_to_token(id) or f"id {id}"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        folder, manifest = self.shards.folder, self.shards.manifest
        return Tokenizer.from_str(
            read_listed(folder, manifest, "tokenizer/tokenizer.json").decode()
        )


def replay(
    run: Path,
    step: int,
    *,
    world_size: int | None = None,
    micro_batch_size: int | None = None,
    shards: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Open step `step` of the run in folder `run`; rows and masks are made as they are asked for.

    Args:
        run: the output folder of a run.
        step: from 1, as the training log counts.
        world_size: processes; the newest checkpoint's number by default. It decides who holds a
            row, never which rows and masks there are.
        micro_batch_size: rows; by default the run's, or what of it divides a rank's share.
        shards: where the shards lie now, if not where the run read them.
        warn: is told of checkpoints that do not verify, and when none covers the step.

    Raises:
        RunError: no checkpoint that verifies, no such step, batches that do not divide, or shards
            of another corpus.
        CorpusError: the shards cannot be opened, or are not what their manifest says.
    """
    from pretrain import checkpoint  # imports accelerate and transformers: seconds

    saved = checkpoint.newest(run / "checkpoints", warn)
    if saved is None:
        raise RunError(f"{run}: no checkpoint, so nothing says what was trained here")
    state = saved.state
    try:
        config = RunConfig.model_validate(state["config"])
        digest, processes = str(state["shards"]), int(state["num_processes"])
    except (KeyError, TypeError, ValidationError) as error:
        raise RunError(
            f"{saved.folder}: state.json is not as this version writes it "
            f"({' '.join(str(error).split())[:200]}); replay it with the version that did"
        ) from None
    opened = open_shards(shards or config.shards)
    manifest = opened.manifest
    if digest != manifest.digest:
        raise RunError(
            f"{opened.folder}: holds other shards (digest {manifest.digest[:16]}) than "
            f"{run} read ({digest[:16]}); name the folder that it read with --shards"
        )
    train = config.train
    assert isinstance(train.micro_batch_size, int)  # a checkpoint has the number that was found
    order = Order(len(opened), train.global_batch_size, train.seed)
    num_steps = train.max_steps or order.steps_for(train.epochs)
    if not 1 <= step <= num_steps:
        raise RunError(f"{run}: has steps 1 to {num_steps}, as its log counts them, not {step}")
    layout = _layout(
        train.global_batch_size,
        processes if world_size is None else world_size,
        train.micro_batch_size,
        micro_batch_size,
    )
    if step > saved.step:
        warn(
            f"{run}: its newest checkpoint is of step {saved.step}: step {step} is shown as that "
            "config, and the skipped rows in metrics.jsonl, would train it"
        )
    masking = build_masking(config.masking, opened.folder, manifest, train.seed)
    skips = recorded_skips(run, saved)
    return Replay(step, num_steps, *layout, opened, order, masking, skips)


def recorded_skips(run: Path, saved: Saved) -> tuple[Skip, ...]:
    """Return the rows a run left out: what its checkpoint says, and metrics.jsonl of the time
    since.

    A run dropped the entries of metrics.jsonl that its checkpoint did not cover when it continued.
    """
    from pretrain.monitor import metrics

    skips = tuple(Skip(*values) for values in saved.state.get("skip_rows", ()))
    path = run / "metrics.jsonl"
    try:
        for entry in metrics.read(path):
            if entry["kind"] == "skip_rows" and entry["step"] >= saved.step:
                skips = with_skip(skips, Skip(entry["first"], entry["last"], entry["step"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path}: not as a run writes it; restore it, or move it away") from None
    return skips


def _layout(rows: int, world: int, usual: int, wanted: int | None) -> tuple[int, int]:
    """(world size, micro-batch size) that divide a global batch of `rows`."""
    if world < 1 or rows % world:
        raise RunError(
            f"world size {world} does not divide train.global_batch_size {rows}: no run of that "
            "many processes can be fed alike"
        )
    share = rows // world
    micro = gcd(usual, share) if wanted is None else wanted
    if micro < 1 or share % micro:
        raise RunError(
            f"micro_batch_size {micro} does not divide the {share} rows that each of {world} "
            f"process(es) has of train.global_batch_size {rows}"
        )
    return world, micro

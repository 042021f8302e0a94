"""Show the input of an optimizer step: rows, masks, and the rank of each row.

The config comes from the newest checkpoint that verifies, not from OUTPUT/config.json, which has no
checksum. Rows and masks come from the same `StepDataset`, `Order` and `Masking` as in training.
No teacher and no GPU is needed. Steps count from 1, as in the training log and `metrics.jsonl`:
step K is the update after which the log prints "step K".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.messages import error_line
from data_prep.shards import ShardSet, open_shards, read_listed
from pretrain import RunError
from pretrain.config import MaskingConfig, RunConfig
from pretrain.data.order import Order
from pretrain.run_folder import check_run, no_checkpoint, sealed_state

if TYPE_CHECKING:  # these import torch, which takes seconds: arguments are checked before
    from pretrain.checkpoint import Saved
    from pretrain.data.rows import Skip
    from pretrain.tasks.mlm.masking import Masking


@dataclass(frozen=True)
class ReplayedRow:
    """Hold one row as the student saw it; M masked positions, L row length."""

    index: int  # in the global batch: 0 to G - 1
    rank: int
    micro_batch: int  # number within its rank, from 0
    epoch: int  # from 0
    row: int  # in the train split of the shards
    input_ids: NDArray[np.int64]  # [L], corrupted
    positions: NDArray[np.int64]  # [M], ascending
    labels: NDArray[np.int64]  # [M], the original ids
    skipped: bool  # left out by --skip-rows: only padding, no masks

    @property
    def shown(self) -> NDArray[np.int64]:
        """Return the ids now at the masked positions [M]: [MASK], a random id or the original."""
        return self.input_ids[self.positions]

    def as_json(self, step: int) -> dict[str, Any]:
        """Return the row as a JSON object."""
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
    """Hold optimizer step `step` (from 1) of a run, divided among `world_size` ranks."""

    step: int
    num_steps: int
    world_size: int
    micro_batch_size: int
    shards: ShardSet
    order: Order
    config: RunConfig
    skips: Sequence[Skip] = ()

    def rows(self, rank: int | None = None) -> Iterator[ReplayedRow]:
        """Yield the rows of one rank, or of all, in the order of the global batch.

        Raises:
            RunError: there is no such rank.
            CorpusError: the shards' token counts are not those of the manifest.
        """
        if rank is not None and not 0 <= rank < self.world_size:
            raise RunError(f"rank {rank}: the ranks of this layout are 0 to {self.world_size - 1}")
        from pretrain.tasks.mlm.examples import build_masking

        folder, manifest, seed = self.shards.folder, self.shards.manifest, self.config.train.seed
        masking = build_masking(self.config.masking, folder, manifest, seed, self.num_steps)
        return self._rows(masking, range(self.world_size) if rank is None else [rank])

    def _rows(self, masking: Masking, ranks: Iterable[int]) -> Iterator[ReplayedRow]:
        from pretrain.contracts.batch import IGNORE
        from pretrain.data.rows import StepDataset, skipped
        from pretrain.tasks.mlm.examples import MaskedRows

        names = ("input_ids", "positions", "masked")
        epochs, numbers = self.order.at(self.step - 1)
        left_out = skipped(numbers, self.step - 1, self.skips)
        for r in ranks:
            dataset = StepDataset(
                self.shards,
                self.order,
                MaskedRows(self.shards, masking),
                rank=r,
                world=self.world_size,
                skips=self.skips,
            )
            # The very dataset that training reads, so a replay cannot drift from it.
            fed = dataset[self.step - 1]
            first = dataset.mine.start
            for i, (ids, positions, labels) in enumerate(
                zip(*(fed[name].long().numpy() for name in names), strict=True)
            ):
                used = labels != IGNORE
                # Slots are in the order of their draws; a reader expects positions from left to
                # right.
                in_order = np.argsort(positions[used])
                yield ReplayedRow(
                    index=first + i,
                    rank=r,
                    micro_batch=i // self.micro_batch_size,
                    epoch=int(epochs[first + i]),
                    row=int(numbers[first + i]),
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
    """Open step `step` of the run in folder `run`; `Replay.rows` computes rows and masks.

    Args:
        run: the output folder of a run.
        step: from 1, as the training log counts.
        world_size: the number of ranks; by default the newest checkpoint's. Each row's rank depends
            on it, rows and masks do not.
        micro_batch_size: rows; by default the run's, or its largest divisor that divides a rank's
            share.
        shards: the folder of the shards, if they were moved since the run.
        warn: receives checkpoints that do not verify, and a step that no checkpoint covers.

    Raises:
        RunError: no checkpoint that verifies, no such step, batches that do not divide, or shards
            of another corpus.
        CorpusError: the shards cannot be opened, or are not what their manifest says.
    """
    check_run(run)
    # Refuse a bad argument before torch is imported, which takes seconds.
    if (found := sealed_state(run)) is not None:
        _plan(run, step, found[1], world_size, micro_batch_size, shards)

    from pretrain import checkpoint

    saved = checkpoint.newest(run / "checkpoints", warn)
    if saved is None:
        raise no_checkpoint(run)
    planned = _plan(run, step, saved.state, world_size, micro_batch_size, shards)
    if step > saved.step:
        warn(
            f"{run}: its newest checkpoint is of step {saved.step}: step {step} is shown as that "
            "config, and the skipped rows in metrics.jsonl, would train it"
        )
    return replace(planned, skips=recorded_skips(run, saved))


def _plan(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    world_size: int | None,
    micro_batch_size: int | None,
    shards: Path | None,
) -> Replay:
    """Return the replay of a step of the run with this checkpoint's state; it skips no rows yet.

    Raises:
        RunError: the state is of a different version, the shards have changed, there is no such
            step, or batches do not divide.
        CorpusError: the shards cannot be opened.
    """
    try:
        config = RunConfig.recorded(state["config"])
        MaskingConfig.model_validate(
            state["config"].get("masking", {})
        )  # else it would draw other masks
        digest, world = str(state["shards"]), int(state["num_processes"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run}: its checkpoint's state.json is not as this version writes it "
            f"({error_line(error)}); replay it with the version that did"
        ) from None
    train = config.train
    opened = open_shards(shards or config.shards)
    if digest != opened.manifest.digest:
        raise RunError(
            f"{opened.folder}: holds different shards (digest {opened.manifest.digest[:16]}) than "
            f"{run} read ({digest[:16]}); name the folder that it read with --shards"
        )
    order = Order(len(opened), train.global_batch_size, train.seed)
    num_steps = train.max_steps or order.steps_for(train.epochs)
    if not 1 <= step <= num_steps:
        raise RunError(f"{run}: there is no step {step}; the run has steps 1 to {num_steps}")
    rows = train.global_batch_size
    world = world if world_size is None else world_size
    if world < 1 or rows % world:
        raise RunError(
            f"world size {world} does not divide train.global_batch_size {rows}: no run of that "
            "many processes can share a step equally"
        )
    share = rows // world
    assert isinstance(train.micro_batch_size, int)  # a checkpoint has the number that was found
    # The largest divisor of both: micro-batches do not change the rows, only their grouping.
    micro = gcd(train.micro_batch_size, share) if micro_batch_size is None else micro_batch_size
    if micro < 1 or share % micro:
        raise RunError(
            f"micro_batch_size {micro} does not divide the {share} rows that each of {world} "
            f"process(es) has of train.global_batch_size {rows}"
        )
    return Replay(step, num_steps, world, micro, opened, order, config)


def recorded_skips(run: Path, saved: Saved) -> tuple[Skip, ...]:
    """Return the rows that a run left out, from its checkpoint and the later metrics.jsonl.

    When a run resumes, it removes the entries of metrics.jsonl after its checkpoint.
    """
    from pretrain.data.rows import Skip, with_skip
    from pretrain.monitor import metrics

    # A checkpoint knows the skips up to its step. Later ones are only in metrics.jsonl.
    skips = tuple(Skip(*values) for values in saved.state.get("skip_rows", ()))
    path = run / "metrics.jsonl"
    try:
        for entry in metrics.read_metrics(path):
            if entry["kind"] == "skip_rows" and entry["step"] >= saved.step:
                skips = with_skip(skips, Skip(entry["first"], entry["last"], entry["step"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path}: not as a run writes it; restore it, or move it away") from None
    return skips

"""What an optimizer step was fed: rows, masks, and which rank held them; from config and shards.

Goes through the same `StepDataset`, `Order` and `Masking` as training, and needs neither teacher
nor GPU nor checkpoint. Steps count from 1, as the training log and `metrics.jsonl` do: step K is
the update after which the log says "step K".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer

from data_prep.shards import ShardSet, open_shards
from pretrain import RunError
from pretrain.config import RunConfig, Train
from pretrain.masking import IGNORE, Masking
from pretrain.order import Order
from pretrain.rows import Skip, StepDataset, build_masking, skipped, with_skip


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
        """What stands at the masked positions now [M]: [MASK], a random id or the same."""
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
        """The rows of one rank, or of all, in the order of the global batch.

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
        """The vocabulary's entry for an id."""
        return self._tokenizer.id_to_token(id) or f"id {id}"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.shards.folder / "tokenizer" / "tokenizer.json"))


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
        world_size: processes; the last checkpoint's number by default, 1 if there is none. It
            decides who holds a row, never which rows and masks there are.
        micro_batch_size: rows; by default the run's, or what of it divides a rank's share.
        shards: where the shards lie now, if not where the run's config says.
        warn: is told when no checkpoint says which shards the run read.

    Raises:
        RunError: no run, no such step, batches that do not divide, or shards of another corpus.
        CorpusError: the shards cannot be opened.
    """
    state = _newest_state(run)
    config = _config(run, state)
    opened = open_shards(shards or config.shards)
    if state is not None and state["shards"] != opened.manifest.digest:
        raise RunError(
            f"{opened.folder}: holds other shards (digest {opened.manifest.digest[:16]}) than "
            f"{run} read ({state['shards'][:16]}); name the folder that it read with --shards"
        )
    train = config.train
    order = Order(len(opened), train.global_batch_size, train.seed)
    num_steps = train.max_steps or order.steps_for(train.epochs)
    if not 1 <= step <= num_steps:
        raise RunError(f"{run}: has steps 1 to {num_steps}, as its log counts them, not {step}")
    layout = _layout(
        train.global_batch_size,
        (state["num_processes"] if state else 1) if world_size is None else world_size,
        _rows_at_a_time(run, train),
        micro_batch_size,
    )
    if state is None:
        warn(f"{run}: no checkpoint names its shards; {opened.folder} is taken to be what it read")
    masking = build_masking(config.masking, opened.folder, opened.manifest, train.seed)
    return Replay(step, num_steps, *layout, opened, order, masking, recorded_skips(run, state))


def recorded_skips(run: Path, state: Mapping[str, Any] | None) -> tuple[Skip, ...]:
    """The rows a run left out: what its checkpoint says, and metrics.jsonl of the time since.

    A run dropped the entries of metrics.jsonl that its checkpoint did not cover when it continued.
    """
    from pretrain import metrics  # imports accelerate and transformers: seconds

    skips = tuple(Skip(*values) for values in (state or {}).get("skip_rows", ()))
    for entry in metrics.read(run / "metrics.jsonl"):
        if entry["kind"] == "skip_rows":
            skips = with_skip(skips, Skip(entry["first"], entry["last"], entry["step"]))
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


def _rows_at_a_time(run: Path, train: Train) -> int:
    """A run's micro-batch size; what stood in the place of `auto` is in the config it wrote."""
    if train.micro_batch_size == "auto":
        raise RunError(
            f"{run}/config.json: train.micro_batch_size is auto, where a run writes the number "
            "that it found; restore it"
        )
    return train.micro_batch_size


def _config(run: Path, state: dict[str, Any] | None) -> RunConfig:
    path = run / "config.json"
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        if state is not None:
            return RunConfig.model_validate(state["config"])
        raise RunError(f"{run}: not the output of a run: it holds no config.json") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RunError(f"{path}: {where}: {first['msg']}; restore it") from None


def _newest_state(run: Path) -> dict[str, Any] | None:
    """What the newest checkpoint says of its run; its weights are not looked at."""
    for path in sorted((run / "checkpoints").glob("step-*/state.json"), reverse=True):
        try:
            state: dict[str, Any] = json.loads(path.read_bytes())
            if state.keys() >= {"shards", "config", "num_processes"}:
                return state
        except (OSError, ValueError, AttributeError):
            continue  # a damaged one; training would skip it, too
    return None

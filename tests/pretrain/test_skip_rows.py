"""Check that skipped rows add nothing and do not change the other rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.batches import terms_of
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor

from data_prep.shards import ShardSet, open_shards
from data_prep.shards.manifest import SpecialIds
from pretrain import RunError
from pretrain.contracts.batch import IGNORE, Batch, Rows
from pretrain.data.order import Order
from pretrain.data.rows import Skip, StepDataset, loader, skipped, with_skip
from pretrain.model.distillation import Distillation
from pretrain.objectives.distilbert import DistilBert
from pretrain.tasks.mlm.examples import MaskedRows, masked_batch, masking_over
from pretrain.tasks.mlm.masking import Masked

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
PAD, CLS = SPECIAL.pad, SPECIAL.cls
G, MICRO = 12, 3  # rows of a step and of a micro-batch
SKIPS = (Skip(20, 60, 4), Skip(100, 101, 0))


@pytest.fixture(scope="module")
def shards(corpus: Path) -> ShardSet:
    return open_shards(corpus)


@pytest.fixture(scope="module")
def examples(shards: ShardSet) -> MaskedRows:
    return MaskedRows(shards, masking_over(shards.manifest, 0.15, 3))


@pytest.fixture(scope="module")
def order(shards: ShardSet) -> Order:
    return Order(len(shards), G, 3)


@pytest.fixture
def dataset(shards: ShardSet, order: Order, examples: MaskedRows) -> StepDataset:
    """Return all rows of each step, without those of `SKIPS`."""
    return StepDataset(shards, order, examples, skips=SKIPS)


def is_left_out(row: int, step: int) -> bool:
    """Return whether `SKIPS` leaves out a row at a step."""
    return row == 100 or (step >= 4 and 20 <= row <= 59)


def test_a_range_ends_before_its_last_and_begins_at_its_step() -> None:
    rows = np.array([59, 60, 19, 20, 100, 101, 99])
    assert skipped(rows, 3, SKIPS).tolist() == [False] * 4 + [True, False, False]
    assert skipped(rows, 4, SKIPS).tolist() == [True, False, False, True, True, False, False]
    assert not skipped(rows, 4, ()).any()


def test_other_rows_do_not_change(shards: ShardSet, order: Order, examples: MaskedRows) -> None:
    """Compare two epochs of three ranks with and without `SKIPS`."""
    steps = 2 * len(shards) // G + 1
    num_left_out = 0
    for rank in range(3):
        plain = StepDataset(shards, order, examples, rank=rank, world=3)
        ours = StepDataset(shards, order, examples, rank=rank, world=3, skips=SKIPS)
        for step in range(steps):
            before, after = plain[step], ours[step]
            for i, row in enumerate(order.at(step)[1][ours.mine].tolist()):
                if is_left_out(row, step):
                    num_left_out += 1
                    assert (after["input_ids"][i] == PAD).all()
                    assert (after["masked"][i] == IGNORE).all()
                else:
                    for ours_now, ours_before in zip(after.values(), before.values(), strict=True):
                        assert torch.equal(ours_now[i], ours_before[i])
    assert num_left_out > 60


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_workers_leave_out_the_same(dataset: StepDataset, num_workers: int) -> None:
    with loader(dataset, 2, 8, num_workers) as batches:
        for step, loaded in enumerate(batches, start=2):
            assert all(map(torch.equal, loaded.values(), dataset[step].values()))


def by_hand(dataset: StepDataset, step: int, *, padded: bool) -> tuple[Masked, NDArray[np.bool_]]:
    """Return the step's rows, those of `SKIPS` padded or removed, and a mask of those."""
    epochs, rows = dataset.order.at(step)
    left_out = np.array([is_left_out(row, step) for row in rows.tolist()])
    ids = np.stack([dataset.shards.rows([row])[0] for row in rows]).astype(np.int64)
    if padded:
        for i in np.flatnonzero(left_out):
            ids[i] = [PAD] * ids.shape[1]
    else:
        ids, epochs, rows = ids[~left_out], epochs[~left_out], rows[~left_out]
    assert isinstance(dataset.examples, MaskedRows)
    return dataset.examples.masking(ids, epochs, rows), left_out


@pytest.fixture
def module() -> Distillation:
    teacher = tiny_bert().requires_grad_(False)
    return Distillation(tiny_distilbert(), teacher, terms_of(DistilBert()), pad_id=PAD)


def accumulate(
    module: Distillation, batches: list[Batch], tokens: int, masked: int
) -> tuple[Tensor, list[Tensor]]:
    """Return (losses and sums of each micro-batch, gradients) of a step, as in training."""
    module.zero_grad()
    torch.manual_seed(5)
    counts = {"tokens": tokens, "masked": masked}
    coefficients = torch.tensor(
        [term.weight(0) * tokens / max(counts[term.over], 1) for term in module.terms]
    )
    outputs = []
    for batch in batches:
        loss, sums = module(batch, coefficients)
        (loss / max(tokens, 1)).backward()
        outputs.append(torch.cat([loss.detach()[None], sums]))
    gradients = [p.grad for p in module.student.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return torch.stack(outputs), [gradient for gradient in gradients if gradient is not None]


def fed(rows: Masked | Rows) -> list[Batch]:
    arrays = rows.values() if isinstance(rows, dict) else rows
    parts = zip(*(torch.as_tensor(array).split(MICRO) for array in arrays), strict=True)
    batches = [masked_batch(*part, cls_id=CLS, pad_id=PAD) for part in parts]
    return [batch.to(torch.device("cpu")) for batch in batches]


def counts(batches: list[Batch]) -> tuple[int, int]:
    """Return (tokens, masked tokens) of micro-batches."""
    return sum(b.counts["tokens"] for b in batches), sum(b.counts["masked"] for b in batches)


STEP = 6


def test_a_step_is_bitwise_the_step_over_rows_padded_by_hand(
    dataset: StepDataset, module: Distillation
) -> None:
    module.student.train()  # with dropout
    ours = dataset[STEP]
    expected, left_out = by_hand(dataset, STEP, padded=True)
    assert 0 < left_out.sum() < G
    tokens = int((expected.input_ids != PAD).sum())
    masked = int((expected.labels != IGNORE).sum())
    assert counts(fed(ours)) == (tokens, masked)
    outputs, gradients = accumulate(module, fed(ours), tokens, masked)
    wanted, wanted_gradients = accumulate(module, fed(expected), tokens, masked)
    assert torch.equal(outputs, wanted)
    assert all(map(torch.equal, gradients, wanted_gradients))
    everything = fed(StepDataset(dataset.shards, dataset.order, dataset.examples)[STEP])
    other, _ = accumulate(module, everything, *counts(everything))
    assert not torch.equal(other, outputs)


def test_a_step_equals_the_step_of_a_run_without_these_rows(
    dataset: StepDataset, module: Distillation
) -> None:
    module.double(), module.teacher.double()  # type: ignore[union-attr]
    ours = fed(dataset[STEP])
    without, left_out = by_hand(dataset, STEP, padded=False)
    assert len(without.input_ids) == G - left_out.sum() < G
    outputs, gradients = accumulate(module, ours, *counts(ours))
    expected, expected_gradients = accumulate(module, fed(without), *counts(ours))
    assert torch.allclose(outputs.sum(0), expected.sum(0), rtol=1e-6, atol=0)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("positions", ["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_of_padding_alone_gives_zero(
    dataset: StepDataset, module: Distillation, positions: str, dtype: torch.dtype
) -> None:
    terms = terms_of(DistilBert(kl_positions=positions))
    module = Distillation(module.student.train(), module.teacher, terms, pad_id=PAD)
    rows = np.arange(MICRO)
    skipped = np.ones(MICRO, dtype=bool)
    nothing = fed(dataset.examples.rows(dataset.shards.rows(rows), 0 * rows, rows, 0, skipped))
    assert counts(nothing) == (0, 0)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs, gradients = accumulate(module, nothing, 100, 10)
    assert torch.equal(outputs, torch.zeros_like(outputs))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_a_whole_step_of_padding_counts_nothing_and_stays_finite(
    shards: ShardSet, order: Order, examples: MaskedRows, module: Distillation
) -> None:
    everything = Skip(0, len(shards), 0)
    step = fed(StepDataset(shards, order, examples, skips=[everything])[0])
    assert counts(step) == (0, 0)
    outputs, gradients = accumulate(module, step, 0, 0)
    assert not outputs.any() and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("first", "last"), [(0, 10**6), (-1, 3), (5, 5), (9, 3)])
def test_rows_that_are_not_there_are_refused(
    shards: ShardSet, order: Order, examples: MaskedRows, first: int, last: int
) -> None:
    with pytest.raises(RunError, match=f"--skip-rows {first}:{last}: .* has {len(shards)} rows"):
        StepDataset(shards, order, examples, skips=[Skip(first, last, 0)])
    with pytest.raises(RunError, match=f"has {len(shards)} rows, 0 to {len(shards) - 1}"):
        StepDataset(shards, order, examples, skips=[*SKIPS, Skip(0, len(shards) + 1, 0)])
    StepDataset(shards, order, examples, skips=[Skip(0, len(shards), 0)])


def test_the_same_option_given_again_adds_nothing() -> None:
    assert with_skip(SKIPS, Skip(20, 60, 9)) == SKIPS  # the same command continues the run
    assert with_skip(SKIPS, Skip(30, 40, 4)) == SKIPS
    for new in (Skip(20, 60, 3), Skip(20, 61, 9), Skip(19, 21, 9), Skip(60, 61, 9)):
        assert with_skip(SKIPS, new) == (*SKIPS, new)

"""Check that all layouts give one result, and that any layout continues a run."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import rank_work, ranks
from support.results import difference, history, losses

from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.config import RunConfig, accumulation_steps
from pretrain.data.order import Order
from pretrain.data.rows import StepDataset
from pretrain.monitor.status import Heartbeat
from pretrain.tasks.mlm.examples import MaskedRows, masking_over
from pretrain.train import train

Settings = Callable[..., dict[str, Any]]
SLOW = pytest.mark.slow


@pytest.fixture
def settings(teacher_folder: Path, make_settings: Settings) -> Settings:
    """Return 20 steps of 24 rows without dropout, under a given name."""
    return make_settings(
        teacher_folder,
        student={"num_layers": 2, "dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"learning_rate": 1e-3, "weight_decay": 0.01},
        train={"max_steps": 20, "global_batch_size": 24, "micro_batch_size": 24},
        evaluation={"every": 10},
        checkpoint={"every": 0},
    )


def seen(settings: dict[str, Any], world: int, arguments: Any = None, stage: int = 0) -> list[Any]:
    """Run, and return [step, row, input_ids, labels] of every row that any rank read."""
    file = Path(settings["output"] + ".seen")
    ranks.run(world, rank_work.seen, settings, arguments, file, environment=ranks.zero(stage))
    notes = []
    for rank in range(world):
        for step, rows in json.loads(file.with_suffix(f".{rank}").read_text(encoding="utf-8")):
            notes.append((step, rank, rows))
    # The first step is read twice: once to warm the buckets up.
    unique = {(step, rank): rows for step, rank, rows in notes}
    return [[step, *row] for (step, rank), rows in sorted(unique.items()) for row in rows]


def wanted(settings: dict[str, Any]) -> list[Any]:
    """Return what one process would read in 20 steps, straight from the pure functions."""
    config = RunConfig.model_validate(settings)
    shards = open_shards(config.shards)
    masking = masking_over(shards.manifest, config.masking.probability, config.train.seed)
    order = Order(len(shards), config.train.global_batch_size, config.train.seed)
    dataset = StepDataset(shards, order, MaskedRows(shards, masking))
    return [
        [step, row, ids.tolist(), labels.tolist()]
        for step in range(20)
        for item, rows in [(dataset[step], order.at(step)[1].tolist())]
        for row, ids, labels in zip(rows, item["input_ids"], item["masked"], strict=True)
    ]


@pytest.fixture
def alone(settings: Settings) -> dict[str, Any]:
    """Return the reference: one process, one micro-batch a step."""
    values = settings("alone")
    assert seen(values, 1) == wanted(values)
    return values


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([(1, 6, 2), (3, 4, 0)], id="two"),
        pytest.param([(2, 12, 0), (2, 3, 1), (4, 3, 2), (4, 6, 0)], id="four", marks=SLOW),
    ],
)
def test_processes_and_micro_batches_change_only_rounding(
    settings: Settings, alone: dict[str, Any], layouts: list[tuple[int, int, int]]
) -> None:
    for world, micro, workers in layouts:
        values = settings(f"{world} x {micro}", micro_batch_size=micro, num_workers=workers)
        if workers:  # rows are then read in other processes, which note nothing
            ranks.run(world, rank_work.once, values)
        else:
            assert seen(values, world) == wanted(values)
        assert difference(values, alone, 20) < 1e-5
        for entry, expected in zip(history(values), history(alone), strict=True):
            assert entry.pop("kind") == expected.pop("kind")
            assert entry == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@ranks.needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_agrees_with_one_process(
    settings: Settings, alone: dict[str, Any], stage: int
) -> None:
    for world, micro in [(2, 6), (3, 8)]:
        values = settings(f"zero {world}", micro_batch_size=micro)
        assert seen(values, world, stage=stage) == wanted(values)
        assert difference(values, alone, 20) < 1e-5


@ranks.needs_deepspeed
def test_zero_computes_in_the_runs_precision_where_deepspeed_sees_autocast(
    settings: Settings,
) -> None:
    """Check ZeRO's loss: DeepSpeed's engine ends an autocast around its forward pass on a GPU."""
    found = {}
    for name, precision, work in (
        ("fp32", "fp32", rank_work.once),
        ("bf16", "bf16", rank_work.once),
        ("ZeRO", "bf16", rank_work.as_on_a_gpu),
    ):
        values = settings(name, micro_batch_size=12, max_steps=1, precision=precision)
        ranks.run(1, work, values, environment=ranks.zero(1 if name == "ZeRO" else 0))
        found[name] = losses(values)[1]
    assert found["ZeRO"] == pytest.approx(found["bf16"], rel=1e-6)
    assert found["ZeRO"] != pytest.approx(found["fp32"], rel=1e-6)


@pytest.mark.slow
@ranks.needs_deepspeed
def test_a_run_changes_its_layout_four_times_and_sees_each_row_once(
    settings: Settings, alone: dict[str, Any]
) -> None:
    parts = [(4, 4, 6, 0), (8, 3, 2, 1), (12, 2, 12, 2), (16, 3, 4, 0), (20, 1, 8, 0)]
    found = []
    for stop, world, micro, stage in parts:
        values = settings("mixed", micro_batch_size=micro)
        found += seen(values, world, {"stop_after": stop}, stage)
    assert found == wanted(values)
    assert difference(values, alone, 20) < 1e-5


class Interrupted(Heartbeat):
    """Signal this process while it waits for the first step's rows."""

    def at(self, step: int, phase: str) -> None:
        if phase == "data":
            os.kill(os.getpid(), signal.SIGTERM)
        super().at(step, phase)


@pytest.mark.slow
@ranks.needs_deepspeed
def test_zero_continues_from_a_checkpoint_of_step_0(settings: Settings) -> None:
    values = settings("stopped", micro_batch_size=6, max_steps=2)
    assert train(RunConfig.model_validate(values), heartbeat=Interrupted(0, None)).step == 0
    undisturbed = settings("undisturbed", micro_batch_size=6, max_steps=2)
    for continued in (values, undisturbed):
        ranks.run(2, rank_work.once, continued, environment=ranks.zero(1))
    found = [ranks.digests(Path(one["output"]), 2) for one in (values, undisturbed)]
    assert found[0] == found[1]


@pytest.mark.slow
@ranks.needs_deepspeed
def test_only_the_last_micro_batch_of_a_step_communicates(
    settings: Settings, tmp_path: Path
) -> None:
    made = {}
    for stage in (0, 1, 2):
        values = settings(f"zero {stage}", micro_batch_size=4, max_steps=2)
        file = tmp_path / f"{stage}.json"
        ranks.run(2, rank_work.collectives, values, file, environment=ranks.zero(stage))
        made[stage] = json.loads(file.read_text(encoding="utf-8"))
    # DDP's warm-up, and then, once for each process, the new order of its buckets.
    assert [last for last, _ in made[0][:2]] == [True, False]
    del made[0][:2]
    assert [last for last, _ in made[0]] == [False, True, False, False, True]
    assert [last for last, _ in made[1]] == [False, False, True] * 2
    for stage in (0, 1):
        assert all((count > 0) == last for last, count in made[stage])
    # ZeRO 2 keeps only its share of the gradients, so it must hand them on each time.
    assert all(count > 0 for _, count in made[2])


@pytest.mark.parametrize(
    ("world", "micro", "product", "fits"),
    [
        (3, 5, r"micro_batch_size 5 x 3 process\(es\) = 15", "15 or 30"),
        (7, 4, r"micro_batch_size 4 x 7 process\(es\) = 28", "28"),
        (5, "auto", r"5 process\(es\)", "20 or 25"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_sizes_that_do(
    settings: Settings, world: int, micro: int | str, product: str, fits: str
) -> None:
    config = RunConfig.model_validate(settings("odd", micro_batch_size=micro))
    with pytest.raises(RunError, match=f"24 is not a multiple of {product}; take {fits}"):
        accumulation_steps(config, world)
    for rows in map(int, fits.split(" or ")):
        assert rows % (world * (1 if micro == "auto" else int(micro))) == 0
    even = RunConfig.model_validate(settings("even", micro_batch_size=3))
    assert accumulation_steps(even, 8) == 1
    assert accumulation_steps(even.with_train(micro_batch_size="auto"), 8) is None

"""Check that replay shows the rows and masks of training."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import history, refused, start, step_folder
from support.traps import edit
from torch import Tensor

from data_prep import CorpusError
from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.data.hashing import root
from pretrain.data.order import permutation
from pretrain.data.rows import Skip, StepDataset
from pretrain.model.distillation import Distillation
from pretrain.replay import ReplayedRow, replay
from pretrain.tasks.mlm.examples import MaskedRows, build_masking

MakeRun = Callable[..., Path]
ROWS, SEED, STEPS = 48, 7, 12  # more than two epochs of the tiny corpus


@pytest.fixture
def make_run(tmp_path: Path, corpus: Path, run_config: Any, seal: Any) -> MakeRun:
    """Return a function that writes a run's folder with a checkpoint of `step`, without training.

    `state` goes into the checkpoint, everything else into the config.
    """
    train = {"max_steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": 3, "seed": SEED}
    values = run_config(tmp_path / "run", Path("nobody/needs-it"), train=train)

    def make(*, step: int = STEPS, state: Mapping[str, Any] | None = None, **changes: Any) -> Path:
        config = RunConfig.model_validate(values | changes)
        shutil.rmtree(config.output, ignore_errors=True)
        digest = open_shards(corpus).manifest.digest
        sealed = {"step": step, "shards": digest, "num_processes": 1, "skip_rows": []}
        seal(config.output, {**sealed, "config": config.model_dump(mode="json"), **(state or {})})
        return config.output

    return make


def test_an_edited_config_is_not_used(make_run: MakeRun) -> None:
    run = make_run()
    before = list(replay(run, 5).rows())
    config = json.loads((step_folder(run, STEPS) / "state.json").read_bytes())["config"]
    config["train"]["seed"] += 1
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert all(map(same, before, replay(run, 5).rows()))
    (run / "config.json").write_text("no config", encoding="utf-8")
    assert all(map(same, before, replay(run, 5).rows()))


def test_an_edited_state_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    edit(step_folder(run, STEPS) / "state.json", skip_rows=[[0, 90, 0]])
    with pytest.raises(RunError, match="no checkpoint verifies"):
        replay(run, 5)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run()
    state = json.loads((step_folder(run, STEPS) / "state.json").read_bytes())
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").write_text(json.dumps(state["config"]), encoding="utf-8")
    for folder in (run, tmp_path):
        with pytest.raises(RunError, match="no checkpoint; give the output folder of a run"):
            replay(folder, 1)


@pytest.mark.parametrize(
    "state",
    [{"config": {"output": 3}}, {"config": None}, {"num_processes": None}],
    ids=["config-keys", "no-config", "no-processes"],
)
def test_the_state_of_another_version_is_refused_in_a_line(
    make_run: MakeRun, state: Mapping[str, Any]
) -> None:
    with refused("state.json is not as this version writes it"):
        replay(make_run(state=state), 1)


def test_edited_token_counts_are_refused(tmp_path: Path, corpus: Path, make_run: MakeRun) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(corpus, shards)
    run = make_run(masking={"mode": "smoothed"})
    replay(run, 5, shards=shards)
    weights = json.loads((shards / "token_counts.json").read_bytes())["smoothing"]
    edit(shards / "token_counts.json", smoothing=weights[::-1])
    with pytest.raises(CorpusError, match=r"token_counts\.json.*the manifest"):
        replay(run, 5, shards=shards).rows()


def test_steps_after_the_newest_checkpoint_give_a_warning(make_run: MakeRun) -> None:
    run = make_run(step=6)
    replay(run, 6, warn=pytest.fail)
    log_says(run, Skip(0, 90, 2))  # of a step that the checkpoint covers
    assert left_out(run, 5) == set()
    said: list[str] = []
    replay(run, 7, warn=said.append)
    assert len(said) == 1 and "newest checkpoint is of step 6" in said[0]


@pytest.mark.parametrize(
    "line",
    ['{"kind": "skip_rows"}', "[]", '{"kind": "skip_rows", "step": "x"}'],
    ids=["keys", "list", "types"],
)
def test_a_log_that_no_run_wrote_is_refused(make_run: MakeRun, line: str) -> None:
    run = make_run()
    (run / "metrics.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(RunError, match=r"metrics\.jsonl: not as a run writes it"):
        replay(run, 1)


def same(one: ReplayedRow, other: ReplayedRow) -> bool:
    """Return whether two rows are equal in everything but rank and micro-batch."""
    numbers = [(r.index, r.epoch, r.row) for r in (one, other)]
    arrays = [(r.input_ids, r.positions, r.labels) for r in (one, other)]
    return numbers[0] == numbers[1] and all(map(np.array_equal, *arrays))


def test_replay_equals_the_input_of_a_real_run(
    tmp_path: Path, teacher_folder: Path, run_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[tuple[Tensor, ...]] = []
    forward = Distillation.forward

    def watched(self: Distillation, batch: Batch, *rest: Any) -> Any:
        if torch.is_grad_enabled():  # not an evaluation
            labels = (batch.labels[name].clone() for name in ("positions", "masked"))
            fed.append((batch.input_ids.clone(), *labels))
        return forward(self, batch, *rest)

    monkeypatch.setattr(Distillation, "forward", watched)
    values = run_config(
        tmp_path / "run",
        teacher_folder,
        masking={"mode": "smoothed"},
        student={"num_layers": 1},
        train={"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "seed": SEED},
        evaluation={"every": 1, "rows": 4},
    )
    start(values)
    replayed = []
    for step in (1, 2, 3):  # as the log counts
        found = replay(tmp_path / "run", step)
        assert (found.num_steps, found.world_size, found.micro_batch_size) == (3, 1, 4)
        rows = list(found.rows())
        assert [row.micro_batch for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
        replayed += rows
    logged = history(tmp_path / "run")
    assert [entry["step"] for entry in logged if entry["kind"] == "train"] == [1, 2, 3]
    assert len(fed) == 6  # three steps of two micro-batches
    assert torch.equal(
        torch.cat([ids for ids, _, _ in fed]),
        torch.from_numpy(np.stack([row.input_ids for row in replayed])),
    )
    masks = [
        {p: label for p, label in zip(*pair, strict=True) if label != -100}
        for _, positions, labels in fed
        for pair in zip(positions.tolist(), labels.tolist(), strict=True)
    ]
    assert masks == [
        dict(zip(row.positions.tolist(), row.labels.tolist(), strict=True)) for row in replayed
    ]


def test_a_run_without_a_teacher_is_replayed_too(make_run: MakeRun) -> None:
    bert = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    without = replay(make_run(teacher=None, objective={"name": "mlm"}, model=bert), 2)
    assert all(map(same, without.rows(), replay(make_run(), 2).rows()))


def test_rows_and_epochs_follow_the_permutation(make_run: MakeRun, corpus: Path) -> None:
    num_rows = len(open_shards(corpus))
    straddling = num_rows // ROWS + 1
    assert num_rows % ROWS and 2 * num_rows < STEPS * ROWS
    for step in (1, straddling, STEPS):
        rows = list(replay(make_run(), step).rows())
        assert (len({row.epoch for row in rows}) == 2) == (step == straddling)
        for i, row in enumerate(rows):
            position = (step - 1) * ROWS + i
            epoch, offset = divmod(position, num_rows)
            expected = permutation(np.array([offset]), num_rows, root(SEED, 1, epoch))[0]
            assert (row.index, row.epoch, row.row) == (i, epoch, expected)


def test_only_the_masked_positions_differ_from_the_shards(make_run: MakeRun, corpus: Path) -> None:
    shards = open_shards(corpus)
    for row in replay(make_run(), 2).rows():
        ids = shards.rows([row.row])[0]
        assert np.array_equal(row.labels, ids[row.positions])
        restored = row.input_ids.copy()
        restored[row.positions] = row.labels
        assert np.array_equal(restored, ids)
        ordinary = int((ids > 4).sum())  # ids 0 to 4 are the special ones
        assert abs(len(row.positions) - 0.15 * ordinary) < 0.51 or len(row.positions) == 1
        assert (np.diff(row.positions) > 0).all()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_world_size_changes_only_the_rank_of_a_row(make_run: MakeRun, world: int) -> None:
    run = make_run()
    alone = list(replay(run, 5, world_size=1, micro_batch_size=ROWS).rows())
    found = replay(run, 5, world_size=world)
    together = [row for rank in range(world) for row in found.rows(rank)]
    assert len(together) == ROWS and all(map(same, alone, together))
    assert all(map(same, alone, found.rows()))
    share = ROWS // world
    for i, row in enumerate(together):
        assert (row.rank, row.micro_batch) == (i // share, i % share // 3)


def test_a_micro_batch_that_does_not_fit_is_made_smaller_or_refused(make_run: MakeRun) -> None:
    run = make_run()
    assert replay(run, 1, world_size=12).micro_batch_size == 1  # a share of 4 has no 3
    assert replay(run, 1, world_size=2, micro_batch_size=6).micro_batch_size == 6
    with pytest.raises(RunError, match="micro_batch_size 5 does not divide the 24 rows"):
        replay(run, 1, world_size=2, micro_batch_size=5)
    with pytest.raises(RunError, match=r"world size 5 does not divide .*global_batch_size 48"):
        replay(run, 1, world_size=5)


def test_steps_of_the_run_alone_can_be_replayed(make_run: MakeRun, corpus: Path) -> None:
    run = make_run()
    for step in (-1, 0, STEPS + 1):
        with pytest.raises(RunError, match=f"no step {step}; the run has steps 1 to {STEPS}"):
            replay(run, step)
    epochs = make_run(train={"epochs": 1.5, "global_batch_size": 10, "micro_batch_size": 5})
    last = -(-round(len(open_shards(corpus)) * 1.5) // 10)
    assert replay(epochs, last).num_steps == last
    with pytest.raises(RunError, match=f"steps 1 to {last}"):
        replay(epochs, last + 1)


def test_a_rank_outside_the_layout_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(RunError, match="ranks of this layout are 0 to 1"):
        replay(make_run(), 1, world_size=2).rows(2)


def test_shards_that_the_run_did_not_read_are_refused(make_run: MakeRun) -> None:
    found = replay(make_run(state={"num_processes": 2}), 1, warn=pytest.fail)
    assert found.world_size == 2  # as many processes as the run had
    with pytest.raises(RunError, match=r"holds different shards .* \(0{16}\)"):
        replay(make_run(state={"shards": "0" * 64}), 1)


def test_shards_may_have_moved(make_run: MakeRun, corpus: Path, tmp_path: Path) -> None:
    run = make_run(shards=str(tmp_path / "gone"))
    with pytest.raises(CorpusError, match="gone"):
        replay(run, 1)
    assert len(list(replay(run, 1, shards=corpus).rows())) == ROWS


def test_json_and_tokens_say_the_same_as_the_arrays(
    make_run: MakeRun, vocabulary: list[str]
) -> None:
    found = replay(make_run(), 4)
    for row in found.rows():
        plain = json.loads(json.dumps(row.as_json(4)))
        assert list(plain) == [
            *("step", "position", "rank", "micro_batch", "epoch", "row", "skipped"),
            *("masks", "input_ids"),
        ]
        assert plain["step"] == 4 and plain["row"] == row.row
        assert len(plain["masks"]) == len(row.positions)
        for mask in plain["masks"]:
            assert plain["input_ids"][mask["position"]] == mask["shown"]
        assert [found.token(id) for id in row.labels] == [vocabulary[id] for id in row.labels]


def log_says(run: Path, *skips: Skip) -> None:
    train = {"kind": "train", "step": 2, "loss": 1.5}
    lines = [train, *({"kind": "skip_rows", **skip._asdict()} for skip in skips)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")


def left_out(run: Path, step: int) -> set[int]:
    return {row.row for row in replay(run, step).rows() if row.skipped}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_left_out_are_shown_as_training_fed_them(make_run: MakeRun, world: int) -> None:
    skips = [Skip(20, 60, 4), Skip(100, 101, 0)]
    run = make_run()
    plain = {step: list(replay(run, step).rows()) for step in (4, 5)}
    run = make_run(state={"skip_rows": [[20, 60, 4], [100, 101, 0]]})
    for step in (4, 5):  # as the log counts; the first range begins with the second of them
        found = replay(run, step, world_size=world)
        opened, seed = found.shards, found.config.train.seed
        masking = build_masking(found.config.masking, opened.folder, opened.manifest, seed)
        datasets = [
            StepDataset(
                opened, found.order, MaskedRows(opened, masking), rank=r, world=world, skips=skips
            )
            for r in range(world)
        ]
        fed = torch.cat([dataset[step - 1]["input_ids"] for dataset in datasets])
        num_masked = sum(int((data[step - 1]["masked"] != IGNORE).sum()) for data in datasets)
        rows = list(found.rows())
        assert np.array_equal(np.stack([row.input_ids for row in rows]), fed.numpy())
        assert sum(len(row.positions) for row in rows) == num_masked
        for row, before in zip(rows, plain[step], strict=True):
            assert row.skipped == (row.row == 100 or (step == 5 and 20 <= row.row < 60))
            shown = row.as_json(step)
            assert shown["skipped"] == row.skipped
            if row.skipped:
                assert shown["masks"] == [] and not any(shown["input_ids"])
                assert (row.index, row.epoch, row.row) == (before.index, before.epoch, before.row)
            else:
                assert same(row, before)
    assert any(20 <= row.row < 60 for row in plain[4] + plain[5])


def test_skipped_rows_come_from_the_checkpoint_and_the_log(make_run: MakeRun) -> None:
    """Check ranges after the newest checkpoint, only in the log, and before it, in both."""
    run = make_run(step=2)
    rows = [{row.row for row in replay(run, step).rows()} for step in (3, 9)]
    assert left_out(run, 3) == set()
    log_says(run, Skip(0, 90, 2))
    assert left_out(run, 2) == set()
    assert left_out(run, 3) == {row for row in rows[0] if row < 90} != set()
    run = make_run(step=4, state={"skip_rows": [[0, 90, 2]]})
    log_says(run, Skip(0, 90, 2), Skip(200, 220, 8))
    assert replay(run, 3).skips == (Skip(0, 90, 2), Skip(200, 220, 8))
    assert left_out(run, 8) == {row for row in left_out(run, 8) if row < 90}
    assert left_out(run, 9) == {row for row in rows[1] if row < 90 or 200 <= row < 220}
    (run / "metrics.jsonl").unlink()
    assert left_out(run, 9) == {row for row in rows[1] if row < 90}

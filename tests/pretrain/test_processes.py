"""Check that ranks decide together, and that wrong numbers change no weights."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import rank_work, ranks
from support.processes import wait_until
from support.tiny import save_teacher, tiny_bert

from pretrain import RunError, checkpoint
from pretrain.config import RunConfig
from pretrain.data.order import Order
from pretrain.distributed.processes import timeout
from pretrain.monitor import metrics
from pretrain.replay import replay
from pretrain.train import train

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(teacher_folder: Path, make_settings: Settings) -> Settings:
    """Return 6 steps of 12 rows: one micro-batch a step for 3 ranks, a checkpoint at each step."""
    return make_settings(
        teacher_folder,
        train={"max_steps": 6, "global_batch_size": 12, "micro_batch_size": 4},
        checkpoint={"every": 1, "keep": 10},
    )


def answers(
    settings: list[dict[str, Any]], folder: Path, world: int, harm: str = ""
) -> list[list[str]]:
    """Return [kind, message] of the end of each rank."""
    ranks.run(world, rank_work.answered, settings, folder / "answer", harm)
    files = [folder / f"answer.{rank}" for rank in range(world)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def status(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(values["output"]) / "exit_status.json").read_text())
    return found


def steps(values: dict[str, Any]) -> list[int]:
    """Return the steps of the checkpoints that verify."""
    folders = sorted((Path(values["output"]) / "checkpoints").glob("step-*"))
    assert all(checkpoint.verify(folder) is None for folder in folders)
    return [int(folder.name.removeprefix("step-")) for folder in folders]


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_update(
    settings: Settings, tmp_path: Path
) -> None:
    values = settings()
    found = answers([values], tmp_path, 3, "loss")
    assert [kind for kind, _ in found] == ["NonFiniteError"] * 3
    assert len({message for _, message in found}) == 1
    assert found[0][1].startswith("step 4: the loss is nan over rows ")
    assert steps(values) == [1, 2, 3]
    ended = status(values)
    assert (ended["ended"], ended["step"], ended["exit_code"]) == ("failed", 3, 3)
    report = json.loads((Path(values["output"]) / "post_mortem.json").read_text(encoding="utf-8"))
    _, rows = Order(255, 12, 0).at(3)
    assert report["ranks"] == [1] and report["rows"] == rows[4:8].tolist()
    assert report["last_metrics"]["step"] == 3
    assert report["micro_batches"][0]["terms"].keys() == {"kl", "mlm", "cosine"}


@pytest.mark.parametrize("harm", ["loss", "gradient"])
def test_a_skipped_step_is_counted_and_changes_no_weight(
    settings: Settings, tmp_path: Path, harm: str
) -> None:
    values = settings(skip_non_finite=1)
    assert answers([values], tmp_path, 3, harm) == [["finished", ""]] * 3
    output = Path(values["output"])
    assert ranks.digests(output, 4) == ranks.digests(output, 3) != ranks.digests(output, 5)
    saved = checkpoint.newest(output / "checkpoints", pytest.fail)
    assert saved is not None and saved.state["skipped_steps"] == 1
    kinds = {
        e["step"]: e["kind"]
        for e in metrics.read_metrics(output / "metrics.jsonl")
        if e["step"] < 6
    }
    assert kinds == {0: "evaluation", 1: "train", 2: "train", 3: "train", 4: "skipped", 5: "train"}


def test_a_flipped_bit_names_its_rank_and_no_checkpoint_holds_it(
    settings: Settings, tmp_path: Path
) -> None:
    values = settings()
    found = answers([values], tmp_path, 3, "bit")
    assert [kind for kind, _ in found] == ["DivergedError"] * 3
    assert "step 4: the weights of rank 2 differ" in found[0][1]
    assert steps(values) == [1, 2, 3] and status(values)["exit_code"] == 3


def test_an_error_on_one_rank_ends_all_ranks(settings: Settings, tmp_path: Path) -> None:
    good = settings()
    found = answers([good, {**good, "teacher": str(tmp_path / "nowhere")}, good], tmp_path, 3)
    assert [kind for kind, _ in found] == ["SystemExit", "RunError", "SystemExit"]
    assert "nowhere" in found[1][1]


def test_ranks_with_different_files_are_refused(settings: Settings, tmp_path: Path) -> None:
    good = settings()
    save_teacher(tmp_path / "other", tiny_bert(seed=9))
    found = answers([good, {**good, "teacher": str(tmp_path / "other")}], tmp_path, 3)
    assert [kind for kind, _ in found] == ["RunError"] * 3
    assert found[0][1].startswith("rank 1 has a different teacher from rank 0")


def test_ranks_with_different_settings_are_refused(settings: Settings, tmp_path: Path) -> None:
    usual = settings(micro_batch_size=6)
    for change in ({"seed": 5}, {"micro_batch_size": 3}, {"skip_non_finite": 1}):
        other = {**usual, "train": {**usual["train"], **change}}
        found = answers([usual, other], tmp_path, 2)
        assert [kind for kind, _ in found] == ["RunError"] * 2
        assert found[0][1].startswith("rank 1 has a different configuration from rank 0")
        assert not steps(usual)


@pytest.mark.slow
def test_a_slow_start_may_take_longer_than_the_timeout(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "found"
    ranks.run(3, rank_work.slow, settings(), 12.0, file, environment={"DISTIL_TIMEOUT": "6"})
    assert [file.with_suffix(f".{rank}").read_text() for rank in range(3)] == ["0", "11", "22"]


def test_skipped_rows_are_recorded_and_stay_skipped(settings: Settings) -> None:
    values = settings(micro_batch_size=12)
    config = RunConfig.model_validate(values)
    _, rows = Order(255, 12, 0).at(4)
    first = int(rows[5])
    train(config, stop_after=2)
    train(config, stop_after=3, skip_rows=[(first, first + 1)])
    train(config)  # the flag need not be given again
    output = Path(values["output"])
    saved = checkpoint.newest(output / "checkpoints", pytest.fail)
    assert saved is not None and saved.state["skip_rows"] == [[first, first + 1, 2]]
    entries = metrics.read_metrics(output / "metrics.jsonl")
    assert {"kind": "skip_rows", "step": 2, "first": first, "last": first + 1} in entries
    shown = replay(output, 5, warn=pytest.fail)
    assert [row.skipped for row in shown.rows(None)] == [number == first for number in rows]
    with pytest.raises(RunError, match="255 rows"):
        train(RunConfig.model_validate(settings("other")), skip_rows=[(250, 256)])


def test_the_second_run_on_an_output_names_the_first(settings: Settings, tmp_path: Path) -> None:
    values = settings(micro_batch_size=12, max_steps=12)
    for attempt in range(3):
        files = [tmp_path / f"{name}-{attempt}" for name in ("one", "other")]
        both = [ranks.start(1, rank_work.answered, [values], file)[0] for file in files]
        assert ranks.wait(both) == [0, 0]
        found = [json.loads(Path(f"{file}.0").read_text()) for file in files]
        kinds = [kind for kind, _ in found]
        if kinds == ["finished", "finished"]:
            continue  # one after the other: the second found it up to date
        loser = kinds.index("Busy")
        assert kinds[1 - loser] == "finished"
        pid = both[1 - loser].pid
        assert f"host {socket.gethostname()}, pid {pid}" in found[loser][1]
        break
    else:
        pytest.fail("they never met")


def test_the_lock_of_a_killed_run_is_taken_over(settings: Settings) -> None:
    values = settings(micro_batch_size=12, max_steps=400)
    (holder,) = ranks.start(1, rank_work.once, values)
    log = Path(values["output"]) / "metrics.jsonl"
    wait_until(
        lambda: len(metrics.read_metrics(log)) > 1,
        lambda: f"exit code {holder.exitcode}",
        alive=holder.is_alive,
    )
    with pytest.raises(Exception, match=f"pid {holder.pid}"):
        train(RunConfig.model_validate(values))
    holder.kill()
    holder.join()
    assert train(RunConfig.model_validate(values), stop_after=8).step >= 8


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf"])
def test_an_invalid_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISTIL_TIMEOUT", text)
    with pytest.raises(RunError, match="not a number of seconds"):
        timeout()
    monkeypatch.setenv("DISTIL_TIMEOUT", "60")
    assert timeout() == 60.0 and os.environ["DISTIL_TIMEOUT"] == "60"

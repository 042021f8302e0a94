"""Check that errors of loader workers are reported with their cause."""

import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from data_prep import CorpusError
from data_prep.shards import open_shards
from pretrain.config import MaskingConfig
from pretrain.contracts.process import ExitCode
from pretrain.data.order import Order
from pretrain.data.rows import (
    SUPERVISOR,
    StepDataset,
    explained_workers,
    loader,
    next_rows,
)
from pretrain.monitor.status import verdict
from pretrain.tasks.mlm.examples import MaskedRows, build_masking

STEPS = 400


@pytest.fixture
def dataset(tmp_path: Path, corpus: Path) -> StepDataset:
    shutil.copytree(corpus, tmp_path / "shards")
    shards = open_shards(tmp_path / "shards")
    masking = build_masking(MaskingConfig(), tmp_path / "shards", shards.manifest, 0)
    return StepDataset(shards, Order(len(shards), 8, 0), MaskedRows(shards, masking))


def test_a_shard_that_is_cut_off_while_it_is_read_is_named(
    dataset: StepDataset, capfd: pytest.CaptureFixture[str]
) -> None:
    (record,) = dataset.shards.manifest.splits["train"].shards
    named = r"train-00000\.arrow: 0 bytes, the manifest says"
    with (
        pytest.raises(CorpusError, match=named) as cut,
        explained_workers(dataset.shards),
        loader(dataset, 0, STEPS, 1) as batches,
    ):
        next(batches)
        os.truncate(dataset.shards.folder / record.file, 0)
        for _ in batches:
            time.sleep(0.01)
    assert "\n" not in str(cut.value)
    assert "shared memory" not in capfd.readouterr().err


def test_a_damaged_block_is_one_line_from_a_worker_too(dataset: StepDataset) -> None:
    (record,) = dataset.shards.manifest.splits["train"].shards
    path = dataset.shards.folder / record.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with (
        pytest.raises(CorpusError, match="block 0 differs from the manifest") as damaged,
        explained_workers(dataset.shards),
        loader(dataset, 0, STEPS, 1) as batches,
    ):
        next(batches)
    assert "\n" not in str(damaged.value)


@pytest.mark.parametrize("kind", [ConnectionResetError, BrokenPipeError, EOFError])
def test_a_broken_connection_to_a_worker_is_a_crash(
    dataset: StepDataset, kind: type[Exception]
) -> None:
    """Check that a launcher restarts it, as it does not after a mistake of the user."""
    with (
        pytest.raises(RuntimeError, match="worker ended while it sent rows") as error,
        explained_workers(dataset.shards),
    ):
        raise kind(104, "Connection reset by peer")
    assert verdict(error.value)[0] == ExitCode.BUG


def test_the_cause_that_arrives_after_a_broken_connection_is_raised(dataset: StepDataset) -> None:
    """torch's handler of SIGCHLD names the dead worker, some time after its connection broke."""

    def died(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    before = signal.signal(signal.SIGALRM, died)
    try:
        with (
            pytest.raises(RuntimeError, match=r"worker \(pid 7\) is killed"),
            explained_workers(dataset.shards),
        ):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            raise ConnectionResetError(104, "Connection reset by peer")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_only_a_run_without_a_supervisor_waits_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    class Noting:
        def interrupt_after(self, seconds: float) -> Any:
            asked.append(seconds)
            return nullcontext()

    signals: Any = Noting()
    for supervised in (False, True):
        if supervised:
            monkeypatch.setenv(SUPERVISOR, "1")
        assert next_rows(iter(["rows"]), signals, 7.5) == "rows"  # type: ignore[arg-type]
    assert asked == [7.5, 0]

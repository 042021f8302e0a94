"""Killed or failing anywhere, a save leaves the old checkpoint or the new one, whole."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MEMORY = Path("/dev/shm")  # flushing takes no time there, and a killed process proves nothing of it


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(dir=MEMORY))
    yield made
    shutil.rmtree(made)


def disasters(kind: str, folder: Path, *prefix: str) -> list[dict[str, Any]]:
    """What every disaster of a kind led to; `disasters.py` has checked it."""
    program = Path(__file__).with_name("disasters.py")
    result = subprocess.run(
        [*prefix, sys.executable, program, kind, folder],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    # DeepSpeed, where it is installed, says on stdout that it was imported.
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def phases(told: list[dict[str, Any]]) -> set[str]:
    return {entry["where"].split()[0] for entry in told}


PHASES = {
    *("save:weights", "save:optimizer", "save:state", "save:manifest"),
    *("save:flush", "save:rename", "save:pointer", "save:rotate"),
}


def test_killed_anywhere_in_a_save_the_old_or_the_new_checkpoint_is_whole(folder: Path) -> None:
    told = disasters("kills", folder)
    assert len(told) >= 100 and phases(told) >= PHASES
    # The old one until the rename, the new one after it, and never the old one again.
    assert [entry["found"] for entry in told] == sorted(entry["found"] for entry in told)
    assert {entry["found"] for entry in told} == {1, 2}


def test_all_is_flushed_before_it_has_its_name_and_nothing_is_removed_before_that(
    folder: Path,
) -> None:
    root = folder / "1" / "checkpoints"
    events = []
    for entry in disasters("flushes", folder):
        path = re.sub(r"\.tmp-step-00000002-\w{8}", "new", entry["path"].replace(f"{root}/", ""))
        events.append(f"{entry['event']} {path}")
    last = events.index("flush new")
    for path in (root / "step-00000002").rglob("*"):
        name = f"new/{path.relative_to(root / 'step-00000002')}"
        flushed = events.index(f"flush {name}")
        assert flushed < last
        assert f"write {name}" not in events[flushed:]
    assert events[last:] == [
        "flush new",
        "rename new",
        f"flush {root}",
        *(f"{event} latest.tmp" for event in ("write", "flush", "rename")),
        f"flush {root}",
        *(f"{event} best.tmp" for event in ("write", "flush", "rename")),
        f"flush {root}",
        "rmtree .tmp-removed-step-00000001",
        "rename step-00000001",
        "rmtree .tmp-removed-step-00000001",
        f"flush {root}",
    ]


def test_killed_anywhere_in_the_first_save_nobody_is_needed(folder: Path) -> None:
    told = disasters("first kills", folder)
    assert len(told) >= 100 and phases(told) >= PHASES
    assert {entry["found"] for entry in told} == {None, 2}


def test_an_input_or_output_error_anywhere_costs_a_line_and_no_checkpoint(folder: Path) -> None:
    told = disasters("errors", folder)
    assert len(told) >= 100 and phases(told) >= PHASES
    assert {entry["found"] for entry in told} == {1, 2}
    assert sum(bool(entry["raised"]) for entry in told) >= 50


def test_files_that_may_not_grow_cost_a_line_and_no_checkpoint(folder: Path) -> None:
    told = disasters("large files", folder)
    assert len(told) >= 10 and all(entry["raised"] and entry["found"] == 1 for entry in told)


def test_a_full_or_read_only_disk_costs_a_line_and_no_checkpoint(folder: Path) -> None:
    namespace = ("unshare", "--mount")
    try:
        probe = subprocess.run(
            [*namespace, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if probe.returncode:
        pytest.skip(f"no mounts of our own here: {probe.stderr.decode().strip()}")
    told = disasters("full disks", folder, *namespace)
    assert "remount,ro" in told[0]["options"] and told[0]["found"] == 1
    assert sum(bool(entry["raised"]) for entry in told) >= 8

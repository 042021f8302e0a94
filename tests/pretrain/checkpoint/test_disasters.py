"""Check that a save that is killed or fails anywhere leaves the old or the new checkpoint whole."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support import warm

ROOT = Path(__file__).parents[3]
MEMORY = Path("/dev/shm")  # flushing takes no time there, and a killed process proves nothing of it


SOME = 7  # the distance between two lines of the sample; each phase of a save has ten or more
TOGETHER = ("kills", "first kills", "errors", "large files", "flushes")
Disasters = Callable[..., tuple[Path, list[dict[str, Any]]]]
MANY = 1 if os.environ.get("DISTIL_TORTURE") else 2  # `make torture` sets it


@pytest.fixture(scope="module")
def disasters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disasters]:
    """Return a function that returns a kind's folder and what its disasters led to.

    `disasters.py` has checked that. Samples of all kinds share a process, which takes seconds to
    start, and a folder in memory where there is one.
    """
    with ExitStack() as stack:
        made: dict[tuple[str, int], tuple[Path, list[dict[str, Any]]]] = {}

        def disasters(kind: str, every: int = SOME) -> tuple[Path, list[dict[str, Any]]]:
            if (kind, every) in made:
                return made[kind, every]
            folder = tmp_path_factory.mktemp("disasters")
            if os.access(MEMORY, os.W_OK):
                folder = Path(stack.enter_context(TemporaryDirectory(dir=MEMORY)))
            shared = every == SOME and kind in TOGETHER
            kinds = TOGETHER if shared else (kind,)
            prefix = ("unshare", "--mount") if kind == "full disks" else ()
            program = ROOT / "tests" / "support" / "disasters.py"
            result = subprocess.run(
                [*prefix, warm.python(), program, folder, str(every), *kinds],
                env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert result.returncode == 0, result.stderr
            for name in kinds:
                made[name, every] = folder / name, []
            # DeepSpeed, where it is installed, says on stdout that it was imported.
            for line in result.stdout.splitlines():
                if line.startswith("{"):
                    entry = json.loads(line)
                    made[entry.pop("kind"), every][1].append(entry)
            return made[kind, every]

        yield disasters


PHASES = {
    *("save:weights", "save:optimizer", "save:state", "save:manifest"),
    *("save:flush", "save:rename", "save:pointer", "save:rotate"),
}


@pytest.mark.parametrize(
    "every", [SOME, pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize(
    ("kind", "steps"),
    [("kills", [1, 2]), ("first kills", [None, 2]), ("errors", [1, 2])],
    ids=["kills", "first kills", "errors"],
)
def test_a_save_that_ends_at_any_line_leaves_the_old_or_the_new_checkpoint_whole(
    disasters: Disasters, kind: str, steps: list[int | None], every: int
) -> None:
    """Check that an error gives a warning, too, and that a first save needs no help afterwards."""
    _, told = disasters(kind, every)
    assert len(told) >= 100 // every
    assert {entry["where"].split()[0] for entry in told} >= PHASES
    found = [entry["found"] for entry in told]
    assert set(found) == set(steps)
    if kind == "errors":
        assert sum(bool(entry["raised"]) for entry in told) >= 50 // every
    else:  # the old one until the rename, the new one after it, and never the old one again
        assert found == sorted(found, key=steps.index)


def test_files_are_flushed_before_the_rename_and_removal_comes_after(disasters: Disasters) -> None:
    folder, told = disasters("flushes")
    root = folder / "1" / "checkpoints"
    events = []
    for entry in told:
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


def test_a_file_size_limit_gives_a_warning_and_loses_no_checkpoint(disasters: Disasters) -> None:
    _, told = disasters("large files")
    assert len(told) >= 10 and all(entry["raised"] and entry["found"] == 1 for entry in told)


def test_a_full_or_read_only_disk_gives_a_warning_and_loses_no_checkpoint(
    disasters: Disasters, tmp_path: Path
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    mount = ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", tmp_path)
    probe = subprocess.run(mount, capture_output=True)
    if probe.returncode:
        pytest.skip(f"no mounts of our own here: {probe.stderr.decode().strip()}")
    _, told = disasters("full disks")
    assert "remount,ro" in told[0]["options"] and told[0]["found"] == 1
    assert sum(bool(entry["raised"]) for entry in told) >= 8

"""Run all tests with one thread per process: tiny models gain nothing from more."""

import gc
import hashlib
import locale
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every child process
os.environ["GOMP_SPINCOUNT"] = "0"  # the few tests of several threads wait without spinning
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# Each process would compile this project again, each worker of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop("FORCE_COLOR", None)  # rich would colour text that tests compare
# Text files are read and written as UTF-8, here and in children, whatever the user's locale says.
for name in ("LANG", "PYTHONUTF8", "PYTHONCOERCECLOCALE"):
    os.environ.pop(name, None)
os.environ["LC_ALL"] = "C.UTF-8"
with suppress(locale.Error):  # a system without this name
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
# A shell that starts this in the background has them ignored, here and in every child.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGQUIT"):
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Files of tests lie in memory where there is room: they are small, and each is written to be kept.
MEMORY, MOST = Path("/dev/shm"), 4 << 30  # bytes; a session takes 0.3 GB
if "TMPDIR" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
    room = os.statvfs(MEMORY)
    free = min(room.f_bavail * room.f_frsize, psutil.virtual_memory().available // 2)
    if free > MOST and not room.f_flag & os.ST_NOEXEC:
        tempfile.tempdir = str(MEMORY)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)  # the folders of tests that failed stay

# Every worker has its own home, so no test reads or writes the user's files. The session shares
# what takes long to download or to compile. Nested sessions of pytest share it too.
REAL_HOME = os.environ.get("DISTIL_TEST_REAL_HOME", os.environ.get("HOME", ""))
if "DISTIL_TEST_SESSION" not in os.environ:
    session = tempfile.mkdtemp(prefix="distil-tests-")
    # After multiprocessing has removed its own folder there.
    multiprocessing.util.Finalize(None, shutil.rmtree, (session, True), exitpriority=-200)
    os.environ |= {"DISTIL_TEST_SESSION": session, "DISTIL_TEST_REAL_HOME": REAL_HOME}
SESSION = Path(os.environ["DISTIL_TEST_SESSION"])
if SESSION.parent == MEMORY:  # what libraries leave there goes with the session
    os.environ["TMPDIR"] = tempfile.tempdir = str(SESSION)
for name, place in (
    ("HOME", f"home-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"),
    ("PIP_CACHE_DIR", "pip"),
    ("TORCH_EXTENSIONS_DIR", "torch-extensions"),
    ("TRITON_CACHE_DIR", "triton"),
    ("TORCHINDUCTOR_CACHE_DIR", "torch-inductor"),
):
    (SESSION / place).mkdir(exist_ok=True)
    os.environ[name] = str(SESSION / place)
for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME"):
    os.environ.pop(name, None)  # they would name the user's files in spite of HOME

import pytest  # noqa: E402
from support import warm  # noqa: E402

try:
    import torch
except ImportError:  # configs and the corpus stage need none
    torch = None  # type: ignore[assignment]
else:
    torch.set_num_threads(1)

pytest_plugins = ["support.costs"]
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # until all tests are collected: a million objects, none of them garbage


def pytest_collection_finish() -> None:
    """Leave the objects of all tests out of each later search for garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name bytes by their parameter: their content may differ between two workers."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> None:
    """Fork the workers of `prepare`: each one that is spawned imports its libraries for a second.

    Commands that tests start as real processes spawn theirs.
    """
    if sys.platform != "linux":
        return
    from support.ranks import FORKS

    from data_prep.pipeline import processes

    # Sockets lie there, and their paths have 107 bytes: a test may set a longer TMPDIR.
    multiprocessing.util.get_temp_dir()

    class Forking:
        get_context = staticmethod(lambda method: FORKS)
        active_children = staticmethod(multiprocessing.active_children)

    processes.multiprocessing = Forking  # type: ignore[assignment, attr-defined]


@pytest.fixture(scope="session")
def seal() -> Callable[[Path, Mapping[str, Any]], Path]:
    """Return a function that writes a checkpoint with a state and nothing else."""
    from data_prep.disk.json_files import indented_json
    from pretrain.checkpoint.layout import FORMAT, folder_name, manifest_bytes

    def write(run: Path, state: Mapping[str, Any]) -> Path:
        folder = run / "checkpoints" / folder_name(state["step"])
        folder.mkdir(parents=True)
        data = indented_json(state)
        (folder / "state.json").write_bytes(data)
        file = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        values = {"format": FORMAT, "step": state["step"], "files": {"state.json": file}}
        (folder / "manifest.json").write_bytes(manifest_bytes(values))
        return folder

    return write


class Ended(NamedTuple):
    """Hold how a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def distil(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Return a function that runs `distil` with its arguments in this process.

    A process of its own takes seconds to import torch. Use one only for what needs it: kills,
    signals, limits, other working directories, and what is imported. Processes that the command
    starts are forked, see `support.warm`.
    """
    from launch.cli import main

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        before = dict(os.environ)
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["distil", *map(str, arguments)])
            patch.setattr(sys, "executable", warm.python())
            main()
        _restore(before)
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def _restore(before: dict[str, str]) -> None:
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def installing() -> dict[str, str]:
    """Return the changes to the environment of a command that installs: pip has settings there."""
    return {"HOME": REAL_HOME} if REAL_HOME else {}


@pytest.fixture(autouse=True)
def _empty_working_directory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start every test in an empty folder: `make demo` has filled the checkout before."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Undo what a command that ran in this process has set for the processes that it starts."""
    before = dict(os.environ)
    yield
    _restore(before)


NOT_RUN = "not run: the time that DISTIL_TEST_UNTIL gives is over"
BEGUN: set[Path] = set()  # files


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not (torch and torch.cuda.is_available()):
        pytest.skip("needs a GPU that torch can use")
    if item.path in BEGUN:
        return
    if time.time() > float(os.environ.get("DISTIL_TEST_UNTIL", "inf")):
        item.user_properties.append(("not run", item.nodeid))
        pytest.skip(NOT_RUN)
    BEGUN.add(item.path)


# Tests that reproduce a defect before its fix, which removes their line: part of the name -> item.
KNOWN_DEFECTS: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Begin with another file each day, so that none is always among those without time.
    files = [*dict.fromkeys(item.path for item in items)]
    first = int(os.environ.get("DISTIL_TEST_DAY", "0")) % max(1, len(files))
    place = {path: (i - first) % len(files) for i, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])
    for item in items:
        for name, issue in KNOWN_DEFECTS.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.xfail(strict=True, reason=f"issue {issue}"))

"""Run the tests of files, permissions and archives as an unprivileged user, by /usr/bin/python3.

A developer's interpreter is often newer than the system's, and root may write anywhere.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import ROOT, finished

USER = 65534  # nobody: the kernel's id for unknown users
SELECTED = (
    *("data_prep/test_files.py", "data_prep/test_locks.py", "data_prep/test_publish.py"),
    *("launch/test_config.py", "pretrain/checkpoint", "pretrain/test_export.py"),
    *("pretrain/test_malicious.py", "test_nothing_executes.py"),
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that belongs to USER; pytest's own folders are closed to other users."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may become another user")
    beside = Path(os.environ["DISTIL_TEST_SESSION"]).parent
    path = Path(tempfile.mkdtemp(prefix="distil-other-user-", dir=beside))
    if any(not parent.stat().st_mode & 0o001 for parent in path.parents):
        path.rmdir()
        pytest.skip(f"other users cannot reach {path.parent}")
    os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


def run(folder: Path, *command: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command as USER in `folder`, without this process's environment variables."""
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "TMPDIR": str(folder)}
    user = {"user": USER, "group": USER, "extra_groups": [], "umask": 0o022}
    return finished(*command, cwd=folder / "tree", env=environment, timeout=timeout, **user)


@pytest.mark.slow
def test_selected_tests_pass_for_an_unprivileged_user_with_system_python(folder: Path) -> None:
    version = "python{}.{}".format(*sys.version_info)
    system = Path("/usr/bin") / version  # another version cannot load the packages
    if not system.exists():
        pytest.skip(f"there is no {system}")
    unneeded = (".git", ".venv", ".*_cache", "__pycache__", "runs", "build", "*.egg-info")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*unneeded))
    for path in [folder / "tree", *(folder / "tree").rglob("*")]:
        os.chown(path, USER, USER, follow_symlinks=False)
    made = run(folder, system, "-m", "venv", "--without-pip", folder / "env", timeout=600)
    if made.returncode:
        pytest.skip(f"{system} makes no environment: {made.stdout}{made.stderr}")
    packages = folder / "env" / "lib" / version / "site-packages"
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join([str(folder / "tree"), *shared]) + "\n")
    python = folder / "env" / "bin" / "python"
    found = run(folder, python, "-c", "import pytest, torch, transformers", timeout=600)
    if found.returncode:
        pytest.skip(f"user {USER} cannot read the packages: {found.stderr.splitlines()[-1:]}")

    options = ["-p", "no:cacheprovider", "-n", "0", "--maxfail", "5"]
    selected = [Path("tests") / name for name in SELECTED]
    done = run(folder, python, "-m", "pytest", *options, *selected, timeout=3600)
    assert done.returncode == 0, done.stdout[-5000:]

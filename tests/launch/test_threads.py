"""Check how long OpenMP's threads spin while they wait, in libgomp's own words."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.processes import ROOT, python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp only on Linux")


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def spin_count(package: str, **given: str) -> int:
    """Return how often a thread spins if torch's OpenMP is loaded after `package`."""
    # Torch takes seconds, and does no more than load the library that lies in its folder.
    folder = Path(find_spec("torch").origin).parent
    (gomp,) = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    load = "import torch" if package == "pretrain" else f"import ctypes; ctypes.CDLL('{gomp}')"
    code = f"import sys, {package}; assert 'torch' not in sys.modules; {load}"
    done = python("-c", code, cwd=ROOT, environment={"OMP_DISPLAY_ENV": "verbose"} | given)
    assert done.returncode == 0, done.stderr
    (count,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return int(count)


@pytest.mark.parametrize("package", ["benchmarks", "launch", "pretrain"])
def test_spinning_is_bounded_before_torch_is_imported(package: str) -> None:
    assert spin_count(package) <= 10_000


@pytest.mark.parametrize(
    "given",
    [{"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "active"}],
    ids=["spin_count", "wait_policy"],
)
def test_a_value_that_the_user_has_set_wins(given: dict[str, str]) -> None:
    assert spin_count("launch", **given) == spin_count("os", **given) not in (0, 300_000)


WORKERS = """
import os
import launch
from data_prep.pipeline.engines import started
from torch.utils.data import DataLoader

if __name__ == "__main__":
    with started(2) as run:
        print(*run(os.getenv, ["GOMP_SPINCOUNT"] * 2, lambda done, total: None))
    print(*DataLoader(["GOMP_SPINCOUNT"], num_workers=1, collate_fn=lambda it: os.getenv(it[0])))
"""


def test_workers_of_the_corpus_and_of_the_loader_inherit_the_spin_limit(tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS, encoding="utf-8")
    done = python(script, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    counts = [int(word) for word in done.stdout.split()]
    assert len(counts) == 3 and max(counts) <= 10_000

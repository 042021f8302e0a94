"""Check that training needs neither datasets nor deepspeed, which a GPU machine may lack."""

import os
import shutil
from pathlib import Path

import pytest
from processes import ROOT, finished, python

# Hide the packages from importlib too, because accelerate asks it whether they are installed.
HIDE = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    hidden = name.partition(".")[0] in ("datasets", "deepspeed")
    return None if hidden else find(name, path, target)

importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """Return the changes to the environment of processes that find neither package."""
    (tmp_path / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_modules_import_without_datasets_and_deepspeed(hidden: dict[str, str]) -> None:
    program = "import importlib.util, launch.cli, pretrain.bench.comparison, data_prep.prepare"
    program += ", pretrain.train; print(*map(importlib.util.find_spec, ('datasets', 'deepspeed')))"
    result = python("-c", program, environment=hidden)
    assert (result.returncode, result.stdout) == (0, "None None\n"), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_gpu_tests_start_without_datasets_and_deepspeed(hidden: dict[str, str]) -> None:
    environment = {**hidden, "PYTEST_ADDOPTS": "-p no:cacheprovider", "CUDA_VISIBLE_DEVICES": ""}
    result = finished("make", "test-gpu", cwd=ROOT, environment=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_gpu.py::test_nccl_has_the_time_limit_and_trains SKIPPED" in result.stdout
    assert "needs a GPU that torch can use" in result.stdout
    assert " failed" not in result.stdout and " error" not in result.stdout

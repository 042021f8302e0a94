"""Check what training and the GPU's tests need, with other packages hidden from the interpreter."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import ROOT, finished, python

# Of an image with torch, transformers, accelerate, pyarrow, typer, rich, xxhash and psutil.
MISSING = ("datasets", "deepspeed", "mwparserfromhell", "py3langid", "rensa", "zstandard", "ray")
NOT_CARRIED = (*MISSING, "pydantic", "pydantic_core")
# Hide the packages from importlib too, because accelerate asks it whether they are installed, and
# their metadata.
HIDE = """
import importlib.machinery
import importlib.metadata

find = importlib.machinery.PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    hidden = name.partition(".")[0] in {names!r}
    return None if hidden else find(name, path, target)

importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
described = importlib.metadata.Distribution.from_name

def from_name(cls, name):
    if name in {names!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return described(name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
"""
Hide = Callable[[tuple[str, ...]], dict[str, str]]


@pytest.fixture
def hide(tmp_path: Path) -> Hide:
    """Return a function to the changes to the environment of processes that lack packages."""

    def changes(names: tuple[str, ...]) -> dict[str, str]:
        (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=names), encoding="utf-8")
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    return changes


def test_modules_import_without_packages_that_few_runs_need(hide: Hide) -> None:
    program = "import importlib.util, launch.cli, pretrain.bench.micro_step, data_prep.prepare"
    program += f", pretrain.train; print(*map(importlib.util.find_spec, {MISSING!r}))"
    result = python("-c", program, environment=hide(MISSING))
    assert (result.returncode, result.stdout) == (0, f"{' '.join(['None'] * len(MISSING))}\n"), (
        result.stderr
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("names", [MISSING, NOT_CARRIED], ids=["carried", "bare"])
def test_gpu_tests_start_on_an_image_that_lacks_packages(
    names: tuple[str, ...], hide: Hide
) -> None:
    environment = {"PYTEST_ADDOPTS": "-p no:cacheprovider", "CUDA_VISIBLE_DEVICES": ""}
    result = finished("make", "test-gpu", cwd=ROOT, environment=environment | hide(names))
    said = result.stdout
    assert result.returncode == 0, said + result.stderr
    assert "test_attention_on_gpu.py::test_the_kernels_of_a_gpu" in said
    assert "test_head_on_gpu.py::test_the_kernel_as_a_gpu_runs_it" in said
    assert ("test_gpu.py::test_every_objective_and_family_has_the_cpus_curve" in said) == (
        names == MISSING
    )
    assert "needs a GPU that torch can use" in said
    assert ("only tests/gpu" in said) == (names == NOT_CARRIED)
    assert " failed" not in said and " error" not in said

"""Check the choice of a CPU's library of matrix products: by the processor, kept by a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import RECIPE, start
from support.said import Said

from pretrain.kernels import products

AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2 fma\n\nvendor_id : other\nflags : avx512f\n"
AVX_512 = AMD.replace("avx2", "avx2 avx512f")
INTEL = AVX_512.replace("AuthenticAMD", "GenuineIntel")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that makes /proc/cpuinfo another processor's."""

    def write(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(products, "CPUINFO", tmp_path / "cpuinfo")

    return write


@pytest.mark.parametrize(
    ("cpuinfo", "choice"), [(AVX_512, "onednn"), (AMD, "mkl"), (INTEL, "mkl"), ("", "mkl")]
)
def test_an_amd_with_avx_512_takes_onednn(
    on: Callable[[str], None], cpuinfo: str, choice: str
) -> None:
    on(cpuinfo)
    assert products.choose()[0] == choice


def test_a_run_keeps_its_choice(
    tmp_path: Path,
    teacher_folder: Path,
    run_config: Callable[..., dict[str, Any]],
    on: Callable[[str], None],
) -> None:
    """Begin on an AMD, and continue on another processor; then ask for a library."""
    on(AVX_512)
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE)
    said = Said()
    start(values, progress=said, stop_after=2)
    assert "products auto: onednn (AuthenticAMD CPU)" in said.lines
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["products"] == "onednn"
    on("")
    said = Said()
    start(values, progress=said, stop_after=3)
    assert "products auto: onednn (as before)" in said.lines
    values["train"]["products"] = "mkl"
    assert start(values).ended == "finished"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["products"] == "mkl"

"""Check the choice of a CPU's library of matrix products: by the table, kept by a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import RECIPE, start
from support.said import Said

from pretrain.kernels import products
from pretrain.load import resolve_products

AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2 fma\n\nvendor_id : other\nflags : avx512f\n"
WIDER, INTEL = AMD.replace("avx2", "avx2 avx512f"), AMD.replace("AuthenticAMD", "GenuineIntel")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that makes /proc/cpuinfo another processor's."""

    def write(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(products, "CPUINFO", tmp_path / "cpuinfo")

    return write


@pytest.mark.parametrize(
    ("cpuinfo", "torch", "row", "choice"),
    [
        (AMD, "2.13.0", ("AuthenticAMD", "avx2", "2.13"), "head"),
        (AMD, "2.13.0+cpu", ("AuthenticAMD", "avx2", "2.13"), "head"),
        (AMD, "2.14.1", ("AuthenticAMD", "avx2", "2.14"), "mixed"),
        (
            AMD.replace("avx2", "avx2 avx512f"),
            "2.13.0",
            ("AuthenticAMD", "avx512f", "2.13"),
            "onednn",
        ),
        (
            AMD.replace("AuthenticAMD", "GenuineIntel"),
            "2.13.0",
            ("GenuineIntel", "avx2", "2.13"),
            "mixed",
        ),
        (
            AMD.replace("AuthenticAMD", "GenuineIntel").replace("avx2", "avx2 avx512f"),
            "2.13.0",
            ("GenuineIntel", "avx512f", "2.13"),
            "mkl",
        ),
        ("", "2.13.0", ("", "older", "2.13"), "mixed"),
    ],
)
def test_the_table_knows_what_was_measured(
    on: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    cpuinfo: str,
    torch: str,
    row: tuple[str, str, str],
    choice: str,
) -> None:
    on(cpuinfo)
    monkeypatch.setattr(products, "version", lambda name: torch)
    assert products.row_of() == row
    found, reason = products.choose()
    assert found == choice and ("not measured" in reason) == (choice == "mixed")


def test_a_run_keeps_its_choice(
    tmp_path: Path,
    teacher_folder: Path,
    run_config: Callable[..., dict[str, Any]],
    on: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Begin on a processor of the table, and continue on another; then ask for a library."""
    monkeypatch.setattr(products, "version", lambda name: "2.13.0")
    on(AMD)
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE)
    said = Said()
    start(values, progress=said, stop_after=2)
    assert "products auto: head (AuthenticAMD CPU, avx2, torch 2.13)" in said.lines
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["products"] == "head"
    on("")
    said = Said()
    start(values, progress=said, stop_after=3)
    assert "products auto: head (as before)" in said.lines
    values["train"]["products"] = "mkl"
    assert start(values).ended == "finished"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["products"] == "mkl"


def test_runs_of_before_the_choice_go_on_as_they_began(on: Callable[[str], None]) -> None:
    import torch

    from pretrain.config import RunConfig

    on(AMD)
    config = RunConfig(output=Path("out"), shards=Path("s"), teacher="t")
    state: dict[str, Any] = {"config": {"train": {}}}
    found = resolve_products(config, torch.device("cpu"), state, lambda line: None)
    assert found.train.products == "mixed"

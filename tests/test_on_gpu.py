"""Rehearse the script that measures on a GPU, and check what it does when a section fails."""

import json
import math
import subprocess
import sys
import time
import venv
from dataclasses import replace
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from packaging.requirements import Requirement
from processes import ROOT, finished
from torch import Tensor

from benchmarks.on_gpu import STEP_TOLERANCES, Section, conclude, measure, plan
from benchmarks.on_gpu_gates import attention_error, head_error
from benchmarks.on_gpu_report import Report, Row, read, table
from benchmarks.on_gpu_sections import largest
from pretrain.bench.sizes import TINY, Sizes
from pretrain.device.precision import PRECISIONS
from pretrain.kernels.attention.dispatch import masked
from pretrain.kernels.head import vocabulary_losses

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def few_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with torch, transformers and accelerate alone."""
    folder = tmp_path_factory.mktemp("few")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # The three packages in `seen` serve only command lines and checks of other packages.
    wanted, seen = ["torch", "transformers", "accelerate"], {"pydantic", "rich", "typer"}
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
        requirements = map(Requirement, distribution(name).requires or ())
        wanted += [r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    return folder / "bin" / "python"


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, **environment}
    script = ROOT / "benchmarks" / "on_gpu.sh"
    return finished(script, *arguments, cwd=cwd, environment=environment, timeout=660)


@pytest.mark.slow
def test_rehearsal_fills_every_row_with_few_packages(tmp_path: Path, few_packages: Path) -> None:
    for name in ("pydantic", "pyarrow", "datasets", "typer", "rich"):
        assert finished(few_packages, "-c", f"import {name}").returncode == 1, name
    environment = {"OUT": str(tmp_path / "out"), "COMMIT": "abc", "PYTHON": str(few_packages)}
    result = run("--rehearse", "--minutes", "9", cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "out").iterdir()
    report = read(file)
    assert report["rehearsal"] is True and report["commit"] == "abc"
    assert report["versions"]["torch"] == torch.__version__
    assert [row["name"] for row in report["rows"]] == list(plan(TINY)[1].rows)
    for row in report["rows"]:
        reason = row["note"].removeprefix("not measured").strip(": ")
        assert (row["value"] is not None) or reason, row
    measured = {row["name"] for row in report["rows"] if row["value"] is not None}
    assert {"gate/step/bf16/all/gradients", "time/bf16/4/masked/torch", "loader/copy"} <= measured
    assert {"syncs/eager", "capacity/16 GB/ratio"}.isdisjoint(measured)
    # The table comes last, and shows the file.
    assert table(report) in result.stdout
    assert all(len(line) <= 100 for line in table(report).splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_the_script_prints_one_line(tmp_path: Path) -> None:
    result = run(cwd=tmp_path, OUT=str(tmp_path / "out"))
    assert result.returncode == 2 and result.stdout == ""
    assert [line for line in result.stderr.splitlines() if "no GPU here" in line]
    assert not (tmp_path / "out").exists()


def test_empty_report_says_not_measured_in_every_row(tmp_path: Path) -> None:
    result = run("--table", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.count("not measured") == len(plan(Sizes())[1].rows)
    assert run("--table", str(tmp_path / "none.json"), cwd=tmp_path).returncode == 2


def test_sections_have_different_names_and_rows() -> None:
    sections, report = plan(Sizes())
    names = [row.name for section in sections for row in section.rows]
    assert len({section.name for section in sections}) == len(sections)
    assert len(set(names)) == len(names)
    assert set(report.rows) - set(names) == {n for n in report.rows if n.startswith("target/")}
    for section in sections:
        assert not section.gate or any(name.startswith(section.gate) for name in names)
    assert {name: p.tolerances for name, p in PRECISIONS.items()} == STEP_TOLERANCES


def test_wrong_head_fails_its_gate() -> None:
    right = partial(vocabulary_losses, backend="torch")

    def wrong(*arguments: Any) -> tuple[Tensor, Tensor]:
        loss, sums = right(*arguments)
        return loss + 0.03 * (loss - loss.detach()), sums  # 3 % too much gradient, the same loss

    report = Report([Row("gate/head/right", at_most=2e-2), Row("gate/head/wrong", at_most=2e-2)])
    for name, head in (("right", right), ("wrong", wrong)):
        report.put(f"gate/head/{name}", head_error(head, torch.bfloat16, CPU, TINY))
    assert report.failures == ["gate/head/wrong"]
    assert head_error(right, torch.float32, CPU, TINY) < 1e-5
    assert abs(head_error(wrong, torch.float32, CPU, TINY) - 0.03) < 1e-4


def test_attention_across_documents_fails_its_gate() -> None:
    def mixing(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *settings: Any) -> Tensor:
        rows = torch.arange(len(q) + 1, dtype=cu.dtype) * q.shape[2]
        return masked(q, k, v, rows, *settings)

    sizes = replace(TINY, width=128, length=24)
    assert attention_error(masked, torch.float32, CPU, sizes) < 1e-5
    assert attention_error(mixing, torch.float32, CPU, sizes) > 0.1


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("start", [1, 8, 300])
def test_search_finds_the_largest_number_that_fits(limit: int, start: int) -> None:
    fits = Mock(side_effect=lambda rows: rows <= limit)
    found = largest(fits, start)
    assert limit - max(0, limit // 32) <= found <= limit
    assert fits.call_count <= 2 + 2 * math.log2(max(limit, start, 2))


SECTION_PROCESS = r"""
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("--section", "--answers"):
    parser.add_argument(name)
parser.add_argument("--heads", nargs="*")
options = parser.parse_args()
print("noise")
file = open(options.answers, "w", buffering=1)
def answer(**line):
    print(json.dumps(line), file=file)
def put(name, value, note="", **detail):
    answer(row=[name, value, note, False, detail])
if options.section == "fine":
    answer(facts={"a": "fact"})
    for name in ("torch", "compiled"):
        put(f"gate/head/{name}/fp32", float(name == "compiled"))
elif options.section == "dies":
    put("dies/first", 1.0)
    file.write('{"row": ["dies/sec')
    file.flush()
    os.kill(os.getpid(), 9)
elif options.section == "hangs":
    time.sleep(1000)
elif options.section == "errs":
    put("errs", None, "a reason")
    answer(error="RuntimeError: what went wrong")
elif options.section == "NaN":
    put("NaN", float("nan"))
else:
    put(options.section, 1.0, heads=options.heads)
"""


def test_section_that_dies_or_hangs_fails_alone(tmp_path: Path) -> None:
    script = tmp_path / "section.py"
    script.write_text(SECTION_PROCESS, encoding="utf-8")
    gates = ["gate/head/torch/fp32", "gate/head/compiled/fp32"]
    sections = [
        Section("fine", [Row(name, at_most=0.5) for name in gates], 0, 100),
        Section("dies", [Row("dies/first"), Row("dies/second")], 0, 100),
        Section("hangs", [Row("hangs")], 0, 0.3),
        Section("errs", [Row("errs"), Row("errs/more")], 0, 100),
        Section("NaN", [Row("NaN")], 0, 100),
        Section("again", [Row("again")], 0, 100, needs="GPU", gate="gate/head/torch/"),
        Section("gated", [Row("gated")], 0, 100, gate="gate/head/compiled/"),
        Section("compiles", [Row("compiles")], 0, 100, needs="compiler"),
        Section("late", [Row("late")], 1000, 100),
    ]
    report = Report((row for section in sections for row in section.rows), tmp_path / "report.json")
    command, deadline = [sys.executable, str(script)], time.monotonic() + 600
    measure(report, sections, command, deadline, {"compiler": "no compiler"})
    found = read(tmp_path / "report.json")
    rows = {row["name"]: row for row in found["rows"]}
    assert found["a"] == "fact" and rows["dies/first"]["value"] == 1
    assert {name: row["note"].removeprefix("not measured: ") for name, row in rows.items()} == {
        **dict.fromkeys([*gates, "dies/first", "again"], ""),
        "dies/second": "its process died: signal 9",
        "hangs": "not done within 0 s",
        "errs": "a reason",
        "errs/more": "RuntimeError: what went wrong",
        "NaN": "nan",
        "gated": "its gate FAILED",
        "compiles": "no compiler",
        "late": "no time",
    }
    assert report.failures == [gates[1], "dies/second", "hangs", "errs/more", "NaN"]
    assert rows["NaN"]["value"] is None
    assert rows["again"]["detail"] == {"heads": ["torch"]}
    assert set(found["seconds"]) == {"fine", "dies", "hangs", "errs", "NaN", "again"}


def test_targets_follow_the_fastest_variant() -> None:
    report = plan(Sizes())[1]
    detail = {"peak_gb": 6.0, "mfu_pct": 45.0}
    report.put("time/bf16/64/all/torch", 90.0, ratio=1.5, **detail | {"peak_gb": 5.0})
    report.put("time/bf16/64/all/triton", 60.0, ratio=2.5, **detail)
    conclude(report, Sizes())
    verdicts = {name: row.verdict for name, row in report.rows.items() if "target/" in name}
    assert verdicts == {
        "target/ratio, KL at all": "met",
        "target/ratio, KL at masked": "",
        "target/peak, KL at all": "met",
        "target/MFU, KL at all": "met",
    }
    assert report.rows["target/peak, KL at all"].value == 6.0
    assert "2.5" in table(json.loads(json.dumps(report.as_json())))

"""The script that measures on a GPU, rehearsed without one; and what it does when things fail."""

import json
import math
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor

from benchmarks.gpu import capacity, heads, plan
from benchmarks.gpu.attention import AttentionSizes, attention_error
from benchmarks.gpu.heads import HeadSizes, head_error
from benchmarks.gpu.report import Report, Row, read, table
from benchmarks.gpu.supervise import Section, Supervisor
from pretrain.bench import measure
from pretrain.bench.sizes import TINY, Sizes
from pretrain.kernels.attention.backends import masked
from pretrain.kernels.head import Projection
from pretrain.objectives.terms import VocabularyTerm

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
HEAD = HeadSizes(N=40, M=9, D=16, V=97)


@pytest.fixture(scope="module")
def few_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch, transformers, accelerate and what they need."""
    folder = tmp_path_factory.mktemp("few")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # The last three are only for the others' command lines and checks.
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
    return subprocess.run(
        [ROOT / "benchmarks" / "on_gpu.sh", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=660,
    )


@pytest.mark.slow
def test_a_rehearsal_fills_in_every_row_with_only_the_few_packages(
    tmp_path: Path, few_packages: Path
) -> None:
    for name in ("pydantic", "pyarrow", "datasets", "typer", "rich"):
        found = subprocess.run([few_packages, "-c", f"import {name}"], capture_output=True)
        assert found.returncode == 1, name
    environment = {"OUT": str(tmp_path / "out"), "COMMIT": "abc", "PYTHON": str(few_packages)}
    result = run("--rehearse", "--minutes", "9", cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "out").iterdir()
    report = read(file)
    assert report["rehearsal"] is True and report["commit"] == "abc"
    assert report["versions"]["torch"] == torch.__version__
    assert [row["name"] for row in report["rows"]] == [row.name for row in plan.rows(TINY)]
    for row in report["rows"]:
        reason = row["note"].removeprefix("not measured").strip(": ")
        assert (row["value"] is not None) or reason, row
    measured = {row["name"] for row in report["rows"] if row["value"] is not None}
    assert {"gate/step/bf16/all/gradients", "time/bf16/4/masked/torch", "loader/copy"} <= measured
    assert {"syncs/eager", "capacity/16 GB/ratio"}.isdisjoint(measured)
    # The table comes last, and is the file's.
    assert table(report) in result.stdout
    assert all(len(line) <= 100 for line in table(report).splitlines())


def test_without_a_gpu_there_is_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run(cwd=tmp_path, OUT=str(tmp_path / "out"))
    assert result.returncode == 2 and result.stdout == ""
    assert [line for line in result.stderr.splitlines() if "no GPU here" in line]
    assert not (tmp_path / "out").exists()


def test_an_empty_report_says_not_measured_everywhere(tmp_path: Path) -> None:
    result = run("--table", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.count("not measured") == len(plan.rows(Sizes()))
    assert run("--table", str(tmp_path / "none.json"), cwd=tmp_path).returncode == 2


def test_every_row_has_its_section() -> None:
    names = [name for section in plan.sections(Sizes()) for name in section.rows]
    assert len(set(names)) == len(names)
    rest = {row.name for row in plan.rows(Sizes())} - set(names)
    assert rest == {row.name for row in plan.rows(Sizes()) if row.name.startswith("target/")}
    assert plan.STEP_TOLERANCES == measure.TOLERANCES


def test_a_wrong_head_fails_its_gate() -> None:
    right = heads.with_backend("torch")

    def wrong(
        student: Projection,
        teacher: Projection,
        labels: Tensor,
        terms: Sequence[VocabularyTerm],
        c: Tensor,
    ) -> tuple[Tensor, Tensor]:
        loss, sums = right(student, teacher, labels, terms, c)
        return loss + 0.03 * (loss - loss.detach()), sums  # 3 % too much gradient, the same loss

    report = Report([Row("gate/head/right", at_most=2e-2), Row("gate/head/wrong", at_most=2e-2)])
    for name, head in (("right", right), ("wrong", wrong)):
        report.put(f"gate/head/{name}", head_error(head, torch.bfloat16, CPU, HEAD))
    assert report.failures == ["gate/head/wrong"]
    assert head_error(right, torch.float32, CPU, HEAD) < 1e-5
    assert abs(head_error(wrong, torch.float32, CPU, HEAD) - 0.03) < 1e-4


def test_attention_that_ignores_documents_fails_its_gate() -> None:
    def mixing(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, dropout: float, scale: float) -> Tensor:
        rows = torch.arange(len(q) + 1, dtype=cu.dtype) * q.shape[2]
        return masked(q, k, v, rows, dropout, scale)

    sizes = AttentionSizes(H=2, L=24)
    assert attention_error(masked, torch.float32, CPU, sizes) < 1e-5
    assert attention_error(mixing, torch.float32, CPU, sizes) > 0.1


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("start", [1, 8, 300])
def test_the_largest_that_fits_is_found(limit: int, start: int) -> None:
    asked: list[int] = []

    def fits(rows: int) -> bool:
        asked.append(rows)
        return rows <= limit

    found = capacity.largest(fits, start)
    assert limit - max(0, limit // 32) <= found <= limit
    assert len(asked) <= 2 + 2 * math.log2(max(limit, start, 2))


WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.gpu.supervise import Answer, work

def fine(failed):
    print("noise")
    yield Answer("fine", 1.0, detail={{"pid": os.getpid(), "told": failed}})
def dies(failed):
    yield Answer("dies/first", 1.0)
    os.kill(os.getpid(), 9)
def hangs(failed):
    time.sleep(1000)
    yield Answer("hangs", 1.0)
def errs(failed):
    yield Answer("errs", None, "a reason")
    raise RuntimeError("what went wrong")
def sick(failed):
    yield Answer("sick", float("nan"))
    well.append(False)

well = []
sections = dict(fine=fine, dies=dies, hangs=hangs, errs=errs, sick=sick, again=lambda failed: (
    Answer("again", 1.0, detail={{"pid": os.getpid(), "told": failed}}),))
work({{"a": "fact"}}, sections, lambda: not well)
"""


def test_a_section_that_dies_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(root=str(ROOT)), encoding="utf-8")
    names = ["fine", "dies/first", "dies/second", "hangs", "errs", "errs/more", "sick", "again"]
    report = Report([Row(name) for name in (*names, "late")], tmp_path / "report.json")
    sections = [
        Section("fine", ["fine"], 0, 100),
        Section("dies", ["dies/first", "dies/second"], 0, 100),
        Section("hangs", ["hangs"], 0, 0.3),
        Section("errs", ["errs", "errs/more"], 0, 100),
        Section("sick", ["sick"], 0, 100),
        Section("again", ["again"], 0, 100),
        Section("late", ["late"], 1000, 100),
    ]
    supervisor = Supervisor(report, [sys.executable, str(script)], time.monotonic() + 600)
    supervisor.run(sections)
    supervisor.close()
    rows = {row["name"]: row for row in read(tmp_path / "report.json")["rows"]}
    assert rows["fine"]["value"] == 1 and report.facts["a"] == "fact"
    assert rows["dies/first"]["value"] == 1
    assert rows["dies/second"]["note"] == "not measured: its process died: signal 9"
    assert rows["hangs"]["note"] == "not measured: no answer within 0 s"
    assert rows["errs"]["note"] == "not measured: a reason" and not rows["errs"]["failed"]
    assert rows["errs/more"]["note"] == "not measured: RuntimeError: what went wrong"
    assert rows["sick"]["value"] is None and rows["sick"]["note"] == "nan"
    assert rows["late"]["note"] == "not measured: no time" and not rows["late"]["failed"]
    failed = ["dies/second", "hangs", "errs/more", "sick"]
    assert rows["again"]["detail"]["told"] == failed == report.failures
    assert rows["again"]["detail"]["pid"] != rows["fine"]["detail"]["pid"]


def test_targets_follow_the_fastest_variant() -> None:
    report = Report(plan.rows(Sizes()))
    detail = {"peak_gb": 6.0, "mfu_pct": 45.0}
    report.put("time/bf16/64/all/torch", 90.0, ratio=1.5, **detail | {"peak_gb": 5.0})
    report.put("time/bf16/64/all/triton", 60.0, ratio=2.5, **detail)
    plan.conclude(report, Sizes())
    verdicts = {name: row.verdict for name, row in report.rows.items() if "target/" in name}
    assert verdicts == {
        "target/ratio, KL at all": "met",
        "target/ratio, KL at masked": "",
        "target/peak, KL at all": "met",
        "target/MFU, KL at all": "met",
    }
    assert report.rows["target/peak, KL at all"].value == 6.0
    assert "2.5" in table(json.loads(json.dumps(report.as_json())))

"""Measure every figure that needs a GPU, in one run of less than ten minutes.

    benchmarks/on_gpu.sh [--minutes 9] [--rehearse]      measure
    benchmarks/on_gpu.sh --table [FILE]                  show a report, or an empty one

The script checks first that every kernel and the whole step compute what they should (the rows
`gate/`), and times them afterwards. It writes a JSON file after every section and prints a table at
the end. A row without a figure says why. `--rehearse` runs everything with tiny models on the CPU,
in about a minute, to show that it works. The figures of a rehearsal mean nothing.

Each section runs in a process of its own with a time limit, because a kernel that fails leaves its
process without a GPU and a compilation may hang. This process never uses the GPU.

Exit codes: 0 all was right; 1 something FAILED; 2 there is no GPU, or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.on_gpu_report import Report, Row, read, table
from pretrain.bench.sizes import TINY, Sizes

RESULTS = Path(__file__).parent / "results"

PRECISIONS = ("fp32", "bf16", "fp16")
KL = ("all", "masked")
HEADS = ("torch", "compiled", "triton")  # the last one should be the fastest
CAPS = (16, 32, 80)  # GB
ATTENTION = ("masked", "memory_efficient", "flash")  # of `pretrain.kernels.attention.dispatch`
STEP_TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, 2e-2), "fp16": (2e-2, 2e-2)}
HEAD_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
# In fp32 the kernels compute a product as three products in tf32.
ATTENTION_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}


class Section(NamedTuple):
    """Hold the rows that one process measures."""

    name: str
    rows: Sequence[Row]
    least: float  # seconds; the section is left out when less time is left
    most: float  # seconds; the process is killed after these
    needs: str = ""  # "GPU" or "compiler"
    gate: str = ""  # nothing is measured if a row whose name begins with this FAILED


def plan(sizes: Sizes, *, bounded: bool = True) -> tuple[list[Section], Report]:
    """Return the sections, the most important first, and a report with all rows empty.

    Sections that do not fit in the time are left out from the end. Without `bounded` only gates
    have bounds.
    """

    def gate(name: str, tolerance: float) -> Row:
        return Row(f"gate/{name}", "relative error", at_most=tolerance)

    def step_gates(step: str, precisions: Iterable[str]) -> list[Row]:
        rows = []
        for precision, kl in product(precisions, KL):
            losses, gradients = STEP_TOLERANCES[precision]
            rows.append(gate(f"{step}/{precision}/{kl}/losses", losses))
            rows.append(gate(f"{step}/{precision}/{kl}/gradients", gradients))
        return rows

    def times(
        precision: str, num_rows: int, names: Iterable[str], kls: Iterable[str] = KL
    ) -> list[Row]:
        folder = f"time/{precision}/{num_rows}"
        return [Row(f"{folder}/{kl}/{name}", "ms") for kl in kls for name in names]

    def capacity(cap: int) -> Section:
        # With checkpointing the search takes long at large caps.
        names = ("usual", "ours", "ours, checkpointing") if cap == CAPS[0] else ("usual", "ours")
        rows = [Row(f"capacity/{cap} GB/{name}", "rows") for name in names]
        rows += [Row(f"capacity/{cap} GB/ratio", "times", at_least=6 if cap == 16 else None)]
        return Section(f"capacity {cap}", rows, 25, 95, needs="GPU")

    trunks, steps = "compiled trunks", ("usual", *HEADS)
    needs = {"torch": "", "compiled": "compiler", "triton": "GPU"}
    heads = []
    for head in HEADS:
        gates = [gate(f"head/{head}/{name}", HEAD_TOLERANCES[name]) for name in PRECISIONS]
        heads.append(Section(f"head {head}", gates, 15, 95, needs[head]))
    machine = [Row("ceiling/bf16 product", "TFLOP/s"), Row("ceiling/copy", "GB/s")]
    machine += [Row("loader/copy", "ms"), Row("loader/masking on host", "M tokens/s")]
    attention = [
        gate(f"attention/{name}/{precision}", ATTENTION_TOLERANCES[precision])
        for name, precision in product(ATTENTION, PRECISIONS)
    ]
    step = [*step_gates("step", PRECISIONS), Row("syncs/eager", "waits", at_most=0)]
    compiled = [Row("compile/trunks", "s"), Row(f"syncs/{trunks}", "waits", at_most=0)]
    compiled += times("bf16", sizes.rows, [trunks])
    fewer = [row for n in sizes.fewer_rows for row in times("bf16", n, steps, ["all"])]
    bf16, fp16 = "gate/step/bf16/", "gate/step/fp16/"
    targets = [
        Row("target/ratio, KL at all", "times", at_least=2.2),
        Row("target/ratio, KL at masked", "times", at_least=3.0),
        Row("target/peak, KL at all", "GB", at_most=8.0),
        Row("target/MFU, KL at all", "%", at_least=40.0),
    ]
    sections = [
        Section("machine", machine, 10, 120),
        *heads,
        Section("attention", attention, 15, 65),
        Section("step", step, 20, 90),
        Section("time bf16", times("bf16", sizes.rows, steps), 20, 95, gate=bf16),
        capacity(CAPS[0]),
        Section("compiled step", step_gates(f"step, {trunks}", ["bf16"]), 35, 125, "compiler"),
        Section(trunks, compiled, 65, 245, "compiler", f"gate/step, {trunks}/"),
        Section("checkpointing", times("bf16", sizes.rows, ["checkpointing"]), 15, 65, gate=bf16),
        Section("time fp16", times("fp16", sizes.rows, steps), 20, 65, gate=fp16),
        *map(capacity, CAPS[1:]),
        Section("fewer rows", fewer, 15, 80, gate=bf16),
        Section("deterministic", [Row("deterministic/step", "times")], 30, 65),
    ]
    report = Report([*(row for section in sections for row in section.rows), *targets])
    for row in report.rows.values():
        if not bounded and not row.name.startswith("gate/"):
            row.at_least = row.at_most = None
    return sections, report


def measure(
    report: Report,
    sections: Sequence[Section],
    command: Sequence[str],
    deadline: float,
    missing: Mapping[str, str],
) -> None:
    """Run each section in a process, and note the reason for every row without a figure.

    Args:
        report: takes the rows.
        sections: run in this order.
        command: measures a section; see `benchmarks.on_gpu_sections.main`.
        deadline: on the monotonic clock.
        missing: a reason for each of `Section.needs` that is not there.
    """
    for section in sections:
        began = time.monotonic()
        left = deadline - began
        if section.needs in missing:
            report.give_up(section.rows, missing[section.needs])
        elif section.gate and "FAILED" in report.verdicts(section.gate):
            report.give_up(section.rows, "its gate FAILED")
        elif left < section.least:
            report.give_up(section.rows, "no time")
        else:
            heads = [head for head in HEADS if report.verdicts(f"gate/head/{head}/") == {"ok"}]
            with tempfile.TemporaryDirectory() as folder:
                answers = Path(folder) / "answers"
                answers.touch()
                arguments = ["--section", section.name, "--answers", str(answers)]
                arguments += ["--heads", *heads]
                error, limit = "", min(section.most, left)
                process = subprocess.Popen(
                    [*command, *arguments],
                    stdout=2,  # standard output has the table alone
                    start_new_session=True,  # compilers are processes that must end with this one
                )
                try:
                    if code := process.wait(limit):
                        what = f"signal {-code}" if code < 0 else f"exit code {code}"
                        error = f"its process died: {what}"
                except subprocess.TimeoutExpired:
                    error = f"not done within {limit:.0f} s"
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                for line in answers.read_text(encoding="utf-8").splitlines(keepends=True):
                    answer = json.loads(line) if line.endswith("\n") else {}  # killed in a line
                    report.facts |= answer.get("facts", {})
                    error = answer.get("error", error)
                    if "row" in answer:
                        name, value, note, failed, detail = answer["row"]
                        report.put(name, value, note, failed, **detail)
            took = round(time.monotonic() - began, 1)
            print(f"{section.name}: {took} s{f', {error}' if error else ''}", file=sys.stderr)
            report.facts.setdefault("seconds", {})[section.name] = took
            if error and time.monotonic() >= deadline:
                report.give_up(section.rows, "no time")
            else:
                report.give_up(section.rows, error or "no figure", failed=True)
        report.write()


def conclude(report: Report, sizes: Sizes) -> None:
    """Fill in the targets from our fastest variant."""
    for kl in KL:
        folder = f"time/bf16/{sizes.rows}/{kl}/"
        rows = (row for name, row in report.rows.items() if name.startswith(folder))
        ours = [row for row in rows if row.value is not None and "ratio" in row.detail]
        best = max(ours, key=lambda row: float(row.detail["ratio"]), default=None)
        for what, key in (("ratio", "ratio"), ("peak", "peak_gb"), ("MFU", "mfu_pct")):
            name = f"target/{what}, KL at {kl}"
            if name not in report.rows:
                continue
            if best is not None and key in best.detail:
                by = f"with {best.name.removeprefix(folder)}"
                report.put(name, float(best.detail[key]), by)
            else:
                report.give_up([report.rows[name]], "no GPU" if best else "no time row")


def main() -> int:
    """Measure all sections, or show a report."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/on_gpu.sh", description="Measure every figure that needs a GPU."
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="the time there is (9)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--compile", action="store_true", help="compile in a rehearsal, too")
    parser.add_argument("--out", type=Path, help="a folder for the report ($OUT by default)")
    parser.add_argument("--table", nargs="?", const="", metavar="FILE", help="show a report")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # these three are for its process
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--heads", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = TINY if options.rehearse else Sizes()
    if options.section:
        from benchmarks import on_gpu_sections  # imports torch, which this process does not need

        on_gpu_sections.main(options, sizes)
        return 0
    sections, report = plan(sizes, bounded=not options.rehearse)
    if options.table is not None:
        try:
            print(table(read(Path(options.table)) if options.table else report.as_json()))
        except (OSError, ValueError) as error:
            print(f"{options.table}: {error}", file=sys.stderr)
            return 2
        return 0

    began, now = time.monotonic(), datetime.now(timezone.utc)
    deadline = began + 60 * options.minutes
    report.facts = {"rehearsal": options.rehearse, "date": f"{now:%Y-%m-%d %H:%M} UTC"}
    command = [sys.executable, "-m", "benchmarks.on_gpu"]
    command += [flag for flag in ("--rehearse", "--compile") if getattr(options, flag[2:])]
    measure(report, sections[:1], command, deadline, {})
    if "hardware" not in report.facts:
        print("measuring did not start", file=sys.stderr)
        return 1
    gpu = report.facts["hardware"].get("gpu")
    if gpu is None and not options.rehearse:
        print("no GPU here; --rehearse runs it all on the CPU, tiny", file=sys.stderr)
        return 2
    missing = {}
    if gpu is None or options.rehearse:
        missing["GPU"] = "no GPU"
        if not options.compile:
            missing["compiler"] = "the compiler was left out"
    folder = options.out or os.environ.get("OUT")
    if folder is None:
        folder = tempfile.mkdtemp(prefix="rehearsal-") if options.rehearse else RESULTS
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
    report.file = Path(folder) / f"{name}-{now:%Y%m%d-%H%M}.json"
    measure(report, sections[1:], command, deadline, missing)
    conclude(report, sizes)
    report.facts["minutes"] = round((time.monotonic() - began) / 60, 2)
    report.write()
    print(table(report.as_json()))
    print(f"\n{report.file}")
    for name in report.failures:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

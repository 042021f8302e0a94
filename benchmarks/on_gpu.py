"""Every figure that needs a GPU, in one run of less than ten minutes: see `on_gpu.sh`.

    python -m benchmarks.on_gpu [--minutes 9] [--rehearse]      measure
    python -m benchmarks.on_gpu --table [FILE]                  show a report, or an empty one

First whether everything computes what it should, then how fast. The report is a JSON file, written
anew after every row, and a table at the end; rows without a figure say why. `--rehearse` runs it
all with tiny models on the CPU, in less than a minute, to see that it works: its figures mean
nothing.

Exit codes: 0 all was right; 1 something FAILED; 2 there is no GPU, or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.gpu import plan
from benchmarks.gpu.report import Report, read, slug, table
from benchmarks.gpu.supervise import Supervisor, work
from pretrain.bench.sizes import TINY, Sizes

_RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Read the arguments, and do what they say."""
    options = _arguments()
    if options.table is not None:
        return _show(options.table)
    sizes = TINY if options.rehearse else Sizes()
    if options.worker:
        return _work(sizes, options)
    return _measure(sizes, options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/on_gpu.sh", description="Measure every figure that needs a GPU."
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="the time there is (9)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--compile", action="store_true", help="compile in a rehearsal, too")
    parser.add_argument("--out", type=Path, help="a folder for the report ($OUT by default)")
    parser.add_argument("--table", nargs="?", const="", metavar="FILE", help="show a report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _show(file: str) -> int:
    if not file:
        report = Report(plan.rows(Sizes()))
        print(table(report.as_json()))
        return 0
    try:
        print(table(read(Path(file))))
    except (OSError, ValueError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(sizes: Sizes, options: argparse.Namespace) -> int:
    began = time.monotonic()
    report = Report(plan.rows(sizes, targets=not options.rehearse))
    now = datetime.now(timezone.utc)
    report.facts = {"rehearsal": options.rehearse, "date": f"{now:%Y-%m-%d %H:%M} UTC"}
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--worker"]
    command += [flag for flag in ("--rehearse", "--compile") if getattr(options, flag[2:])]
    supervisor = Supervisor(report, command, began + 60 * options.minutes)
    try:
        if error := supervisor.start():
            print(f"measuring did not start: {error}", file=sys.stderr)
            return 1
        gpu = report.facts["hardware"].get("gpu")
        if gpu is None and not options.rehearse:
            print("no GPU here; --rehearse runs it all on the CPU, tiny", file=sys.stderr)
            return 2
        folder = options.out or Path(os.environ.get("OUT") or _folder(options.rehearse))
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{slug(gpu or 'rehearsal')}-{now:%Y%m%d-%H%M}"
        report.file = folder / f"{name}.json"
        supervisor.run(plan.sections(sizes))
    finally:
        supervisor.close()
    plan.conclude(report, sizes)
    report.facts["minutes"] = round((time.monotonic() - began) / 60, 2)
    report.write()
    print(table(report.as_json()))
    print(f"\n{report.file}")
    for name in report.failures:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if report.failures else 0


def _folder(rehearsal: bool) -> str:
    return tempfile.mkdtemp(prefix="rehearsal-") if rehearsal else str(_RESULTS)


def _work(sizes: Sizes, options: argparse.Namespace) -> int:
    import torch  # only here: who waits for the figures has no need of it

    from benchmarks.gpu.machine import machine
    from benchmarks.gpu.sections import Measurements

    if options.rehearse:
        torch.set_num_threads(1)  # tiny matrices: threads only wait for one another
    gpu = torch.cuda.is_available() and not options.rehearse
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    measurements = Measurements(sizes, device, compiles=gpu or options.compile)
    work(machine(device), measurements.sections(), measurements.is_well)
    return 0


if __name__ == "__main__":
    sys.exit(main())

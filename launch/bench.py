"""`distil bench`: what is measured, in which order, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from launch.console.tables import print_table, show
from pretrain import RunError
from pretrain.bench import cells, environment
from pretrain.bench.cost import flops_per_token, peak_flops
from pretrain.bench.sizes import Sizes
from pretrain.data.batch import MicroBatch
from pretrain.device.precision import allow_tf32
from pretrain.objectives.terms import Term

SCHEMA = 1
PRECISIONS = ("fp32", "bf16", "fp16")
# Of the peak, our step reaches about this much, the usual one a half of that: for an estimate.
_REACHED = {"cpu": 0.6, "cuda": 0.4}


@dataclass(frozen=True)
class Subject:
    """Models and rows, drawn or those of a config."""

    what: str  # in a line
    pair: cells.Pair
    row_length: int
    terms: Callable[[str], Sequence[Term]]  # of "all" or "masked", where KL is over
    rows: Callable[[int], MicroBatch]  # that many, of one document each
    documents: Callable[[int], dict[str, dict[str, MicroBatch]]]  # by layout, see `cells.documents`


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    precisions: Sequence[str]
    kl: Sequence[str]
    micro_batches: Sequence[int]
    repeats: int
    documents: bool
    compiled: bool


def check(settings: Settings, device: torch.device) -> None:
    """Refuse what cannot be measured.

    Raises:
        RunError: with the option and the fix.
    """
    for precision in settings.precisions:
        if precision not in PRECISIONS:
            raise RunError(f"--precision {precision}: there are {', '.join(PRECISIONS)}")
        if precision == "fp16" and device.type == "cpu":
            raise RunError("--precision fp16: needs a GPU; on a CPU use bf16 or fp32")
    for positions in settings.kl:
        if positions not in ("all", "masked"):
            raise RunError(f"--kl {positions}: there are all and masked")
    for size in settings.micro_batches:
        if size < 1:
            raise RunError(f"--micro-batch {size}: give 1 or more")


def sizes_of(layers: int, width: int, row_length: int) -> Sizes:
    """Of synthetic models.

    Raises:
        RunError: the width does not divide into heads.
    """
    if layers % 2:
        raise RunError(f"--layers {layers}: the student has half as many; give an even number")
    heads = max(1, width // 64)
    if width % heads:
        raise RunError(f"--width {width}: {heads} heads do not divide it; take a multiple of 64")
    return Sizes(layers=layers, width=width, length=row_length)


def bench(subject: Subject, settings: Settings, file: Path | None) -> None:
    """Measure, show a table, and write `file`.

    Raises:
        NumericalError: the two steps do not compute the same.
        OSError: `file` cannot be written; found out before anything is measured.
    """
    device = subject.pair.device
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "what": subject.what,
        "hardware": environment.hardware(device),
        "versions": environment.versions(),
        "commit": environment.commit(),
        "row_length": subject.row_length,
        "repeats": settings.repeats,
        "compiled": subject.pair.compiled,
        "peak_flops": {p: peak_flops(device, p) for p in settings.precisions},
        "agreement": [],
        "rows": [],
        "documents": [],
    }
    _introduce(report, subject, settings)
    for precision, positions in product(settings.precisions, settings.kl):
        report["agreement"].append(_agreement(subject, precision, positions, settings))
    allow_tf32(device)  # as a run in fp32 does; only now, since rounding would hide an error
    for precision, positions, size in _cells(settings):
        name = {"precision": precision, "kl": positions, "micro_batch": size}
        show([f"measuring {precision}, KL over {positions}, {size} rows"])
        terms = subject.terms(positions)
        batch = subject.rows(size)
        found = cells.rows(subject.pair, terms, batch, precision, settings.repeats)
        report["rows"].append({**name, **found})
        for layout, batches in (subject.documents(size) if settings.documents else {}).items():
            found = cells.documents(subject.pair, terms, batches, precision, settings.repeats)
            report["documents"].append({**name, "layout": layout, **found})
    for precision, before in report["peak_flops"].items():  # again, should the first be disturbed
        report["peak_flops"][precision] = max(before, peak_flops(device, precision))
    for cell in report["rows"]:
        for step in cell["steps"].values():
            share = step.get("flops", 0.0) / report["peak_flops"][cell["precision"]]
            step["mfu"] = share if 0 < share <= 1 else None
    _rows_table(report["rows"], report["peak_flops"])
    if settings.documents:
        _documents_table(report["documents"])
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        show([f"written: {file}"])


def _cells(settings: Settings) -> Iterator[tuple[str, str, int]]:
    return product(settings.precisions, settings.kl, settings.micro_batches)


def _introduce(report: dict[str, Any], subject: Subject, settings: Settings) -> None:
    hardware, versions = report["hardware"], report["versions"]
    where = hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} thread(s)"
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    show(
        [
            f"{where}; {known}; commit {report['commit'] or 'unknown'}",
            subject.what,
            f"our step and the usual one in turn, {settings.repeats} time(s) each after one that "
            f"warms up: forward and backward with dropout, the median counts; "
            f"{_duration(_seconds(report, subject, settings))}",
        ]
    )


def _seconds(report: dict[str, Any], subject: Subject, settings: Settings) -> float:
    """Return a rough estimate from the cost model."""
    pair, total = subject.pair, 0.0
    work = flops_per_token(pair.student, pair.usual_teacher, subject.row_length, 1.0)
    rounds = settings.repeats + 3  # memory, a trunk alone, warming up
    for precision, _, size in _cells(settings):
        speed = _REACHED.get(pair.device.type, 0.4) * report["peak_flops"][precision]
        steps = 3.0 + (2 * 5.0 if settings.documents else 0.0)  # the usual one takes twice ours
        total += steps * rounds * size * subject.row_length * work / speed
    return total


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min on an idle machine"


def _agreement(
    subject: Subject, precision: str, positions: str, settings: Settings
) -> dict[str, Any]:
    size = min(settings.micro_batches)
    found = cells.agreement(subject.pair, subject.terms(positions), subject.rows(size), precision)
    name = {"precision": precision, "kl": positions, "micro_batch": size}
    if "error" in found:
        show([f"{precision}, KL over {positions}: {found['error']} before the two were compared"])
    else:
        show(
            [
                f"the same function in {precision}, KL over {positions}: terms within "
                f"{found['term']:.0e}, gradients within {found['gradient']:.0e}"
            ]
        )
    return {**name, **found}


def _rows_table(found: Sequence[dict[str, Any]], peaks: dict[str, float]) -> None:
    lines = []
    for cell in found:
        for name, step in cell["steps"].items():
            title = f"{cell['precision']} {cell['kl']} {cell['micro_batch']}"
            if "error" in step:
                lines.append([title, name, "-", step["error"], "-", "-", "-", "-"])
                continue
            gain = f"{cell['ratio']:.2f}" if cell["ratio"] and name == "ours" else ""
            lines.append(
                [
                    title,
                    name,
                    _number(step["milliseconds"]),
                    f"{step['tokens_per_second']:,.0f}",
                    _number(step["peak_bytes"] / 1e6),
                    _number(step["above_trunk_bytes"] / 1e6),
                    f"{step['mfu']:.0%}" if step["mfu"] else "-",
                    gain,
                ]
            )
    print_table(("precision KL rows", "step", "ms", "tokens/s", "MB", "above", "MFU", "x"), lines)
    show(
        [
            "ms: the median. MB: the most at a time, weights and gradients included, no optimizer "
            "state; above: of it, above the trunks. x: so many times as long the usual step takes, "
            "the median of pairs timed one after the other; small models and rows gain nothing",
            "MFU: the share that goes into the loss of what matrix products reached here in this "
            "run, " + ", ".join(f"{peak / 1e9:.1f} GFLOP/s ({p})" for p, peak in peaks.items()),
        ]
    )


def _documents_table(found: Sequence[dict[str, Any]]) -> None:
    lines = []
    for cell in found:
        title = f"{cell['precision']} {cell['kl']} {cell['micro_batch']} {cell['layout']}"
        for name in cell["steps"]:
            step, against = cell["steps"][name], cell.get(f"against {name}")
            lines.append(
                [
                    title,
                    name,
                    f"{cell['fills'][name.split()[1]]:.2f}",
                    f"{step['tokens_per_second']:,.0f}" if "error" not in step else step["error"],
                    f"{against['ratio']:.2f}" if against else "",
                    f"{against['kept']:.2f}" if against else "",
                ]
            )
    print_table(("precision KL rows layout", "step", "fill", "tokens/s", "x", "kept"), lines)
    show(
        [
            "x: packed rows make so many times the real tokens/s of this line; kept: that, divided "
            "by what the fills promise"
        ]
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

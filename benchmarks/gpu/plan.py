"""Every row that there is, the sections that measure them, and in what order.

The order is that of importance: what does not fit in the time is left out from the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.supervise import Section
from pretrain.bench.sizes import Sizes

PRECISIONS = ("fp32", "bf16", "fp16")
HALF = ("bf16", "fp16")
KL = ("all", "masked")
HEADS = ("torch", "compiled", "triton")
MORE = ("compiled trunks", "checkpointing")  # with the head that should be the fastest
CAPS = (16, 32, 80)
ATTENTION = ("masked", "memory_efficient", "flash")  # of `pretrain.kernels.attention.backends`
STEP_TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, 2e-2), "fp16": (2e-2, 2e-2)}
HEAD_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
# In fp32 the kernels put a product together from three in tf32.
ATTENTION_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
# What the deterministic algorithms of cuBLAS ask for; read when its library starts.
DETERMINISTIC = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),)


def rows(sizes: Sizes, *, targets: bool = True) -> list[Row]:
    """All rows, without figures; the bounds of gates, and with `targets` of the others, too."""
    found = [Row("ceiling/bf16 product", "TFLOP/s"), Row("ceiling/copy", "GB/s")]
    for head, precision in product(HEADS, PRECISIONS):
        found += [_gate(f"head/{head}/{precision}", HEAD_TOLERANCES[precision])]
    for backend, precision in product(ATTENTION, PRECISIONS):
        found += [_gate(f"attention/{backend}/{precision}", ATTENTION_TOLERANCES[precision])]
    for precision, kl in product(PRECISIONS, KL):
        found += _step_gate("step", precision, kl)
    for kl in KL:
        found += _step_gate("step, compiled trunks", "bf16", kl)
    found += [Row(f"syncs/{name}", "waits", at_most=0) for name in ("eager", "compiled trunks")]
    found += [Row("compile/trunks", "s")]
    for precision, kl in product(HALF, KL):
        names = ("usual", *HEADS, *(MORE if precision == "bf16" else ()))
        found += _times(f"time/{precision}/{sizes.rows}/{kl}", names)
    for num_rows in sizes.fewer_rows:
        found += _times(f"time/bf16/{num_rows}/all", ("usual", *HEADS))
    for cap in CAPS:
        found += [Row(f"capacity/{cap} GB/{what}", "rows") for what in capacities(cap)]
        found += [Row(f"capacity/{cap} GB/ratio", "times", at_least=6 if cap == 16 else None)]
    found += [Row("loader/copy", "ms")]
    found += [Row(f"loader/masking on {where}", "M tokens/s") for where in ("host", "device")]
    found += [Row("deterministic/step", "times")]
    found += [
        Row("target/ratio, KL at all", "times", at_least=2.2),
        Row("target/ratio, KL at masked", "times", at_least=3.0),
        Row("target/peak, KL at all", "GB", at_most=8.0),
        Row("target/MFU, KL at all", "%", at_least=40.0),
    ]
    for row in found:
        if not targets and not row.name.startswith("gate/"):
            row.at_least = row.at_most = None
    return found


def capacities(cap: int) -> tuple[str, ...]:
    """Whose largest micro-batch is looked for; with checkpointing it takes long at large caps."""
    return ("usual", "ours", "ours, checkpointing") if cap == CAPS[0] else ("usual", "ours")


def sections(sizes: Sizes) -> list[Section]:
    """In the order of importance."""
    names = [row.name for row in rows(sizes)]

    def section(name: str, prefixes: Iterable[str], least: float, most: float) -> Section:
        of_it = [row for row in names if row.startswith(tuple(prefixes))]
        assert of_it, name
        return Section(name, of_it, least, most)

    full = f"time/bf16/{sizes.rows}"
    eager = [f"{full}/{kl}/{what}" for kl in KL for what in ("usual", *HEADS)]
    trunks = [f"{full}/{kl}/compiled trunks" for kl in KL]
    caps = [section(f"capacity {cap}", [f"capacity/{cap} GB/"], 20, 90) for cap in CAPS]
    return [
        section("ceilings", ["ceiling/"], 5, 60),
        *(section(f"head {head}", [f"gate/head/{head}/"], 10, 90) for head in HEADS),
        section("attention", ["gate/attention/"], 10, 60),
        section("step", ["gate/step/"], 10, 60),
        section("syncs", ["syncs/eager"], 5, 40),
        Section("time bf16", eager, 15, 90),
        caps[0],
        section("compiled step", ["gate/step, compiled"], 30, 120),
        section("compiled trunks", ["syncs/compiled", "compile/", *trunks], 60, 240),
        section("checkpointing", [f"{full}/{kl}/checkpointing" for kl in KL], 10, 60),
        section("time fp16", [f"time/fp16/{sizes.rows}/"], 15, 60),
        *caps[1:],
        *(section(f"time {n}", [f"time/bf16/{n}/"], 10, 40) for n in sizes.fewer_rows),
        section("loader", ["loader/"], 5, 30),
        section("deterministic", ["deterministic/"], 25, 60)._replace(environment=DETERMINISTIC),
    ]


def conclude(report: Report, sizes: Sizes) -> None:
    """The targets, from the fastest of our variants."""
    for kl in KL:
        folder = f"time/bf16/{sizes.rows}/{kl}/"
        ours = [
            row
            for row in report.rows.values()
            if row.name.startswith(folder) and row.value is not None and "ratio" in row.detail
        ]
        if not ours:
            report.give_up([name for name in _targets(report) if name.endswith(kl)], "no time row")
            continue
        best = max(ours, key=lambda row: float(row.detail["ratio"]))
        by = best.name.removeprefix(folder)
        for what, key in (("ratio", "ratio"), ("peak", "peak_gb"), ("MFU", "mfu_pct")):
            name = f"target/{what}, KL at {kl}"
            if name in report.rows and key in best.detail:
                report.put(name, float(best.detail[key]), f"with {by}")
            elif name in report.rows:
                report.give_up([name], "no GPU")


def _targets(report: Report) -> Sequence[str]:
    return [name for name in report.rows if name.startswith("target/")]


def _gate(name: str, tolerance: float) -> Row:
    return Row(f"gate/{name}", "relative error", at_most=tolerance)


def _step_gate(step: str, precision: str, kl: str) -> list[Row]:
    term, gradient = STEP_TOLERANCES[precision]
    return [
        _gate(f"{step}/{precision}/{kl}/losses", term),
        _gate(f"{step}/{precision}/{kl}/gradients", gradient),
    ]


def _times(folder: str, names: Iterable[str]) -> list[Row]:
    return [Row(f"{folder}/{name}", "ms") for name in names]

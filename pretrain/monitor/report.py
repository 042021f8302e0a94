"""Tell how runs are doing, from the files that they write; no process of a run is asked.

Shown: alive or not, position, time left, losses, validation beside the teacher, the last checkpoint
and the last error; in HTML also curves and what differs between the configs.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.filesize import decimal
from safetensors import SafetensorError, safe_open

from data_prep.disk.json_files import parse_object
from data_prep.disk.locks import holder
from data_prep.messages import duration
from data_prep.shards import CorpusError, load_manifest
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.monitor.figures import RATES, with_columns
from pretrain.monitor.metrics import read_metrics
from pretrain.monitor.plot import line_plot
from pretrain.monitor.status import read_status
from pretrain.plan import num_steps
from pretrain.run_folder import MEASURED, flatten, recorded, sealed_state

# Entries of a line of metrics that are not the value of a term.
_NO_TERM = ("kind", "step", "grad_norm", "learning_rate", "epoch", "tokens", *RATES)
# Figures of evaluation that describe the rows, not the student.
_OF_ROWS = ("kind", "step", "tokens", "masked_tokens", "constant_accuracy", "unigram_loss")
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:1rem auto;padding:0 .75rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:left}"
    "svg{width:100%;height:auto}.plots{display:grid;gap:1rem;"
    "grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}h2{overflow-wrap:anywhere}.bad{color:#b91c1c}"
)


@dataclass(frozen=True)
class RunReport:
    """Hold what the files of a run say at one moment."""

    name: str
    config: RunConfig
    state: str  # "running (pid 7)", "finished", "interrupted", ...
    running: bool | None  # None: a process of another machine may still run
    starts: int
    num_steps: int | None
    lines: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    checkpoint: int | None
    error: str
    size: str  # size of the newest checkpoint's student; "" before the first
    origin: Mapping[str, str]  # what it was made of and by
    versions: Mapping[str, str]
    measured: Mapping[str, Any]  # tables that `distil evaluate` has kept, of the newest checkpoint

    @property
    def trained(self) -> list[Mapping[str, Any]]:
        """Return the lines of training."""
        return [line for line in self.lines if line["kind"] == "train"]

    @property
    def evaluated(self) -> list[Mapping[str, Any]]:
        """Return the lines of evaluations."""
        return [line for line in self.lines if line["kind"] == "evaluation"]

    @property
    def step(self) -> int:
        """Return the last step that the files tell of."""
        return max([self.checkpoint or 0, *(line["step"] for line in self.lines)])

    @property
    def seconds_left(self) -> float | None:
        """Return the time to the last step at the speed of the last lines; None if not known."""
        recent = self.trained[-5:]
        if self.num_steps is None or len(recent) < 2:
            return None
        steps = recent[-1]["step"] - recent[0]["step"]
        seconds = sum(
            (after["tokens"] - before["tokens"]) / max(after["tokens_per_second"], 1e-9)
            for before, after in pairwise(recent)
        )
        return seconds / steps * (self.num_steps - self.step) if steps > 0 else None


def not_begun(run: Path) -> bool:
    """Return whether a folder, which need not exist, has no files of a run yet."""
    return not (run / "config.json").exists() and read_status(run) is None


def report(run: Path) -> RunReport:
    """Read the files of a run.

    Raises:
        RunError: the folder holds none.
    """
    config = recorded(run)
    status, sealed = read_status(run), sealed_state(run)
    if config is None and (run / "config.json").exists():
        raise RunError(f"{run / 'config.json'}: cannot be read as the config of a run; restore it")
    if config is None and status is not None:
        raise RunError(f"{run}: {status['ended']} before its first step: {status['error']}")
    if config is None:
        raise RunError(f"{run}: no run has begun there; give the output of a run")
    state = sealed[1] if sealed is not None else {}
    held = holder(run, "pretrain")
    if held.alive:
        said = f"running ({held.named})"
    elif status is not None:
        said = str(status["ended"])
    elif held.alive is None:
        said = f"unknown ({held.named} may be at work)"
    else:
        said = "ended without a word: killed, or its machine went down"
    lines = read_metrics(run / "metrics.jsonl")
    kept = _json(run / MEASURED)
    return RunReport(
        name=str(run),
        config=config,
        state=said,
        # A start removes the status of the one before.
        running=held.alive if status is None else bool(held.alive),
        starts=held.generation,
        num_steps=state.get("num_steps") or (status or {}).get("num_steps") or _steps(config),
        lines=[line for line in lines if {"kind", "step"} <= line.keys()],
        checkpoint=state.get("step"),
        error="" if held.alive else str((status or {}).get("error", "")),
        size=_size(sealed[0]) if sealed is not None else "",
        origin=_origin(state, _json(run / "config.json").get("machine", {})),
        versions=state.get("versions", {}),
        measured=kept.get("tables", {}) if kept.get("step") == state.get("step", -1) else {},
    )


def _json(file: Path) -> dict[str, Any]:
    """Return the values of a file; none if it is missing or incomplete."""
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError):
        return {}


def _size(checkpoint: Path) -> str:
    """Return the parameters and bytes of a checkpoint's student, by the file's header."""
    file, num = checkpoint / "student" / "model.safetensors", 0
    try:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                num += math.prod(tensors.get_slice(name).get_shape())
    except (OSError, SafetensorError):
        return ""
    return f"{num:,} parameters, {decimal(file.stat().st_size)} in fp32"


def _origin(state: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run was made of, and by what it was computed from its last start on."""
    teacher, device = state.get("teacher") or {}, machine.get("gpu") or machine.get("processor")
    found = {
        "teacher": teacher.get("name") or teacher.get("sha256", "")[:16],
        "shards": state.get("shards", "")[:16],
        "beginning": "; ".join(state.get("notes") or []),
        "hardware": f"{machine.get('processes', 1)} x {device}" if device else "",
        "commit": machine.get("commit") or "",
    }
    return {key: value for key, value in found.items() if value}


def text(found: RunReport) -> list[str]:
    """Return what a terminal of 80 columns shows of a run."""
    first, *others = lines_of(found)
    wrap = partial(textwrap.wrap, width=80, subsequent_indent="    ", break_long_words=False)
    indented = (wrap(line, initial_indent="  ") for line in others)
    shown = [*wrap(first), *(part for lines in indented for part in lines)]
    return [line.replace("\xa0", " ") for line in shown]


def lines_of(found: RunReport) -> list[str]:
    """Return what is known of a run, its name and state first."""
    total = (
        f" of {found.num_steps:,} ({found.step / found.num_steps:.0%})" if found.num_steps else ""
    )
    lines = [f"{found.name}: {found.state}", f"step {found.step:,}{total}"]
    if found.trained:
        last = found.trained[-1]
        terms = {"loss": last["loss"], **_terms(last)}
        lines.append(f"at step {last['step']:,}: {_numbers(terms)}")
        speed = f"{last['tokens_per_second']:,.0f} tokens/s"
        if found.running and (left := found.seconds_left) is not None:
            speed += f", {duration(left)} left"
        if "memory" in last:  # not in lines of earlier versions
            speed += f", {decimal(round(last['memory']))} of memory"
        lines.append(speed)
        if "time" in last:
            then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
            lines.append(f"last line: {then}, {duration(last['elapsed'])} after its start")
    if found.evaluated:
        last = found.evaluated[-1]
        lines.append(f"validation at step {last['step']:,}: {_numbers(_validation(last))}")
    if found.checkpoint is not None:
        size = f", {found.size}" if found.size else ""
        lines.append(f"newest checkpoint: step {found.checkpoint:,}{size}")
    if found.starts > 1:
        lines.append(f"started {found.starts} times")
    if found.error:
        lines.append(f"error: {found.error}")
    return lines


def html(found: Sequence[RunReport]) -> str:
    """Return one page without any other file: curves, figures, and what differs."""
    names = _short([each.name for each in found])
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Runs</title>',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<style>{_STYLE}</style><h1>Runs</h1>",
    ]
    for name, each in zip(names, found, strict=True):
        shown = [escape(line.replace("\xa0", " ")) for line in lines_of(each)[1:]]
        bad = ' class="bad"' if each.error else ""
        parts.append(f"<h2>{escape(name)}</h2><p{bad}>{escape(each.state)}</p>")
        parts.append("<p>" + "<br>".join(shown) + "</p>")
    plots = (
        line_plot(title, "optimizer steps", curves, lines, narrow=True)
        for title, curves, lines in _plots(names, found)
    )
    parts.append(f'<div class="plots">{"".join(f"<div>{plot}</div>" for plot in plots)}</div>')
    parts.append(
        "<h2>Size and speed</h2>" + _table(["run", "size", "training"], _sizes(names, found))
    )
    for name, each in zip(names, found, strict=True):
        for what, rows in each.measured.items():
            title = f"<h2>Measured: {escape(name)} on {escape(what)}</h2>"
            parts.append(title + _table(*with_columns(rows)))
    parts += _differences(names, found)
    for title, of in (("Provenance", "origin"), ("Environment", "versions")):
        facts = [
            [name, *fact]
            for name, each in zip(names, found, strict=True)
            for fact in getattr(each, of).items()
        ]
        parts.append(f"<h2>{title}</h2>{_table(['run', '', ''], facts)}")
    return "\n".join(parts) + "\n"


def _sizes(names: Sequence[str], found: Sequence[RunReport]) -> list[list[str]]:
    """Return the student's size and the median speed of training of each run."""
    rows = []
    for name, each in zip(names, found, strict=True):
        rates = [line["tokens_per_second"] for line in each.trained]
        speed = f"{median(rates):,.0f} tokens/s" if rates else "no line yet"
        rows.append([name, each.size or "no checkpoint yet", speed])
    return rows


def _steps(config: RunConfig) -> int | None:
    """Return the steps that a config asks for; None if its shards are elsewhere."""
    if config.train.max_steps:
        return config.train.max_steps
    try:
        return num_steps(config, load_manifest(config.shards).splits["train"].rows)
    except (CorpusError, OSError, KeyError):
        return None


def _terms(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of a line of training; of a single one the loss says enough."""
    terms = {k: v for k, v in line.items() if k not in (*_NO_TERM, "loss")}
    return terms if len(terms) > 1 else {}


def _validation(line: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in _OF_ROWS}


def _numbers(values: Mapping[str, float | None]) -> str:
    shown = {k: "not finite" if v is None else f"{v:.4g}" for k, v in values.items()}
    # Spaces that do not break: a line never ends between a name and its number.
    return ", ".join(f"{name.replace('_', ' ')}\xa0{value}" for name, value in shown.items())


Curves = dict[str, list[tuple[float, float]]]


def _plots(
    names: Sequence[str], found: Sequence[RunReport]
) -> list[tuple[str, Curves, dict[str, float]]]:
    """Return title, curves and dashed lines of each plot that has something to show."""
    plots: list[tuple[str, Curves, dict[str, float]]] = []

    def add(title: str, kind: str, key: str, line_of: str = "") -> None:
        curves: Curves = {}
        lines: dict[str, float] = {}
        for name, each in zip(names, found, strict=True):
            own = [line for line in each.lines if line["kind"] == kind]
            points = [(line["step"], line[key]) for line in own if _finite(line.get(key))]
            curves[name] = points
            if line_of and own and _finite(own[-1].get(line_of)):
                lines[f"teacher of {name}"] = own[-1][line_of]
        if any(curves.values()):
            plots.append((title, curves, lines))

    add("training loss", "train", "loss")
    for term in dict.fromkeys(
        term for each in found for line in each.trained for term in _terms(line)
    ):
        add(f"training: {term}", "train", term)
    figures = dict.fromkeys(
        f for each in found for line in each.evaluated for f in _validation(line)
    )
    for figure in figures:
        if not figure.startswith("teacher_"):
            add(f"validation: {figure}", "evaluation", figure, f"teacher_{figure}")
    add("tokens per second", "train", "tokens_per_second")
    return plots


def _differences(names: Sequence[str], found: Sequence[RunReport]) -> list[str]:
    """Return what differs between the configs; of a single run what is not the default."""
    single = len(found) == 1
    title = "Config: what is not the default" if single else "What differs"
    configs = [
        flatten(each.config.model_dump(mode="json", exclude_none=True, exclude_defaults=single))
        for each in found
    ]
    for config, each in zip(configs, found, strict=True):  # each kind has its own default
        config |= {"objective.name": each.config.objective.name, "task.name": each.config.task.name}
    rows = [
        [key, *(str(config.get(key, "")) for config in configs)]
        for key in dict.fromkeys(key for config in configs for key in config)
        if key != "output" and (single or len({str(config.get(key)) for config in configs}) > 1)
    ]
    return [f"<h2>{title}</h2>", _table(["key", *names], rows)] if rows else []


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(column)}" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _short(names: Sequence[str]) -> list[str]:
    """Return names without the folders that all of them share."""
    parts = [Path(name).parts for name in names]
    same = 0
    while len(names) > 1 and all(len(p) > same + 1 and p[same] == parts[0][same] for p in parts):
        same += 1
    return [str(Path(*p[same:])) for p in parts] if len(names) > 1 else [Path(names[0]).name]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

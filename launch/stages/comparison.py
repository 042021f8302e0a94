"""Compare the validation figures of finished runs: a table in two formats, and the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from data_prep.disk.replacing import replace_text
from launch.console import print_table, show
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.monitor.figures import FORMATS, compare
from pretrain.monitor.plot import line_plot

FILES = ("curves.svg", *(f"table.{kind}" for kind in FORMATS))
# An entry of the table, a run of it, and the state of its last step.
Run = tuple[str, RunConfig, Mapping[str, Any]]
_COLUMNS = ("figure", "entry", "runs", "mean", "deviation", "difference", "low", "high")
_MEANING = (
    "difference: to the first entry that has the figure, of runs with the same train.seed, with "
    "its 95 % interval from low to high"
)
# Beginnings of validation figures that do not tell students apart.
_SAME = ("tokens", "masked_tokens", "teacher_", "constant_", "unigram_")


def write_comparison(folder: Path, runs: Sequence[Run]) -> None:
    """Compare the figures of the last step, and write tables and curves to a folder.

    Raises:
        RunError: a run was measured on another number of rows.
    """
    from pretrain.monitor.metrics import read_metrics

    values = figures_of(runs)
    rows: list[tuple[object, ...]] = []
    for figure, of_entry in values.items():
        for entry, found in compare(of_entry).items():
            numbers = found.difference or (None, None, None)
            rows.append((figure, entry, *found[:3], *numbers))
    shown = [[f"{c:.4g}" if isinstance(c, float) else c for c in row] for row in rows]
    texts = [["" if cell is None else str(cell) for cell in row] for row in shown]
    folder.mkdir(parents=True, exist_ok=True)
    for kind, write in FORMATS.items():
        cells = rows if kind == "csv" else texts
        replace_text(folder / f"table.{kind}", write(_COLUMNS, cells))

    # Curves of the figure that most entries have: means over their runs.
    figure = max(values, key=lambda name: (len(values[name]), name.startswith("loss")))
    points: dict[str, dict[float, list[float]]] = {entry: {} for entry in values[figure]}
    for entry, config, _ in runs:
        curve = points.get(entry, {})
        for line in read_metrics(config.output / "metrics.jsonl"):
            value = line.get(figure.partition(" ")[0])
            if line["kind"] == "evaluation" and value is not None:
                curve.setdefault(float(line["step"]), []).append(value)
    curves = {
        entry: [(step, mean(found)) for step, found in sorted(of_step.items())]
        for entry, of_step in points.items()
    }
    (folder / "curves.svg").unlink(missing_ok=True)
    if any(curves.values()):  # else somebody has removed the metrics of these runs
        plot = line_plot(f"{figure}, of validation rows", "optimizer steps", curves)
        replace_text(folder / "curves.svg", plot)
    print_table(_COLUMNS, texts)
    if len({frozenset(of_entry) for of_entry in values.values()}) > 1:
        show("terms of an objective are compared where they are the same terms")
    show(_MEANING, f"{folder}: table.md, table.csv, curves.svg")


def figures_of(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the validation figures of the last step by name, entry of the table and seed.

    The figures of an LM head compare all runs. Those of an objective compare the runs with the
    same terms; others have the name of their first entry.

    Raises:
        RunError: a run was measured on another number of rows.
    """
    values: dict[str, dict[str, dict[str, float]]] = {}
    first: dict[str, str] = {}  # entry with these terms
    for entry, config, state in runs:
        before, now = state["config"]["evaluation"]["rows"], config.evaluation.rows
        if before != now:
            raise RunError(
                f"{config.output}: was measured on evaluation.rows {before}, and this sweep on "
                f"{now}; revert the change, or set another `output:`"
            )
        terms, of_entry = "", ""
        if not config.objective.needs.logits:
            terms = config.objective.model_dump_json()
            if config.objective.needs.sums:
                terms += f" {config.student} {config.model}"
        if first.setdefault(terms, entry) != next(iter(first.values())) and terms:
            of_entry = f" of {first[terms]}"
        for figure, value in state["evaluation"].items():
            if not figure.startswith(_SAME):
                of_figure = values.setdefault(figure + of_entry, {})
                of_figure.setdefault(entry, {})[str(config.train.seed)] = value
    return values

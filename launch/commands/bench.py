"""Implement `distil bench`: time our step, check this machine, or compare models."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.commands import Overrides, RecordFile, quiet
from launch.console import print_table, show
from pretrain.contracts.process import ExitCode
from pretrain.monitor.records import append_record, check_record, row

if TYPE_CHECKING:
    from pretrain.bench.micro_step import Measured


def bench(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file, or shipped:NAME.yaml; by default DistilBERT's.", metavar="CONFIG"
        ),
    ] = None,
    overrides: Overrides = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows at a time; repeatable. By default the config's; else 2 and 8, on a GPU 8, "
            "32, 64."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable. By default the config's; auto without one.", metavar="NAME"),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often each step is timed; by default 5.", min=1)
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check", help="Compare every objective and family with curves of a CPU first."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="After these --self-check times no further config; by default 8.", min=0),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of a step, compare models and their ONNX files in size, latency and "
            "memory; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    record: RecordFile = None,
) -> None:
    """Time a micro-step of a config, forward and backward, with random weights.

    Rows are those of its shards, or random ones where there are none; no weights are read.
    `--self-check` tells whether this machine computes what it should: losses of every objective and
    family, a killed run, then the speed of four shipped configs. It takes no other
    option but --minutes and --record, and `--model` no other but --record.

    Example: distil bench shipped:minilm-6x384.yaml train.activation_checkpointing=true
    """
    from launch.config import config_line, load_config
    from pretrain import RunError
    from pretrain.config import RunConfig

    is_given = any((config, overrides, micro_batch, precision, repeats))
    if model:
        if is_given or self_check or minutes is not None:
            raise RunError("--model: takes only --record; leave out the others")
        compare_models(model, record)
        return
    if self_check:
        if is_given:
            raise RunError("--self-check: takes only --minutes and --record; leave out the others")
        check_itself(8.0 if minutes is None else minutes, record)
        return
    if minutes is not None:
        raise RunError("--minutes: is for --self-check")
    is_own, config = config is not None, config or Path("shipped:distilbert-base-uncased.yaml")
    settings = load_config(RunConfig, config, overrides or [])
    if not is_own:  # that one is for V100s
        settings = settings.with_train(precision="auto", micro_batch_size="auto")
    check_record(record)

    # torch takes seconds to import: a mistake in the config is answered before.
    quiet()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes of itself
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    from pretrain.bench import machine, micro_step
    from pretrain.device.gpu import check_kernels

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    check_kernels(device)
    asked = micro_step.asked(settings, device, precision or [], micro_batch or [])
    show(config_line(config), machine.line(device))
    found, peaks = micro_step.measure(asked, device, repeats or 5, show)
    show_steps(found, peaks)
    append_record(record, None, recorded(found))


def compare_models(models: Sequence[str], record: Path | None) -> None:
    """Compare the size and speed of models and their ONNX files."""
    from pretrain import RunError
    from pretrain.bench.speed import BATCH, BATCH_TOKENS, TOKENS, compare_speed, with_files
    from pretrain.model.folder import model_config
    from pretrain.model.session import model_folder
    from pretrain.monitor.figures import Figure
    from pretrain.run_folder import check_model, onnx_file

    check_record(record)
    for model in models:
        check_model(Path(model))
        folder = model_folder(file) if (file := onnx_file(Path(model))) else model
        longest = model_config(f"--model {model}", str(folder)).get("max_position_embeddings")
        if isinstance(longest, int) and longest < BATCH_TOKENS:
            raise RunError(
                f"--model {model}: reads {longest} tokens, and models are compared on texts of "
                f"{BATCH_TOKENS}"
            )
    quiet()
    found = compare_speed([name for model in models for name in with_files(model)], show)
    columns = dict.fromkeys(name for figures in found.values() for name in figures)
    cells = [
        [name, *(f"{figures[c]:,.2f}" if c in figures else "" for c in columns)]
        for name, figures in found.items()
    ]
    # Narrow tables: what one thread does, then all.
    for many in (False, True):
        some = [i for i, name in enumerate(columns) if ("threads" in name) == many]
        if some:
            titles = [[*columns][i].replace(", ", "\n") for i in some]
            print_table(["", *titles], [[cell[0], *(cell[i + 1] for i in some)] for cell in cells])
    show(
        f"p50, p95: one text of {TOKENS} tokens; texts/s: {BATCH} texts of {BATCH_TOKENS} tokens "
        "at a time; one thread where no other number is said; peak: of a process with that model"
    )
    rows = [
        row(name, {k: Figure(v) for k, v in figures.items()}) for name, figures in found.items()
    ]
    append_record(record, None, rows)


def check_itself(minutes: float, record: Path | None) -> None:
    """Compare curves, then time shipped configs while there is time; exit with 1 if any differs."""
    from launch.config import load_config
    from pretrain.config import RunConfig

    check_record(record)
    end = time.monotonic() + 60 * minutes
    quiet()
    from launch.self_check import SPEED, TOLERANCE, checks, speed

    rows, lines, num_failed = [], [], 0
    for check in checks():
        result = "FAILED" if check.failed else check.note or "ok"
        far = "" if check.difference is None else f"{check.difference:.0e}"
        show(f"{check.name}: {result} {far}".rstrip())
        lines.append([check.name, result if not check.failed else f"FAILED {check.note}", far])
        num_failed += check.failed
        if check.difference is not None:
            figures = {"difference": check.difference, "ok": float(not check.failed)}
            rows.append(row(check.name, figures))
    found = []
    for name in SPEED:
        if time.monotonic() > end:
            lines.append([name, f"not run: {minutes:g} minutes were over", ""])
            continue
        show("", name)
        steps, peaks = speed(load_config(RunConfig, Path(f"shipped:{name}"), []), show)
        found.append((name, steps, peaks))
        rows += [{**line, "model": f"{name}: {line['model']}"} for line in recorded(steps)]
    print_table(("check", "result", "largest difference of a loss"), lines)
    show(f"a loss may differ by {TOLERANCE:g} of its size from that of a CPU")
    for name, steps, peaks in found:
        show("", name)
        show_steps(steps, peaks)
    append_record(record, None, rows)
    if num_failed:
        show(f"{num_failed} FAILED: this machine does not compute what it should; please report it")
        raise typer.Exit(ExitCode.BUG)


def recorded(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the rows of a record."""
    return [
        row(
            f"{step.precision} {step.rows} rows: ours",
            {
                "milliseconds": step.milliseconds,
                "megabytes": step.peak_bytes / 1e6,
                "share of the measured peak": step.of_peak,
                "tokens/s": 1000 * step.tokens / step.milliseconds,
            },
        )
        for step in found
        if step.tokens
    ]


def show_steps(found: Sequence[Measured], peaks: dict[str, float]) -> None:
    """Print time, memory and speed of steps."""
    lines = []
    for step in found:
        if not step.tokens:
            lines.append([step.precision, str(step.rows), "-", "out of memory", "-", "-"])
            continue
        speed = 1000 * step.tokens / step.milliseconds
        ms = f"{step.milliseconds:,.0f}" if step.milliseconds >= 100 else f"{step.milliseconds:.3g}"
        megabytes = f"{step.peak_bytes / 1e6:,.0f}"
        lines.append(
            [step.precision, str(step.rows), ms, f"{speed:,.0f}", megabytes, f"{step.of_peak:.0%}"]
        )
    print_table(("precision", "rows", "ms", "tokens/s", "MB", "peak"), lines)
    show(
        "ms: the median. MB: the most at a time, weights and gradients included, no optimizer "
        "state. peak: the share that goes into the loss of what matrix products reached here in "
        "this run, " + ", ".join(f"{peak / 1e9:.1f} GFLOP/s ({p})" for p, peak in peaks.items())
    )

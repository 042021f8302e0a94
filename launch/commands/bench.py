"""Implement `distil bench`: time our step, check this machine, or compare models."""

from __future__ import annotations

import os
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
    repeats: Annotated[
        int | None, typer.Option(help="How often each step is timed; by default 5.", min=1)
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check", help="Instead, compare every objective and family with curves of a CPU."
        ),
    ] = False,
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

    Rows are those of its shards, or random ones where there are none; no weights are read. Without
    train.micro_batch_size 2 and 8 rows are tried, on a GPU 8, 32 and 64. `--self-check` tells
    whether this machine computes what it should: losses of every objective and family, and a run
    that is killed and continued. It and `--model` take no other option but --record.

    Example: distil bench shipped:minilm-6x384.yaml train.precision=bf16 train.micro_batch_size=4
    """
    from launch.config import config_line, load_config
    from pretrain import RunError
    from pretrain.config import RunConfig

    if model or self_check:
        if config or overrides or repeats or (model and self_check):
            option = "--model" if model else "--self-check"
            raise RunError(f"{option}: takes only --record; leave out the others")
        if model:
            compare_models(model, record)
        else:
            check_itself(record)
        return
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
    asked = micro_step.asked(settings, device)
    show(config_line(config), machine.line(device))
    found, peaks = micro_step.measure(asked, device, repeats or 5, show)
    show_steps(found, peaks)
    append_record(record, None, recorded(found))


def compare_models(models: Sequence[str], record: Path | None) -> None:
    """Compare the size and speed of models and their ONNX files."""
    from launch.stages.evaluate import row_names
    from pretrain import RunError
    from pretrain.bench.speed import BATCH, BATCH_TOKENS, TOKENS, compare_speed, with_files
    from pretrain.model.folder import model_config
    from pretrain.model.session import model_folder
    from pretrain.monitor.figures import Figure, with_columns
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
    names = row_names(found)
    shown = {
        name: {k: f"{v:,.2f}" for k, v in found[model].items()} for model, name in names.items()
    }
    print_table(*with_columns(shown.items()))
    show(
        f"p50, p95: one text of {TOKENS} tokens; texts/s: {BATCH} texts of {BATCH_TOKENS} tokens "
        "at a time; one thread where no other number is said; peak: of a process with that model"
    )
    rows = [row(names[model], {k: Figure(v) for k, v in f.items()}) for model, f in found.items()]
    append_record(record, None, rows)


def check_itself(record: Path | None) -> None:
    """Compare curves of this machine with those of a CPU; exit with 1 if any differs."""
    check_record(record)
    quiet()
    from launch.self_check import TOLERANCE, checks

    rows, num_failed = [], 0
    for check in checks():
        result = f"FAILED {check.note}".strip() if check.failed else "ok"
        far = "" if check.difference is None else f"{check.difference:.0e}"
        show(f"{check.name}: {result} {far}".rstrip())
        num_failed += check.failed
        if check.difference is not None:
            figures = {"difference": check.difference, "ok": float(not check.failed)}
            rows.append(row(check.name, figures))
    show(f"a loss may differ by {TOLERANCE:g} of its size from that of a CPU")
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

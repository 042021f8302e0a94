"""Implement `distil bench`: time our step next to two baselines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.commands import Overrides, RecordFile, quiet
from launch.console import print_table, show
from pretrain.exit_codes import ExitCode
from pretrain.monitor.records import append_record, check_record, row

_SPEED = "## Size and speed"  # of a card


def bench(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file, shipped:NAME.yaml; without one, DistilBERT at BERT-base's sizes.",
            metavar="CONFIG",
        ),
    ] = None,
    overrides: Overrides = None,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic",
            help="Random weights and rows: no shards. With CONFIG its objective and sizes.",
        ),
    ] = False,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(help="Rows at a time; repeatable. By default 2 and 8, on a GPU 8, 32, 64."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable. By default the config's; else fp32 and bf16, on a GPU bf16 and fp16.",
            metavar="NAME",
        ),
    ] = None,
    kl: Annotated[
        list[str] | None,
        typer.Option(
            help="Where KL is over: all tokens or masked ones; repeatable. By default the "
            "config's, else both.",
            metavar="all|masked",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each step is timed.", min=1)] = 5,
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
    documents: Annotated[
        bool, typer.Option("--documents", help="Also compare packed rows with padded documents.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Our step as with train.compile=true.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Of a synthetic teacher.", min=2)] = 12,
    width: Annotated[int, typer.Option(help="Of synthetic models.", min=8)] = 768,
    row_length: Annotated[int, typer.Option(help="Of synthetic rows.", min=8, max=4096)] = 512,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there.", metavar="FILE")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of a step, compare models and their ONNX files in size, latency and "
            "memory; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Also put that table into the first model's README.md.")
    ] = False,
    record: RecordFile = None,
) -> None:
    """Time a step next to its objective in plain transformers, after comparing their results.

    All have the same weights, rows and masks. "usual" is the form of Hugging Face's distillation
    code; "careful" computes logits only where a loss reads them, with the same matrix library as
    ours. On Linux all keep freed memory. `--self-check` tells whether this machine computes
    what it should: losses of every objective and family, compilation, a killed run, then the speed
    of four shipped configs. It takes no other option but --minutes and --record, and `--model` no
    other but --card and --record.

    Example: distil bench shipped:minilm-6x384.yaml --synthetic --micro-batch 2
    """
    from launch.config import config_line, load_config
    from pretrain import RunError
    from pretrain.config import RunConfig

    given = (config, *(overrides or ()), synthetic, micro_batch, precision, kl, json_file)
    if model or card:
        if any((*given, documents, compiled, self_check, minutes is not None)) or not model:
            raise RunError("--model: takes --card and --record alone; leave out the others")
        compare_models(model, card=card, record=record)
        return
    if self_check:
        if any((*given, documents, compiled)) or (layers, width, row_length) != (12, 768, 512):
            raise RunError("--self-check: takes --minutes and --record alone; leave out the others")
        check_itself(8.0 if minutes is None else minutes, record)
        return
    if minutes is not None:
        raise RunError("--minutes: is for --self-check")
    sizes = layers, width, row_length
    if config is not None and not synthetic and sizes != (12, 768, 512):
        raise RunError(
            f"--layers, --width, --row-length: {config} has its own models and rows; leave them "
            "out, or add --synthetic"
        )
    settings = load_config(RunConfig, config, overrides or []) if config else None

    # torch takes seconds to import: a mistake in the config is answered before.
    quiet()
    import torch

    from pretrain.bench import table
    from pretrain.device.gpu import check_kernels

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    check_kernels(device)
    if config is not None:
        show(config_line(config))
    asked_for = (precision, kl, micro_batch)
    asked = table.choose(settings, device, *asked_for, repeats, documents, compiled)
    if settings is None or synthetic:
        subject = table.synthetic(settings, *sizes, device, asked)
    else:
        subject = table.configured(settings, device, asked)
    check_record(record)
    if json_file is not None:  # a file that cannot be written is an error before hours of timing
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.open("a").close()
    from pretrain.kernels.products import choose, using

    library = "auto" if settings is None else settings.train.products
    with using(choose()[0] if library == "auto" else library):
        report = table.compare(subject, asked, show)
    show_rows(report["rows"], report["peak_flops"])
    if documents:
        show_documents(report["documents"])
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        show(f"written: {json_file}")
    append_record(record, None, [line for cell in report["rows"] for line in recorded(cell)])


def compare_models(models: Sequence[str], *, card: bool, record: Path | None) -> None:
    """Compare the size and speed of models and their ONNX files."""
    from pretrain import RunError
    from pretrain.deploy.speed import BATCH, BATCH_TOKENS, TOKENS, compare_speed
    from pretrain.monitor.figures import Figure
    from pretrain.monitor.tables import markdown
    from pretrain.run_folder import check_model

    check_record(record)
    for model in models:
        check_model(Path(model))
    page = Path(models[0]) / "README.md"
    if card and not page.is_file():
        raise RunError(f"--card: {models[0]} has no README.md; give an exported folder first")
    quiet()
    found = compare_speed(models, show)
    columns = dict.fromkeys(name for figures in found.values() for name in figures)
    # A published card names no folder of this machine.
    folders = {
        str(Path(model)): "/".join(Path(model).parts[-2 if Path(model).is_file() else -1 :])
        for model in models
    }
    if len({*folders.values()}) < len(folders):
        folders = {folder: folder for folder in folders}
    names = {}
    for name in found:
        folder = next(f for f in folders if Path(name).is_relative_to(f))
        names[name] = str(Path(folders[folder]) / Path(name).relative_to(folder))
    cells = [
        [names[name], *(f"{v[c]:,.2f}" if c in v else "" for c in columns)]
        for name, v in found.items()
    ]
    # Narrow tables: what one thread does, then all.
    for many in (False, True):
        some = [i for i, name in enumerate(columns) if ("threads" in name) == many]
        if some:
            titles = [[*columns][i].replace(", ", "\n") for i in some]
            print_table(["", *titles], [[cell[0], *(cell[i + 1] for i in some)] for cell in cells])
    about = (
        f"p50, p95: one text of {TOKENS} tokens; texts/s: {BATCH} texts of {BATCH_TOKENS} tokens "
        "at a time; one thread where no other number is said; peak: of a process with that model"
    )
    show(about)
    if card:
        import torch

        from pretrain.bench.machine import hardware

        cpu = hardware(torch.device("cpu"))["processor"]
        table = markdown(["", *columns], cells)
        # Only this section is replaced; what an author wrote behind it stays.
        text = re.sub(rf"(?ms)^{_SPEED}$.*?(?=^## |\Z)", "", page.read_text(encoding="utf-8"))
        text = (
            text.rstrip() + f"\n\n{_SPEED}\n\n{table}\n\nOn {cpu}. {about[0].upper()}{about[1:]}.\n"
        )
        page.with_name(".README.md.tmp").write_text(text, encoding="utf-8")
        page.with_name(".README.md.tmp").rename(page)
        show(f"written: {page}")
    rows = [row(names[name], {k: Figure(v) for k, v in f.items()}) for name, f in found.items()]
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
        report = speed(load_config(RunConfig, Path(f"shipped:{name}"), []), show)
        found.append((name, report))
        for cell in report["rows"]:
            rows += [{**line, "model": f"{name}: {line['model']}"} for line in recorded(cell)]
    print_table(("check", "result", "largest difference of a loss"), lines)
    show(f"a loss may differ by {TOLERANCE:g} of its size from that of a CPU")
    for name, report in found:
        show("", name)
        show_rows(report["rows"], report["peak_flops"])
    append_record(record, None, rows)
    if num_failed:
        show(f"{num_failed} FAILED: this machine does not compute what it should; please report it")
        raise typer.Exit(ExitCode.BUG)


def recorded(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record: the steps of a cell."""
    size = f"{cell['micro_batch']} rows"
    title = " ".join(filter(None, (cell["precision"], cell["kl"] and f"KL {cell['kl']}", size)))
    found = []
    for name, step in cell["steps"].items():
        if "error" in step:
            continue
        figures = {
            "milliseconds": step["milliseconds"],
            "megabytes above the encoders": step["above_trunk_bytes"] / 1e6,
        }
        if step["of_peak"]:
            figures["share of the measured peak"] = step["of_peak"]
        figures["tokens/s"] = step["tokens_per_second"]
        if "ratio" in step:
            figures["times as long as ours"] = step["ratio"]
        found.append(row(f"{title}: {name}", figures))
    return found


def show_rows(found: Sequence[dict[str, Any]], peaks: dict[str, float]) -> None:
    """Print time, memory and speed of the steps in each cell."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    lines = []
    for cell in found:
        for name, step in cell["steps"].items():
            title = " ".join(
                filter(None, (cell["precision"], cell["kl"], str(cell["micro_batch"])))
            )
            if "error" in step:
                lines.append([title, name, "-", step["error"], "-", "-", "-", "-"])
                continue
            gain = f"{step['ratio']:.2f}" if "ratio" in step else ""
            lines.append(
                [
                    title,
                    name,
                    number(step["milliseconds"]),
                    f"{step['tokens_per_second']:,.0f}",
                    number(step["peak_bytes"] / 1e6),
                    number(step["above_trunk_bytes"] / 1e6),
                    f"{step['of_peak']:.0%}" if step["of_peak"] else "-",
                    gain,
                ]
            )
    print_table(("precision KL rows", "step", "ms", "tokens/s", "MB", "above", "peak", "x"), lines)
    show(
        "ms: the median. MB: the most at a time, weights and gradients included, no optimizer "
        "state; above: of it, above the encoders. x: how many times as long as ours, the median "
        "of pairs timed one after the other; small models and rows gain nothing",
        "peak: the share that goes into the loss of what matrix products reached here in this "
        "run, " + ", ".join(f"{peak / 1e9:.1f} GFLOP/s ({p})" for p, peak in peaks.items()),
    )


def show_documents(found: Sequence[dict[str, Any]]) -> None:
    """Print the speed of packed rows next to that of padded documents."""
    lines = []
    for cell in found:
        parts = cell["precision"], cell["kl"], str(cell["micro_batch"]), cell["layout"]
        title = " ".join(filter(None, parts))
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
        "x: tokens/s of packed rows divided by those of this line, without padding; kept: that, "
        "divided by the ratio of the fills"
    )

"""Implement `distil demo`: run every stage on text that is installed here, and print one table."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.commands import quiet
from launch.console import Training, keep_going, print_table, show

_SENTENCE = "This function returns a [MASK] of the given objects."
_QUICK = {
    "teacher": ["train.max_steps=30", "evaluation.rows=64", "evaluation.every=0"],
    "student": ["train.max_steps=15", "evaluation.rows=64", "evaluation.every=0"],
}
_NAMES = {"shards", "teacher", "student", "teacher-export", "student-export", "results.json"}
_EXPORTED = re.compile(r"README\.md|vocab\.txt|[a-z_]+\.json|model\.safetensors")


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where everything is written.", show_default="runs/demo")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A shortened run, to see that it works.")] = False,
) -> None:
    """Run every stage on documentation that is installed here: nothing is downloaded.

    Example: distil demo
    """
    keep_going()
    quiet()
    run_demo(output or Path("runs/demo-quick" if quick else "runs/demo"), quick=quick)


def run_demo(output: Path, *, quick: bool = False) -> None:
    """Run every stage under `output`, or what is left of it, and print the table.

    Raises:
        RunError: the folder holds what no demo has written.
    """
    import psutil

    from data_prep.config import CorpusConfig
    from launch.commands.prepare import prepare_and_show
    from launch.config import config_line, load_config
    from pretrain.files import write_json

    check_output(output)
    shipped = Path("shipped:corpus-demo.yaml")
    corpus = load_config(
        CorpusConfig,
        shipped,
        [f"output={output}/shards", *(["sources.0.max_megabytes=1"] if quick else [])],
    )
    show("1/4 corpus: the documentation installed with Python and our dependencies")
    show(config_line(shipped))
    prepare_and_show(corpus)

    extra = _QUICK if quick else {"teacher": [], "student": []}
    show("", "2/4 teacher: a small BERT, masked language modelling")
    teacher = output / "teacher-export"
    news = _train_and_export("demo-teacher.yaml", output, "teacher", [*extra["teacher"]])
    show("", "3/4 student: half the layers, from the teacher's, triple loss")
    news |= _train_and_export(
        "demo.yaml", output, "student", [f"teacher={teacher}", *extra["student"]]
    )

    show("", "4/4 both, exported and loaded back by plain transformers")
    results = output / "results.json"
    figures = {} if news or not results.exists() else json.loads(results.read_bytes())
    if "constant" in figures:  # an older version measured something else
        show("everything is up to date; this was measured before")
    else:
        figures = _measure(output, rows=256 if quick else 1600)
        write_json(results, figures)
    parameters, accuracy = figures["parameters"], figures["accuracy"]
    speeds = figures["tokens_per_second"]
    retention = accuracy["student"] / max(accuracy["teacher"], 1e-9)
    print_table(
        ("", "teacher", "student", "student / teacher"),
        [
            [
                "parameters",
                f"{parameters['teacher']:,}",
                f"{parameters['student']:,}",
                f"{parameters['student'] / parameters['teacher']:.0%}",
            ],
            [
                f"masked accuracy (best constant {figures['constant']:.1%})",
                f"{accuracy['teacher']:.1%}",
                f"{accuracy['student']:.1%}",
                f"{retention:.0%} retained",
            ],
            ["agreement with the teacher", "", f"{figures['agreement']:.1%}", ""],
            [
                "forward, tokens/s",
                f"{speeds['teacher']:,.0f}",
                f"{speeds['student']:,.0f}",
                f"{speeds['student'] / speeds['teacher']:.2f} x",
            ],
        ],
    )
    words = ", ".join(figures["words"])
    show(f"{figures['sentence']}  [MASK] = {words}")
    show(f"the student: {output}/student-export")
    # From the start of the process: importing torch and transformers takes seconds, too.
    took = time.time() - psutil.Process().create_time()
    show(f"this command took {took:.0f} s")


def check_output(output: Path) -> None:
    """Refuse a folder that is not a demo's, because exports and results in it are replaced."""
    from data_prep.shards.manifest import MANIFEST
    from pretrain import RunError
    from pretrain.output import foreign, is_run

    if output.exists() and not output.is_dir():
        raise RunError(f"{output}: is not a folder; give another --output DIR")
    found = {path.name: path for path in output.iterdir()} if output.exists() else {}
    odd = [
        path
        for name, path in found.items()
        if name not in _NAMES and not name.startswith(".") and path.suffix not in (".yaml", ".yml")
    ]
    for name in {"teacher", "student"} & found.keys():
        odd += [path for path in [foreign(found[name])] if path is not None]
    for name in {"teacher", "student"}:
        files = list(found[f"{name}-export"].iterdir()) if f"{name}-export" in found else []
        odd += [file for file in files if not file.is_file() or not _EXPORTED.fullmatch(file.name)]
        if files and not is_run(output / name):  # of which it would be the export
            odd.append(found[f"{name}-export"])
    shards = output / "shards"
    if "shards" in found and not any((shards / part).exists() for part in (".work", MANIFEST)):
        odd += shards.iterdir()
    if "results.json" in found and not is_run(output / "student"):
        odd.append(found["results.json"])
    if odd:
        raise RunError(
            f"{min(odd)}: no demo has written this; remove it, or give another --output DIR"
        )


def _train_and_export(config: str, output: Path, name: str, overrides: list[str]) -> bool:
    """Train or resume one run and export it; return whether anything was new."""
    from launch.config import config_line, load_config
    from pretrain.config import RunConfig
    from pretrain.exit_codes import ExitCode
    from pretrain.export.export import export
    from pretrain.train import train

    shipped = Path(f"shipped:{config}")
    settings = load_config(
        RunConfig,
        shipped,
        [f"output={output}/{name}", f"shards={output}/shards", *overrides],
    )
    show(config_line(shipped))
    with Training() as progress:
        outcome = train(settings, progress=progress)
    if outcome.ended == "interrupted":
        show(f"interrupted at step {outcome.step}; the same command continues")
        raise typer.Exit(ExitCode.REQUEUE)
    exported = output / f"{name}-export"
    if outcome.ended == "up to date" and exported.exists():
        show(f"{settings.output}: up to date, step {outcome.step}")
        return False
    if exported.exists():  # of an earlier, shorter run of this demo
        shutil.rmtree(exported)
    export(settings.output, exported, show)
    return True


def _measure(output: Path, rows: int) -> dict[str, Any]:
    """Return validation figures, sizes, speeds and one filled-in sentence."""
    import torch
    from transformers import AutoModelForMaskedLM, pipeline

    from data_prep.messages import warn
    from pretrain.evaluate import evaluate_folder

    folders = {name: output / f"{name}-export" for name in ("teacher", "student")}
    models = {
        name: AutoModelForMaskedLM.from_pretrained(folder).eval()
        for name, folder in folders.items()
    }
    teacher = str(folders["teacher"])
    figures = evaluate_folder(
        folders["student"], output / "shards", teacher=teacher, rows=rows, warn=warn
    )
    # Forward passes in fp32 on the CPU. The models take turns, so that both meet the same load.
    length = min(model.config.max_position_embeddings for model in models.values())
    ids = torch.arange(1024 // length * length).reshape(-1, length) % 1000
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for _ in range(7):
            for name, model in models.items():
                start = time.perf_counter()
                model(input_ids=ids)
                times[name].append(time.perf_counter() - start)
    fill = pipeline("fill-mask", model=str(folders["student"]), device="cpu")
    return {
        "parameters": {n: sum(p.numel() for p in m.parameters()) for n, m in models.items()},
        "accuracy": {"teacher": figures["teacher_accuracy"], "student": figures["accuracy"]},
        "constant": figures["constant_accuracy"],
        "agreement": figures["agreement"],
        "tokens_per_second": {n: ids.numel() / statistics.median(t) for n, t in times.items()},
        "sentence": _SENTENCE,
        "words": [answer["token_str"] for answer in fill(_SENTENCE, top_k=3)],
    }

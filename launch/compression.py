"""Write a recipe that makes a model smaller, from the model and texts or labels alone, and make it.

The recipe is the whole of it: `distil recipe OUTPUT/recipe.yaml` does the same, and may be changed.
Rates and sizes of steps are those of records (docs/results.md), for the width that a model has
there; that of another width is in inverse proportion to it, which is not measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from data_prep.examples.labelled_files import read_records
from data_prep.messages import warn
from launch.console import print_table, show
from pretrain import RunError
from pretrain.contracts.terms import Sizes
from pretrain.model.architectures import TRANSFORMERS, longest_row
from pretrain.monitor.figures import Figure

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The measured rate, and the width of its model.
_RATES = {"encoder": (5e-4, 384), "masked": (2e-3, 256), "labels": (1e-4, 384)}
_LONGEST = {"encoder": 512, "masked": 128, "labels": 128}  # tokens of a row, or of an example
_FEWEST = {"encoder": 100, "masked": 2, "labels": 50}  # texts: some are held out, and measured on
_HEAD = """\
# {what}. Made by
#
#     {command}
#
# which continues after an interruption. After a change here: {again}
"""
# Of what shipped configs measure: embedding-3x384, demo, tasks-english.
_RECIPES = Path(__file__).with_name("recipes")
_SHOWN = {
    "encoder": ("similarity", "cosine"),
    "masked": ("accuracy", "agreement"),
    "labels": ("score", "retention"),
}
_NEXT = {
    "encoder": (
        "python -c 'import sys, pretrain; print(pretrain.encode(sys.argv[1], [\"A text.\"]))' "
        "{out}/model",
        "distil evaluate {out}/student --data PAIRS.csv    # sentence1, sentence2, score",
    ),
    "masked": (
        "distil evaluate {out}/student {out}/shards",
        "distil compress {model} --texts MORE --output {out}-2    # more text helps most",
    ),
    "labels": (
        "distil evaluate {out}/student {out}/shards",
        "distil inspect {out}/shards    # how the texts were read",
    ),
}


@dataclass(frozen=True)
class Small:
    """Hold what `compress` has made.

    Attributes:
        folder: the student, for transformers or sentence-transformers, with onnx/ and its card.
        figures: the table of scores, by model.
    """

    folder: Path
    figures: Mapping[str, Mapping[str, Figure]]

    def encode(self, texts: Sequence[str], *, normalize: bool = False) -> NDArray[Any]:
        """Return the vectors [n, W] of texts; see `pretrain.encode`."""
        from pretrain.evaluation.encoders import encode

        return encode(self.folder, texts, normalize=normalize)


def compress(
    model: Path | str,
    texts: Path | str | Sequence[str] | None = None,
    *,
    labels: Path | str | None = None,
    layers: int | None = None,
    output: Path | str = "small",
    column: str = "text",
    label: str = "label",
    steps: int | None = None,
    write_only: bool = False,
    workers: int | None = 1,
) -> Small:
    """Make a model smaller: some of its layers, which learn what the whole of it does.

    A masked language model learns by the triple loss and a sentence encoder its vectors, from
    `texts`; a classifier, or an encoder that becomes one, its labels, from `labels`.

    Args:
        model: a folder or a hub's name.
        texts: a list of texts; a .txt file with a text in each line; a table (CSV, TSV, JSONL,
            Parquet); or a folder of such files, where each .txt is a text, and for an encoder each
            of its paragraphs. Of an encoder those above 512 tokens are left out.
        labels: a table with a column of texts and one of labels.
        layers: of the student; by default half of them.
        output: folder of recipe.yaml, and of all that it makes.
        column: of the texts in a table.
        label: column of the labels.
        steps: of training; by default those of one pass over the texts, or three over labels.
        write_only: stop after the recipe.
        workers: processes that read the texts; None: one for each core. A script that is to have
            several needs `if __name__ == "__main__":`.

    Raises:
        RunError, CorpusError: names what cannot be used, and the fix.
    """
    from data_prep.disk.replacing import replace_text
    from launch.config import find_shipped, load_config, parse
    from launch.recipe_config import Recipe
    from launch.stages.estimate import cost_lines
    from launch.stages.stage import How
    from launch.stages.table import check_all, cost_of, make_all, stage_of

    out, file = Path(output), Path(output, "recipe.yaml")
    if (texts is None) == (labels is None):
        raise RunError("compress: give texts or labels: --texts PATH or --labels FILE")
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    if out.exists() and not ("recipe.yaml" in names or names <= {"texts.jsonl"}):
        raise RunError(f"{out}: distil compress has not written this; give another --output")
    if not isinstance(texts, Path | str | None):
        texts = _written(texts, out / "texts.jsonl")
    model = str(find_shipped(Path(model))) if str(model).startswith("shipped:") else str(model)
    facts = _facts(model, labels is not None)
    whole = facts.sizes.num_hidden_layers
    chosen = max(1, whole // 2) if layers is None else layers
    if not 1 <= chosen <= whole:
        raise RunError(f"--layers {chosen}: {model} has {whole}: give 1 to {whole}")
    data = Path(labels if labels is not None else str(texts))
    text = _recipe(model, facts, data, chosen, out, column, label, steps)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise RunError(
            f"{file} is another recipe than this command writes: continue it with "
            f"{_again(file)}, or give another --output"
        )
    values = parse(f"{file}:", text)
    if workers is not None and labels is None:
        values["runs"][0]["workers"] = workers  # changes no byte
    stages = [stage_of(entry) for entry in load_config(Recipe, values, []).runs]
    if not write_only and any(stage.state() != "done" for stage in stages):
        if labels is None:
            _refuse_few(data, stages[0].config.sources[0], _FEWEST[facts.kind])
        lines = check_all(stages, How(), dry_run=True)
        wanted = ("about ", "student: ", "steps: ")
        show(*(line for about in lines for line in about if line.startswith(wanted)))
        costs = cost_lines([cost_of(stage) for stage in stages], None)
        show(*(f"{line} (the training alone)" for line in costs))
    if not file.exists():  # now that it can be made
        out.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    show(f"recipe: {file}; after a change: {_again(file)}")
    if write_only:
        return Small(out / "model", {})
    lines = check_all(stages, How(), dry_run=False)
    if code := make_all(stages, How(), lines, dry_run=False):
        raise SystemExit(code)
    found = json.loads((out / "scores" / "figures.json").read_bytes())["figures"]
    table = {name: {k: Figure(**v) for k, v in of.items()} for name, of in found.items()}
    _show(table, facts.kind, model, out)
    return Small(out / "model", table)


def _again(file: Path) -> str:
    return shlex.join(["distil", "recipe", str(file)])


class Facts(NamedTuple):
    """Hold what a model's config.json says."""

    kind: str  # of what is made of it: "encoder", "masked" or "labels"
    sizes: Sizes
    positions: int
    labels: tuple[str, ...] | None  # of a classifier


def _facts(model: str, of_labels: bool) -> Facts:
    """Read a model's config.json, of a hub nothing else; RunError if it cannot be made smaller."""
    from pretrain.model.config_file import read_config, read_json
    from pretrain.model.hub import config_file, not_there
    from pretrain.run_folder import is_run

    folder = Path(model)
    if is_run(folder):
        raise RunError(f"{model}: is a run; give its export: distil export {model} DIR")
    try:
        raw = read_config(model, folder if folder.is_dir() else config_file(model).parent)
    except OSError as error:
        raise not_there(model, error) from None
    sizes, name = Sizes.of(raw), str((raw.get("architectures") or [""])[0])
    if sizes is None or sizes.family not in TRANSFORMERS:
        known = ", ".join(TRANSFORMERS)
        raise RunError(
            f"{model}: model_type {raw.get('model_type')}: this command takes layers of {known}. "
            "Let it write vectors (docs/papers/sentence-embeddings.md) or probabilities of your "
            "texts, and distil those: shipped:own-task.yaml"
        )
    classifier = name.endswith("ForSequenceClassification")
    masked = name.endswith(("ForMaskedLM", "ForPreTraining"))
    names = raw.get("id2label") or {str(i): f"LABEL_{i}" for i in range(raw.get("num_labels", 2))}
    several = raw.get("problem_type") in ("multi_label_classification", "regression")
    fits = masked or name.endswith("Model") or (classifier and of_labels)
    if not fits or (classifier and (several or len(names) < 2)):
        also = "give --labels; " if classifier and not several else ""
        raise RunError(
            f"{model}: is a {name or 'model of no known kind'}, which this command does not make "
            f"smaller; {also}distil recipe shipped:tasks-english.yaml has other tasks"
        )
    positions = longest_row(raw)
    if not masked and not of_labels:  # a folder of sentence-transformers may read less
        with suppress(OSError, RunError):
            settings = "sentence_bert_config.json"
            file = folder / settings if folder.is_dir() else config_file(model, settings)
            positions = min(positions, int(read_json(model, file).get("max_seq_length", positions)))
    kind = "labels" if of_labels else "masked" if masked else "encoder"
    listed = tuple(str(names[str(i)]) for i in range(len(names))) if classifier else None
    return Facts(kind, sizes, positions, listed)


def _recipe(
    model: str,
    facts: Facts,
    data: Path,
    layers: int,
    out: Path,
    column: str,
    label: str,
    steps: int | None,
) -> str:
    """Return the text of the recipe. Its strings are quoted as JSON, which YAML reads."""
    of_labels = facts.kind == "labels"
    rate, measured_at = _RATES[facts.kind]
    rate *= measured_at / facts.sizes.hidden_size
    places = {"shards": "shards", "run": "student", "alone": "alone", "made": "model"}
    places |= {"tuned_run": "teacher", "scores": "scores"}
    places |= {"int8": "model/onnx/model_quantized.onnx"}
    values: dict[str, Any] = {name: _quoted(str(out / place)) for name, place in places.items()}
    values |= {
        "model": _quoted(model),
        "layers": layers,
        "length": min(_LONGEST[facts.kind], facts.positions),
        "steps": f"max_steps: {steps}" if steps else f"epochs: {3 if of_labels else 1}",
        "rate": f"{rate:.1e}",
    }
    options = {"labels" if of_labels else "texts": data, "layers": layers, "output": out}
    options |= {"column": column} if column != "text" else {}
    options |= {"label": label} if label != "label" else {}
    options |= {"steps": steps} if steps else {}
    words = [f"--{name}={value}" for name, value in options.items()]
    if of_labels:
        _check_table(data, column, label, facts.labels)
        tuned = _filled("tuned", values | {"rate": f"{rate / 2:.1e}"})
        values |= {
            "data": _quoted(str(data)),
            "text": _quoted(column),
            "label": _quoted(label),
            "labels": f", labels: {_quoted(facts.labels)}" if facts.labels else "",
            "teacher": values["model"] if facts.labels else values["tuned_run"],
            "tuned": "" if facts.labels else tuned,
        }
        what, body = "labels and soft labels", _filled("labels", values)
    else:
        source = _quoted(_source(data, column, facts.kind))
        encoder = facts.kind == "encoder"
        what = "its vectors of texts" if encoder else "the triple loss on texts"
        student = _filled("vectors" if encoder else "masked", values).rstrip()
        body = _filled("texts", values | {"source": source, "student": student})
    whole = facts.sizes.num_hidden_layers
    head = _HEAD.format(
        what=f"{layers} of the {whole} layers of {model}, distilled by {what}",
        command=shlex.join(["distil", "compress", model, *words]),
        again=_again(out / "recipe.yaml"),
    )
    return head + body


def _filled(name: str, values: Mapping[str, Any]) -> str:
    return Template((_RECIPES / f"{name}.yaml").read_text(encoding="utf-8")).substitute(values)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _source(data: Path, column: str, kind: str) -> dict[str, Any]:
    """Return the source of a corpus for texts, by the name of the file or of those in a folder."""
    from data_prep.sources import Csv, Jsonl, Parquet, Text, Tsv

    if not data.exists():
        raise RunError(f"--texts {data}: no such file or folder")
    files = [data] if data.is_file() else sorted(p for p in data.rglob("*") if p.is_file())
    kinds = {
        source
        for source in (Text, Csv, Tsv, Jsonl, Parquet)
        for file in files
        if any(fnmatch(file.name.lower(), pattern) for pattern in source.patterns)
    }
    names = sorted(str(source.model_fields["kind"].default) for source in kinds)
    if len(names) != 1:
        found = f"files of several kinds: {', '.join(names)}" if names else "no file of that kind"
        raise RunError(
            f"--texts {data}: holds {found}; give a .txt, CSV, TSV, JSONL or Parquet file, or a "
            "folder of such files"
        )
    if kinds != {Text}:
        return {"kind": names[0], "path": str(data), "text_field": column}
    if column != "text":
        raise RunError(f"--column {column}: {data} has no columns; leave it out")
    # An encoder reads passages; rows of a masked model hold pieces of whole files.
    document = "line" if data.is_file() else {"encoder": "paragraph"}.get(kind, "file")
    return {"kind": names[0], "path": str(data), "document": document}


def _refuse_few(data: Path, source: Any, fewest: int) -> None:
    """Refuse texts of which too few would be held out to measure on."""
    found = (document for piece in source.inputs(1 << 24) for document in source.documents(piece))
    num = sum(1 for _ in islice(found, fewest))
    if num < fewest:
        raise RunError(f"--texts {data}: {num} texts; give at least {fewest}: a part is held out")


def _check_table(file: Path, text: str, label: str, classes: Sequence[str] | None) -> None:
    """Refuse a table without the columns, with few rows, or with labels that no class has."""
    if not file.exists():
        raise RunError(f"--labels {file}: no such file")
    rows = list(read_records(file, True, warn))
    if len(rows) < _FEWEST["labels"]:
        raise RunError(f"--labels {file}: {len(rows)} rows; give at least {_FEWEST['labels']}")
    for option, name in (("--column", text), ("--label", label)):
        if name not in rows[0]:
            known = ", ".join(map(str, rows[0]))
            raise RunError(f"{option} {name}: {file} has no such column; it has {known}")
    names = {str(row[label]) for row in rows if row.get(label) not in (None, "")}
    places = {str(i) for i in range(len(classes or ()))}
    if classes is not None and not (names <= set(classes) or names <= places):
        raise RunError(
            f"--labels {file}: its labels are {', '.join(sorted(names)[:9])}, and the classes of "
            f"the model {', '.join(classes[:9])}: name them in its config.json, in id2label and "
            "label2id, or give their numbers"
        )


def _written(texts: Sequence[str], file: Path) -> Path:
    """Write texts to a file, unless it holds them."""
    from data_prep.disk.replacing import replace_text

    if not texts or not all(isinstance(text, str) for text in texts):
        raise RunError("texts: must be a path, or a list of strings")
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    if not file.exists() or file.read_text(encoding="utf-8") != lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, lines)
    return file


def _show(table: Mapping[str, Mapping[str, Figure]], what: str, model: str, out: Path) -> None:
    """Print the table of scores, and what to do next."""
    from launch.stages.evaluate import TIMED
    from pretrain.evaluation.validation import UNTRAINED

    columns = _SHOWN[what]
    tuned = out / "teacher"
    teacher = str(tuned) if tuned.exists() else model
    rows = {
        teacher: f"teacher, {Path(model).name}",
        f"{out}/student": "student",
        f"{out}/model/onnx/model_quantized.onnx": "student, int8",
        f"{out}/alone": "its layers, labels only",
        UNTRAINED: "its layers, untrained",
    }
    cells = []
    for name, shown in rows.items():
        figures = table.get(name) or table.get(Path(name).name)
        if figures is not None:
            sizes = [f"{figures[k].value:,.1f}" if k in figures else "" for k in TIMED]
            cells.append([shown, *sizes, *(str(figures.get(column, "")) for column in columns)])
    show("")
    print_table(["", *TIMED, *columns], cells)
    loads = "sentence-transformers" if what == "encoder" else "transformers"
    show(f"{out / 'model'}: for {loads}; onnx/model_quantized.onnx runs without torch", "next:")
    folder, model = shlex.quote(str(out)), shlex.quote(model)
    show(*(f"  {line.format(out=folder, model=model)}" for line in _NEXT[what]))
    show(f"  distil export {folder}/student DIR --push OWNER/NAME    # to the Hub")

"""Write a recipe that makes a model smaller, from the model and texts or labels alone, and make it.

The recipe is the whole of it: `distil recipe OUTPUT/recipe.yaml` does the same, and may be changed.
Rates and sizes of steps are those of records (docs/results.md), for the width that a model has
there; that of another width is in inverse proportion to it, which is not measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.examples.labelled_files import read_records
from data_prep.messages import warn
from launch.console import print_table, show
from pretrain import RunError
from pretrain.monitor.figures import Figure

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The measured rate, and the width of its model.
_RATES = {"encoder": (5e-4, 384), "masked": (2e-3, 256), "labels": (1e-4, 384)}
_ROW = 128  # tokens of a text, or of a row
_FAMILIES = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "modernbert")
_HEAD = """\
# {what}. Made by
#
#     {command}
#
# which continues after an interruption. After a change here continue with `distil recipe {file}`.
"""
_TEXTS = """\
runs:
  - stage: prepare
    output: {out}/shards
    tokenizer: {model}
    row_length: {length}
    sources:
      - {source}
    deduplicate: {{documents: exact}}
    validation: 0.05
  - output: {out}/student
    shards: {out}/shards
    teacher: {model}
{student}
    checkpoint: {{every: 200, keep: 1}}
    logging: {{every: 25}}
  - {{stage: export, output: {out}/model, run: {out}/student, int8: true, max_drop: 0.05}}
  - stage: evaluate
    output: {out}/scores
    models: [{out}/student, {out}/model/onnx/model_quantized.onnx]
    data: {out}/shards
    timed: true
"""
# configs/embedding-3x384.yaml, configs/demo.yaml
_VECTORS = """\
    student: {{architecture: same, num_layers: {layers}, dropout: 0.0, attention_dropout: 0.0}}
    objective: {{name: embedding, cosine: 1.0, similarity: 1.0}}
    optimizer: {{learning_rate: {rate:.1e}, warmup_ratio: 0.05, max_grad_norm: 1.0}}
    train: {{{steps}, global_batch_size: 4, micro_batch_size: 4}}
    evaluation: {{every: 0, rows: 64}}"""
_MASKED = """\
    student: {{num_layers: {layers}, dropout: 0.0, attention_dropout: 0.0}}
    objective: {{name: distilbert, kl: 5.0, mlm: 2.0, cosine: 1.0, kl_positions: masked}}
    masking: {{probability: 0.15, mode: uniform}}
    optimizer: {{learning_rate: {rate:.1e}, warmup_ratio: 0.05, max_grad_norm: 5.0}}
    train: {{{steps}, global_batch_size: 32, micro_batch_size: 32}}
    evaluation: {{every: 0, rows: 512}}"""
# configs/tasks-english.yaml. `alone` is the control: the same layers learn from the labels only.
_LABELS = """\
defaults:
  shards: {out}/shards
  task: {{name: classification}}
  optimizer:
    {{learning_rate: {rate:.1e}, warmup_ratio: 0.1, max_grad_norm: 1.0, weight_decay: 0.01}}
  train: {{{steps}, global_batch_size: 32, micro_batch_size: 32}}
  evaluation: {{every: 0, rows: 10000}}
  checkpoint: {{every: 200, keep: 1}}
  logging: {{every: 25}}
runs:
  - stage: examples
    output: {out}/shards
    task: {{name: classification, text: {text}, label: {label}{labels}}}
    train: {data}
    validation: 0.1
    tokenizer: {model}
    max_length: {length}
    longer: cut
{tuned}  - output: {out}/student
    teacher: {teacher}
    student: {{architecture: same, num_layers: {layers}}}
    objective: {{name: kd, temperature: 2.0, soft: 0.5, hard: 0.5}}
  - output: {out}/alone
    teacher: {model}
    student: {{architecture: same, num_layers: {layers}}}
    objective: {{name: kd, soft: 0.0, hard: 1.0}}
  - {{stage: export, output: {out}/model, run: {out}/student, int8: true, max_drop: 0.05}}
  - stage: evaluate
    output: {out}/scores
    models: [{out}/student, {out}/alone, {out}/model/onnx/model_quantized.onnx]
    teacher: {teacher}
    data: {out}/shards
    timed: true
"""
_TUNED = """\
  - output: {out}/teacher
    objective: {{name: finetune}}
    model: {{init: {model}}}
    optimizer: {{learning_rate: {rate:.1e}}}
"""
_SHOWN = {
    "encoder": ("similarity", "cosine"),
    "masked": ("accuracy", "agreement"),
    "labels": ("score", "retention"),
}
_NEXT = {
    "encoder": (
        """python -c 'import pretrain; print(pretrain.encode("{out}/model", ["A text."]))'""",
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
    model: str,
    texts: Path | str | Sequence[str] | None = None,
    *,
    labels: Path | str | None = None,
    layers: int | None = None,
    output: Path | str = "small",
    column: str | None = None,
    label: str = "label",
    steps: int | None = None,
    write_only: bool = False,
) -> Small:
    """Make a model smaller: some of its layers, which learn what the whole of it does.

    A masked language model learns by the triple loss and a sentence encoder its vectors, from
    `texts`; a classifier, or an encoder that becomes one, its labels, from `labels`.

    Args:
        model: a folder or a hub's name.
        texts: a list of texts, a .txt file with a text in each line, a table (CSV, TSV, JSONL,
            Parquet) or a folder of such files, where each .txt is one text.
        labels: a table with a column of texts and one of labels.
        layers: of the student; by default half of them.
        output: folder of recipe.yaml, and of all that it makes.
        column: of the texts in a table; by default `text`.
        label: column of the labels.
        steps: of training; by default those of one pass over the texts, or three over labels.
        write_only: stop after the recipe.

    Raises:
        RunError, CorpusError: names what cannot be used, and the fix.
    """
    from data_prep.disk.replacing import replace_text
    from launch.config import find_shipped, load_config, parse
    from launch.recipe_config import Recipe
    from launch.stages.estimate import cost_lines
    from launch.stages.stage import How
    from launch.stages.table import check_all, cost_of, make_all, stage_of

    out = Path(output)
    if (texts is None) == (labels is None):
        raise RunError("compress: give texts or labels: --texts PATH or --labels FILE")
    if (
        out.exists()
        and not (out / "recipe.yaml").exists()
        and (not out.is_dir() or [*out.iterdir()])
    ):
        raise RunError(f"{out}: distil compress has not written this; give another --output")
    if not isinstance(texts, Path | str | None):
        texts = _written(texts, out / "texts.jsonl")
    model = str(find_shipped(Path(model))) if model.startswith("shipped:") else model
    what, text = _recipe(model, texts, labels, layers, out, column, label, steps)
    file = out / "recipe.yaml"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise RunError(
            f"{file} is another recipe than this command writes: continue it with `distil recipe "
            f"{file}`, or give another --output"
        )
    stages = [stage_of(entry) for entry in load_config(Recipe, parse(f"{file}:", text), []).runs]
    if not write_only and any(stage.state() != "done" for stage in stages):
        lines = check_all(stages, How(), dry_run=True)
        wanted = ("about ", "student: ", "steps: ")
        show(*(line for about in lines for line in about if line.startswith(wanted)))
        show(*cost_lines([cost_of(stage) for stage in stages], None))
    if not file.exists():  # now that it can be made
        out.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    show(f"recipe: {file}; after a change: distil recipe {file}")
    if write_only:
        return Small(out / "model", {})
    lines = check_all(stages, How(), dry_run=False)
    if code := make_all(stages, How(), lines, dry_run=False):
        raise SystemExit(code)
    figures = json.loads((out / "scores" / "figures.json").read_bytes())["figures"]
    small = Small(
        out / "model", {m: {k: Figure(**v) for k, v in f.items()} for m, f in figures.items()}
    )
    _show(small, what, model, out)
    return small


def _recipe(
    model: str,
    texts: Path | str | None,
    labels: Path | str | None,
    layers: int | None,
    out: Path,
    column: str | None,
    label: str,
    steps: int | None,
) -> tuple[str, str]:
    """Return the kind of a model, "encoder", "masked" or "labels", and its recipe."""
    raw = _config_of(model)
    kind = str((raw.get("architectures") or [""])[0])
    whole, width = (
        raw.get("num_hidden_layers", raw.get("n_layers")),
        raw.get("hidden_size", raw.get("dim")),
    )
    if (
        not isinstance(whole, int)
        or not isinstance(width, int)
        or raw.get("model_type") not in _FAMILIES
    ):
        raise RunError(
            f"{model}: is a {raw.get('model_type', 'model of no known kind')}, whose layers this "
            "command cannot take. Let it write vectors or labels of your texts, and distil those: "
            "`distil recipe shipped:own-task.yaml`, docs/papers/sentence-embeddings.md"
        )
    layers = layers or max(1, whole // 2)
    if not 1 <= layers <= whole:
        raise RunError(f"--layers {layers}: {model} has {whole}")
    length = min(_ROW, *(n for n in (raw.get("max_position_embeddings"),) if isinstance(n, int)))
    of_labels = labels is not None
    if kind.endswith("ForMaskedLM") and not of_labels:
        what, title = "masked", "the triple loss on texts"
    elif not kind.endswith(("ForMaskedLM", "Model")) and not (
        of_labels and kind.endswith("ForSequenceClassification")
    ):
        also = "; give --labels" if kind.endswith("ForSequenceClassification") else ""
        raise RunError(
            f"{model}: is a {kind or 'model of no known kind'}, which this command does not make "
            f"smaller by texts{also}; distil recipe shipped:tasks-english.yaml has other tasks"
        )
    else:
        what = "labels" if of_labels else "encoder"
        title = "labels and soft labels" if of_labels else "its vectors of texts"
    rate, measured_at = _RATES[what]
    values: dict[str, Any] = {
        "out": json.dumps(str(out))[1:-1],
        "model": json.dumps(model),
        "layers": layers,
        "length": length,
        "steps": f"max_steps: {steps}" if steps else f"epochs: {3 if of_labels else 1}",
        "rate": rate * measured_at / width,
    }
    data = Path(labels if labels is not None else str(texts))
    options = {"labels" if of_labels else "texts": data, "layers": layers, "output": out}
    options |= {"column": column, "label": label if label != "label" else None, "steps": steps}
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    command = shlex.join(["distil", "compress", model, *words])
    if of_labels:
        column = column or "text"
        _check_columns(data, column, label)
        head = kind.endswith("ForSequenceClassification")
        names = raw.get("id2label") if head else None
        listed = [names[str(i)] for i in range(len(names))] if isinstance(names, dict) else []
        tuned = _TUNED.format(**values | {"rate": values["rate"] / 2})
        values |= {
            "data": json.dumps(str(data)),
            "text": json.dumps(column),
            "label": json.dumps(label),
            "labels": f", labels: {json.dumps(listed)}" if listed else "",
            "teacher": values["model"] if head else f"{values['out']}/teacher",
            "tuned": "" if head else tuned,
        }
        body = _LABELS.format(**values)
    else:
        source = json.dumps(_source(data, column)).replace('"kind"', "kind")
        student = (_VECTORS if what == "encoder" else _MASKED).format(**values)
        body = _TEXTS.format(**values, source=source, student=student)
    about = f"{layers} of the {whole} layers of {model}, distilled by {title}"
    return what, _HEAD.format(what=about, command=command, file=out / "recipe.yaml") + body


def _config_of(model: str) -> dict[str, Any]:
    """Return the config.json of a model; of a hub's nothing else is downloaded."""
    from pretrain.model.config_file import read_config
    from pretrain.model.hub import config_file, not_there
    from pretrain.run_folder import is_run

    folder = Path(model)
    if is_run(folder):
        raise RunError(f"{model}: is a run; give its export: distil export {model} DIR")
    try:
        return read_config(model, folder if folder.is_dir() else config_file(model).parent)
    except OSError as error:
        raise not_there(model, error) from None


def _source(data: Path, column: str | None) -> dict[str, Any]:
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
        found = f"files of several kinds: {', '.join(names)}" if names else "no such file"
        raise RunError(
            f"--texts {data}: holds {found}; give a .txt, CSV, TSV, JSONL or Parquet file, or a "
            "folder of such files"
        )
    if kinds == {Text}:
        if column is not None:
            raise RunError(f"--column {column}: {data} has no columns; leave it out")
        document = "line" if data.is_file() else "file"
        return {"kind": names[0], "path": str(data), "document": document}
    return {"kind": names[0], "path": str(data), "text_field": column or "text"}


def _check_columns(file: Path, text: str, label: str) -> None:
    """Refuse a table of labels without the columns that are named."""
    if not file.exists():
        raise RunError(f"--labels {file}: no such file")
    first = next(iter(read_records(file, True, warn)), {})
    for option, name in (("--column", text), ("--label", label)):
        if name not in first:
            known = ", ".join(map(str, first)) if isinstance(first, Mapping) else "none"
            raise RunError(f"{option} {name}: {file} has no such column; it has {known}")


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


def _show(small: Small, what: str, model: str, out: Path) -> None:
    """Print the table of scores, and what to do next."""
    columns = _SHOWN[what]
    tuned = out / "teacher"
    teacher = str(tuned) if tuned.exists() else model
    rows = {
        teacher: f"teacher, {Path(model).name}",
        f"{out}/student": "student",
        f"{out}/model/onnx/model_quantized.onnx": "student, int8",
        f"{out}/alone": "its layers, labels only",
        "the same layers, untrained": "its layers, untrained",
    }
    cells = []
    for name, shown in rows.items():
        figures = small.figures.get(name) or small.figures.get(Path(name).name)
        if figures is not None:
            sizes = [f"{figures[key].value:,.1f}" if key in figures else "" for key in ("MB", "ms")]
            cells.append([shown, *sizes, *(str(figures.get(column, "")) for column in columns)])
    show("")
    print_table(["", "MB", "ms a text", *columns], cells)
    loads = "sentence-transformers" if what == "encoder" else "transformers"
    show(f"{small.folder}: for {loads}; onnx/model_quantized.onnx runs without torch", "next:")
    show(*(f"  {line.format(out=out, model=model)}" for line in _NEXT[what]))
    show(f"  distil export {out}/student DIR --push OWNER/NAME    # to the Hub")

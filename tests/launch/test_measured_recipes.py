"""Run the recipes that measured tasks, at tiny size, in the order in which they need each other."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.shipped import CONFIGS
from support.task_data import WORDS, save_model, sentence
from transformers import AutoTokenizer, BertForSequenceClassification

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare


def write_inputs() -> None:
    """Write what the recipes name, in the working directory."""
    draw = random.Random(0)

    def example() -> tuple[int, str]:
        label = draw.randrange(2)
        return label, f"{WORDS[label]} {sentence(draw)}"

    for folder in ("glue/SST-2", "glue/STS-B", "aclImdb/train/neg", "aclImdb/train/pos"):
        Path(folder).mkdir(parents=True)
    for split, num in (("train", 96), ("dev", 40)):
        lines = [f"{text}\t{label}\n" for label, text in (example() for _ in range(num))]
        Path(f"glue/SST-2/{split}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
        rows = [
            ["a", "b", "c", "d", label, text, sentence(draw)]
            for label, text in (example() for _ in range(num))
        ]
        table = "".join("\t".join(map(str, row)) + "\n" for row in rows)
        Path(f"glue/STS-B/sts-{split}.csv").write_text(table)
    for number in range(120):
        label, text = example()
        Path(f"aclImdb/train/{('neg', 'pos')[label]}/{number}_5.txt").write_text(text)
    articles = Path("wiki/wikiextractor_enwiki_2015/text/AA")
    articles.mkdir(parents=True)
    (articles / "wiki_00").write_text(
        "".join(
            f'<doc id="{i}" url="" title="t{i}">\nt{i}\n\n'
            f"{' '.join(sentence(draw) for _ in range(40))}\n</doc>\n"
            for i in range(200)
        )
    )
    body = save_model(
        Path("minilm-l6-body"),
        "bert",
        "classification",
        num_hidden_layers=6,
        max_position_embeddings=128,
    )
    body.bert.save_pretrained("minilm-l6-body")
    AutoTokenizer.from_pretrained("minilm-l6-body").save_pretrained("minilm-l6-body")
    Path("texts.txt").write_text("\n".join(sentence(draw) for _ in range(400)), encoding="utf-8")
    corpus = {
        "output": "shards/wiki-sentences",
        "tokenizer": "minilm-l6-body",
        "row_length": 64,
        "sources": [{"kind": "text", "path": "texts.txt", "document": "line"}],
        "deduplicate": {"documents": "exact"},
        "validation": 0.1,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(corpus))


def export_of(distil: Any, run: Path) -> Path:
    """Return the exported folder of a run."""
    code, out, err = distil("export", run, "exported")
    assert code == 0, out + err
    return Path("exported")


def scores_of(distil: Any, name: str, *without: str) -> dict[str, Any]:
    """Run a recipe on one task with one seed, without some arms of a sweep; return its scores."""
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    fewer = {"train.seed": "[0]", "shards": "[shards/tasks/sst2]"}  # new ones each: no aliases
    for run in values["runs"]:
        if "max_steps" in run.get("train", {}):
            run["train"]["max_steps"] = 3
        if "sweep" in run:
            run["sweep"] = {
                k: yaml.safe_load(fewer[k]) if k in fewer else v
                for k, v in run["sweep"].items()
                if k not in without
            }
    models = values["runs"][-1]["models"]
    if isinstance(runs := models["teacher"], list):
        models["teacher"] = [run for run in runs if run.endswith("sst2")]
    Path("recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 0, out + err
    scores = Path(values["runs"][-1]["output"], "scores.json")
    found: dict[str, Any] = json.loads(scores.read_text(encoding="utf-8"))["figures"]
    return found


def recorded_figures() -> dict[str, set[str]]:
    """Append the scores of tasks-english to a record; return the names of its figures by model."""
    command = [sys.executable, "-m", "benchmarks.scores", "runs/tasks/scores/scores.json"]
    root = Path(__file__).parents[2]
    subprocess.run(
        [*command, "--record", "record.json"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    found: dict[str, set[str]] = {}
    for record in json.loads(Path("record.json").read_bytes()):
        for row in record["rows"]:
            found.setdefault(row["model"], set()).update(row["figures"])
    return found


@pytest.mark.slow
def test_the_measured_recipes_score_their_students(distil: Any) -> None:
    write_inputs()
    found = scores_of(distil, "tasks-english")
    arms = {f"student {arm}" for arm in ("labels", "kd", "pkd", "theseus", "insights")}
    assert {*found} == {"teacher", "body", "tinybert"} | arms
    assert {*found["student kd"]} == {"sst2", "average", "retention"}
    assert {*recorded_figures()} == {*found}
    found = scores_of(distil, "imdb-soft-labels", "labels", "kd")
    assert {*found} == {"teacher", "student soft"} and "imdb" in found["student soft"]
    found = scores_of(distil, "tasks-pretrained", "minilm")
    assert {*found} == {"teacher", "student embedding", "student alone"}
    assert {*found["student alone"]} == {"sst2", "average", "retention"}
    found = scores_of(distil, "tasks-bilstm")
    assert {*found} == {"teacher", "student labels", "student distilled"}


@pytest.mark.slow
def test_tinybert_learns_a_task_by_layers_then_by_predictions(distil: Any) -> None:
    """Run its recipe on a teacher and a student of few weights."""
    write_inputs()
    names = ("negative", "positive")
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    for name, layers in (("words", 2), ("runs/glue/teacher-sst2", 4), ("runs/tinybert-4x312", 2)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        save_model(Path(name), "bert", "classification", num_hidden_layers=layers, **labels)
    values = yaml.safe_load((CONFIGS / "tinybert-task.yaml").read_text(encoding="utf-8"))
    glue = yaml.safe_load((CONFIGS / "glue.yaml").read_text(encoding="utf-8"))
    sst2 = next(run for run in glue["runs"] if run["output"] == "shards/glue/sst2")
    for run in values["runs"]:
        run["train"] = {"max_steps": 3, "micro_batch_size": 32}
    values["runs"] = [sst2 | {"tokenizer": "words"}, *values["runs"]]
    Path("recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 0, out + err
    student = Path("runs/tinybert-task/student")
    exported = BertForSequenceClassification.from_pretrained(export_of(distil, student))
    assert exported.config.num_hidden_layers == 2 and exported.config.num_labels == 2

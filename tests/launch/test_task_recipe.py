"""Run the shipped recipe of a user's own labels at tiny size, and its data's mistakes."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.task_data import WORDS, save_model, sentence
from support.tiny import VOCABULARY
from transformers import AutoModelForSequenceClassification

from pretrain.evaluation.tasks import evaluate_tasks

ROOT = Path(__file__).parents[2]


def write_csv(folder: Path, num: int = 240) -> Path:
    """Write texts whose first word tells their label."""
    draw = random.Random(0)
    with (folder / "mine.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(num):
            label = draw.randrange(2)
            rows.writerow([f"{WORDS[label]} {sentence(draw)}", ("no", "yes")[label]])
    return folder / "mine.csv"


def overrides(folder: Path) -> list[str]:
    train = "{max_steps: 60, global_batch_size: 24, precision: fp32, num_workers: 0}"
    model = folder / "model"
    found = [
        f"runs.0.output={folder / 'shards'}",
        f"runs.0.train={folder / 'mine.csv'}",
        f"runs.0.tokenizer={model}",
        "runs.0.max_length=64",
        f"runs.3.output={folder / 'figures'}",
        f"runs.3.models=[{folder / 'student'}]",
        f"runs.3.teacher={folder / 'teacher'}",
        f"runs.3.data={folder / 'shards'}",
        f"runs.4.output={folder / 'exported'}",
        f"runs.4.run={folder / 'student'}",
        "runs.4.max_drop=0.9",
    ]
    for i, name in ((1, "teacher"), (2, "student")):
        found += [
            f"runs.{i}.output={folder / name}",
            f"runs.{i}.shards={folder / 'shards'}",
            f"runs.{i}.train={train}",
            f"runs.{i}.optimizer.learning_rate=0.002",
        ]
    return [
        *found,
        f"runs.1.model={{init: {model}, hidden_dropout_prob: 0.0}}",
        f"runs.2.teacher={folder / 'teacher'}",
        "runs.2.student.num_layers=1",
    ]


@pytest.mark.slow
def test_a_csv_becomes_a_small_classifier_without_torch(tmp_path: Path, distil: Any) -> None:
    write_csv(tmp_path)
    save_model(tmp_path / "model", "bert", "classification")
    recipe = str(ROOT / "configs" / "own-task.yaml")
    code, out, err = distil("recipe", recipe, *overrides(tmp_path))
    assert code == 0, out + err
    kept = json.loads((tmp_path / "figures" / "figures.json").read_text(encoding="utf-8"))
    teacher, student = kept["figures"]["teacher"], kept["figures"]["student"]
    assert teacher["score"]["value"] > 0.8 and student["score"]["value"] > 0.7  # guessing: half
    ratio = student["score"]["value"] / teacher["score"]["value"]
    assert student["retention"]["value"] == pytest.approx(ratio)
    assert student["retention"]["low"] <= ratio <= student["retention"]["high"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert model.config.id2label == {0: "no", 1: "yes"} and model.config.num_hidden_layers == 1
    files = {path.name for path in (tmp_path / "exported" / "onnx").iterdir()}
    assert files == {"model.onnx", "model_quantized.onnx", "export.json"}
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert "text-classification" in card and "| accuracy |" in card
    code, out, err = distil("recipe", recipe, *overrides(tmp_path))
    assert code == 0 and out.count("up to date") >= 4, out + err


@pytest.mark.slow
def test_glues_recipe_scores_models_on_tasks_and_seeds(tmp_path: Path, distil: Any) -> None:
    """Run the shipped recipe on two tasks and two seeds; compare its table with single commands."""
    values = yaml.safe_load((ROOT / "configs" / "glue.yaml").read_text(encoding="utf-8"))
    save_model(tmp_path / "model", "bert", "classification")
    values["defaults"] |= {
        "train": {"max_steps": 20, "global_batch_size": 8, "precision": "fp32", "num_workers": 0},
        "evaluation": {"every": 0, "rows": 8},
    }
    runs = {run["output"]: run for run in values["runs"]}
    examples = [runs["shards/glue/sst2"], runs["shards/glue/stsb"]]
    shards = []
    draw = random.Random(0)
    for entry in examples:
        name = entry["output"].rpartition("/")[2]
        for split, num in (("train", 60), ("validation", 30)):
            rows = []
            for _ in range(num):
                place = draw.randrange(2)
                text = f"{WORDS[place]} {sentence(draw)}"
                rows.append([text, place] if name == "sst2" else [text, sentence(draw), place])
            head = ["sentence", "label"] if name == "sst2" else ["sentence1", "sentence2", "score"]
            lines = ["\t".join(map(str, row)) for row in [head, *rows]]
            path = tmp_path / f"{name}-{split}.tsv"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            entry[split] = str(path)
        entry |= {"output": str(tmp_path / name), "tokenizer": str(tmp_path / "model")}
        shards.append(entry["output"])
    teacher, student = runs["runs/glue/teacher"], runs["runs/glue/student"]
    teacher |= {"output": str(tmp_path / "teacher"), "model": {"init": str(tmp_path / "model")}}
    layers = {"architecture": "same", "init": [0]}
    student |= {"output": str(tmp_path / "student"), "teacher": str(tmp_path / "teacher")}
    student["student"] = layers
    for run in (teacher, student):
        run["shards"], run["sweep"]["shards"] = shards[0], [*shards]
    student["sweep"]["train.seed"] = [0, 1]
    scores = runs["runs/glue/scores"]
    scores |= {"output": str(tmp_path / "scores"), "without": ["stsb"]}
    scores["models"] = {"teacher": teacher["output"], "student": student["output"]}
    values["runs"] = [*examples, teacher, student, scores]
    path = tmp_path / "glue.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    kept = json.loads((tmp_path / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert {*kept["figures"]} == {"teacher", "student labels", "student kd"}
    for model, figures in kept["figures"].items():
        seeds = kept["seeds"][model]
        medians = {task: sorted(found.values())[0] for task, found in seeds.items()}
        for task, median in medians.items():  # the lower one of two
            assert figures[task]["value"] == pytest.approx(median)
        assert figures["average"]["value"] == pytest.approx(sum(medians.values()) / 2)
        assert figures["average without stsb"]["value"] == pytest.approx(medians["sst2"])
        if model != "teacher":
            own = figures["average without stsb"]["value"]
            theirs = kept["figures"]["teacher"]["average without stsb"]["value"]
            assert figures["retention"]["value"] == pytest.approx(own / theirs)
    run = tmp_path / "student-sst2-seed1-kd"
    figures = evaluate_tasks([str(run)], tmp_path / "sst2")[str(run)]
    assert figures["score"].value == pytest.approx(kept["seeds"]["student kd"]["sst2"]["1"])
    code, out, err = distil("recipe", path)
    assert code == 0 and "scores: up to date" in out
    code, out, err = distil("evaluate", run, tmp_path / "sst2", "--json")
    found = {entry["model"]: entry["figures"] for entry in map(json.loads, out.splitlines())}
    assert code == 0 and [*found] == ["teacher-sst2", run.name]  # the run's own teacher
    assert found[run.name]["score"]["value"] == figures["score"].value


def test_a_tasks_data_is_refused_in_one_line_and_other_commands_say_what_it_is(
    tmp_path: Path, distil: Any
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    write_csv(tmp_path)
    data = tmp_path / "data.yaml"
    data.write_text(
        f"output: {tmp_path / 'shards'}\ntask: {{name: classification, text: sentence}}\n"
        f"train: {tmp_path / 'mine.csv'}\nvalidation: 0.1\ntokenizer: {tmp_path / 'vocab.txt'}\n",
        encoding="utf-8",
    )
    code, out, err = distil("prepare", data)
    assert code == 2 and err.count("\n") == 1
    assert "no column 'sentence'; it has text, label" in err
    code, out, err = distil("pretrain", data)
    assert code == 2 and "this is the data of a task: distil prepare" in err
    code, out, err = distil("prepare", data, "task.text=text")
    assert code == 0 and "labels: no, yes" in out
    assert distil("verify", tmp_path / "shards")[0] == 0
    code, out, err = distil("prepare", data, "task.text=text")
    assert code == 0 and "up to date" in out
    code, out, err = distil("prepare", data, "task.text=text", "--dry-run")
    assert code == 2 and "takes no option but --record" in err
    code, out, err = distil("evaluate", tmp_path / "model", tmp_path / "shards", "--rows", "3")
    assert code == 2 and err.count("\n") == 1

"""Make models smaller by one command: recipes, refusals, and what comes out."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.shipped import CONFIGS

from launch.compression import compress
from launch.config import find_shipped, load_config
from launch.recipe_config import Recipe
from pretrain import RunError

DEMO = find_shipped(Path("shipped:demo-teacher"))
TEXT = find_shipped(Path("shipped:demo-text.txt.gz"))


def shipped(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    """Write the demo's teacher with another config.json."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    values = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def labelled(tmp_path: Path, rows: int = 200) -> Path:
    file = tmp_path / "mine.csv"
    with file.open("w", encoding="utf-8", newline="") as opened:
        write = csv.writer(opened)
        write.writerow(["text", "label"])
        for i in range(rows):
            word = ("list", "string")[i % 2]
            write.writerow([f"return the {word} of number {i}", word])
    return file


def recipe(tmp_path: Path, model: Path, **options: Any) -> Any:
    compress(str(model), **options, output=tmp_path / "out", write_only=True)
    return yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text(encoding="utf-8"))


def test_the_demo_makes_the_documented_configs(distil: Any, tmp_path: Path) -> None:
    options = ("--texts", TEXT, "--output", "runs/demo", "--write-only")
    code, out, err = distil("compress", "shipped:demo-teacher", *options)
    assert code == 0 and "distil recipe runs/demo/recipe.yaml" in out, err
    prepare, student, export, scores = yaml.safe_load(Path("runs/demo/recipe.yaml").read_text())[
        "runs"
    ]
    corpus, run = shipped("corpus-demo.yaml"), shipped("demo.yaml")
    corpus["sources"][0]["path"], corpus["tokenizer"] = str(TEXT), str(DEMO)
    assert prepare == {"stage": "prepare", **corpus}
    assert student == {**run, "teacher": str(DEMO)}
    assert export["run"] == student["output"] and export["int8"]
    assert scores["models"] == [student["output"], f"{export['output']}/onnx/model_quantized.onnx"]
    assert not Path("runs/demo/shards").exists()


def test_the_settings_are_those_of_records(tmp_path: Path) -> None:
    """Compare a model of the record's width with the config that was measured."""
    sizes = {"architectures": ["BertModel"], "hidden_size": 384, "num_hidden_layers": 6}
    model = folder_of(tmp_path, **sizes)
    student = recipe(tmp_path, model, texts=TEXT)["runs"][1]
    measured = shipped("embedding-3x384.yaml")
    for section in ("student", "objective", "optimizer"):
        assert student[section].items() <= measured[section].items(), section
    sized = ("global_batch_size", "micro_batch_size")
    assert [student["train"][k] for k in sized] == [measured["train"][k] for k in sized]
    shutil.rmtree(tmp_path / "out")
    found = recipe(tmp_path, model, labels=labelled(tmp_path))
    measured = shipped("tasks-english.yaml")
    assert found["defaults"]["optimizer"] == measured["defaults"]["optimizer"]
    assert found["defaults"]["train"].items() <= measured["defaults"]["train"].items()
    tuned = next(run for run in measured["runs"] if run["output"] == "runs/tasks/teacher")
    assert found["runs"][1]["optimizer"] == tuned["optimizer"]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "give texts or labels"),
        ({}, {"texts": TEXT, "labels": TEXT}, "give texts or labels"),
        ({}, {"texts": "nowhere.txt"}, "--texts nowhere.txt: no such file"),
        ({}, {"labels": "nowhere.csv"}, "--labels nowhere.csv: no such file"),
        ({}, {"texts": [TEXT]}, "texts: must be a path, or a list of strings"),
        ({}, {"texts": DEMO / "model.safetensors"}, "holds no file of that kind; give a .txt"),
        ({}, {"texts": TEXT, "column": "body"}, "--column body: .* has no columns"),
        ({}, {"texts": TEXT, "layers": 5}, "--layers 5: .* has 4"),
        ({}, {"texts": TEXT, "layers": 0}, "--layers 0: .* has 4: give 1 to 4"),
        ({"model_type": "gpt2"}, {"texts": TEXT}, "model_type gpt2: .* shipped:own-task.yaml"),
        (
            {"architectures": ["BertForSequenceClassification"]},
            {"texts": TEXT},
            "is a BertForSequenceClassification, .*give --labels",
        ),
        (
            {"architectures": ["BertForQuestionAnswering"]},
            {"texts": TEXT},
            "shipped:tasks-english.yaml",
        ),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "problem_type": "multi_label_classification",
            },
            {"labels": TEXT},
            "this command does not make smaller",
        ),
        ({"architectures": ["BertModel"]}, {"texts": ["a text"] * 99}, "99 texts; .* at least 100"),
    ],
)
def test_what_cannot_be_made_smaller_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    model = folder_of(tmp_path, **changes)
    for _ in range(2):  # the second call meets what the first has left
        with pytest.raises(RunError, match=message):
            compress(str(model), **options, output=tmp_path / "out")
    assert not (tmp_path / "out" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("classes", "kept"),
    [(None, False), ({"0": "list", "1": "string"}, True), ({"0": "yes", "1": "no"}, False)],
)
def test_labels_are_those_of_the_classifier(
    tmp_path: Path, classes: dict[str, str] | None, kept: bool
) -> None:
    changes = {} if classes is None else {"id2label": classes}
    model = folder_of(tmp_path, architectures=["BertForSequenceClassification"], **changes)
    file = labelled(tmp_path)
    if kept:
        assert recipe(tmp_path, model, labels=file)["runs"][0]["task"]["labels"] == [
            *(classes or {}).values()
        ]
        return
    with pytest.raises(RunError, match="its labels are list, string, and the classes of the model"):
        compress(str(model), labels=file, output=tmp_path / "out")
    numbers = file.read_text().replace(",list", ",0").replace(",string", ",1")
    file.write_text(numbers, encoding="utf-8")  # as transformers' own examples have them
    assert len(recipe(tmp_path, model, labels=file)["runs"][0]["task"]["labels"]) == 2


@pytest.mark.parametrize("name", ["a: b #1", "ü 😀", 'qu"ote', "{x}, [y]", "it's"])
def test_any_folder_may_be_named(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    texts = tmp_path / f"{name}.txt"
    texts.write_text("A text.\n" * 200, encoding="utf-8")
    compress(str(DEMO), texts, output=out, write_only=True)
    runs = load_config(Recipe, out / "recipe.yaml", []).runs
    assert [entry.output for entry in runs] == [
        out / each for each in ("shards", "student", "model", "scores")
    ]
    assert runs[0].sources[0].path == str(texts) and runs[2].run == out / "student"


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"max_position_embeddings": 4096}, 512),
        ({"max_position_embeddings": 40}, 40),
        ({"max_position_embeddings": 66, "model_type": "roberta", "pad_token_id": 1}, 64),
        ({"max_position_embeddings": 512, "max_seq_length": 256}, 256),
    ],
)
def test_texts_are_as_long_as_the_encoder_reads(
    tmp_path: Path, changes: dict[str, Any], length: int
) -> None:
    longest = changes.pop("max_seq_length", None)
    model = folder_of(tmp_path, architectures=["BertModel"], **changes)
    if longest is not None:
        settings = json.dumps({"max_seq_length": longest})
        (model / "sentence_bert_config.json").write_text(settings, encoding="utf-8")
    assert recipe(tmp_path, model, texts=TEXT)["runs"][0]["row_length"] == length


def test_columns_that_a_table_lacks_are_named(tmp_path: Path) -> None:
    file = labelled(tmp_path)
    (tmp_path / "notes.txt").write_text("A text.", encoding="utf-8")
    with pytest.raises(RunError, match="files of several kinds: csv, text"):
        compress(str(DEMO), tmp_path, output=tmp_path / "out")
    with pytest.raises(RunError, match=r"--label class: .* it has text, label"):
        compress(str(DEMO), labels=file, label="class", output=tmp_path / "out")
    with pytest.raises(ValueError, match=r"no column 'body'; it has text, label"):
        compress(str(DEMO), file, column="body", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_work_of_others_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match="give another --output"):
        compress(str(DEMO), TEXT, output=out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").unlink()
    compress(str(DEMO), TEXT, output=out, write_only=True)
    edited = (out / "recipe.yaml").read_text(encoding="utf-8").replace("epochs: 1", "epochs: 2")
    (out / "recipe.yaml").write_text(edited, encoding="utf-8")
    with pytest.raises(RunError, match="another recipe than this command writes"):
        compress(str(DEMO), TEXT, output=out)
    assert (out / "recipe.yaml").read_text(encoding="utf-8") == edited


@pytest.mark.slow
def test_a_masked_model_becomes_smaller_once(tmp_path: Path, distil: Any) -> None:
    options = ("demo", "--steps", 12, "--output", tmp_path / "out")
    code, out, err = distil(*options)
    assert code == 0, out + err
    folder = tmp_path / "out" / "model"
    found = json.loads((tmp_path / "out/scores/figures.json").read_bytes())["figures"]
    for name, file in (
        ("student", "model.safetensors"),
        ("model_quantized.onnx", "onnx/model_quantized.onnx"),
    ):
        assert found[name]["MB"]["value"] == round((folder / file).stat().st_size / 1e6, 2)
        assert found[name]["ms"]["value"] > 0
    assert found["demo-teacher"]["accuracy"]["value"] > 0.4  # on text that it never saw
    rows = [line for line in out.splitlines() if "teacher, demo-teacher" in line]
    assert len(rows) == 1 and f"{found['demo-teacher']['accuracy']['value']:.3f}" in rows[0]
    files = [path for path in folder.rglob("*") if path.name != "README.md" and path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    again = distil(*options)
    assert again.code == 0 and again.out.count("up to date") >= 4
    assert f"{tmp_path}/out/scores: up to date" in again.out.replace("\n", "")
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.slow
def test_an_encoder_becomes_smaller_and_answers_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    positions = {"intermediate_size": 64, "max_position_embeddings": 16}  # below 17, see `compare`
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=4096, **sizes, **positions)).save_pretrained(model)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(model)
    texts = [f"Text {i}\nof arrays." for i in range(300)]
    # A script, without the lines that several processes need.
    (tmp_path / "script.py").write_text(
        "import json, sys\nfrom pretrain import compress\n"
        "texts = json.loads(sys.argv[1])\n"
        "compress('model', texts, layers=1, steps=30, output='out')\n"
    )
    subprocess.run(
        [sys.executable, "script.py", json.dumps(texts)], check=True, cwd=tmp_path, timeout=600
    )
    small = compress("model", texts, layers=1, steps=30, output="out")
    named = small.figures
    assert {*named} == {"model", "student", "model_quantized.onnx", "the same layers, untrained"}
    vectors = small.encode(texts[:3], normalize=True)
    assert vectors.shape == (3, 32) and np.allclose((vectors**2).sum(1), 1)
    kept = [json.loads(line)["text"] for line in (tmp_path / "out/texts.jsonl").open()]
    assert kept == texts


@pytest.mark.slow
def test_labels_make_a_classifier_and_its_control(tmp_path: Path, distil: Any) -> None:
    from transformers import pipeline

    options = ("--labels", labelled(tmp_path), "--steps", 25, "--output", tmp_path / "out")
    code, out, err = distil("compress", DEMO, *options)
    assert code == 0 and "its layers, labels only" in out, out + err
    found = json.loads((tmp_path / "out/scores/figures.json").read_bytes())["figures"]
    assert {*found} == {"teacher", "student", "alone", "model_quantized.onnx"}
    classify = pipeline("text-classification", model=str(tmp_path / "out" / "model"), device="cpu")
    answers = [answer["label"] for answer in classify(["return the list of number 7"] * 2)]
    assert answers == ["list"] * 2 and found["student"]["accuracy"]["value"] > 0.9
    # A classifier teaches with its own head and its own order of labels.
    options = (*options[:3], 5, "--output", tmp_path / "second")
    code, out, err = distil("compress", tmp_path / "out" / "model", *options)
    assert code == 0 and "teacher, model" in out, out + err
    runs = yaml.safe_load((tmp_path / "second" / "recipe.yaml").read_text())["runs"]
    assert runs[0]["task"]["labels"] == ["list", "string"]
    assert [run["output"].rpartition("/")[2] for run in runs[1:3]] == ["student", "alone"]

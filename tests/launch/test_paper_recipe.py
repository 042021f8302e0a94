"""Run the DistilBERT paper's recipe at tiny size, from texts to its four tables."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import in_a_process
from support.shipped import CONFIGS
from support.task_data import sentence, write_data
from support.tiny import save_teacher, tiny_bert
from transformers import BertConfig

PAGE = CONFIGS.parent / "docs" / "reproduce-distilbert.md"
TASKS = ("stsb",)
SIZES = {"max_steps": 2, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32"}


def write_inputs(folder: Path) -> None:
    """Write a BERT of 12 narrow layers, and a few texts in the form of each of the paper's."""
    draw = random.Random(0)
    save_teacher(folder / "bert", tiny_bert(12, width=16))
    (folder / "books").mkdir()
    for i in range(40):
        text = "\n".join(sentence(draw, 30) for _ in range(10))
        (folder / "books" / f"{i}.txt").write_text(text + "\n", encoding="utf-8")
    for split in ("train", "dev"):
        stsb = [
            f"{sentence(draw)}\t{sentence(draw)}\t{draw.randint(0, 50) / 10}" for _ in range(24)
        ]
        (folder / "glue" / "STS-B").mkdir(parents=True, exist_ok=True)
        lines = "\n".join(["sentence1\tsentence2\tscore", *stsb]) + "\n"
        (folder / f"glue/STS-B/{split}.tsv").write_text(lines, encoding="utf-8")
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            reviews = folder / "aclImdb" / split / label
            reviews.mkdir(parents=True)
            for i in range(8):
                (reviews / f"{i}.txt").write_text(sentence(draw), encoding="utf-8")
    (folder / "squad").mkdir()
    for seed, name in enumerate(("train", "dev")):
        records = write_data(folder, "question_answering", 16, seed).read_text(encoding="utf-8")
        paragraphs = []
        for record in map(json.loads, records.splitlines()):
            known = record["answers"]
            answers = [
                {"text": text, "answer_start": start}
                for text, start in zip(known["text"], known["answer_start"], strict=True)
            ]
            asked = {"id": record["id"], "question": record["question"], "answers": answers}
            paragraphs.append({"context": record["context"], "qas": [asked]})
        data = json.dumps({"data": [{"paragraphs": paragraphs}]})
        (folder / "squad" / f"{name}-v1.1.json").write_text(data, encoding="utf-8")


def tiny(values: Any) -> Any:
    """Return the recipe with one task of GLUE, one seed, two steps, and files in place of a hub."""
    text = yaml.safe_dump(values, sort_keys=False).replace("bert-base-uncased", "bert")
    recipe = yaml.safe_load(text.replace("runs/distilbert", "runs/distil"))
    kept = []
    for run in recipe["runs"]:
        if run.get("stage") == "examples":
            name = run["output"].removeprefix("shards/glue/")
            if run["output"].startswith("shards/glue/") and name not in TASKS:
                continue
            run["max_length"] = 48
            if run["task"]["name"] == "question_answering":
                run["stride"] = 8
        if run.get("stage") == "prepare":
            run |= {"sources": [{"kind": "sentences", "path": "books"}], "workers": 1}
            run |= {"row_length": 32, "validation": 0.1}
        if "train" in run and "stage" not in run:
            run["train"] = {**SIZES}
            run["checkpoint"] = {"every": 0}
        run.pop("without", None)
        sweep = run.get("sweep", {})
        if "shards" in sweep:
            sweep |= {"shards": [f"shards/glue/{task}" for task in TASKS], "train.seed": [0]}
        kept.append(run)
    recipe["defaults"]["train"] = {**SIZES, "num_workers": 0}
    return {**recipe, "runs": kept}


def commands() -> dict[str, list[str]]:
    """Return the commands of docs/reproduce-distilbert.md, by what they are for."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    lines = [shlex.split(line)[1:] for line in blocks.splitlines()]
    names = [
        "cost",
        "sample",
        "prepare",
        "verify",
        "script",
        "launch",
        "export",
        "plan",
        "job",
        "recipe",
    ]
    return dict(zip(names, lines, strict=True))


def of_recipe(command: list[str], *, here: bool = False) -> list[str]:
    """Return a command with the tiny recipe in place of the shipped one, on this machine."""
    assert "shipped:distilbert-paper.yaml" in command
    words = [word.removeprefix("shipped:") for word in command]
    return words[:-2] if here else words


def write_recipe(folder: Path) -> None:
    """Write the recipe at tiny size, and its inputs."""
    write_inputs(folder)
    values = yaml.safe_load((CONFIGS / "distilbert-paper.yaml").read_text(encoding="utf-8"))
    (folder / "distilbert-paper.yaml").write_text(
        yaml.safe_dump(tiny(values), sort_keys=False), encoding="utf-8"
    )


# The figures are those of test_dry_run's test of its page, which plans the same sizes; plans of
# recipes are tested by test_dry_run and test_recipe, and that the shipped one loads by test_config.
@pytest.mark.slow
def test_the_paper_is_planned(tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the figures of the page with a dry run of the real sizes, and plan tiny ones."""
    monkeypatch.chdir(tmp_path)
    shown, page = commands(), PAGE.read_text(encoding="utf-8")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained("bert-base-uncased")
    code, out, err = distil(*shown["cost"])
    assert code == 0 and "price: " in out, out + err
    for printed in ("4,721 of 4,096", "67.0 M", "9.6 GB of 14.7 GB", "468.9 MB", "5.5 h", "3.2 GB"):
        assert printed in out
    for written in ("4,721", "67.0 M", "9.6 of 14.7", "469 MB", "5.5 hours to 3.8", "3.2 GB"):
        assert written in page
    code, out, err = distil(*shown["script"])
    assert code == 0 and "#SBATCH --nodes=4\n" in out and "#SBATCH --gpus-per-node=8\n" in out, err

    write_recipe(tmp_path)
    code, out, err = distil(*of_recipe(shown["plan"]))
    assert code == 0, out + err
    assert out.count("estimate: ") == 11 and "steps: about 2 of 8 rows" in out
    assert out.splitlines()[-1].startswith("in all: estimate: ")
    # Eight GPUs on each of four nodes cannot share eight rows.
    code, out, err = distil(*of_recipe(shown["job"]))
    assert code == 2 and "32 process(es)" in err, out + err
    text = Path("distilbert-paper.yaml").read_text(encoding="utf-8")
    text = text.replace("global_batch_size: 8", "global_batch_size: 128")
    Path("distilbert-paper.yaml").write_text(text, encoding="utf-8")
    code, out, err = distil(*of_recipe(shown["job"]))
    assert code == 0 and "distil launch distilbert-paper.yaml" in out, out + err


@pytest.mark.slow
def test_the_student_from_texts_to_its_export(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the page's commands from the texts on, with less of everything."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    Path("bert").rename("bert-base-uncased")  # where step 1 puts it
    shown = commands()
    assert distil(*shown["cost"]).code == 0
    corpus = ["row_length=32", "validation=0.1", "workers=1"]
    corpus.append("sources=[{kind: sentences, path: books}]")
    run = ["train.max_steps=2", "train.global_batch_size=8", "evaluation.rows=8"]
    for name, more in (("sample", corpus), ("prepare", corpus), ("verify", [])):
        code, out, err = distil(*shown[name], *more)
        assert code == 0, out + err
    assert shown["launch"][-2:] == ["--hardware", "8xv100-16gb"]  # which this machine is not
    here = [*shown["launch"][:-2], "--hardware", "cpu", "--gpus", "2"]
    code, out, err = in_a_process(*here, "train.micro_batch_size=2", *run)
    assert code == 0, out + err
    code, out, err = distil(*shown["export"])
    assert code == 0 and Path("exported/distilbert/model.safetensors").is_file(), out + err


@pytest.mark.slow
def test_the_paper_from_texts_to_its_tables(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run it at tiny size. Stages, sweeps and tables have fast tests; here all meet."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    run = of_recipe(commands()["recipe"], here=True)
    code, out, err = distil(*run)
    assert code == 0, out + err
    for number in range(1, 5):
        kept = json.loads((tmp_path / f"runs/paper/table-{number}/scores.json").read_bytes())
        published = kept["inputs"]["published"]
        for model, figures in published.items():
            assert f"{model}, published" in out
            assert all(f"{value:g}" in out for value in figures.values())
        assert {*published} <= {*kept["figures"]}  # ours stands beside each published row
        if number == 3:
            sizes = {model: row["M parameters"] for model, row in kept["others"].items()}
            assert sizes["DistilBERT"] < sizes["BERT-base"]
    code, out, err = distil(*run)
    assert code == 0 and len(re.findall(r"table-\d: up to date", out)) == 4, out + err

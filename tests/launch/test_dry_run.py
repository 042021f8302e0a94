"""Check what `--dry-run` says of memory, network and time, by hand, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.filesize import decimal
from support import task_data
from support.processes import ROOT
from support.tiny import save_teacher

from launch.config import load_config
from pretrain.config import RunConfig
from pretrain.contracts.terms import Sizes
from pretrain.device.footprint import Footprint
from pretrain.plan import Planned, plan

Distil = Callable[..., Any]
BASE = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
SMALL = {**BASE, "hidden_size": 96, "intermediate_size": 256, "vocab_size": 3000}
# BERT-base's weights: embeddings of words, positions and types with a norm, 12 layers, the LM head.
LAYER = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
EMBEDDINGS = (30522 + 512) * 768 + 2 * 768
HEAD = 768 * 768 + 768 + 2 * 768 + 30522
TEACHER = EMBEDDINGS + 2 * 768 + 12 * LAYER + HEAD
STUDENT = EMBEDDINGS + 6 * LAYER + HEAD


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write DistilBERT's config with a teacher that has only a config.json, and no shards."""
    monkeypatch.chdir(tmp_path)
    Path("bert").mkdir()
    Path("bert/config.json").write_text(json.dumps(BASE), encoding="utf-8")
    values = {
        "output": "run",
        "shards": "shards",
        "teacher": "bert",
        "train": {"epochs": 3, "global_batch_size": 4096, "micro_batch_size": "auto"},
    }
    Path("paper.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return "paper.yaml"


def test_the_paper_on_four_nodes_is_what_a_calculation_gives(distil: Distil, paper: str) -> None:
    options = ("--dry-run", "--hardware", "8xv100-16gb", "--nodes", 4, "--tokens", "4e9")
    code, out, err = distil("launch", paper, *options, "--head", "h", "--node-rank", 0)
    assert code == 0, out + err
    sizes = f"{STUDENT / 1e6:.1f} M of the student, {TEACHER / 1e6:.1f} M of the teacher"
    assert f"parameters: {sizes}" in out
    # 4e9 / 512 rows of 512 in steps of 4,096, three times.
    assert "steps: about 5,723 of 4,096 rows x 512 tokens, 3 epochs" in out
    assert "a step: 4,096 rows = 64 x 2 micro-batches x 32 process(es), fp16, 1.4 PFLOP" in out
    sent = 2 * 31 / 32 * 4 * STUDENT
    assert f"a process sends {sent / 1e6:.1f} MB of gradients a step: 0.17 s between nodes" in out
    flop = 664e6 * 3 * 4e9  # docs/performance.md: of a token
    minutes = flop / (32 * 0.33 * 125e12) / 60
    [(shown, hours)] = re.findall(r"estimate: (\d+) min to ([\d.]+) h on 4 nodes of 8xv10", out)
    assert float(shown) == pytest.approx(minutes, rel=0.02)
    # The authors' 90 hours on one node are for 3.3 billion tokens.
    assert float(hours) == pytest.approx(90 * 4 / 3.3 / 4, rel=0.03)
    [(least, most)] = re.findall(r", ([\d,.]+) to ([\d,.]+) GPU-hours", out)
    assert float(least) == pytest.approx(32 * minutes / 60, rel=0.05)
    assert float(most.replace(",", "")) == pytest.approx(32 * 90 / 3.3, rel=0.05)
    assert "price" not in out
    parts = dict(re.findall(r"(student|teacher|gradients|AdamW) ([\d.]+) MB", out))
    for name, size in {
        "student": 4 * STUDENT,
        "teacher": 2 * TEACHER,
        "gradients": 4 * STUDENT,
        "AdamW": 8 * STUDENT,
    }.items():
        assert float(parts[name]) == pytest.approx(size / 1e6, rel=1e-3), name


def test_a_gpu_that_was_measured_has_its_rate(distil: Distil, paper: str) -> None:
    rows = json.loads((ROOT / "docs/results/step-gpu.json").read_bytes())[0]["rows"]
    (rate,) = (
        row["figures"]["tokens/s"]["value"]
        for row in rows
        if row["model"] == "distilbert-base-uncased.yaml: bf16 KL all 32 rows: ours"
    )
    out = distil("launch", paper, "--dry-run", "--hardware", "h200", "--tokens", "4e9").out
    (shown,) = re.findall(r"estimate: ([\d.]+) h on h200, .* of a step on one: docs", out)
    assert float(shown) == pytest.approx(3 * 4e9 / rate / 3600, rel=0.02)


def test_a_price_is_that_of_all_gpu_hours(distil: Distil, paper: str) -> None:
    options = ("--dry-run", "--hardware", "8xv100-16gb", "--tokens", "4e9")
    plain = distil("launch", paper, *options, "price_per_hour=2.5").out
    for out in (plain, distil("pretrain", paper, *options, "price_per_hour=2.5").out):
        (hours,) = re.findall(r"([\d,.]+) to ([\d,.]+) GPU-hours", out)
        paid = re.findall(r"price: ([\d,.]+) to ([\d,.]+), at price_per_hour 2.5 for each G", out)
        assert len(paid) == 1
        for hour, price in zip(hours, paid[0], strict=True):
            values = (float(text.replace(",", "")) for text in (price, hour))
            assert next(values) == pytest.approx(2.5 * next(values), rel=0.05)
    # A node without GPUs has its price, too.
    out = distil("pretrain", paper, "--dry-run", "--tokens", "4e9", "price_per_hour=0.1").out
    assert "at price_per_hour 0.1 for each node" in out and "GPU-hours" not in out
    for wrong in ("0", "-1", "inf", "nan", "free"):
        assert distil("pretrain", paper, "--dry-run", f"price_per_hour={wrong}").code == 2


def test_zero_shares_the_moments(distil: Distil, paper: str) -> None:
    pytest.importorskip("deepspeed")
    options = ("--dry-run", "--hardware", "8xv100-16gb", "--tokens", "4e9", "--zero", 1)
    code, out, err = distil("launch", paper, *options)
    assert code == 0, out + err
    assert f"AdamW {8 * STUDENT / 8 / 1e6:.1f} MB" in out


def test_what_does_not_fit_is_refused_with_what_does(distil: Distil, paper: str) -> None:
    options = ("--dry-run", "--hardware", "1xv100-16gb", "--tokens", "4e9")
    code, _, err = distil("pretrain", paper, "train.micro_batch_size=512", *options)
    (rows,) = re.findall(r"take (\d+), which trains the same", err)
    assert code == 2 and "train.micro_batch_size 512: a process would take" in err
    assert distil("pretrain", paper, f"train.micro_batch_size={rows}", *options).code == 0
    assert distil("pretrain", paper, f"train.micro_batch_size={2 * int(rows)}", *options).code == 2


def test_the_plan_of_a_begun_run_is_that_of_its_other_steps(distil: Distil, run: Path) -> None:
    whole = plan(load_config(RunConfig, run, []), {}, needs_shards=True)
    assert distil("pretrain", run, "--stop-after", 2).code == 0
    rest = plan(load_config(RunConfig, run, []), {}, needs_shards=True)
    assert rest.flop == whole.flop / whole.steps * (whole.steps - 2)
    out = distil("pretrain", run, "--dry-run").out
    assert f"done: 2 steps; the estimate is of the other {whole.steps - 2}" in out
    assert distil("pretrain", run).code == 0
    out = distil("pretrain", run, "--dry-run").out
    assert "the estimate is of the other 0" in out and "estimate: " not in out


def test_several_nodes_are_for_launch(distil: Distil, paper: str) -> None:
    code, _, err = distil("recipe", paper, "--nodes", 2)
    assert code == 2 and f"distil launch {paper} --nodes 2" in err
    code, _, err = distil("recipe", paper, "--slurm")
    assert code == 2 and f"distil launch {paper} --slurm" in err


def test_options_of_a_dry_run_need_one(distil: Distil, paper: str, run: Path) -> None:
    for command in (("pretrain", paper, "--tokens", "4e9"), ("launch", paper, "--tokens", "4e9")):
        code, _, err = distil(*command)
        assert code == 2 and "--dry-run" in err, err
    Path("recipe.yaml").write_text(
        "runs: [{output: a, shards: b, teacher: bert}]", encoding="utf-8"
    )
    code, _, err = distil("recipe", "recipe.yaml", "--tokens", "4e9")
    assert code == 2 and "--tokens is for --dry-run" in err
    code, _, err = distil("pretrain", run, "--dry-run", "--tokens", "4e9")
    assert code == 2 and "already exists" in err


# That masked positions take less is tested by test_plan_memory and test_footprint.
@pytest.mark.parametrize("kl", ["all", pytest.param("masked", marks=pytest.mark.slow)])
def test_the_page_has_these_figures(distil: Distil, paper: str, kl: str) -> None:
    options = ("--dry-run", "--hardware", "8xv100-16gb", "--tokens", "4e9")
    out = distil("launch", paper, f"objective.kl_positions={kl}", *options).out
    memory, of, rows = re.findall(r"memory: ([\d.]+) GB of ([\d.]+) GB .* of (\d+) rows", out)[0]
    (hours,) = re.findall(r"estimate: (.*) on 8xv100-16gb", out)
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"| 8xv100-16gb | {kl} | {rows} | {memory} of {of} | {hours} | |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrain train.micro_batch_size=48", "not a multiple of micro_batch_size 48"),
        ("pretrain train.precision=fp16", "train.precision fp16 needs a CUDA GPU"),
        ("launch --gpus 3 --hardware a100", "is not a multiple of 3 process(es)"),
        ("launch --nodes 8192 --head h --hardware a100", "is not a multiple of 65536"),
        ("launch --gpus 64", "so many processes leave no memory"),
    ],
)
def test_what_a_run_would_refuse_is_refused(
    distil: Distil, paper: str, arguments: str, message: str
) -> None:
    command, *options = arguments.split()
    code, out, err = distil(command, paper, *options, "--dry-run", "--tokens", "4e9")
    assert code == 2 and message in err and len(err.splitlines()) == 1, out + err
    assert "memory" not in out


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ({"vocab_size": 3}, "full rows of 512, 3 words"),
        # Rows of 16 are those of the test of networks below.
        pytest.param({"max_position_embeddings": 64}, "full rows of 64,", marks=pytest.mark.slow),
        ({"model_type": "modernbert", "max_position_embeddings": 8192}, "full rows of 512,"),
    ],
)
def test_rows_that_do_not_exist_have_at_most_the_teacher_s_positions(
    distil: Distil, paper: str, model: dict[str, Any], shown: str
) -> None:
    small = {**SMALL, "num_hidden_layers": 1, **model}
    Path("bert/config.json").write_text(json.dumps(small), encoding="utf-8")
    options = ("--dry-run", "--hardware", "8xv100-16gb", "--tokens", "4e9")
    code, out, err = distil("launch", paper, *options)
    assert code == 0 and shown in out and "# memory: " in out, out + err


def test_what_is_not_known_is_said(distil: Distil, paper: str) -> None:
    out = distil("launch", paper, "--dry-run", "--nodes", 4, "--head", "h", "--tokens", "4e9").out
    assert "memory: add --hardware NAME" in out and "for its time add --hardware NAME" in out
    out = distil("launch", paper, "--dry-run", "--hardware", "a100").out
    assert "memory: known once shards exists, or with --tokens" in out
    code, _, err = distil("launch", paper, "--dry-run", "--tokens", "inf")
    assert code == 2 and "--tokens inf" in err
    shutil.rmtree("bert")
    Path("bert").mkdir()
    out = distil("launch", paper, "--dry-run", "--hardware", "a100", "--tokens", "4e9").out
    assert "memory: known once the config.json of its models can be read" in out


# Both commands call one function with the same stages; `launch` is compared with a run by itself.
@pytest.mark.parametrize("command", ["recipe", pytest.param("launch", marks=pytest.mark.slow)])
def test_runs_of_a_recipe_are_planned_as_one_run(
    distil: Distil, paper: str, command: str, tmp_path: Path
) -> None:
    Path("bert/config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 4}))
    run = yaml.safe_load(Path(paper).read_text(encoding="utf-8"))
    again = {"output": "again", "shards": "shards", "teacher": "run", "train": run["train"]}
    Path("recipe.yaml").write_text(json.dumps({"runs": [run, again]}), encoding="utf-8")
    options = ("--dry-run", "--hardware", "8xv100-16gb", "--tokens", "4e9")
    one = distil("launch", paper, *options).out
    code, out, err = distil(command, "recipe.yaml", *options, "price_per_hour=2")
    assert code == 0, out + err
    *prices, whole = re.findall(r"price: ([\d.,]+) to", out)  # of both runs, and of the recipe
    assert len(prices) == 2
    assert float(whole) == pytest.approx(sum(map(float, prices)), rel=0.1)
    first, _, second = out.partition("run 2 of 2")
    for found in ("memory: .*", "steps: .*", "assumed: .*", "estimate: .*"):
        (line,) = re.findall(f"# ({found})", one)
        assert line in first, (line, first)
    # The student of the first run, of two layers, is the teacher of the second.
    assert "student: distilbert, 1 layers" in second and "estimate: " in second
    assert "no hub answers" not in out


def test_where_the_network_decides_the_estimate_is_its_time(distil: Distil, paper: str) -> None:
    """Take rows of 16 in steps of 64: little arithmetic, and gradients of the whole student."""
    options = ["train.global_batch_size=64", "train.epochs=1", "--dry-run", "--tokens", "1e8"]
    options += ["--hardware", "8xa100-80gb", "--nodes", "4"]
    values = json.loads(Path("bert/config.json").read_text(encoding="utf-8"))
    values["max_position_embeddings"] = 16
    Path("bert/config.json").write_text(json.dumps(values), encoding="utf-8")
    out = distil("launch", paper, *options).out
    steps = 1e8 / 16 / 64
    sent = 2 * 31 / 32 * 4 * (STUDENT - (512 - 16) * 768)
    hours = steps * sent / (25e9 / 8) / 3600
    (shown,) = re.findall(r"estimate: (.*) on 4 nodes of 8xa100-80gb .bound by its network", out)
    assert float(shown.split(" h")[0]) == pytest.approx(hours, rel=0.02)
    Path("recipe.yaml").write_text(
        json.dumps({"runs": [yaml.safe_load(Path(paper).read_text(encoding="utf-8"))]}),
        encoding="utf-8",
    )
    keys = [f"runs.0.{key}" for key in options[:2]]
    code, out, err = distil("launch", "recipe.yaml", *keys, *options[2:])
    assert code == 0 and out.count(f"estimate: {shown} on 4 nodes") == 2, out + err
    # On one node no gradient leaves it, but a step has its kernels to start: 20 ms.
    out = distil("launch", paper, *options[:-2]).out
    (shown,) = re.findall(
        r"estimate: (\d+) min .*on 8xa100-80gb .bound by its network, or by 20 ms", out
    )
    assert float(shown) == pytest.approx(steps * 0.02 / 60, rel=0.02)


def test_the_memory_of_a_plan_is_that_of_its_own_run(distil: Distil, paper: str) -> None:
    """Change each thing that memory depends on, in one process, which keeps what it has counted."""
    base = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 64}
    masked = "objective.kl_positions=masked"
    changes: list[tuple[dict[str, int], str, list[str]]] = [
        ({}, "cpu", []),
        ({}, "cpu", [masked]),
        ({}, "cpu", [masked, "masking.probability=0.5"]),
        ({}, "cpu", ["train.activation_checkpointing=true"]),
        ({}, "cpu", ["train.precision=bf16"]),
        ({"max_position_embeddings": 32}, "cpu", []),
        ({"vocab_size": 6000}, "cpu", []),
        ({}, "a100", ["train.precision=fp32"]),
    ]
    seen = set()
    for sizes, hardware, keys in changes:
        model = base | sizes
        Path("bert/config.json").write_text(json.dumps(model), encoding="utf-8")
        keys = ["train.precision=fp32", "train.micro_batch_size=4", *keys]
        options = ("--dry-run", "--tokens", "1e6", "--hardware", hardware)
        out = distil("launch", paper, "train.global_batch_size=64", *keys, *options).out
        (shown,) = re.findall(r"a micro-step ([\d.]+ [kMG]?B)\)", out)
        length, words = model["max_position_embeddings"], model["vocab_size"]
        teacher = Sizes("bert", 96, 2, 12, 256)
        counted = Footprint(
            load_config(RunConfig, Path(paper), keys),
            *(teacher._replace(family="distilbert", num_hidden_layers=1), teacher),
            Planned(1, 1, length, words),
            "cpu" if hardware == "cpu" else "cuda",
        )
        assert shown == decimal(counted.micro_step(4, held=True)), (sizes, hardware, keys)
        seen.add(shown)
    assert len(seen) == len(changes)


def test_a_dry_run_refuses_the_models_that_the_run_refuses(
    distil: Distil, run: Path, tmp_path: Path
) -> None:
    """Compare its message with the run's: other tokens, other cuts of a text, no head of a task."""
    assert distil("pretrain", run).code == 0
    values = yaml.safe_load(run.read_text(encoding="utf-8"))
    distilled = {key: values[key] for key in ("shards", "train", "evaluation")}
    distilled |= {"output": str(tmp_path / "student"), "student": {"num_layers": 1}}
    task_data.save_model(tmp_path / "tagger", "bert", "token_classification")
    save_teacher(tmp_path / "words")
    export_of = distil("export", tmp_path / "out", tmp_path / "cased")
    assert export_of.code == 0, export_of.err
    tokenizer = tmp_path / "cased" / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    tokenizer.write_text(text.replace('"lowercase": true', '"lowercase": false'), encoding="utf-8")
    task_data.make(tmp_path, "classification")
    task = task_data.run_of(tmp_path, "classification", objective={"name": "kd"})
    task |= {"student": {"architecture": "same", "init": [0]}}
    for config, teacher, message in (
        (distilled, "words", "its vocabulary has"),
        (distilled, "cased", "it splits text differently from the shards"),
        (task, "tagger", "which has no head for SequenceClassification"),
    ):
        file = tmp_path / "config.yaml"
        entry = {**config, "teacher": str(tmp_path / teacher)}
        file.write_text(yaml.safe_dump(entry), encoding="utf-8")
        shown = [distil("pretrain", file, *options) for options in (["--dry-run"], [])]
        assert [one.code for one in shown] == [2, 2] and message in shown[0].err, (message, shown)
        assert shown[0].err.splitlines()[-1] == shown[1].err.splitlines()[-1]
        file.write_text(yaml.safe_dump({"runs": [entry]}), encoding="utf-8")
        code, _, err = distil("recipe", file, "--dry-run")
        assert code == 2 and message in err, err
    # What a head needs: its classes by their names, and a file of logits that is one.
    names = {i: f"LABEL_{i}" for i in range(3)}
    task_data.save_model(tmp_path / "nameless", "bert", "classification", id2label=names)
    task_data.save_model(tmp_path / "good", "bert", "classification")
    (tmp_path / "junk").write_bytes(b"x" * 99)
    junk = {**task, "task": {**task["task"], "logits": str(tmp_path / "junk")}}
    for config, teacher, message in (
        (task, "nameless", "its config.json names no classes"),
        (junk, "good", "is not a safetensors file"),
    ):
        entry = {**config, "teacher": str(tmp_path / teacher)}
        file.write_text(yaml.safe_dump(entry), encoding="utf-8")
        for options in (["--dry-run"], []):
            code, out, err = distil("pretrain", file, *options)
            assert code == 2 and message in err, (options, out + err)
    # Shards of another kind are the run's to refuse.
    entry = {**task, "shards": values["shards"], "teacher": str(tmp_path / "out")}
    file.write_text(yaml.safe_dump(entry), encoding="utf-8")
    assert [distil("pretrain", file, *more).code for more in (["--dry-run"], [])] == [0, 2]
    file.write_text(yaml.safe_dump({**distilled, "teacher": str(tmp_path / "out")}))
    code, out, err = distil("pretrain", file, "--dry-run")
    assert code == 0, out + err

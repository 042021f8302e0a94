"""Run whole trainings of tiny real models: continued, interrupted and split in several ways."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm
from support.results import difference, history, weights
from support.runs import start as run
from support.runs import step_folder, write_yaml
from transformers import BertForMaskedLM

from launch.console import Training
from pretrain import RunError, checkpoint
from pretrain.config import Optimizer, RunConfig
from pretrain.monitor import metrics
from pretrain.step import learning_rate

STILL = {"student": {"dropout": 0.0, "attention_dropout": 0.0}}

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tmp_path: Path, run_config: Settings, teacher_folder: Path) -> Settings:
    """Return 10 steps of 8 rows with dropout, as YAML would give it; changes by section."""

    def make(name: str = "run", **changes: Any) -> dict[str, Any]:
        values = run_config(
            tmp_path / name,
            teacher_folder,
            student={"num_layers": 2, "dropout": 0.1, "attention_dropout": 0.1},
            optimizer={"learning_rate": 1e-3},
            train={"max_steps": 10, "global_batch_size": 8, "micro_batch_size": 4},
            evaluation={"every": 5},
            checkpoint={"every": 5},
        )
        for section, change in changes.items():
            if isinstance(change, dict) and isinstance(values.get(section), dict):
                values[section] |= change
            else:
                values[section] = change
        return values

    return make


def assert_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare bitwise: weights, optimizer state, and every metric but the rates."""
    ours, theirs = weights(one, 10), weights(other, 10)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert history(one) == history(other)


def command(values: dict[str, Any]) -> list[str]:
    return [warm.python(), "-m", "launch", "pretrain", str(write_yaml(values))]


def started(values: dict[str, Any], until: int) -> warm.Process:
    """Start a run in a session of its own; return it when it has logged the step `until`."""
    process = warm.Process(*command(values)[1:])
    log = Path(values["output"]) / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if any(entry["step"] >= until for entry in metrics.read_metrics(log)):
            break
        time.sleep(0.005)
    return process


def test_a_run_resumed_half_way_is_bitwise_identical(settings: Settings) -> None:
    whole, halves = settings("whole"), settings("halves")
    assert run(whole).ended == "finished"
    first = run(halves, stop_after=5)
    assert (first.ended, first.step) == ("stopped", 5)
    assert run(halves).ended == "finished"
    assert_same_run(whole, halves)
    status = (Path(halves["output"]) / "exit_status.json").read_bytes()
    assert run(halves).ended == "up to date"
    assert (Path(halves["output"]) / "exit_status.json").read_bytes() == status


def test_another_micro_batch_may_continue_a_run(settings: Settings) -> None:
    whole, mixed = settings("whole", **STILL), settings("mixed", **STILL)
    run(whole), run(mixed, stop_after=5)
    run(settings("mixed", train={"micro_batch_size": 8}, **STILL))
    assert difference(mixed, whole, 10) < 1e-5


def test_sigterm_saves_and_the_same_command_continues(settings: Settings) -> None:
    long = {"train": {"max_steps": 60}, "checkpoint": {"every": 0}}
    undisturbed, disturbed = settings("undisturbed", **long), settings("disturbed", **long)
    # To the whole group, as torchrun and schedulers send it: the loader's worker gets it too.
    disturbed["train"] |= {"num_workers": 1}
    process = started(disturbed, until=3)
    os.killpg(process.real, signal.SIGTERM)
    assert process.wait(600) == 75
    saved = checkpoint.newest(Path(disturbed["output"]) / "checkpoints", pytest.fail)
    assert saved is not None and 0 < saved.step < 60

    run(undisturbed), run(disturbed)
    assert torch.equal(*(weights(v, 60)["vocab_projector.bias"] for v in (undisturbed, disturbed)))
    assert history(undisturbed) == history(disturbed)


def test_a_killed_run_loses_only_steps_after_its_checkpoint(settings: Settings) -> None:
    undisturbed, killed = settings("undisturbed"), settings("killed")
    run(undisturbed)
    run(killed, stop_after=5)
    process = started(settings("killed", checkpoint={"every": 0}), until=6)
    process.kill()
    process.wait(600)
    run(killed)
    assert_same_run(undisturbed, killed)


def test_no_share_of_a_peak_is_claimed_that_is_not_measured(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    values = settings(train={"max_steps": 1})
    with Training() as shown:
        run(values, progress=shown)
    entry = metrics.read_metrics(Path(values["output"]) / "metrics.jsonl")[1]
    assert entry["kind"] == "train" and not {"mfu", "of_peak"} & {*entry}
    out = capsys.readouterr().out
    assert "tok/s" in out and "MFU" not in out


@pytest.mark.parametrize("zero", ["kl", "mlm", "cosine"])
def test_a_weight_of_zero_leaves_the_other_terms_as_they_were(
    settings: Settings, zero: str
) -> None:
    short = {"train": {"max_steps": 1}, **STILL}
    full = settings("full", **short)
    ablated = settings("ablated", objective={"name": "distilbert", zero: 0.0}, **short)
    run(full), run(ablated)
    before, after = history(full)[1], history(ablated)[1]
    assert zero not in after
    for name in {"kl", "mlm", "cosine"} - {zero}:
        assert after[name] == pytest.approx(before[name], rel=1e-5)


def test_mlm_trains_a_bert_and_learns(settings: Settings) -> None:
    values = settings(
        objective={"name": "mlm"}, train={"max_steps": 40}, optimizer={"learning_rate": 1e-2}
    )
    del values["teacher"], values["student"]
    values["model"] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    }
    outcome = run(values)
    start = history(values)[0]["loss"]
    assert start == pytest.approx(math.log(200), rel=0.05)  # nothing is known of 200 words
    assert outcome.evaluation["loss"] < start - 0.5
    folder = step_folder(values["output"], 40) / "student"
    assert type(BertForMaskedLM.from_pretrained(folder)) is BertForMaskedLM


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can do fp16")
def test_fp16_is_refused_on_a_cpu(settings: Settings) -> None:
    with pytest.raises(RunError, match="fp16 needs a CUDA GPU"):
        run(settings(train={"precision": "fp16"}))


def test_bf16_follows_fp32(settings: Settings) -> None:
    full, half = settings("full", **STILL), settings("half", train={"precision": "bf16"}, **STILL)
    run(full), run(half)
    for one, other in zip(history(full), history(half), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.03)
    assert history(full)[1]["loss"] != history(half)[1]["loss"]


def test_only_the_last_checkpoints_stay(settings: Settings) -> None:
    values = settings(checkpoint={"every": 2, "keep": 2})
    said: list[str] = []
    listener = metrics.Silent()
    listener.say = said.append
    run(values, progress=listener)
    stalls = [line for line in said if "training stood still for" in line]
    assert [line.split()[3] for line in stalls] == ["2:", "4:", "6:", "8:"]
    root = Path(values["output"]) / "checkpoints"
    names = ["best", "latest", "step-00000008", "step-00000010"]
    assert sorted(p.name for p in root.glob("*")) == names
    assert (root / "latest").read_text(encoding="utf-8") == "step-00000010\n"


def test_learning_rate_warms_up_and_decays_linearly() -> None:
    optimizer = Optimizer(learning_rate=1.0, warmup_ratio=0.2)
    rates = [learning_rate(optimizer, step, 10) for step in range(10)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_config_is_saved_beside_the_metrics(settings: Settings) -> None:
    values = settings()
    run(values, stop_after=1)
    saved = json.loads((Path(values["output"]) / "config.json").read_text(encoding="utf-8"))
    expected = RunConfig.model_validate(values).with_train(products=saved["train"]["products"])
    assert RunConfig.model_validate(saved) == expected

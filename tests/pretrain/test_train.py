"""Run whole trainings of tiny real models: continued, interrupted and split in several ways."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_work, ranks, warm
from support.results import difference, history, weights
from support.runs import start as run
from support.runs import step_folder, write_yaml
from support.tiny import tiny_distilbert
from transformers import BertForMaskedLM

from launch.console import Training
from pretrain import NonFiniteError, RunError, checkpoint
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


def test_dropout_is_really_on(settings: Settings) -> None:
    dropped = settings("dropped", train={"max_steps": 1})
    kept = settings("kept", train={"max_steps": 1}, **STILL)
    run(dropped), run(kept)
    assert history(dropped)[1]["kl"] != history(kept)[1]["kl"]


def test_loader_workers_do_not_change_the_run(settings: Settings) -> None:
    one, other = settings("one"), settings("other", train={"num_workers": 2})
    run(one), run(other)
    assert_same_run(one, other)


def test_micro_batches_and_processes_change_only_rounding(settings: Settings) -> None:
    one = settings("8x1", train={"micro_batch_size": 8}, **STILL)
    two = settings("2x4", train={"micro_batch_size": 2}, **STILL)
    split = settings("2 ranks", train={"micro_batch_size": 2}, **STILL)
    run(one), run(two)
    ranks.run(2, rank_work.once, split)
    assert difference(two, one, 10) < 1e-5
    assert difference(split, one, 10) < 1e-5
    for entry, other, third in zip(history(one), history(two), history(split), strict=True):
        for key, value in entry.items():
            if isinstance(value, float):
                assert other[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
                assert third[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


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


def test_terms_are_logged_by_name_and_add_up(settings: Settings) -> None:
    values = settings(train={"max_steps": 1})
    run(values)
    entry = history(values)[1]
    assert entry["kind"] == "train"
    total = 5 * entry["kl"] + 2 * entry["mlm"] + entry["cosine"]
    assert entry["loss"] == pytest.approx(total, rel=1e-6)


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


def test_cosine_alone_trains_in_two_processes(settings: Settings) -> None:
    # The head's parameters then get no gradient, which DDP must be told.
    values = settings(
        objective={"name": "distilbert", "kl": 0.0, "mlm": 0.0}, train={"max_steps": 3}
    )
    ranks.run(2, rank_work.once, values)
    assert [e["step"] for e in history(values) if e["kind"] == "train"] == [1, 2, 3]


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


def test_random_initialisation_and_continuing_from_a_folder(settings: Settings) -> None:
    random = settings("random", student={"init": "random"}, train={"max_steps": 2})
    run(random)
    folder = step_folder(random["output"], 2) / "student"
    again = settings("again", student={"init": str(folder)}, train={"max_steps": 2})
    run(again)
    # Evaluation at step 0 of the second is that at the end of the first.
    assert history(again)[0]["loss"] == history(random)[-1]["loss"]


def test_a_non_finite_loss_stops_before_the_update(
    settings: Settings, tmp_path: Path, teacher_folder: Path, distil: Any
) -> None:
    poisoned = tiny_distilbert()
    with torch.no_grad():
        poisoned.vocab_transform.bias[0] = float("nan")
    poisoned.save_pretrained(tmp_path / "poisoned")
    shutil.copy(teacher_folder / "vocab.txt", tmp_path / "poisoned")
    values = settings(student={"init": str(tmp_path / "poisoned")})
    with pytest.raises(NonFiniteError, match=r"step 1: the loss is nan over rows \d+, .* not made"):
        run(values)
    code, _, err = distil("pretrain", write_yaml(values))
    assert code == 3
    assert "Traceback" not in err
    assert not list((Path(values["output"]) / "checkpoints").glob("step-*"))


def test_an_mlm_run_is_not_continued_by_a_distillation(settings: Settings) -> None:
    mlm = settings(objective={"name": "mlm"}, train={"max_steps": 1})
    del mlm["teacher"], mlm["student"]
    mlm["model"] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    run(mlm)
    with pytest.raises(RunError, match=r"objective\.name was mlm and is now distilbert"):
        run(settings())


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


def test_a_damaged_checkpoint_is_skipped_and_reported(settings: Settings) -> None:
    whole, damaged = settings("whole"), settings("damaged")
    run(whole), run(damaged)
    root = Path(damaged["output"]) / "checkpoints"
    file = root / "step-00000010" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said: list[str] = []
    saved = checkpoint.newest(root, said.append)
    assert saved is not None and saved.step == 5
    assert "optimizer.safetensors differs from its checksum" in said[0]
    run(damaged)
    assert_same_run(whole, damaged)


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


@pytest.mark.slow
def test_a_full_disk_loses_no_checkpoint(settings: Settings) -> None:
    values = settings()
    run(values, stop_after=5)
    # A file-size limit stands in for the full disk: the same error path, at the same write.
    result = subprocess.run(
        ["bash", "-c", 'ulimit -f 40; exec "$@"', "-", *command(values)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and "checkpoints" in result.stderr
    saved = checkpoint.newest(Path(values["output"]) / "checkpoints", pytest.fail)
    assert saved is not None and saved.step == 5


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

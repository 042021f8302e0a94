"""Read what a run left: its log, its checkpoints and the settings that it recorded."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pretrain.monitor import metrics

RATES = ("tokens_per_second", "data_wait")  # the only figures that time may change


def history(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a run's log without the figures that time may change."""
    entries = metrics.read_metrics(Path(values["output"]) / "metrics.jsonl")
    return [{key: value for key, value in e.items() if key not in RATES} for e in entries]


def losses(values: dict[str, Any]) -> dict[int, float]:
    """Return the losses by step; a step that fp16's scaler leaves out has none."""
    return {e["step"]: e["loss"] for e in history(values) if e["kind"] == "train"}


def recorded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the section `train` of the config that the run recorded."""
    text = (Path(values["output"]) / "config.json").read_text(encoding="utf-8")
    section: dict[str, Any] = json.loads(text)["train"]
    return section


def state(values: dict[str, Any], step: int) -> dict[str, Any]:
    """Return `state.json` of a checkpoint."""
    text = (_checkpoint(values, step) / "state.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def weights(values: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the student's weights and the optimizer's state in a checkpoint."""
    folder = _checkpoint(values, step)
    student = load_file(folder / "student" / "model.safetensors")
    return student | load_file(folder / "optimizer.safetensors")


def difference(one: dict[str, Any], other: dict[str, Any], step: int) -> float:
    """Return the largest difference between the students' weights, relative to the weights' size.

    The key biases have a true gradient of zero, so Adam turns their rounding noise into steps.
    """
    ours, theirs = weights(one, step), weights(other, step)
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-3))
        for name in ours
        if "/" not in name and "k_lin.bias" not in name
    )


def _checkpoint(values: dict[str, Any], step: int) -> Path:
    return Path(values["output"]) / "checkpoints" / f"step-{step:08d}"

"""Read what a run left: its log, its checkpoints and the settings that it recorded."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from support import runs
from support.runs import step_folder
from torch import Tensor


def history(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a run's log without the figures that time may change."""
    return runs.history(values["output"])


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
    text = (step_folder(values["output"], step) / "state.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def weights(values: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the student's weights and the optimizer's state in a checkpoint."""
    folder = step_folder(values["output"], step)
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

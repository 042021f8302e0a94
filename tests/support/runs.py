"""Train from settings, check refusals, and read or forge what a run wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.disk import hash_file
from pretrain import RunError
from pretrain.checkpoint.layout import manifest_bytes
from pretrain.config import RunConfig
from pretrain.monitor.metrics import read_metrics
from pretrain.train import Outcome, train

# Four steps of four rows, a checkpoint at each: changes of sections for `run_config`.
RECIPE: dict[str, Any] = {
    "student": {"num_layers": 2},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 4},
    "evaluation": {"rows": 4},
    "checkpoint": {"every": 1},
}
# The only figures that time may change.
RATES = ("time", "elapsed", "memory", "tokens_per_second", "data_wait", "cpu_seconds")


def start(values: dict[str, Any], **arguments: Any) -> Outcome:
    """Train with these settings."""
    return train(RunConfig.model_validate(values), **arguments)


def write_yaml(values: dict[str, Any]) -> Path:
    """Write settings next to their output; return the file."""
    path = Path(values["output"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@contextmanager
def refused(
    *parts: str, kind: type[Exception] | tuple[type[Exception], ...] = RunError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Check for an error of one line with all the parts."""
    with pytest.raises(kind) as error:
        yield error
    text = str(error.value)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text


def case_name(case: tuple[Any, ...]) -> str:
    """Name a parametrized case by its first item, a function or a partial of one."""
    spoil = case[0]
    if not isinstance(spoil, partial):
        return spoil.__name__
    values = ",".join(f"{key}={value}" for key, value in spoil.keywords.items())
    return f"{spoil.func.__name__}({values})"


def history(output: str | Path) -> list[dict[str, Any]]:
    """Return a run's metrics, without those that time may change."""
    entries = read_metrics(Path(output) / "metrics.jsonl")
    return [{k: v for k, v in entry.items() if k not in RATES} for entry in entries]


def step_folder(output: str | Path, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return Path(output) / "checkpoints" / f"step-{step:08d}"


def reseal_checkpoint(folder: Path, **changes: Any) -> None:
    """Describe all files of a checkpoint correctly, as no accident would."""
    values = json.loads((folder / "manifest.json").read_text(encoding="utf-8")) | changes
    del values["sha256"]
    values["files"] = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            sha256, size = hash_file(path)
            values["files"][str(path.relative_to(folder))] = {"bytes": size, "sha256": sha256}
    (folder / "manifest.json").write_bytes(manifest_bytes(values))


def edit_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's state.json, as a different version might have written it."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    change(state)
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    reseal_checkpoint(folder)

"""Append measurements to a record file, from which `make results` writes tables and figures.

A file holds a JSON list, one record for each command:

    {"command": "distil evaluate ...", "date": "2026-11-25", "commit": "1a2b3c4", "data": "...",
     "hardware": {...}, "versions": {...},
     "rows": [{"model": "mine", "run": "mine", "objective": "embedding", "seed": 1, "step": 25,
               "tokens": 51172, "cpu_seconds": 50.3,
               "figures": {"pearson": {"value": 0.850, "low": 0.834, "high": 0.865}}}]}

`low` and `high` are the 95 % interval of a value that has one. `data` is the digest of shards, or
the SHA-256 of a file. No record holds a host or a user. Paths are those that were
typed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from data_prep.disk import hash_file
from data_prep.disk.replacing import replace_json
from pretrain import RunError, __version__
from pretrain.monitor.figures import Figure

_PROJECT = Path(__file__).parents[2]


def check_record(file: Path | None) -> None:
    """Refuse a file that a record cannot be appended to, before hours of measuring.

    Raises:
        RunError: it holds something else, or cannot be written.
    """
    if file is None:
        return
    _read(file)
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise RunError(f"--record {file}: {folder} cannot be written to; give another file")


def row(model: str, figures: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a row; a figure is a number, or a `Figure` with its interval."""
    values = {}
    for name, value in figures.items():
        parts = value._asdict() if isinstance(value, Figure) else {"value": value}
        values[name] = {key: round(part, 6) for key, part in parts.items() if part is not None}
    return {"model": model, **more, "figures": values}


def append_record(file: Path | None, data: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append what a command has measured; nothing without a file.

    Args:
        file: the record file, made if it does not exist.
        data: shards or a file that were measured on; None if there are none.
        rows: see `row`.
    """
    if file is None:
        return
    import torch

    from data_prep.shards import load_manifest
    from pretrain.bench.machine import commit, hardware, versions

    digest = None
    if data is not None:
        digest = hash_file(data)[0] if data.is_file() else load_manifest(data).digest
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = {
        "command": _command(),
        "date": date.today().isoformat(),
        "commit": commit(),
        "version": __version__,
        "data": digest,
        "hardware": hardware(device),
        "versions": versions(),
        "rows": list(rows),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_json(file, [*_read(file), made])


def _read(file: Path) -> list[Any]:
    if not file.exists() or file.stat().st_size == 0:
        return []
    try:
        known = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"--record {file}: is not JSON ({error}); give another file") from None
    if not isinstance(known, list) or not all(isinstance(entry, dict) for entry in known):
        raise RunError(f"--record {file}: holds no list of records; give another file")
    return known


def _command() -> str:
    """Return this process's command, without `--record FILE`, which changes no figure."""
    script, arguments = Path(sys.argv[0]), sys.argv[1:]
    kept = [text for text in arguments if not text.startswith("--record=")]
    if "--record" in kept:
        place = kept.index("--record")
        del kept[place : place + 2]
    of_distil = script.name in ("distil", "__main__.py")
    if (script := script.resolve()).is_relative_to(_PROJECT):
        script = script.relative_to(_PROJECT)
    program = ["distil"] if of_distil else ["python", "/".join(script.parts[-3:])]
    return shlex.join([*program, *kept])


def of_run(folder: Path) -> dict[str, Any]:
    """Return objective, seed, step, tokens and CPU seconds of a run; nothing of other folders.

    A run may also be named by the student in one of its checkpoints.
    """
    from pretrain.monitor.metrics import read_metrics
    from pretrain.run_folder import checkpoint_of, recorded, sealed_state

    place = {}
    if (checkpoint := checkpoint_of(folder)) is not None:
        run, state = checkpoint.parents[1], json.loads((checkpoint / "state.json").read_bytes())
        place = {"checkpoint": True}  # a point of a curve, not the run's result
    else:
        run, state = folder, (sealed_state(folder) or (None, {}))[1]
    config = recorded(run)
    if not state or config is None:
        return {}
    entries = [
        entry
        for entry in read_metrics(run / "metrics.jsonl")
        if entry["kind"] == "train" and entry["step"] <= state["step"]
    ]
    cost = {}
    # A line of the log has the seconds since the one before.
    logged = bool(entries) and entries[-1]["step"] == state["step"]
    if logged and all("cpu_seconds" in entry for entry in entries):
        cost = {"cpu_seconds": round(sum(entry["cpu_seconds"] for entry in entries), 1)}
    known = {"seed": config.train.seed, "step": state["step"], "tokens": state["tokens"]}
    return {"run": run.name, "objective": config.objective.name, **known, **cost, **place}

"""Tell how runs are doing, from the files that they write; no process of a run is asked.

Shown: alive or not, position, time left, losses, validation beside the teacher, the last checkpoint
and the last error.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from safetensors import SafetensorError, safe_open

from data_prep.disk.locks import holder
from data_prep.messages import duration
from data_prep.shards import CorpusError, load_manifest
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.monitor.figures import RATES
from pretrain.monitor.metrics import read_metrics
from pretrain.monitor.status import read_status
from pretrain.plan import num_steps
from pretrain.run_folder import recorded, sealed_state

# Entries of a line of metrics that are not the value of a term.
_NO_TERM = ("kind", "step", "grad_norm", "learning_rate", "epoch", "tokens", *RATES)
# Figures of evaluation that describe the rows, not the student.
_OF_ROWS = ("kind", "step", "tokens", "masked_tokens", "constant_accuracy", "unigram_loss")


def report(run: Path) -> list[str]:
    """Return what a terminal of 80 columns shows of a run, its name and state first.

    Raises:
        RunError: the folder holds none.
    """
    config = recorded(run)
    status, sealed = read_status(run), sealed_state(run)
    if config is None and (run / "config.json").exists():
        raise RunError(f"{run / 'config.json'}: cannot be read as the config of a run; restore it")
    if config is None and status is not None:
        raise RunError(f"{run}: {status['ended']} before its first step: {status['error']}")
    if config is None:
        raise RunError(f"{run}: no run has begun there; give the output of a run")
    state = sealed[1] if sealed is not None else {}
    held = holder(run, "pretrain")
    if held.alive:
        said = f"running ({held.named})"
    elif status is not None:
        said = str(status["ended"])
    elif held.alive is None:
        said = f"unknown ({held.named} may be at work)"
    else:
        said = "ended without a word: killed, or its machine went down"
    entries = read_metrics(run / "metrics.jsonl")
    entries = [entry for entry in entries if {"kind", "step"} <= entry.keys()]
    trained = [entry for entry in entries if entry["kind"] == "train"]
    evaluated = [entry for entry in entries if entry["kind"] == "evaluation"]
    checkpoint = state.get("step")
    step = max([checkpoint or 0, *(entry["step"] for entry in entries)])
    total = state.get("num_steps") or (status or {}).get("num_steps") or _steps(config)
    of_total = f" of {total:,} ({step / total:.0%})" if total else ""
    lines = [f"{run}: {said}", f"step {step:,}{of_total}"]
    if trained:
        last = trained[-1]
        terms = {k: v for k, v in last.items() if k not in (*_NO_TERM, "loss")}
        terms = {"loss": last["loss"], **(terms if len(terms) > 1 else {})}
        lines.append(f"at step {last['step']:,}: {_numbers(terms)}")
        speed = f"{last['tokens_per_second']:,.0f} tokens/s"
        # A start removes the status of the one before.
        if held.alive and total and (each := _seconds_per_step(trained[-5:])) is not None:
            speed += f", {duration(each * (total - step))} left"
        if "memory" in last:  # not in lines of earlier versions
            speed += f", {decimal(round(last['memory']))} of memory"
        lines.append(speed)
        if "time" in last:
            then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
            lines.append(f"last line: {then}, {duration(last['elapsed'])} after its start")
    if evaluated:
        last = evaluated[-1]
        figures = {k: v for k, v in last.items() if k not in _OF_ROWS}
        lines.append(f"validation at step {last['step']:,}: {_numbers(figures)}")
    if sealed is not None:
        size = f", {shown}" if (shown := _size(sealed[0])) else ""
        lines.append(f"newest checkpoint: step {checkpoint:,}{size}")
    if held.generation > 1:
        lines.append(f"started {held.generation} times")
    if not held.alive and (error := str((status or {}).get("error", ""))):
        lines.append(f"error: {error}")
    wrapped = (
        textwrap.wrap(
            line,
            width=80,
            initial_indent="  " if place else "",
            subsequent_indent="    ",
            break_long_words=False,
        )
        for place, line in enumerate(lines)
    )
    return [part.replace("\xa0", " ") for parts in wrapped for part in parts]


def _seconds_per_step(trained: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the time of a step by some lines of training; None if they do not tell."""
    steps = trained[-1]["step"] - trained[0]["step"]
    seconds = sum(
        (after["tokens"] - before["tokens"]) / max(after["tokens_per_second"], 1e-9)
        for before, after in pairwise(trained)
    )
    return seconds / steps if steps > 0 else None


def _size(checkpoint: Path) -> str:
    """Return the parameters and bytes of a checkpoint's student, by the file's header."""
    file, num = checkpoint / "student" / "model.safetensors", 0
    try:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                num += math.prod(tensors.get_slice(name).get_shape())
    except (OSError, SafetensorError):
        return ""
    return f"{num:,} parameters, {decimal(file.stat().st_size)} in fp32"


def _steps(config: RunConfig) -> int | None:
    """Return the steps that a config asks for; None if its shards are elsewhere."""
    if config.train.max_steps:
        return config.train.max_steps
    try:
        return num_steps(config, load_manifest(config.shards).splits["train"].rows)
    except (CorpusError, OSError, KeyError):
        return None


def _numbers(values: Mapping[str, float | None]) -> str:
    shown = {k: "not finite" if v is None else f"{v:.4g}" for k, v in values.items()}
    # Spaces that do not break: a line never ends between a name and its number.
    return ", ".join(f"{name.replace('_', ' ')}\xa0{value}" for name, value in shown.items())

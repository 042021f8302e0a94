"""Checkpoints: whole or not there. Safetensors and JSON only; nothing that executes on loading.

    checkpoints/step-00000500/
        student/               a Hugging Face folder that loads at any moment
        optimizer.safetensors  AdamW's moments, by parameter name
        state.json             step, configuration, data digest, teacher, fp16 scale
        manifest.json          size and sha256 of every file, itself hashed
    checkpoints/latest         the newest one's name, a hint

Written to a temporary folder, flushed, hashed, renamed; only then is an old one removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pretrain import RunError
from pretrain.files import replace_text, write_json, writing_to

_FORMAT = 1


class Saved(NamedTuple):
    """A checkpoint that was found and verified."""

    step: int
    folder: Path
    state: dict[str, Any]

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's tensors by name."""
        return load_file(self.folder / "optimizer.safetensors")


def save(
    root: Path,
    step: int,
    *,
    student: PreTrainedModel,
    tokenizer: Path,
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` under `root`, then drop all but the newest `keep`.

    Raises:
        OSError: the disk is full or read-only; earlier checkpoints are untouched.
    """
    final = root / f"step-{step:08d}"
    if final.exists() and verify(final) is None:
        return final  # this very step was written before: a run is repeatable
    temporary = root / f".tmp-{final.name}"
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover)
    try:
        with writing_to(temporary):
            temporary.mkdir(parents=True)
            student.save_pretrained(temporary / "student")
            shutil.copytree(tokenizer, temporary / "student", dirs_exist_ok=True)
            moments = temporary / "optimizer.safetensors"
            save_file(dict(optimizer), moments, metadata={"format": "pt"})
            write_json(temporary / "state.json", {**state, "step": step})
            write_json(temporary / "manifest.json", _sealed(temporary, step))
            for path in [*temporary.rglob("*"), temporary]:
                _sync(path)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():  # one that does not verify
        _remove(final)
    temporary.rename(final)
    _sync(root)
    replace_text(root / "latest", f"{final.name}\n")
    for old in _folders(root)[keep:]:
        _remove(old)
    return final


def newest(root: Path, warn: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that verifies; `warn` is told of each that was skipped, and why.

    Raises:
        RunError: there are checkpoints and none verifies.
    """
    folders = _folders(root)
    for folder in folders:
        problem = verify(folder)
        if problem is None:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return Saved(state["step"], folder, state)
        warn(f"{folder}: {problem}; trying the one before it")
    if folders:
        raise RunError(
            f"{root}: no checkpoint verifies; restore one, or remove the folder to start again"
        )
    return None


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        seal = manifest.pop("sha256")
        if seal != _digest(manifest):
            return "manifest.json was altered"
        if manifest["format"] != _FORMAT:
            return f"format {manifest['format']} is not known to this version"
        if folder.name != f"step-{manifest['step']:08d}":
            return f"the folder holds step {manifest['step']}"
        files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        if files - {"manifest.json"} != set(manifest["files"]):
            odd = sorted((files - {"manifest.json"}) ^ set(manifest["files"]))[0]
            return f"{odd} is missing or does not belong"
        for name, entry in manifest["files"].items():
            if _sha256(folder / name) != entry["sha256"]:
                return f"{name} differs from its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({error})"
    return None


def _sealed(folder: Path, step: int) -> dict[str, Any]:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": _FORMAT, "step": step, "files": files}
    return {**manifest, "sha256": _digest(manifest)}


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _folders(root: Path) -> list[Path]:
    """Newest first, by step number: modification times lie."""
    return sorted((p for p in root.glob("step-*") if p.is_dir()), reverse=True)


def _remove(folder: Path) -> None:
    # Renamed first, so that a removal cut short never leaves half a checkpoint under its name.
    doomed = folder.with_name(f".tmp-removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

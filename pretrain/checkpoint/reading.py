"""Find and verify the checkpoint that a run continues from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from data_prep.disk import hash_file
from data_prep.disk.json_files import NotRegularError, read_regular
from pretrain import RunError
from pretrain.checkpoint.layout import (
    ADAPTERS,
    FORMAT,
    MANIFEST,
    MOMENTS,
    OPTIMIZER,
    STATE,
    STEP,
    checkpoints,
    folder_name,
    manifest_bytes,
)

Result = TypeVar("Result")
_ATTEMPTS = 20  # reads of a checkpoint that its run removes meanwhile


class Saved(NamedTuple):
    """Hold a verified checkpoint."""

    step: int
    folder: Path
    state: dict[str, Any]

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer state by name; `check_optimizer` checks that it fits."""
        return self._load(OPTIMIZER)

    def adapters(self) -> dict[str, Tensor]:
        """Return the tensors of the objective's adapters by name; empty if it has none."""
        return self._load(ADAPTERS) if (self.folder / ADAPTERS).exists() else {}

    def _load(self, name: str) -> dict[str, Tensor]:
        try:
            return load_file(self.folder / name)
        except (SafetensorError, OSError) as error:
            raise RunError(
                f"{self.folder / name}: cannot be read ({error}); continue from another checkpoint"
            ) from error


class DamagedError(ValueError):
    """Report that a checkpoint differs from what was written, and where."""


def newest(root: Path, warn: Callable[[str], None]) -> Saved | None:
    """Return the newest checkpoint that verifies; `warn` of each that was skipped, and why.

    Raises:
        RunError: no checkpoint verifies, or one is of a different version.
    """
    skipped: set[Path] = set()
    # List again each time: a running training may remove one while it is read here.
    while left := [(n, folder) for n, folder in checkpoints(root).items() if folder not in skipped]:
        step, folder = left[0]
        try:
            return Saved(step, folder, read_state(folder))
        except DamagedError as problem:
            # Else its run has removed it meanwhile, which is not damage.
            if folder.exists():
                warn(f"{folder}: {problem}; trying the one before it")
                skipped.add(folder)
    if skipped:
        raise RunError(
            f"{root}: no checkpoint verifies; restore one, or remove the folder to start again"
        )
    return None


def read_newest(
    root: Path, read: Callable[[Saved], Result], warn: Callable[[str], None]
) -> tuple[Saved, Result] | None:
    """Return the newest checkpoint that verifies and the result of `read` on it.

    A run may remove a checkpoint while it is read here. Then the newest is read instead, with a
    warning.

    Raises:
        RunError: as `newest`, or the run removes checkpoints faster than they are read.
    """
    for _ in range(_ATTEMPTS):
        saved = newest(root, warn)
        if saved is None:
            return None
        try:
            result = read(saved)
            if saved.folder.exists():  # else some files may have been missing
                return saved, result
        except Exception:
            if saved.folder.exists():
                raise
        warn(f"{saved.folder}: its run removed it while it was read; reading the newest again")
    raise RunError(
        f"{root}: the run removes its checkpoints faster than they can be read: set "
        "checkpoint.keep or checkpoint.every higher, or wait for its end"
    )


def verify(folder: Path) -> str | None:
    """Return the fault of a checkpoint, or None.

    Raises:
        RunError: it is whole, but of a different version.
    """
    try:
        read_state(folder)
    except DamagedError as problem:
        return str(problem)
    return None


def read_state(folder: Path, *, every_byte: bool = True) -> dict[str, Any]:
    """Verify all files of a checkpoint, and return the content of its state.json.

    Args:
        folder: the checkpoint.
        every_byte: hash all files; else only manifest and state, which takes no time.

    Raises:
        DamagedError: a file is missing, altered or foreign.
        RunError: the checkpoint is whole, but of a different version.
    """
    try:
        try:
            data = read_regular(folder / MANIFEST)
        except NotRegularError:
            raise DamagedError(f"{MANIFEST} is not a file") from None
        values = json.loads(data)
        values.pop("sha256")
        # The manifest seals itself: write it again from its values and compare every byte.
        if data != manifest_bytes(values):
            raise DamagedError(f"{MANIFEST} was altered")
        # After the seal, so that damage is not reported as a different version.
        if values["format"] != FORMAT:
            raise RunError(
                f"{folder}: written in checkpoint format {values['format']}, this version reads "
                f"{FORMAT}: continue with the version that wrote it, or give the run another "
                "output:"
            )
        # A folder that was renamed would be taken for another step.
        if folder.name != folder_name(values["step"]):
            raise DamagedError(f"the folder holds step {values['step']}")

        # Sizes before hashes: they find most damage without reading the files.
        files: dict[str, dict[str, Any]] = values["files"]
        found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if not p.is_dir()}
        del found[MANIFEST]
        if odd := sorted(found.keys() ^ files.keys()):
            why = "is missing" if odd[0] in files else "is not a file of a checkpoint"
            raise DamagedError(f"{odd[0]} {why}")
        for name, path in found.items():
            if path.stat().st_size != files[name]["bytes"]:
                size = path.stat().st_size
                raise DamagedError(f"{name} has {size:,} bytes, not {files[name]['bytes']:,}")
        for name, path in found.items() if every_byte else []:
            if hash_file(path)[0] != files[name]["sha256"]:
                raise DamagedError(f"{name} differs from its checksum")

        # Hash the bytes that are parsed, not the file: it might change in between.
        data = read_regular(folder / STATE)
        if hashlib.sha256(data).hexdigest() != files[STATE]["sha256"]:
            raise DamagedError(f"{STATE} differs from its checksum")
        state: dict[str, Any] = json.loads(data)
        if folder.name != folder_name(state["step"]):
            raise DamagedError(f"the folder holds step {state['step']}")
    except (DamagedError, RunError):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"unreadable ({type(error).__name__}: {error})") from error
    return state


def load_adapters(adapters: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a checkpoint's adapters into those of the objective.

    Raises:
        RunError: naming the first tensor that does not fit.
    """
    _check_fit(ADAPTERS, tensors, adapters.state_dict())
    adapters.load_state_dict(tensors)


def check_optimizer(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that AdamW's state fits the parameters; one without a gradient so far has no state.

    Raises:
        RunError: naming the first tensor that does not fit.
    """
    kinds = (STEP, *MOMENTS)
    needed = {
        f"{name}/{kind}": parameter.new_empty(()) if kind == STEP else parameter
        for name, parameter in parameters.items()
        if any(f"{name}/{kind}" in tensors for kind in kinds)
        for kind in kinds
    }
    _check_fit(OPTIMIZER, tensors, needed)


def _check_fit(file: str, tensors: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or types than those that are needed."""
    here, there = (
        {n: f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for n, t in of.items()}
        for of in (tensors, needed)
    )
    for name in sorted(here.keys() | there.keys()):
        has, needs = here.get(name, "missing"), there.get(name, "no such tensor")
        if has != needs:
            raise RunError(
                f"{file}: {name} is {has}, this run needs {needs}; continue from another checkpoint"
            )

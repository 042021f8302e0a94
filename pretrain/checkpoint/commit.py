"""Write a checkpoint to disk in an order that leaves no half of one after a crash."""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from data_prep.disk import hash_file, sync
from data_prep.disk.replacing import replace_text, writing_to
from pretrain import RunError
from pretrain.checkpoint.layout import (
    ADAPTERS,
    FORMAT,
    LATEST,
    MANIFEST,
    OPTIMIZER,
    STATE,
    STUDENT,
    checkpoints,
    folder_name,
    manifest_bytes,
)
from pretrain.checkpoint.reading import DamagedError, read_state, verify

if TYPE_CHECKING:  # takes two seconds, which ranks without a model need not wait
    from transformers import PreTrainedModel

_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Contents:
    """Hold all of a checkpoint, in memory that nothing else writes to."""

    step: int
    model: PreTrainedModel  # without weights
    weights: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: bytes
    tokenizer: Mapping[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Return the approximate size on disk."""
        every = (self.weights, self.adapters, self.optimizer)
        tensors = {t.data_ptr(): t for part in every for t in part.values()}
        files = [self.state, *self.tokenizer.values()]
        return sum(t.nbytes for t in tensors.values()) + sum(map(len, files))


def commit(
    root: Path, contents: Contents, *, phase: Callable[[str], None], fence: Callable[[], None]
) -> None:
    """Write a checkpoint to a temporary folder, flush it, and rename it.

    An existing one that verifies stays, because a run is repeatable.

    Raises:
        OSError: it could not be written; older checkpoints are untouched.
    """
    final = root / folder_name(contents.step)
    if final.exists() and verify(final) is None:
        return
    with writing_to(root):
        if not root.exists():
            root.mkdir(parents=True)
            sync(root.parent)
        for leftover in root.glob(f"{_TEMPORARY}*"):  # left by processes that have ended
            shutil.rmtree(leftover, ignore_errors=True)
    # A unique name: a process that was wrongly taken for dead may still write to its own.
    temporary = root / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        _fill(temporary, contents, phase)
        # The last moment to learn that another process has taken the run over.
        fence()
        phase("save:rename")
        with writing_to(final):
            if final.exists():  # it does not verify
                remove(final)
            temporary.rename(final)
            sync(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fill(folder: Path, contents: Contents, phase: Callable[[str], None]) -> None:
    student = folder / STUDENT
    phase("save:weights")
    with writing_to(student):
        student.mkdir(parents=True)
        for name, data in contents.tokenizer.items():
            (student / name).write_bytes(data)
        # Weights come last, so that no file of the tokenizer can replace one.
        contents.model.save_pretrained(student, state_dict=dict(contents.weights))
        for path in student.iterdir():
            # safetensors writes files that only the owner can read. Use the mode of the rest.
            shutil.copymode(student / "config.json", path)
            sync(path)
    phase("save:optimizer")
    for name, tensors in ((OPTIMIZER, contents.optimizer), (ADAPTERS, contents.adapters)):
        if name == ADAPTERS and not tensors:
            continue
        with writing_to(folder / name):
            save_file(dict(tensors), folder / name, metadata={"format": "pt"})
            shutil.copymode(student / "config.json", folder / name)
            sync(folder / name)
    phase("save:state")
    _put(folder / STATE, contents.state)
    phase("save:manifest")
    files = {}
    with writing_to(folder):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            sha256, size = hash_file(path)
            files[str(path.relative_to(folder))] = {"bytes": size, "sha256": sha256}
    values = {"format": FORMAT, "step": contents.step, "files": files}
    # Last of all files: a folder without a manifest is not a checkpoint.
    _put(folder / MANIFEST, manifest_bytes(values))
    # A file's entry in its folder is flushed with the folder, not with the file.
    phase("save:flush")
    with writing_to(folder):
        for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
            sync(path)


def _put(path: Path, data: bytes) -> None:
    with writing_to(path):
        path.write_bytes(data)
        sync(path)


def tidy(root: Path, step: int, *, keep: int, phase: Callable[[str], None]) -> None:
    """Write the pointers after `step` was committed, then remove what is neither new nor best.

    Of the checkpoints up to this step the newest `keep` stay, and the one with the lowest
    validation loss. Later ones did not verify when the run was resumed; each is replaced at its
    step. Checkpoints that are damaged or of a different version are neither counted nor removed.

    Raises:
        OSError: a pointer was not written or a folder not removed; all checkpoints are whole.
    """
    phase("save:pointer")
    losses: dict[Path, float] = {}
    for number, folder in checkpoints(root).items():
        # Only the state is hashed here: reading all weights would take as long as the save.
        if number <= step:
            with suppress(DamagedError, RunError):
                state = read_state(folder, every_byte=False)
                loss = (state.get("evaluation") or {}).get("loss", math.inf)
                # A checkpoint carries the newest figures, which may be those of an earlier step.
                own = state.get("evaluation_step") == state["step"]
                losses[folder] = loss if own and math.isfinite(loss) else math.inf
    # Oldest first: of two equal losses the older checkpoint is the best.
    best = min(reversed(losses), key=losses.__getitem__, default=None)
    if best is not None and losses[best] == math.inf:
        best = None
    try:
        replace_text(root / LATEST, f"{folder_name(step)}\n")
        if best is not None:
            replace_text(root / "best", f"{best.name}\n")
    finally:  # on a full disk the pointer fails, and removing makes space
        phase("save:rotate")
        with writing_to(root):
            for folder in list(losses)[keep:]:
                if folder != best:
                    remove(folder)
            sync(root)


def remove(folder: Path) -> None:
    """Remove a checkpoint, and never leave half of it under its name."""
    doomed = folder.with_name(f"{_TEMPORARY}removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)  # in one step, so that a crash leaves nothing half under its name
    shutil.rmtree(doomed)

"""Save while training continues: copy at once, write in a thread, one save at a time.

The order of writing leaves no half of a checkpoint after a crash.
"""

from __future__ import annotations

import copy
import errno
import math
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_prep.disk import hash_file, sync
from data_prep.disk.json_files import indented_json
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Snapshot:
    """Hold host copies of named tensors; the next `take` reuses their memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
        """Copy all tensors, and overwrite what the last call returned.

        If `tied`, several names of one tensor share a copy; else each name has its own.
        """
        owners: dict[object, str] = {}
        copies: dict[str, Tensor] = {}
        gpus: set[torch.device] = set()
        for name, tensor in tensors.items():
            # One tensor under two names: the same memory, read in the same way.
            where = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
            owner = owners.setdefault(where if tied else name, name)
            if owner != name:
                copies[name] = copies[owner]
                continue
            buffer = self._buffers.get(name)
            # Kept from save to save, because taking new memory is slow: 0.41 s for the first save
            # against 0.13 s (docs/log). Pinned memory lets a GPU copy without blocking the host.
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                gpus.add(tensor.device)
            copies[name] = buffer
        # The copies are asynchronous. The next step overwrites the weights, so wait for them here.
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return copies


def complete(weights: Mapping[str, Tensor], student: PreTrainedModel) -> dict[str, Tensor]:
    """Return `weights` under all names of the student's state dict, including tied ones.

    Raises:
        KeyError: a parameter is missing from `weights`, or one of them is not a parameter.
    """
    own = student.state_dict()
    by_place = {own[name].data_ptr(): tensor for name, tensor in weights.items()}
    parameters = {name for name, _ in student.named_parameters(remove_duplicate=False)}
    return {
        name: by_place[tensor.data_ptr()] if name in parameters else tensor
        for name, tensor in own.items()
    }


def without_weights(student: PreTrainedModel) -> PreTrainedModel:
    """Return the same model on no device: it can write weights, and has none of its own."""
    with torch.device("meta"):
        return type(student)(copy.deepcopy(student.config))


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

    Of the checkpoints up to this step the newest `keep` stay, the one with the lowest validation
    loss, and one before a decay of the learning rate, which other runs may continue from. Later
    ones did not verify when the run was resumed; each is replaced at its step. Checkpoints that are
    damaged or of a different version are neither counted nor removed.

    Raises:
        OSError: a pointer was not written or a folder not removed; all checkpoints are whole.
    """
    phase("save:pointer")
    losses: dict[Path, float] = {}
    stays = set[Path]()
    for number, folder in checkpoints(root).items():
        # Only the state is hashed here: reading all weights would take as long as the save.
        if number <= step:
            with suppress(DamagedError, RunError):
                state = read_state(folder, every_byte=False)
                loss = (state.get("evaluation") or {}).get("loss", math.inf)
                # A checkpoint carries the newest figures, which may be those of an earlier step.
                own = state.get("evaluation_step") == state["step"]
                losses[folder] = loss if own and math.isfinite(loss) else math.inf
                if state.get("before_decay"):
                    stays.add(folder)
    # Oldest first: of two equal losses the older checkpoint is the best.
    best = min(reversed(losses), key=losses.__getitem__, default=None)
    if best is not None and losses[best] == math.inf:
        best = None
    stays |= {best} if best is not None else set()
    try:
        replace_text(root / LATEST, f"{folder_name(step)}\n")
        if best is not None:
            replace_text(root / "best", f"{best.name}\n")
    finally:  # on a full disk the pointer fails, and removing makes space
        phase("save:rotate")
        with writing_to(root):
            for folder in list(losses)[keep:]:
                if folder not in stays:
                    remove(folder)
            sync(root)


def remove(folder: Path) -> None:
    """Remove a checkpoint, and never leave half of it under its name."""
    doomed = folder.with_name(f"{_TEMPORARY}removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)  # in one step, so that a crash leaves nothing half under its name
    shutil.rmtree(doomed)


class Writer:
    """Write the checkpoints of one run; the caller holds the lock of the run's folder.

    Args:
        root: the folder of checkpoints; the first save makes it.
        tokenizer: the files next to the student's weights, by name.
        keep: the number of newest checkpoints that stay, next to the best.
        phase: called from the thread with the name of each part of a save.
        fence: called just before a checkpoint gets its name; raises if the run was taken over.
        warn: called from the thread with one line about a save that failed.
    """

    def __init__(
        self,
        root: Path,
        *,
        tokenizer: Mapping[str, bytes],
        keep: int,
        phase: Callable[[str], None],
        fence: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        assert keep >= 1
        self._root, self._keep = root, keep
        self._phase, self._fence, self._warn = phase, fence, warn
        self._tokenizer = tokenizer
        self._weights, self._adapters, self._moments = Snapshot(), Snapshot(), Snapshot()
        self._model: PreTrainedModel | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._flight: Future[None] | None = None

    def save(
        self,
        step: int,
        *,
        student: PreTrainedModel,
        weights: Mapping[str, Tensor] | None,
        adapters: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        wait: bool = False,
    ) -> float:
        """Copy all that a checkpoint of `step` needs, and let the thread write it.

        A save in flight is waited for first. One that fails gives a warning: the checkpoint before
        it stays, and the next save tries again.

        Args:
            step: optimizer steps done.
            student: the model; its own weights are read only if `weights` is None.
            weights: the full fp32 parameters by name.
            adapters: those of the objective by name; none make no file.
            optimizer: AdamW's state by `parameter/state`.
            state: all else, for JSON; `evaluation` and `evaluation_step` decide which is the best.
            wait: return only when it is committed.

        Returns:
            The seconds that the caller waited.

        Raises:
            OSError: with `wait`, it was not written.
            Exception: the fence raised it in the save before this one, or in this one with `wait`.
        """
        start = time.perf_counter()
        with suppress(OSError):  # the thread has warned of it
            self.finish()
        # A model of the same class on no device: `save_pretrained` then writes the copied weights,
        # and never the live ones.
        if self._model is None:
            self._model = without_weights(student)
        own = student.state_dict() if weights is None else complete(weights, student)
        # From here on training may change the weights: all that the thread needs is a copy.
        contents = Contents(
            step=step,
            model=self._model,
            weights=self._weights.take(own, tied=True),
            adapters=self._adapters.take(adapters, tied=False),
            optimizer=self._moments.take(optimizer, tied=False),
            state=indented_json({**state, "step": step}),
            tokenizer=self._tokenizer,
        )
        self._flight = self._thread.submit(self._write, contents, wait)
        if wait:
            self.finish()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Wait for the save in flight.

        Raises:
            OSError: it was not written.
            Exception: the fence raised it.
        """
        if self._flight is not None:
            try:
                self._flight.result()
            finally:
                if self._flight.done():  # a signal handler may have raised during the wait
                    self._flight = None

    def close(self) -> None:
        """Wait for the save in flight, and end the thread."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()

    def _write(self, contents: Contents, wait: bool) -> None:
        step = contents.step
        try:
            commit(self._root, contents, phase=self._phase, fence=self._fence)
        except OSError as error:
            final = self._root / folder_name(step)
            cause = f"{error.strerror or error} (at least {contents.num_bytes:,} bytes are needed)"
            if not wait:
                self._warn(
                    f"{final}: not saved: {cause}; earlier checkpoints are untouched, and the next "
                    "save tries again"
                )
            # Kept in the future: `finish` raises it where somebody waits.
            raise OSError(error.errno or errno.EIO, cause, str(final)) from error
        try:
            tidy(self._root, step, keep=self._keep, phase=self._phase)
        # The checkpoint itself is complete by now, so this is a warning and no error.
        except OSError as error:
            self._warn(f"{self._root}: step {step} is saved, what is older not tidied up: {error}")

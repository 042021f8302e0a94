"""Save while training continues: copy at once, write in a thread, one save at a time."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from data_prep.disk.json_files import indented_json
from pretrain.checkpoint.commit import Contents, commit, tidy
from pretrain.checkpoint.layout import folder_name
from pretrain.checkpoint.snapshot import Snapshot, complete, without_weights

if TYPE_CHECKING:  # takes two seconds, which ranks without a model need not wait
    from transformers import PreTrainedModel


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

"""Let the first of several nodes do what only one may, while the others wait for its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from launch.torchrun.command import LATE, Head
from pretrain import RunError
from pretrain.contracts.process import ExitCode
from pretrain.monitor.status import verdict

_APART = 10_000  # from the port at which the ranks of a run meet
_POLL, _LEAVE = 0.5, 10.0  # seconds


class Nodes:
    """Hold a store that the first node serves for as long as a recipe takes."""

    def __init__(self, head: Head, rank: int, num: int, seconds: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        port = head.port_apart(_APART)
        self.rank, self.num = rank, num
        wait = seconds + LATE
        try:
            self.store = TCPStore(
                head.host.strip("[]"), port, num, rank == 0, timedelta(seconds=wait)
            )
        except RuntimeError as error:
            raise RunError(
                f"the {num} nodes have not met at {head.host}:{port} within {wait:.0f} s: "
                f"start the same command on each ({str(error).splitlines()[0]})"
            ) from None

    def first(self, name: str, work: Callable[[], int]) -> int:
        """Return the exit code of `work`, which the first node does.

        Raises:
            RunError: the first node has gone.
        """
        if self.rank == 0:
            try:
                code = int(work())
            except BaseException as error:
                self.store.set(name, str(int(verdict(error)[0])))
                raise
            self.store.set(name, str(code))
            return code
        try:
            while not self.store.check([name]):
                time.sleep(_POLL)
            code = int(self.store.get(name))
        except RuntimeError:
            code = ExitCode.BUG
        if code != ExitCode.DONE:
            raise RunError(f"the first node has ended {name} with code {code}: see its output")
        return code

    def leave(self) -> None:
        """Wait on the first node, for a few seconds, until the others have read the last result."""
        end = time.monotonic() + _LEAVE
        with suppress(RuntimeError):  # the first node has left
            count = self.store.add("left", 1)
            while self.rank == 0 and count < self.num and time.monotonic() < end:
                time.sleep(_POLL)
                count = self.store.add("left", 0)

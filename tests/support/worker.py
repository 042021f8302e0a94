"""Act as a rank for tests of the supervisor: steps of real collectives, at most one fault.

launch/torchrun/entry.py worker STEPS [FAULT RANK STEP]
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from launch.torchrun.failures import record
from pretrain.distributed.processes import meeting_point
from pretrain.monitor.status import Heartbeat, write_status

OUTPUT = Path(os.environ["WORKER_OUTPUT"])


def train(steps: int, fault: str, faulty: int, when: int) -> str:
    """Run steps of 20 ms until the last, a signal, or the fault."""
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: stop.append(number))
    rank = distributed.get_rank()
    heartbeat = Heartbeat.from_environment(rank)
    for step in range(steps):
        heartbeat.at(step, "data")
        if (rank, step) == (faulty, when):
            fail(fault)
        heartbeat.at(step, "counts")
        if fault == "hang-nccl" and step == when:
            abort()
        counts = torch.tensor([1, len(stop)])
        distributed.all_reduce(counts)
        if counts[1]:
            return "interrupted"
        heartbeat.at(step, "forward")
        if step == 10:
            print(f"rank {rank} is under way")
        time.sleep(0.02)
    return "finished"


def fail(fault: str) -> None:
    """Make a rank fail in one of several ways."""
    marker = OUTPUT / "failed-once"
    if fault == "crash" or (fault == "crash-once" and not marker.exists()):
        marker.touch()
        raise LookupError("row 17 has gone astray")
    if fault == "evaluate":
        Heartbeat.from_environment(0).at(20, "evaluation")
        time.sleep(3 * float(os.environ["DISTIL_TIMEOUT"]) + 6)
    if fault in ("hang", "hang-nccl"):
        print("about to hang")
        hang()
    if fault == "litter":  # as a loader worker that is killed leaves it
        made = Path(tempfile.mkdtemp(prefix="pymp-"))
        print(f"litter in {made.parent.name}")
    if fault == "diverge":
        record(ArithmeticError(), 3, "step 3: the loss is nan")
        sys.exit(3)


def hang() -> None:
    """Wait for something that never comes."""
    while True:
        time.sleep(1)


def abort() -> None:
    """Abort as NCCL's watchdog does after a wait that took too long."""
    print("terminate called after throwing an instance of 'c10::DistBackendError'")
    print("  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)")
    os.abort()


def main() -> None:
    """Train, and say how it ended."""
    steps, fault, faulty, when = [*sys.argv[1:], "none", "0", "0"][:4]
    seconds = float(os.environ["DISTIL_TIMEOUT"])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds), **meeting_point())
    rank = distributed.get_rank()
    ended = train(int(steps), fault, int(faulty), int(when))
    code = 75 if ended == "interrupted" else 0
    if rank == 0:
        write_status(OUTPUT, ended=ended, step=0, num_steps=int(steps), exit_code=code)
    with suppress(RuntimeError):
        distributed.barrier()
    distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()

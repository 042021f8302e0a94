"""Run one rank under the supervisor, with its own log, a heartbeat and a record of its failure.

    python launch/torchrun/entry.py launch.torchrun.rank MODULE [ARGUMENT ...]

runs MODULE as `python -m MODULE` would, with standard output and error in a file of this rank.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from data_prep.disk.credentials import masked
from launch.console import tolerant
from launch.torchrun import failures
from pretrain.contracts.process import HEARTBEATS, LOGS, STORE, ExitCode
from pretrain.monitor.status import Heartbeat

STACK = signal.SIGUSR2  # a rank that receives it writes its stack to its log
SHOWN = "shown"  # in the heartbeats' folder: the rank whose output the supervisor shows


def main() -> None:
    """Run the module named on the command line, and report how it ends."""
    rank = int(os.environ["RANK"])
    file = log_file(Path(os.environ[LOGS]), rank)
    file.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed since the start
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    for number in (1, 2):  # the process's descriptors, because native libraries write to them
        os.dup2(opened, number)
    os.close(opened)
    sys.stdout, sys.stderr = (tolerant(number, "utf-8") for number in (1, 2))
    if STORE in os.environ:
        # With an address set, rank 0 would open a TCP store by default.
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    if os.environ["LOCAL_RANK"] == "0":
        (Path(os.environ[HEARTBEATS]) / SHOWN).write_text(str(rank))
    faulthandler.enable()  # a crash in native code shows where
    faulthandler.register(STACK, all_threads=False)
    heartbeat = Heartbeat.from_environment(rank)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
        if code not in (ExitCode.DONE, ExitCode.REQUEUE):
            failures.record(stop, code, "")
    except BaseException as error:
        failures.record(error, ExitCode.BUG, f"{type(error).__name__}: {error}")
        print(masked(traceback.format_exc()), file=sys.stderr)
        code = 1
    heartbeat.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see launch.cli.end


def log_file(folder: Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return folder / f"rank-{rank:05d}.log"


if __name__ == "__main__":
    main()

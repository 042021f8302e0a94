"""`distil`: the command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import typer

from launch.commands.audit import audit
from launch.commands.bench import bench
from launch.commands.demo import demo
from launch.commands.evaluate import evaluate
from launch.commands.export import export
from launch.commands.inspect import inspect
from launch.commands.launch import launch
from launch.commands.prepare import prepare
from launch.commands.pretrain import pretrain
from launch.commands.replay import replay
from launch.commands.verify import verify

app = typer.Typer(
    name="distil",
    help="Make your own DistilBERT: corpus -> packed shards -> distillation -> checkpoint.",
    epilog="Any command takes --debug, which shows the traceback behind an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    *(prepare, verify, inspect, audit),
    *(pretrain, launch, evaluate, replay, export, demo, bench),
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Entry point: a user's mistake becomes one line and exit code 2, numbers gone wrong 3."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    # Processes of multiprocessing would import from the working directory; 3.10 does not know this.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Set before transformers and tokenizers are imported; a user's own setting wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except SystemExit as stop:
        end(stop.code if isinstance(stop.code, int) else 1 if stop.code else 0)
    except (Exception, KeyboardInterrupt) as error:
        from data_prep.messages import complain
        from launch.torchrun.failures import record
        from pretrain.monitor.status import verdict

        code, text = verdict(error)
        record(error, code, text)  # where a supervisor started this rank
        if debug or code == 1:
            complain(traceback.format_exc().rstrip())
        if code in (2, 3):
            complain(f"error: {text}")
        end(code)


def end(code: int) -> NoReturn:
    """End this process; one of several without the interpreter's own end.

    A thread of gloo that lets go of a tensor while the interpreter ends is unwound through C++ that
    may not throw, and aborts a rank that has done its work (torch 2.13, Python 3.11: in one of some
    fifty runs).
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if (
        alone or "DISTIL_HEARTBEATS" in os.environ
    ):  # `launch.torchrun.rank` has still something to say
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

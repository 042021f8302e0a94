"""Run the command line `distil`: list the commands, turn errors into exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import traceback
from inspect import cleandoc
from typing import Annotated, NoReturn

import typer

from launch.commands.bench import bench
from launch.commands.compress import compress, demo
from launch.commands.config_files import config
from launch.commands.doctor import doctor
from launch.commands.evaluate import evaluate
from launch.commands.export import export
from launch.commands.inspect import inspect
from launch.commands.launch import launch
from launch.commands.prepare import prepare
from launch.commands.pretrain import pretrain
from launch.commands.recipe import recipe
from launch.commands.replay import replay
from launch.commands.report import report
from launch.commands.vectors import vectors
from launch.commands.verify import verify
from pretrain import __version__
from pretrain.contracts.process import ENDS_WITH_STDIN, HEARTBEATS, ExitCode

app = typer.Typer(
    name="distil",
    epilog="Any command takes --debug, which shows the traceback behind an error.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        typer.echo(f"distil {__version__}")
        raise typer.Exit


# What people type for something that has another name here.
_MEANT = {
    "--time": "is a key of the file: slurm.time=1:00:00",
    "--resume": "is no option: the same command continues a run",
    "--quantize": "is called --int8",
    "publish": "is called: distil export RUN DIR --push OWNER/NAME",
}


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Make your own compact encoder: corpus -> packed shards -> distillation -> export."""


# Each under what it is for.
_OF = {
    "Start here": (compress, demo),
    "Text, into packed shards": (prepare, verify, inspect, vectors),
    "Train: one run, the stages of a recipe, or several processes": (pretrain, recipe, launch),
    "Watch, measure, write": (report, replay, evaluate, export),
    "Look up": (doctor, bench),
}
COMMANDS = tuple(command for commands in _OF.values() for command in commands)
for panel, commands in _OF.items():
    for command in commands:
        # A paragraph is one line, which the terminal's width breaks.
        paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        app.command(help=text, rich_help_panel=panel)(command)
app.add_typer(config, name="config", rich_help_panel="Look up")


def main() -> None:
    """Run a command; a mistake of the user becomes one line and exit code 2, NaN or inf 3."""
    # Taken out by hand, so that every command has it, before or after its own options.
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    # Imports of torch and transformers make a million objects that stay. With the default of 700 a
    # fifth of a start is spent on looking for garbage among them.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # the interpreter's last search for garbage takes a second
    # Keep child processes of multiprocessing from importing modules of the working directory.
    # Python 3.10 ignores the variable.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Set before transformers and tokenizers are imported; a user's own setting wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if os.environ.pop(ENDS_WITH_STDIN, None):
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    typed = [text.partition("=")[0] for text in sys.argv[1:] if text.startswith("--")]
    for word in (*sys.argv[1:2], *typed):
        if word in _MEANT:
            from data_prep.messages import complain

            complain(f"error: {word}: {_MEANT[word]}")
            end(ExitCode.MISTAKE)
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
        if debug or code == ExitCode.BUG:
            complain(traceback.format_exc().rstrip())
        if code in (ExitCode.MISTAKE, ExitCode.NOT_FINITE):
            complain(f"error: {text}")
        end(code)


def _end_with_stdin() -> None:
    """Stop this process, which saves, once the one that started it has ended."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def end(code: int) -> NoReturn:
    """End this process; skip the interpreter's shutdown in one of several ranks.

    During that shutdown a thread of gloo that releases a tensor can abort a rank that has finished
    (torch 2.13, Python 3.11: about one run in fifty).
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone or HEARTBEATS in os.environ:  # `launch.torchrun.rank` ends the rank itself
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

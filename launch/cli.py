"""`distil`: the command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from launch.commands import bench, corpus, training

app = typer.Typer(
    name="distil",
    help="Make your own DistilBERT: corpus -> packed shards -> distillation -> checkpoint.",
    epilog="Any command takes --debug, which shows the traceback behind an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    *(corpus.prepare, corpus.verify, corpus.inspect, corpus.audit),
    *(training.pretrain, training.launch, training.evaluate),
    *(training.replay, training.export, training.demo, bench.bench),
):
    app.command()(command)


def main() -> None:
    """Entry point: a user's mistake becomes one line and exit code 2, numbers gone wrong 3."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    # The processes of multiprocessing would import from the working directory (not mended in 3.10).
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
    except KeyboardInterrupt:
        end(130)
    except Exception as error:
        answer = _answer(error)
        text, code = answer or (str(error), 1)
        from data_prep.disk.credentials import masked
        from launch.failures import record

        record(error, code, text)  # where a supervisor started this rank
        if debug or answer is None:
            print(masked(traceback.format_exc()), file=sys.stderr)
        if answer is not None:
            print(f"error: {masked(text)}", file=sys.stderr)
        end(code)


def end(code: int) -> NoReturn:
    """End this process; one of several without the interpreter's own end.

    A thread of gloo that lets go of a tensor while the interpreter ends is unwound through C++ that
    may not throw, and aborts a rank that has done its work (torch 2.13, Python 3.11: in one of some
    fifty runs).
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone or "DISTIL_HEARTBEATS" in os.environ:  # `launch.rank` has still something to say
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answer(error: Exception) -> tuple[str, int] | None:
    """(message, exit code) for what is the user's to mend; None for a bug of ours."""
    from data_prep import CorpusError
    from launch.config import ConfigError
    from pretrain import NumericalError, RunError
    from pretrain.memory import out_of_memory

    if isinstance(error, CorpusError | ConfigError | RunError):
        return str(error), 2
    if isinstance(error, NumericalError):
        return str(error), 3
    if out_of_memory(error):
        said = str(error).partition("\n")[0] or type(error).__name__
        return f"out of memory ({said}): end other programs, or use a machine with more", 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}{_remedy(error)}", 2
    return None


def _remedy(error: OSError) -> str:
    import errno

    remedies: dict[Any, str] = {
        errno.ENOSPC: "free some space, then run the same command again; what is finished stays",
        errno.EDQUOT: "free some space, then run the same command again; what is finished stays",
        errno.EROFS: "the disk is read-only; set `output:` to a place that can be written",
        errno.EACCES: "no permission; set `output:` to a place that can be written",
        errno.ENOTDIR: "a file stands where a folder should be; choose another path",
        errno.EEXIST: "a file stands where a folder should be; choose another path",
        errno.EFBIG: "a file-size limit was reached; raise it (ulimit -f) or write elsewhere",
    }
    return f"; {remedies[error.errno]}" if error.errno in remedies else ""


if __name__ == "__main__":
    main()

"""Define one command of `distil` per file; `launch/cli.py` lists them.

Each file imports what takes seconds (torch, transformers, pyarrow) inside its functions: a mistake
in a config is answered before.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path, typer.Argument(help="A YAML file, or shipped:NAME.yaml.", metavar="CONFIG")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value ...", metavar="[OVERRIDES]...")
]
Shards = Annotated[Path, typer.Argument(help="A folder of shards.")]
Run = Annotated[Path, typer.Argument(help="The output folder of a run.")]
# Groups of options in a command's help.
PLAN, PLACE, COURSE = "Before it starts", "Where it runs", "How it runs and ends"
StopAfter = Annotated[
    int | None,
    typer.Option(help="Stop after this step; the schedule stays.", min=1, rich_help_panel=COURSE),
]
NumNodes = Annotated[int, typer.Option(help="How many nodes.", min=1, rich_help_panel=PLACE)]
NodeRank = Annotated[
    int | None,
    typer.Option(help="This node's number, from 0; Slurm knows it.", min=0, rich_help_panel=PLACE),
]
HeadNode = Annotated[
    str | None,
    typer.Option(
        help="The first node; Slurm knows it.", metavar="HOST[:PORT]", rich_help_panel=PLACE
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        help="With --dry-run: of shards that do not exist yet, 4e9 for instance.",
        min=1,
        rich_help_panel=PLAN,
    ),
]
RecordFile = Annotated[
    Path | None,
    typer.Option(help="Also append the figures to this JSON file.", metavar="FILE"),
]
AcceptCode = Annotated[
    bool,
    typer.Option(
        "--accept-code",
        help="Keep finished shards that different code of the same behaviour made, and record it.",
    ),
]
SkipRows = Annotated[
    list[str] | None,
    typer.Option(
        help="Leave out rows a to b-1 from now on; repeatable.",
        metavar="a:b",
        rich_help_panel=COURSE,
    ),
]


def parse_rows(text: str) -> tuple[int, int]:
    """Return the a and b of `--skip-rows a:b`; RunError if it is not a range."""
    from pretrain import RunError

    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, end = (int(found[1]), int(found[2])) if found else (0, 0)
    if first >= end:
        raise RunError(
            f"--skip-rows {text}: no range: a:b leaves out rows a to b-1, such as 100:200"
        )
    return first, end


def quiet() -> None:
    """Hide the progress bars and deprecation warnings of the libraries."""
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(accelerate|deepspeed|torch)\."
    )

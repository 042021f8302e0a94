"""What each command of `distil` takes. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path, typer.Argument(help="A YAML file, or shipped:NAME.yaml.", metavar="CONFIG")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value ...", metavar="[OVERRIDES]...")
]


def quiet() -> None:
    """Keep the libraries' own bars, and words to their developers, from running through ours."""
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(accelerate|deepspeed|torch)\."
    )

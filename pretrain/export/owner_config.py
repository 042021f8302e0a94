"""Define keys that change nothing of what a run computes: those of a model's card, and of a job."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from data_prep.keys import Keys

# Tasks, by the hub's names, whose answer to an example is shown in a card.
SHOWN = ("fill-mask", "text-classification", "token-classification")


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Card(Keys):
    """Say what only the owner of a model knows, for the card of its exports."""

    licence: Annotated[str, BeforeValidator(_lower), Field(pattern=r"^[a-z0-9.+-]+$")] | None = None
    """Of the model, as hubs spell it: apache-2.0, cc-by-sa-4.0, other."""
    language: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]+)*$")], ...],
        BeforeValidator(_listed),
    ] = ()
    """Codes of the texts' languages: [en, de]."""
    base_model: str | None = None
    """Hub name of the model that this one is made from; None: the teacher, if it came from a hub.
    """
    example: str | None = None
    """A text whose answer the card shows; [MASK] is a hidden word."""


PricePerHour = Annotated[float, Field(gt=0, le=1e9)] | None

_NO_SPACE = r"^[^\s'\"]+$"
_TIME = re.compile(r"[0-9]+|[0-9]+(:[0-9]{1,2}){1,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED")
_Line = Annotated[str, Field(pattern=r"^[^\n]+$")]


def slurm_seconds(time: str) -> float:
    """Return the seconds of a time as sbatch reads it: minutes, h:m:s, days-hours and the like."""
    if time == "UNLIMITED":
        return float("inf")
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:  # hours first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class Slurm(Keys):
    """Say what a cluster asks for, for `distil launch --slurm`."""

    account: Annotated[str, BeforeValidator(str), Field(pattern=_NO_SPACE)] | None = None
    """Who pays."""
    partition: str | None = Field(None, pattern=_NO_SPACE)
    """Which nodes."""
    time: str | None = None
    """Limit, D-HH:MM:SS; a minute and `--grace` (60 s) before it the run saves, and the job is
    queued again.
    """
    options: tuple[_Line, ...] = ()
    """Further options of sbatch: [--qos=high, --mem=0]."""
    container: str | None = Field(None, pattern=_NO_SPACE)
    """Image: FILE.sif for Apptainer, else of `srun --container-image` (Pyxis)."""
    mounts: tuple[_Line, ...] = ()
    """Folders that the container sees: [/data:/data]."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the run: [module load cuda, source venv/bin/activate]. One that fails
    ends the job.
    """

    @field_validator("time", mode="before")
    @classmethod
    def _as_sbatch_reads_it(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, str) and _TIME.fullmatch(value)):
            raise ValueError('give days-hours:minutes:seconds in quotes: "1-00:00:00"')
        return value

"""Define what a stage offers to a recipe. It imports no torch before `run`."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from data_prep import CorpusError
from data_prep.disk import hash_file
from data_prep.disk.json_files import canonical_sha256
from data_prep.disk.made import CARD, aside, difference, foreign, seal
from data_prep.keys import Keys
from launch.commands import quiet
from launch.console import show
from pretrain import RunError
from pretrain.contracts.process import ExitCode
from pretrain.contracts.terms import Sizes
from pretrain.model.session import model_folder
from pretrain.plan import Planned
from pretrain.run_folder import onnx_file, sealed_state

if TYPE_CHECKING:
    from launch.torchrun.start import Launch

_PINNED = re.compile(r".+@[0-9a-f]{40}")  # a hub's name with its commit
State = Literal["new", "begun", "done"]  # judged by the folder; inputs of "done" are compared later
# Real paths of what earlier stages make; with the sizes of a model, or the rows of shards, where
# they are known.
Made = Mapping[Path, Sizes | Planned | None]


@dataclass(frozen=True)
class How:
    """Hold the options of `distil recipe` for stages that start processes."""

    launch: Launch | None = None  # as `distil launch` starts a run; otherwise in this process
    accept_code: bool = False  # keep finished shards of different code, as in `distil prepare`
    tokens: float | None = None  # in a dry run: tokens of shards that nothing has made or makes
    price: float | None = None  # price of an hour of a GPU, or of a node without GPUs


class Stage(ABC):
    """Turn folders into a folder: an entry of a recipe's `runs:`.

    `keys` are those of an entry. With `of` they are another config's, to which the recipe adds
    `stage`.
    """

    keys: ClassVar[type[Keys]]
    of: ClassVar[type[Keys] | None] = None
    everywhere: ClassVar[bool] = False  # do all nodes take part? Otherwise the first one does it
    flop: float | None = 0.0  # that it takes, once `check` has estimated it; None: not known
    disk: int = 0  # bytes of the checkpoints that it keeps
    least: float = 0.0  # seconds that it takes, however fast arithmetic is

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    @abstractmethod
    def title(self) -> str:
        """Return what the stage does, in a few words."""

    def outputs(self) -> list[Path]:
        """Return the folders that it makes."""
        return [self.config.output]

    @abstractmethod
    def reads(self) -> dict[str, str]:
        """Return the folders or hub names that it reads, by key."""

    @abstractmethod
    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Refuse what cannot be done, before the first stage starts.

        Returns:
            its outputs, with the sizes of the models in them, and the lines of `--dry-run`.

        Raises:
            RunError, CorpusError: names the key and the fix.
        """

    @abstractmethod
    def state(self) -> State:
        """Return what is there."""

    @abstractmethod
    def run(self, how: How) -> int:
        """Make the output, or what is left of it; return an exit code."""

    def result(self) -> str:
        """Return in a few words what is there, for the table at a recipe's end."""
        return str(self.state())


class Compared(Stage):
    """Make a folder that is kept with what it was made of, and made again for anything else."""

    name: ClassVar[str]  # of what it makes, for messages
    record: ClassVar[str]  # the file in the output that says what it was made of
    code: ClassVar[int] = 1  # raised when the same inputs would make something else
    others: ClassVar[tuple[str, ...]] = ()  # files of the output that people may change

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """Return all that shapes the folder; see `made.difference`.

        Raises:
            OSError, RunError, CorpusError: an input is not there.
        """

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the files into an empty folder; return what else the record keeps."""

    def state(self) -> State:
        """Return whether the folder of these very inputs is there."""
        try:
            other = difference(self.config.output / self.record, self._made_of())
        except (OSError, RunError, CorpusError):
            return "new"  # an input is made by an earlier stage
        return "new" if other else "done"

    def _made_of(self) -> dict[str, Any]:
        return {**self.inputs(), "code": self.code}

    def run(self, how: How) -> int:
        """Make the folder beside its place, with its record, and move it there."""
        output, inputs = self.config.output, self._made_of()
        if difference(output / self.record, inputs) is None:
            show(f"{output}: up to date")
            return ExitCode.DONE
        quiet()
        with aside(output, who="distil recipe") as folder:
            seal(folder / self.record, inputs, **self.make(folder))
        show(f"{output}: done")
        return ExitCode.DONE

    def check_output(self, *, below: bool = False) -> None:
        """Refuse an output that holds something else, or that is read.

        Args:
            below: it may lie in the working directory, also where that is read.

        Raises:
            RunError: names the file, or the key.
        """
        output = self.config.output
        names_in(output)
        if name := foreign(output / self.record, self.others):
            raise not_ours(output, name, self.name)
        for key, read in self.reads().items():
            there, target = real(read), real(output)
            allowed = below and there == real(".") != target
            if not allowed and (target.is_relative_to(there) or there.is_relative_to(target)):
                raise RunError(
                    f"output {output} is {key}, or one lies in the other; set another `output:`"
                )


def real(path: Path | str) -> Path:
    """Return a path with its links resolved."""
    return Path(os.path.realpath(path))


def made_by(name: Path | str) -> Path:
    """Return the output that a stage makes, for a path to it or to ONNX files in it."""
    place = real(name)
    place = place.parent if place.suffix == ".onnx" else place
    return place.parent if place.name == "onnx" else place


def names_in(output: Path) -> list[str]:
    """Return the names in an output folder, in order; none if it does not exist.

    Raises:
        RunError: it is no folder.
    """
    if output.exists() and not output.is_dir():
        raise RunError(f"output {output} is not a folder; set another `output:`")
    return sorted(path.name for path in output.iterdir()) if output.is_dir() else []


def not_ours(output: Path, name: str, writer: str) -> RunError:
    """Return the error of an output that holds what no such stage has written."""
    return RunError(
        f"output {output} holds {name}, which no {writer} has written; set another `output:`, a "
        "new or an empty folder"
    )


def version_of(name: str) -> str | None:
    """Return a hash of a model's files, or the commit that a hub's name ends with; else None."""
    return digest(name) or (name if _PINNED.fullmatch(name) else None)


def digest(name: str) -> str | None:
    """Return a hash of a model's files but its card; None for a hub's name."""
    folder = Path(name)
    if (file := onnx_file(folder)) is not None:
        folder = model_folder(file)
    if not folder.is_dir():
        return None
    if (sealed := sealed_state(folder)) is not None:
        return hash_file(sealed[0] / "manifest.json")[0]
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / CARD)
    return canonical_sha256({str(p.relative_to(folder)): hash_file(p)[0] for p in files})

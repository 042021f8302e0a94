"""Load an objective from a user's own file or module: `objective: {name: my_loss:MyLoss}`.

Only the name in a config, or on the command line, makes a process load it. A run's folder, or a
model's, never does: what a report, an export or a card must know of the objective lies in the run's
config (`Recorded`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, PrivateAttr

from pretrain import RunError
from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Shape, Term
from pretrain.objectives.objective import Objective


def own_class(name: str) -> type[Objective]:
    """Return the class that `name` says: FILE:CLASS or MODULE:CLASS, of the working directory.

    Raises:
        ValueError: there is none, it cannot be imported, or it is no whole objective.
    """
    where, _, attribute = name.rpartition(":")
    file = Path(where if where.endswith(".py") else f"{where}.py")
    try:
        if not (where and attribute):
            raise ImportError("it has two parts")
        if not file.is_file():
            module = import_module(where)
            file = Path(str(module.__file__))
        elif (file.parent / "config.json").exists():
            raise ValueError(f"objective.name {name}: nothing is loaded from a model's folder")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if where not in sys.modules:
            where = f"_objective_{digest}"  # a file that has changed is another module
            if where not in sys.modules:
                spec = spec_from_file_location(where, file)
                assert spec is not None and spec.loader is not None
                module = module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[where] = module
    except ImportError as error:
        raise ValueError(
            f"objective.name {name}: there is no file {file}, and no module ({error}); give "
            "FILE:CLASS, by its path from here"
        ) from error
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("objective.name"):
            raise
        raise ValueError(f"objective.name {name}: {file} fails: {error!r}") from error
    found = getattr(sys.modules[where], attribute, None)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(f"objective.name {name}: {file} has no subclass {attribute} of Objective")
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise ValueError(f"objective.name {name}: {attribute} does not define {missing}")
    found.file_sha256 = digest
    return found


def kept(objective: Objective) -> dict[str, Any]:
    """Return what a run's config keeps of an objective from a user's file; nothing of another."""
    if isinstance(objective, Recorded):
        return objective.known
    if not objective.file_sha256:
        return {}
    return {
        "sha256": objective.file_sha256,
        "tasks": list(objective.tasks),
        "needs_teacher": objective.needs_teacher,
        "parts": [list(part) for part in objective.parts],
        "sentence": objective.sentence,
    }


class Recorded(Objective):
    """Stand for an objective from a user's file where nothing is computed."""

    model_config = ConfigDict(extra="allow")
    _known: dict[str, Any] = PrivateAttr()

    @classmethod
    def of(cls, values: Mapping[str, Any], known: Mapping[str, Any]) -> Recorded:
        """Return what stands for the section `objective` of a run's config."""
        found = cls.model_construct(**values)
        found._known = dict(known)
        return found

    @property
    def known(self) -> dict[str, Any]:
        """Return what the run kept."""
        return self._known

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the tasks that it can serve."""
        return tuple(self.known["tasks"])

    @property
    def needs_teacher(self) -> bool:  # type: ignore[override]
        """Return whether a run names a teacher."""
        return bool(self.known["needs_teacher"])

    @property
    def sentence(self) -> str:
        """Return the terms, for the model card."""
        return str(self.known["sentence"])

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return what its terms read."""
        return tuple(Part(*part) for part in self.known["parts"])

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Refuse to compute."""
        raise RunError(f"objective {self.name}: nothing is computed of a recorded objective")

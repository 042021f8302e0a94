"""Load an objective from a user's own file or module: `objective: {name: my_loss:MyLoss}`.

Only the name in a config, or on the command line, makes a process load it. A run's folder, or a
model's, never does: what a report, an export or a card must know of the objective lies in the run's
config (`Recorded`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from pydantic import ConfigDict, PrivateAttr, ValidationError

from data_prep.disk import hash_file
from data_prep.keys import Keys
from pretrain import RunError
from pretrain.contracts.needs import Part, Read
from pretrain.contracts.terms import Shape, SignalTerm, Term, VocabularyTerm
from pretrain.objectives.objective import Objective


def own_class(name: str) -> type[Objective]:
    """Return the class that `name` says: FILE:CLASS by its path from here, or MODULE:CLASS.

    A module must be installed: one of the working directory is a file.

    Raises:
        ValueError: there is none, it cannot be imported, or it is no whole objective.
    """
    where, _, attribute = name.rpartition(":")
    file = Path(where if where.endswith(".py") else f"{where}.py")
    begin = f"objective.name {name}"
    if file.is_file():
        digest = hash_file(file)[0]
        module = _loaded(file, digest, begin)
    else:
        here = Path.cwd()
        installed = [path for path in sys.path if Path(path).resolve() != here]
        if not attribute or not PathFinder.find_spec(where.partition(".")[0], installed):
            raise ValueError(
                f"{begin}: there is no file {file} and no such module: give FILE:CLASS"
            )
        with one_line(begin, ValueError):
            module = import_module(where)
            digest = hash_file(Path(str(module.__file__)))[0]
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(f"{begin}: {where} has no subclass {attribute} of Objective")
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise ValueError(f"{begin}: {attribute} does not define {missing}")
    found.file_sha256 = digest
    return found


def _loaded(file: Path, digest: str, begin: str) -> ModuleType:
    """Return the module of a file, executed once for each content; ValueError if that fails."""
    here, file = Path.cwd(), file.resolve()
    folders = [*file.parents]
    if here in folders:
        folders = folders[: folders.index(here) + 1]
    if models := [folder for folder in folders if (folder / "config.json").exists()]:
        raise ValueError(
            f"{begin}: nothing is loaded from a model's folder, and {models[0]} has a config.json"
        )
    where = f"_objective_{digest}"
    if where not in sys.modules:
        spec = spec_from_file_location(where, file)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        with one_line(begin, ValueError):
            spec.loader.exec_module(module)
        sys.modules[where] = module
    return sys.modules[where]


@contextmanager
def one_line(begin: str, kind: type[Exception] = RunError) -> Iterator[None]:
    """Turn any error of a user's code into one line, an error of this kind."""
    try:
        yield
    except (ValidationError, RunError):
        raise
    except SyntaxError as error:
        raise kind(f"{begin}: line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        if "out of memory" in str(error):  # which `micro_batch_size: auto` answers
            raise
        raise kind(f"{begin}: its code fails: {error!r} (--debug shows where)") from error


def validated(kind: type[Objective], values: Mapping[str, Any]) -> Objective:
    """Return the objective of a config's section, whose parts are as its terms will need them."""
    with one_line(begin := kind.__name__, ValueError):
        found = kind.model_validate(values)
        parts: Any = found.parts
    if not isinstance(parts, tuple) or not all(isinstance(part, Part) for part in parts):
        raise ValueError(f"{begin}: `parts` is no tuple of Part")
    if odd := {read for part in parts for read in part.reads} - {*get_args(Read)}:
        known = ", ".join(get_args(Read))
        raise ValueError(f"{begin}: a part reads {odd.pop()!r}; there are {known}")
    return found


def checked(objective: Objective, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
    """Return the terms of an objective, which must be as its parts say.

    Of a user's file, an error within a term, and a total that is no number, are one line, too.

    Raises:
        RunError: they are not.
    """
    begin = f"objective {objective.name}"
    with one_line(begin) if objective.file_sha256 else nullcontext():
        if teacher is not None:
            objective.check(student, teacher)
        terms = objective.terms(student, teacher)
    if not objective.file_sha256:
        return terms
    if not isinstance(terms, tuple) or not all(isinstance(term, Term) for term in terms):
        raise RunError(f"{begin}: `terms` returns no tuple of terms")
    parts = objective.parts
    said = [(part.over, part.teacher, "logits" in part.reads) for part in parts]
    made = [(t.over, t.needs_teacher, isinstance(t, VocabularyTerm)) for t in terms]
    if said != made:
        raise RunError(
            f"{begin}: its parts say (over, teacher, reads logits) {said}, and its terms {made}: "
            "both need the same order"
        )
    for part, term in zip(parts, terms, strict=True):
        if isinstance(term, SignalTerm) and term.student and "layers" not in part.reads:
            raise RunError(
                f"{begin}: the term {term.name} compares layers: its part reads `layers`"
            )
    return tuple(
        term._replace(total=_number(f"{begin}, term {term.name}", term.total))
        if isinstance(term, SignalTerm)
        else term
        for term in terms
    )


def _number(begin: str, total: Callable[..., Any]) -> Callable[..., Any]:
    """Return a term's total that refuses whatever is no sum with a gradient."""
    import torch

    def of_term(*arguments: Any) -> Any:
        with one_line(begin):
            found = total(*arguments)
        if not isinstance(found, torch.Tensor) or found.dim():
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise RunError(f"{begin}: gives {shape}, and must give one number, a tensor []")
        if torch.is_grad_enabled() and not found.requires_grad:
            raise RunError(f"{begin}: has no gradient; of no document give hidden.sum() * 0")
        return found

    return of_term


class Kept(Keys):
    """Hold what a run's config keeps of an objective from a user's file."""

    sha256: str
    tasks: tuple[str, ...]
    needs_teacher: bool
    sentence: str
    parts: tuple[Part, ...]


def kept(objective: Objective) -> Kept | None:
    """Return what a run keeps of an objective from a user's file; None of another."""
    if isinstance(objective, Recorded):
        return objective._kept
    if not objective.file_sha256:
        return None
    return Kept(
        sha256=objective.file_sha256,
        tasks=objective.tasks,
        needs_teacher=objective.needs_teacher,
        sentence=objective.sentence,
        parts=objective.parts,
    )


class Recorded(Objective):
    """Stand for an objective from a user's file where nothing is computed."""

    model_config = ConfigDict(extra="allow")
    _kept: Kept = PrivateAttr()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Recorded | None:
        """Return what stands for the objective of a run's config; None for a shipped one.

        Raises:
            ValidationError: the config does not say what the objective was.
        """
        values = config.get("objective", {})
        if not isinstance(values, dict) or ":" not in str(values.get("name", "")):
            return None
        found = cls.model_construct(**values)
        found._kept = Kept.model_validate(config.get("own"))
        return found

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the tasks that it can serve."""
        return self._kept.tasks

    @property
    def needs_teacher(self) -> bool:  # type: ignore[override]
        """Return whether a run names a teacher."""
        return self._kept.needs_teacher

    @property
    def sentence(self) -> str:
        """Return the terms, for the model card."""
        return self._kept.sentence

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return what its terms read."""
        return self._kept.parts

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Refuse to compute."""
        raise RunError(f"objective {self.name}: its code is not recorded, only what it was")

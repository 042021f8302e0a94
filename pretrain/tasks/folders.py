"""Find the tasks that a config may name: each is a class in the `task.py` of a folder here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, TypeVar, Union

from pydantic import Field

import pretrain.tasks
from data_prep.keys import Keys
from pretrain.tasks.task import Task

_Kind = TypeVar("_Kind", bound=Keys)


def named(package: ModuleType, kind: type[_Kind], file: str = "") -> Iterator[type[_Kind]]:
    """Yield the subclasses with a name of their own that the files of a package define.

    Args:
        package: its folder is looked through.
        kind: of the classes.
        file: where they are, in each folder; empty: in files of the package itself.
    """
    for found in iter_modules(package.__path__, f"{package.__name__}."):
        if found.ispkg == bool(file):
            module = import_module(f"{found.name}.{file}".rstrip("."))
            for one in vars(module).values():
                own = isinstance(one, type) and one.__module__ == module.__name__
                if own and issubclass(one, kind) and not one.model_fields["name"].is_required():
                    yield one


TASKS: dict[str, type[Task]] = {
    str(task.model_fields["name"].default): task
    for task in named(pretrain.tasks, Task, "task")  # type: ignore[type-abstract]
}

if TYPE_CHECKING:
    AnyTask = Task
else:
    AnyTask = Annotated[Union[tuple(TASKS.values())], Field(discriminator="name")]  # noqa: UP007

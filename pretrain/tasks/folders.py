"""List the tasks that a config may name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from pretrain.tasks.task import Task

# A new task is a class in the TASKS of a folder's `task.py`, and the folder a name here.
FOLDERS = ("mlm", "embedding", "labelled")
TASKS: dict[str, type[Task]] = {
    str(task.model_fields["name"].default): task
    for name in FOLDERS
    for task in import_module(f"pretrain.tasks.{name}.task").TASKS
}

if TYPE_CHECKING:
    AnyTask = Task
else:
    AnyTask = Annotated[Union[tuple(TASKS.values())], Field(discriminator="name")]  # noqa: UP007

"""List the tasks that a config may name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from pretrain.tasks.task import Task

# A new task is a folder with `task.py`, whose TASK is its class, and a name here.
FOLDERS = (
    "mlm",
    "embedding",
    "classification",
    "token_classification",
    "question_answering",
)
TASKS: dict[str, type[Task]] = {
    name: import_module(f"pretrain.tasks.{name}.task").TASK for name in FOLDERS
}

if TYPE_CHECKING:
    AnyTask = Task
else:
    AnyTask = Annotated[Union[tuple(TASKS.values())], Field(discriminator="name")]  # noqa: UP007

"""Hold the state that changes while a run trains. A checkpoint keeps all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pretrain.data.rows import Skip


@dataclass
class TrainState:
    """Hold the position and the counts of a run.

    The learning rate, the rows, their masks and dropout are functions of the step and need no
    state. Weights and optimizer state are tensors, which a checkpoint keeps in other files.
    """

    step: int = 0  # optimizer steps made
    tokens: int = 0  # trained on, without padding
    skipped_steps: int = 0  # left out because they were not finite
    skip_rows: tuple[Skip, ...] = ()
    evaluation: dict[str, float] = field(default_factory=dict)  # the newest validation figures
    evaluation_step: int = 0
    scaler: dict[str, Any] | None = None  # state of fp16's loss scale

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> TrainState:
        """Build from the values of a checkpoint's state.json."""
        known = {key: values[key] for key in FIELDS}
        return cls(**{**known, "skip_rows": tuple(Skip(*skip) for skip in values["skip_rows"])})

    def write(self) -> dict[str, Any]:
        """Return the values for state.json, which `from_checkpoint` takes."""
        # JSON has no dataclasses: each skip is a list of three numbers.
        skips = [[skip.first, skip.last, skip.step] for skip in self.skip_rows]
        return {**asdict(self), "skip_rows": skips}


FIELDS = tuple(field.name for field in fields(TrainState))

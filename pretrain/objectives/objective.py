"""Define what an objective, one paper's losses, offers to a run. A config loads without torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from data_prep.keys import Keys
from pretrain.contracts.terms import Shape, Term

if TYPE_CHECKING:
    from torch import nn


class Part(NamedTuple):
    """Describe a term before torch is imported, for checks of a config and for the model card."""

    key: str  # of the config, where a term has one
    weight: float
    text: str
    over: str = "tokens"  # see `VocabularyTerm`
    logits: bool = False  # does it read vocabulary logits?
    teacher: bool = True  # does it compare the student with a teacher?


class Objective(Keys):
    """Configure one paper's losses: a subclass in a file of its own, whose fields are YAML keys.

    A property may be a constant of the subclass: `published: ClassVar[str] = "..."`.
    """

    name: str
    tasks: ClassVar[tuple[str, ...]] = ("mlm",)  # that it can serve, the default one first
    # Also where no term compares: the student may be cut from it.
    sums_layers: ClassVar[bool] = False  # do its terms grow with the number of layers?
    needs_teacher: ClassVar[bool] = True
    # Keys of a run that have another default with this objective, by section.
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return what a run and the card must know of each term that is computed."""

    @property
    def needs_logits(self) -> bool:
        """Return whether a term reads vocabulary logits; otherwise no LM head is trained."""
        return any(part.logits for part in self.parts)

    @property
    def compares(self) -> bool:
        """Return whether a term compares student and teacher."""
        return any(part.teacher for part in self.parts)

    @property
    def published(self) -> str:
        """Return the paper's name if this is its objective; empty for a variant."""
        return ""

    @property
    def sentence(self) -> str:
        """Return the terms and their weights, for the model card."""
        return " + ".join(f"{part.weight:g} x {part.text}" for part in self.parts)

    def adapters(self, student: Shape, teacher: Shape | None) -> nn.ModuleDict:
        """Return the modules that are trained with a student for its terms.

        They are not exported, unless the task does (`Task.export`).
        The run initialises them. A checkpoint keeps them next to the student, and a run that
        continues loads them.
        """
        from torch import nn

        return nn.ModuleDict()

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse sizes that do not fit the objective; imports no torch.

        Raises:
            RunError: names the keys to change.
        """

    @abstractmethod
    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms for models of these sizes.

        Raises:
            RunError: the sizes do not fit the objective; names the keys to change.
        """

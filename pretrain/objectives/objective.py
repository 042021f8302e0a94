"""Define what an objective, one paper's losses, offers to a run. A config loads without torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from data_prep.keys import Keys
from pretrain.contracts.terms import Shape, Term

if TYPE_CHECKING:
    from torch import nn


class Objective(Keys):
    """Configure one paper's losses: a subclass in a file of its own, whose fields are YAML keys.

    A property may be a constant of the subclass: `published: ClassVar[str] = "..."`.
    """

    # Also where no term compares: the student may be cut from it.
    needs_teacher: ClassVar[bool] = True

    # Terms compare a vector of each whole document: the loader finds these, the student may be that
    # of `model:`, and sentence-transformers loads the export.
    compares_documents: ClassVar[bool] = False

    corrupts: ClassVar[bool] = True  # by default masks are drawn; `masking.probability` decides

    # What a run must know before models are loaded, and the model card without any.

    @property
    def needs_logits(self) -> bool:
        """Return whether a term reads vocabulary logits; otherwise no LM head is trained."""
        return True

    @property
    def on_masked(self) -> str:
        """Return the key of a term that needs masked tokens; empty if none does."""
        return ""

    @property
    def compares(self) -> bool:
        """Return whether a term compares student and teacher."""
        return self.needs_teacher

    @property
    def published(self) -> str:
        """Return the paper's name if this is its objective; empty for a variant."""
        return ""

    @property
    @abstractmethod
    def sentence(self) -> str:
        """Return the terms and their weights, for the model card."""

    def adapters(self, student: Shape, teacher: Shape | None) -> nn.ModuleDict:
        """Return the modules that are trained with a student for its terms, and not exported.

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

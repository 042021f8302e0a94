"""What a run trains for: one paper a file, each with its config class and its terms.

An objective returns terms; the loop and the head know nothing else of it. A term names what it is
averaged over and gives one value a position, from the signals it asked for.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.terms import Signals, Term

Objective = Annotated[DistilBert | MaskedLanguageModel, Field(discriminator="name")]

__all__ = ["DistilBert", "MaskedLanguageModel", "Objective", "Signals", "Term"]

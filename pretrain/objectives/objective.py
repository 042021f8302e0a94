"""Define what an objective, one paper's losses, offers to a run. A config loads without torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from data_prep.keys import Keys
from pretrain import RunError
from pretrain.contracts.needs import Needs, Part
from pretrain.contracts.terms import Encoded, Kind, Shape, Signal, SignalTerm, Term, constant

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


def layer_pairs(
    layers: Sequence[int], student: int, teacher: Shape, *, but: str = ""
) -> tuple[tuple[int, int], ...]:
    """Return (student layer, teacher layer) pairs.

    Args:
        layers: of the teacher, from `objective.layers`.
        student: how many layers the student has.
        teacher: its sizes.
        but: " but the last" where the student's last layer does not learn from one.

    Raises:
        RunError: there are more or fewer than that, or the teacher has no such layer.
    """
    if len(layers) != student - bool(but):
        raise RunError(
            f"objective.layers has {len(layers)} layers, and the student has {student}; list a "
            f"layer of the teacher for each{but}"
        )
    if beyond := [layer for layer in layers if layer >= teacher.num_layers]:
        raise RunError(
            f"objective.layers {beyond[0]}: the teacher has layers 0 to {teacher.num_layers - 1}"
        )
    return tuple(enumerate(layers))


def even_layers(student: int, teacher: int, who: str, otherwise: str) -> tuple[int, ...]:
    """Return evenly spaced layers of a teacher that end with its last: 2, 5, 8, 11 for 4 of 12.

    Layer m of the student, from 1, learns from layer m * teacher / student.

    Args:
        student, teacher: how many layers they have.
        who: whose key says so, for the message.
        otherwise: what the user may do if they are not evenly spaced.

    Raises:
        RunError: they are not.
    """
    if teacher % student:
        raise RunError(
            f"{who}: the teacher's {teacher} layers are no multiple of the student's {student}; "
            f"{otherwise}"
        )
    step = teacher // student
    return tuple(range(step - 1, teacher, step))


def check_width(name: str, student: Shape, teacher: Shape, otherwise: str = "") -> None:
    """Refuse a student whose hidden states cannot be compared with the teacher's.

    Args:
        name: of the objective.
        student, teacher: their sizes.
        otherwise: what else the user may do, after a comma.
    """
    if student.hidden_size != teacher.hidden_size:
        raise RunError(
            f"objective {name}: compares hidden states, and the student's have "
            f"{student.hidden_size} numbers, the teacher's {teacher.hidden_size}; set "
            f"student.hidden_size: {teacher.hidden_size}{otherwise}"
        )


def layers_term(
    name: str,
    weight: float,
    over: str,
    pairs: Sequence[tuple[int, int]],
    compare: Callable[..., Tensor],
    kinds: Sequence[Kind] = ("hidden",),
) -> SignalTerm:
    """Return a term that compares layers of both models, and is the sum over pairs of them.

    Args:
        name, weight, over: of the term.
        pairs: a layer of the student and one of the teacher; of hidden states -1: the embeddings.
        compare: gets the batch, the adapters, the student's tensor of each kind, then the
            teacher's, each [B, L, D]; returns a total.
        kinds: what is compared.
    """

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        import torch

        assert teacher is not None
        sums = []
        for ours, theirs in pairs:  # one at a time, so that only its scores are in memory
            of_both = [student.signals[Signal(kind, ours)] for kind in kinds]
            of_both += [teacher.signals[Signal(kind, theirs)] for kind in kinds]
            sums.append(compare(batch, adapters, *of_both))
        return torch.stack(sums).sum()

    needs = (frozenset(Signal(kind, pair[i]) for kind in kinds for pair in pairs) for i in (0, 1))
    return SignalTerm(name, constant(weight), over, total, True, *needs)


_RATE = {"learning_rate": 1e-4, "warmup_ratio": 0.1, "max_grad_norm": 1.0, "weight_decay": 0.01}
# Of records in docs/results: of tasks (tasks-english), and of encoders (tasks-pretrained).
OF_TASKS: Mapping[str, Mapping[str, Any]] = {
    "masking": {"probability": 0.0},
    "optimizer": _RATE,
    "train": {"global_batch_size": 32},
}
OF_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "masking": {"probability": 0.0},
    "student": {"dropout": 0.0, "attention_dropout": 0.0},
    "optimizer": {"max_grad_norm": 1.0},
    "train": {"global_batch_size": 4},
}


class Objective(Keys):
    """Configure one paper's losses: a subclass in a file of its own, whose fields are YAML keys.

    A property may be a constant of the subclass: `published: ClassVar[str] = "..."`.
    """

    name: str
    tasks: ClassVar[tuple[str, ...]] = ("mlm",)  # that it can serve, the default one first
    # True also if no term uses the teacher, because student layers may be copied from it.
    needs_teacher: ClassVar[bool] = True
    file_sha256: ClassVar[str] = ""  # of a user's own file, see own.py
    # Keys of a run that have another default with this objective, by section.
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return what a run and the card must know of each term that is computed."""

    @model_validator(mode="after")
    def _some_term(self) -> Objective:
        if not self.parts:
            off = ", ".join(name for name, value in self if value == 0)
            raise ValueError(f"no term is left: give one of {off} a weight above 0")
        return self

    @property
    def needs(self) -> Needs:
        """Return what a run must have for the terms."""
        return Needs.of(self.parts)

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

    def begin(self, adapters: nn.ModuleDict) -> None:
        """Set the initial weights of adapters that should not start random."""

    def running(self, step: int, seed: int, num_layers: int) -> tuple[bool, ...] | None:
        """Return which of the student's layers run in a step; None: all, as in most papers.

        Where one does not, the layers of the teacher that it replaces do.
        """
        return None

    def heaviest(self, num_layers: int) -> tuple[bool, ...] | None:
        """Return the value of `running` that takes the most memory.

        The first layer is trained, and all that is computed after it is kept for its gradient.
        """
        return (True, *[False] * (num_layers - 1)) if self.needs.modules else None

    def relation_heads_of(self, num_heads: int) -> int:
        """Return how many scores of a pair of tokens a layer has, where terms compare them."""
        return num_heads

    def notes(self, num_steps: int) -> list[str]:
        """Return what a user should know of a run of so many steps."""
        return []

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

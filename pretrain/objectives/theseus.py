"""Replace a model's modules by smaller ones: BERT-of-Theseus (Xu et al., arXiv 2002.02925).

    y_(i+1) = r_i s_i(y_i) + (1 - r_i) t_i(y_i),    r_i ~ Bernoulli(p(d))
    L = L_labels

s_i is layer i of the student (the successor), and t_i the module of the teacher (the predecessor)
that it replaces: its layers i N / M to (i + 1) N / M - 1, of N and M layers. Each r_i is drawn once
for a step d. p grows in a line from `rate` to 1 in `steps` steps, or is `rate` for so many steps
(`schedule: constant`). Then the student is fine-tuned without the teacher, in the same run.

Embeddings and head are the teacher's. They are frozen, as the teacher is, and so take no part in
clipping, where the authors' code counts their gradients. The teacher runs without dropout; theirs
runs with it. The paper's student starts from the teacher's first layers: `student.init: [0, ...]`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.contracts.terms import Shape, Term
from pretrain.data.hashing import root
from pretrain.objectives.finetune import TASKS, labels_part, labels_term
from pretrain.objectives.objective import OF_TASKS, Objective, even_layers

_REPLACING = 4  # this use of the seed; order, masking and dropout have other numbers


class Theseus(Objective):
    """Configure how likely the student's layers stand in for the teacher's."""

    tasks: ClassVar[Any] = TASKS
    defaults: ClassVar[Any] = OF_TASKS
    parts: ClassVar[Any] = (labels_part("", 1.0)._replace(reads=("head", "labels", "modules")),)

    name: Literal["theseus"] = "theseus"
    schedule: Literal["linear", "constant"] = "linear"
    """The probability grows in a line, or stays."""
    rate: float = Field(0.3, ge=0, le=1)
    """Probability of each of the student's layers at the first step."""
    steps: int = Field(ge=1)
    """Until every layer is the student's."""

    def probability(self, step: int) -> float:
        """Return p, the probability of each of the student's layers in a step."""
        if step >= self.steps:
            return 1.0
        grown = step / self.steps if self.schedule == "linear" else 0.0
        return self.rate + (1 - self.rate) * grown

    def running(self, step: int, seed: int, num_layers: int) -> tuple[bool, ...]:
        """Return r, which of the student's layers run in a step."""
        threshold = self.probability(step) * 2**32
        return tuple(root(seed, _REPLACING, step, i) < threshold for i in range(num_layers))

    def notes(self, num_steps: int) -> list[str]:
        """Warn of a run that ends before the student trains without the teacher."""
        if num_steps > self.steps:
            return []
        return [
            f"warning: objective.steps {self.steps:,} of {num_steps:,}: the student is never "
            "trained alone; lower it, or set train.max_steps to more"
        ]

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse layers that do not stand for as many of the teacher each, and other widths."""
        ours, theirs = student.num_layers, teacher.num_layers
        if ours > theirs:
            raise RunError(
                f"objective theseus: the student's {ours} layers replace the teacher's, which has "
                f"{theirs}; set student.num_layers to a divisor of these"
            )
        even_layers(ours, theirs, "objective theseus", "set student.num_layers to a divisor")
        if student[1:3] != teacher[1:3]:
            raise RunError(
                "objective theseus: the student's layers stand among the teacher's, and have "
                f"{student.hidden_size} numbers in {student.num_heads} heads, the teacher's "
                f"{teacher.hidden_size} in {teacher.num_heads}; leave out student.hidden_size and "
                "student.num_attention_heads"
            )

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the loss of the labels."""
        assert teacher is not None
        return (labels_term(1.0),)

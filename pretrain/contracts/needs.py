"""Say what an objective reads, before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

# What a term reads: vocabulary logits; logits of a task's head; labels of the data; a teacher's
# layers, which then runs in each step; its modules, which stand in for the student's.
Read = Literal["logits", "head", "labels", "layers", "modules"]


class Part(NamedTuple):
    """Describe a term for checks of a config, the plan of a run and the model card."""

    key: str  # its config key, where it has one
    weight: float
    text: str
    over: str = "tokens"  # what it is a mean over, one of the task's counts
    reads: Sequence[Read] = ()
    teacher: bool = True  # does it compare the student with a teacher?
    sums: bool = False  # is it a sum over layers, which grows with their number?


class Needs(NamedTuple):
    """Hold what the parts of an objective read together."""

    logits: bool  # an LM head is trained
    head: bool  # the head of a task is trained
    labels: bool
    soft: bool  # a teacher's logits of the task, or probabilities of the data
    layers: bool
    modules: bool  # embeddings and head are the teacher's, and frozen
    compares: bool
    sums: bool

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Needs:
        """Return what these parts need."""
        reads = {read for part in parts for read in part.reads}
        return cls(
            logits="logits" in reads,
            head="head" in reads,
            labels="labels" in reads,
            soft=any(part.teacher and "head" in part.reads for part in parts),
            layers=bool({"layers", "modules"} & reads),
            modules="modules" in reads,
            compares=any(part.teacher for part in parts),
            sums=any(part.sums for part in parts),
        )

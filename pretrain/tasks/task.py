"""Define what a task, the kind of example of a run, offers. A config loads without torch.

    rows of the order -> Examples.rows (in a loader's worker) -> Examples.batch -> Batch -> terms

Shapes: R rows, L row length, T terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from data_prep.keys import Keys
from pretrain.contracts.terms import Shape, TeacherLabels, Term

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from data_prep.shards import Manifest, ShardSet
    from pretrain.config import RunConfig
    from pretrain.contracts.batch import Batch, Rows
    from pretrain.model.families import MaskedLM
    from pretrain.model.teacher import Teacher
    from pretrain.objectives.objective import Objective


class Start(NamedTuple):
    """Hold what a task knows of a run when it looks for its files."""

    config: RunConfig
    manifest: Manifest  # describes the shards
    teacher: Teacher | None
    notes: list[str]  # receives what screen and card should say
    whole: bool  # read files of the task completely, to compare them with their checksums?
    num_steps: int


class Use(NamedTuple):
    """Hold what a model card says about using a model of this task."""

    library: str
    pipeline: str  # the hub's name of the task
    code: str
    note: str = ""


class Task(Keys):
    """Say what an example is: a subclass in a folder of this one, whose fields are YAML keys.

    `counts` are the names of what terms may be means over; a step sums them over all ranks.
    `objectives` are those that only this task has.
    """

    # Is the teacher a sentence encoder, with modules behind its encoder and perhaps other tokens?
    sentence_encoder: ClassVar[bool] = False
    # Does it read and write the head of a task, beside the encoder?
    has_head: ClassVar[bool] = False

    name: str
    counts: ClassVar[tuple[str, ...]] = ("tokens", "sequences", "pairs")
    objectives: ClassVar[tuple[type[Objective], ...]] = ()

    @classmethod
    def unread(cls, objective: type[Objective] | Objective) -> dict[str, str]:
        """Return the keys of a run that an objective does not read, each with what it lacks."""
        keys = {"vectors": "compares no sentence vectors"}
        if objective.needs_teacher:
            return {**keys, "model": "takes the teacher's widths, as mlm does not"}
        no_teacher = ("teacher", "teacher_vocabulary", "student")
        return {**dict.fromkeys(no_teacher, "has no teacher"), **keys}

    def check(self, config: RunConfig) -> None:
        """Refuse a config whose sections do not fit the task and its objective; no torch.

        Raises:
            ValueError: names the key and the fix.
        """
        name = config.objective.name
        for key, lack in self.unread(config.objective).items():
            if getattr(config, key) != type(config).model_fields[key].default:
                raise ValueError(f"objective {name} {lack}: remove {key}")
        if config.objective.needs_teacher and config.teacher is None:
            raise ValueError(f"objective {name} needs `teacher:`, a folder or a hub name")
        if not config.objective.needs_teacher and config.model is None:
            raise ValueError(
                f"objective {name} needs `model:`, the sizes of a BERT or {{init: FOLDER}}"
            )

    @abstractmethod
    def examples(self, start: Start) -> Examples:
        """Return what turns the rows of a run into examples.

        Raises:
            RunError, CorpusError: a file of the task is missing, or of another corpus.
        """

    def attach(self, student: MaskedLM, manifest: Manifest) -> nn.ModuleDict:
        """Return the modules behind the encoder that are trained and exported with the student.

        A term finds them beside the objective's adapters, by these names. The run initialises them:
        normal 0.02, biases 0, and 1 for a vector whose name ends in `norm.weight`.
        """
        from torch import nn

        return nn.ModuleDict()

    def begin(self, config: RunConfig, student: MaskedLM, modules: nn.ModuleDict) -> list[str]:
        """Give modules of `attach` other first weights; return what screen and card should say."""
        return []

    @abstractmethod
    def measure(
        self, examples: Examples, validation: ShardSet, terms: Sequence[Term], *, teacher: bool
    ) -> Measure:
        """Return what is measured on validation rows.

        Args:
            examples: of the run.
            validation: the split.
            terms: of the run's objective.
            teacher: whether the run has one that computes.
        """

    def trained(self, objective: Objective) -> str:
        """Return how a model without a teacher was trained, for the card."""
        return f"Trained with {objective.sentence}"

    def use(self, objective: Objective) -> Use:
        """Return what the card says about using the model."""
        code = 'from transformers import pipeline\n\nvectors = pipeline("feature-extraction", '
        return Use(
            "transformers",
            "feature-extraction",
            f'{code}model="PATH_OR_NAME")',
            "It has no language-model head: fine-tune it on a task.",
        )

    def finished(
        self, student: MaskedLM, state: Mapping[str, Any], modules: Mapping[str, Tensor]
    ) -> PreTrainedModel | None:
        """Return the model to export, where it is of another class than the student's; else None.

        Args:
            student: in fp32, from the checkpoint.
            state: of the checkpoint.
            modules: the trained tensors of the objective's adapters and of `attach`.
        """
        return None

    def export(
        self,
        folder: Path,
        width: int,
        state: Mapping[str, Any],
        modules: Mapping[str, Tensor],
    ) -> None:
        """Write what belongs to a model of this task beside its encoder; by default nothing.

        Args:
            folder: of the export, in which the encoder lies.
            width: of the encoder.
            state: of the checkpoint.
            modules: the trained tensors of the objective's adapters and of `attach`.
        """
        return

    def drawn(self, batch: Batch, width: int, *, pad_id: int) -> tuple[Batch, TeacherLabels | None]:
        """Return a batch of drawn rows as one of this task, for `distil bench`.

        Args:
            batch: of masked rows, on the host.
            width: of the teacher's tokens.
            pad_id: id of padding.

        Returns:
            the batch, and what gives labels of the teacher's output.
        """
        return batch, None


class Examples(ABC):
    """Turn the rows of a split into examples; a loader's worker gets a copy."""

    missing: bool = False  # files of the task are not written, or not all of them; see `write`
    runs_teacher: bool = True  # in each step, if a term compares with it
    teacher_labels: TeacherLabels | None = None

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.special = shards.manifest.tokenizer.special_ids

    @abstractmethod
    def rows(self, ids: Any, epochs: Any, numbers: Any, step: int = 0, skipped: Any = None) -> Rows:
        """Return rows as tensors of narrow types, from arrays; a pure function of its arguments.

        Args:
            ids: uncorrupted [R, L].
            epochs, numbers: of each row [R].
            step: optimizer step, from 0.
            skipped: which rows are left out [R]; their tokens must count nothing.
        """

    @abstractmethod
    def batch(self, rows: Rows) -> Batch:
        """Return a micro-batch of rows, on the host."""

    @abstractmethod
    def fullest(self, ids: Any, numbers: Any, token: int) -> Batch:
        """Return a micro-batch that takes the most memory, for the trial of its size.

        Args:
            ids: rows without padding [R, L].
            numbers: of these rows in the split [R].
            token: id of an ordinary token.
        """

    def shape(self, teacher: Shape | None) -> Shape | None:
        """Return the teacher's sizes as the objective should see them."""
        return teacher

    def identity(self) -> dict[str, str]:
        """Return digests of the task's files, which all ranks must have."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {}

    def changes(self, state: Mapping[str, Any]) -> list[str]:
        """Return what differs from the state of a checkpoint that is continued."""
        return []

    def to(self, device: torch.device) -> None:
        """Move the modules that `teacher_labels` needs."""
        return

    def write(self, device: torch.device, precision: str, say: Callable[[str], None]) -> None:
        """Write the files that are missing, or the rest of them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Measure:
    """Hold what is measured on validation rows: the terms to sum, and the figures they make."""

    examples: Examples  # reads the validation split
    terms: Sequence[Term]
    # (sums of the terms by name, counts, sums of `tally`, the optimizer step) -> figures, of which
    # the lowest `loss` is of the best checkpoint
    figures: Callable[[Mapping[str, float], Mapping[str, float], Any, int], dict[str, float]]
    counts: Sequence[str]
    spread: bool = False  # take rows evenly from the split, not the first ones
    places: NDArray[np.int64] | None = None  # rows that can be measured; None: all
    # `tallies` numbers that are counted on the host besides; summed over batches and ranks.
    tally: Callable[[Batch], Tensor] | None = None  # called after the terms of the batch
    tallies: int = 0
    # What screen and card should say about the figures before training.
    doubts: Callable[[Mapping[str, float]], list[str]] = lambda figures: []


def own_terms(
    examples: Examples, terms: Sequence[Term], counts: Sequence[str], *, spread: bool = False
) -> Measure:
    """Measure the means of an objective's own terms, and their weighted sum as loss."""

    def figures(
        totals: Mapping[str, float], counts: Mapping[str, float], tally: Any, step: int
    ) -> dict[str, float]:
        own = {term.name: totals[term.name] / max(counts[term.over], 1.0) for term in terms}
        loss = sum(term.weight(step) * own[term.name] for term in terms)
        return {**own, "loss": loss, "tokens": counts["tokens"]}

    return Measure(examples, terms, figures, counts, spread)

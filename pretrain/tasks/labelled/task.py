"""Define the tasks with a head: checks, the head, and its export. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.contracts.terms import Term
from pretrain.objectives.objective import Objective
from pretrain.tasks.task import Examples, Measure, Start, Task, Use, own_terms

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from data_prep.shards import Manifest, ShardSet
    from pretrain.config import RunConfig
    from pretrain.contracts.batch import Batch
    from pretrain.model.families import MaskedLM
    from pretrain.tasks.labelled.transfer import Transfer


class LabelledTask(Task):
    """Train the head of a task on rows that are examples.

    A subclass says which examples it takes, and how its models are used.
    """

    has_head: ClassVar[bool] = True
    counts: ClassVar[Any] = ("tokens", "sequences", "labelled", "pairs")
    kinds: ClassVar[tuple[str, ...]]  # kinds of examples, as `distil prepare` names them
    pipeline: ClassVar[str]  # the hub's name of the task

    logits: Path | None = None
    """File of the teacher's logits; the first start writes it."""

    @classmethod
    def unread(cls, objective: type[Objective] | Objective) -> dict[str, str]:
        """Return the keys that a run of the task does not read."""
        keys = {"vectors": "compares no sentence vectors"}
        if objective.needs_teacher:
            return keys
        no_teacher = ("teacher", "teacher_vocabulary", "student")
        return {**dict.fromkeys(no_teacher, "has no teacher"), **keys}

    def check(self, config: RunConfig) -> None:
        """Refuse masks, and a run without a student or with two."""
        name = config.objective.name
        if any(config.masking.ends):
            raise ValueError(f"task {self.name} masks nothing: remove masking")
        if not config.objective.needs_teacher:
            super().check(config)
            if self.logits is not None:
                raise ValueError(f"objective {name} reads no soft labels: remove task.logits")
            return
        if config.vectors is not None:
            raise ValueError(f"objective {name} compares no sentence vectors: remove vectors")
        if config.model is not None and config.student != type(config.student)():
            raise ValueError("the student is that of `model:`: remove one of the two sections")
        if config.teacher is None and config.model is None:
            raise ValueError(
                f"objective {name} needs `teacher:`, or, for shards with probabilities, `model:`"
            )
        if config.objective.needs.layers and config.teacher is None:
            raise ValueError(f"objective {name} reads a teacher's layers: name `teacher:`")
        if config.objective.needs.layers and self.logits is not None:
            raise ValueError(f"objective {name} runs its teacher in each step: remove task.logits")
        init = config.student.init
        elsewhere = config.model is not None or (isinstance(init, str) and init != "teacher")
        if config.objective.needs.modules and elsewhere:
            raise ValueError(
                f"objective {name} keeps its teacher's embeddings and head: remove model, and set "
                "student.init to teacher or a list of its layers"
            )
        if self.logits is not None and not config.objective.needs.soft:
            raise ValueError(f"objective {name} reads no soft labels here: remove task.logits")

    def examples(self, start: Start) -> Examples:
        """Return the rows of the training split, with the teacher's head if there is one."""
        from data_prep.shards import open_shards
        from pretrain.tasks.labelled.examples import (
            LabelledExamples,
            check_kind,
            check_labels,
            load_task_head,
        )
        from pretrain.tasks.task_heads import HEADS

        config, manifest = start.config, start.manifest
        check_kind(config.shards, manifest, self.name, self.kinds)
        shards, head = open_shards(config.shards), None
        teacher = start.teacher if config.objective.needs.compares else None
        if teacher is not None and config.objective.needs.soft:
            who = f"teacher {teacher.name}"
            head = load_task_head(who, teacher.name, HEADS[manifest.kind].output)
            check_labels(who, head.labels, manifest.labels)
        if self.logits is not None and head is None and not self.logits.is_file():
            raise RunError(f"{self.logits}: no such file; name the teacher that writes it")
        transfer = self.transfer(config.shards, manifest, config.train.seed)
        found = LabelledExamples(shards, teacher, head, self.logits, transfer)
        soft = head is not None or self.logits is not None or "probs" in found.columns
        if config.objective.needs.soft and not soft:
            raise RunError(
                f"{config.shards}: holds no probabilities, and there is no teacher: name one, or "
                "prepare the examples with task.probabilities"
            )
        if config.objective.needs.labels and not found.labelled:
            raise RunError(
                f"{config.shards}: no training example has a label; take objective kd, or prepare "
                "the examples with task.label"
            )
        return found

    def transfer(self, shards: Path, manifest: Manifest, seed: int) -> Transfer | None:
        """Return what changes the texts of training examples; None if nothing does."""
        return None

    def attach(self, student: MaskedLM, manifest: Manifest) -> nn.ModuleDict:
        """Return the head, with the weights that the model's folder has for it."""
        from torch import nn

        from pretrain.model.distillation import HEAD
        from pretrain.model.families import family_of
        from pretrain.model.task_head import TaskHead
        from pretrain.tasks.task_heads import HEADS

        output = HEADS[manifest.kind].output
        if output not in (known := family_of(student).outputs):
            raise RunError(
                f"student.architecture {student.config.model_type}: has a head for "
                f"{' and '.join(known)}, and task {self.name} needs {output}; take distilbert or "
                "same"
            )
        head = TaskHead(student.config, output, manifest.labels)
        return nn.ModuleDict({HEAD: head})

    def begin(self, config: RunConfig, student: MaskedLM, modules: nn.ModuleDict) -> list[str]:
        """Give the head the weights that the folder of its model has for it."""
        from pretrain.model.distillation import HEAD
        from pretrain.tasks.labelled.examples import first_weights, mean_score

        head: Any = modules[HEAD]
        new = first_weights(config, student, head)
        if new and head.output == "score":
            head.begin_at(mean_score(config.shards))
        if new and config.objective.needs.modules:
            raise RunError(
                f"objective {config.objective.name} keeps the teacher's head, and {config.teacher} "
                f"has no {', '.join(new)} for this student: fine-tune the teacher on the task, and "
                "set student.architecture: same"
            )
        note = f"the head of the task is new ({', '.join(new)})"
        if not new:
            note = "the head of the task began from that of the model"
        if not config.objective.needs.head:
            note += f"; objective {config.objective.name} does not train it"
        return [note]

    def measure(
        self, examples: Examples, validation: ShardSet, terms: Sequence[Term], *, teacher: bool
    ) -> Measure:
        """Measure the terms on validation rows, and the share of right labels.

        Of classes also Matthews' correlation, and the share of the most frequent class.
        """
        import torch

        from pretrain.contracts.batch import IGNORE
        from pretrain.objectives.finetune import labels_term
        from pretrain.tasks.labelled.examples import LabelledRows, correct_term
        from pretrain.tasks.task_metrics import matthews

        found = LabelledRows(validation, self.logits)
        if not teacher and self.logits is None and "probs" not in found.columns:
            # Only training rows have soft labels, so validation measures labels.
            terms = [term for term in terms if not term.needs_teacher] or [labels_term(1.0)]
        own = own_terms(found, terms, self.counts)
        # An objective of layers leaves the head as it is.
        guesses = any(term.over == "labelled" or term.name == "soft" for term in terms)
        if any(term.over == "labelled" for term in terms) and found.labelled:
            own = replace(own, places=found.places())  # a loss of no labels would be 0
        if not guesses or not found.predicts.has_classes:
            return own
        num = 0 if found.predicts.by_token else len(found.names)
        chosen_C = torch.zeros(num, dtype=torch.float64)
        correct = correct_term(chosen_C if num else None)

        def classes(batch: Batch) -> Tensor:
            labels = batch.labels["label"]
            given_C = torch.bincount(labels[labels != IGNORE].long(), minlength=num)
            both = torch.cat([given_C, chosen_C])
            chosen_C.zero_()
            return both

        def figures(
            totals: Mapping[str, float], counts: Mapping[str, float], tally: Any, step: int
        ) -> dict[str, float]:
            count, right = max(counts[correct.over], 1.0), totals[correct.name]
            shares = {"accuracy": right / count}
            if num:
                given, chosen = tally.view(2, num).numpy()
                shares["majority"] = float(given.max()) / count
                shares["mcc"] = matthews(given, chosen, right)
            return {**own.figures(totals, counts, tally, step), **shares}

        return Measure(
            found,
            [*terms, correct],
            figures,
            self.counts,
            tally=classes if num else None,
            tallies=2 * num,
            places=own.places,
        )

    def trained(self, objective: Objective) -> str:
        """Return how a model without a teacher was trained, for the card."""
        return f"Fine-tuned on a task ({self.name}) with {objective.sentence}"

    def use(self, objective: Objective) -> Use:
        """Return the pipeline of transformers."""
        code = "from transformers import pipeline\n\n"
        return Use(
            "transformers",
            self.pipeline,
            f'{code}run = pipeline("{self.pipeline}", model="PATH_OR_NAME")',
        )

    def finished(
        self, student: MaskedLM, state: Mapping[str, Any], modules: Mapping[str, Tensor]
    ) -> PreTrainedModel:
        """Return the encoder and its head as transformers' class for the task."""
        from pretrain.model.task_head import TaskHead, saved_head, with_head

        labels = state["labels"]
        head = TaskHead(student.config, labels["output"], labels["names"])
        head.load(saved_head(modules))
        return with_head(student, head)


class Classification(LabelledTask):
    """Predict a class or a score of each row; shards of scores make a head with one output."""

    kinds: ClassVar[Any] = ("classification", "regression")
    pipeline: ClassVar[str] = "text-classification"

    name: Literal["classification"] = "classification"
    masked: float = Field(0.0, ge=0, lt=1)
    """Share of a training text's words that become [MASK], for a student that learns only from its
    teacher.
    """
    ngrams: float = Field(0.0, ge=0, le=1)
    """Share of such examples that keep a few words."""

    def check(self, config: RunConfig) -> None:
        """Refuse changed texts that no teacher reads."""
        super().check(config)
        if self.masked == self.ngrams == 0:
            return
        name, objective = config.objective.name, config.objective
        if config.teacher is None or not objective.needs.compares:
            raise ValueError(
                f"task.masked and task.ngrams change texts, whose labels a teacher must tell: name "
                f"`teacher:`, and an objective that compares with it (here {name})"
            )
        if self.logits is not None:
            raise ValueError("task.logits are those of texts that do not change: remove the key")

    def transfer(self, shards: Path, manifest: Manifest, seed: int) -> Transfer | None:
        """Return what changes the texts of training examples; RunError if words are not known."""
        if self.masked == self.ngrams == 0:
            return None
        from pretrain.tasks.labelled.transfer import Transfer
        from pretrain.tasks.mlm.examples import special_tokens, words_of

        words = words_of(shards, manifest, "task.masked", "remove it and task.ngrams")
        special = special_tokens(manifest, len(words.goes_on))
        ids = manifest.tokenizer.special_ids
        frame = (ids.cls, ids.sep, ids.pad)
        return Transfer(self.masked, self.ngrams, seed, words, special, ids.mask, ids.pad, frame)


class TokenClassification(LabelledTask):
    """Predict a tag of each word."""

    kinds: ClassVar[Any] = ("token_classification",)
    pipeline: ClassVar[str] = "token-classification"

    name: Literal["token_classification"] = "token_classification"


class QuestionAnswering(LabelledTask):
    """Predict the first and the last token of the answer in each row."""

    kinds: ClassVar[Any] = ("question_answering",)
    pipeline: ClassVar[str] = "question-answering"

    name: Literal["question_answering"] = "question_answering"

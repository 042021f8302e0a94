"""Configure the task of masked rows: an example is a row of the corpus, some tokens masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pretrain.contracts.terms import Term, VocabularyTerm
from pretrain.objectives.objective import Objective
from pretrain.tasks.task import Examples, Measure, Start, Task, Use, own_terms

if TYPE_CHECKING:
    from data_prep.shards import ShardSet
    from pretrain.config import RunConfig


class MaskedLanguageModelling(Task):
    """Mask tokens of rows as the section `masking` says."""

    counts: ClassVar[Any] = ("tokens", "masked", "sequences", "pairs")

    name: Literal["mlm"] = "mlm"

    def check(self, config: RunConfig) -> None:
        """Refuse a term on masked tokens where none are masked, too."""
        masked = [part.key for part in config.objective.parts if part.over == "masked"]
        if masked and not any(config.masking.ends):
            term = masked[0]
            raise ValueError(
                f"masking.probability is 0, and the term {term} of objective "
                f"{config.objective.name} is computed on masked tokens: set another probability, "
                f"or objective.{term}: 0"
            )
        super().check(config)

    def examples(self, start: Start) -> Examples:
        """Return the masked rows of the training split."""
        from data_prep.shards import open_shards
        from pretrain.tasks.mlm.examples import MaskedRows, build_masking

        config, manifest = start.config, start.manifest
        masking = build_masking(
            config.masking, config.shards, manifest, config.train.seed, start.num_steps
        )
        return MaskedRows(open_shards(config.shards), masking)

    def measure(
        self, examples: Examples, validation: ShardSet, terms: Sequence[Term], *, teacher: bool
    ) -> Measure:
        """Measure the LM head at masked positions; without one the terms, on rows without masks."""
        from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking
        from pretrain.tasks.mlm.head_figures import measure_head

        if any(isinstance(term, VocabularyTerm) for term in terms):
            return measure_head(validation, teacher=teacher)
        unmasked = MaskedRows(validation, evaluation_masking(validation.manifest, 0.0))
        return own_terms(unmasked, terms, self.counts)

    def trained(self, objective: Objective) -> str:
        """Return how a model without a teacher was trained."""
        return f"Trained by masked language modelling ({objective.sentence})"

    def use(self, objective: Objective) -> Use:
        """Return the use of a masked language model, or of an encoder."""
        if not objective.needs.logits:
            return super().use(objective)
        code = 'from transformers import pipeline\n\nfill = pipeline("fill-mask", '
        return Use("transformers", "fill-mask", f'{code}model="PATH_OR_NAME")')

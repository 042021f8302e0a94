"""Answer questions with a span of a given text, as SQuAD does."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pretrain.tasks.labelled_task import LabelledTask


class QuestionAnswering(LabelledTask):
    """Predict the first and the last token of the answer in each row."""

    kinds: ClassVar[Any] = ("question_answering",)
    pipeline: ClassVar[str] = "question-answering"

    name: Literal["question_answering"] = "question_answering"


TASK = QuestionAnswering

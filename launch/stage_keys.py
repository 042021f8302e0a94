"""Define the keys of each stage of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from data_prep.config import CorpusConfig
from data_prep.examples.examples_config import ExamplesConfig, Split
from data_prep.keys import Keys
from pretrain.config import RunConfig


class TrainKeys(RunConfig):
    """Hold the keys of a run, and the recipe's own."""

    stage: Literal["train"] = "train"


class PrepareKeys(CorpusConfig):
    """Hold the keys of a corpus, and the recipe's own."""

    stage: Literal["prepare"] = "prepare"


class ExamplesKeys(ExamplesConfig):
    """Hold the keys of a task's data, and the recipe's own."""

    stage: Literal["examples"] = "examples"


class TrimKeys(Keys):
    """Configure a model with fewer tokens: pretrain/shrink/trim.py.

    Its output is a folder like the model's, a teacher or `model.init` for later stages. A corpus
    for it names it as `tokenizer`.
    """

    stage: Literal["trim"] = "trim"
    output: Path
    """Folder of the new model."""
    model: str
    """Run, folder or hub name."""
    shards: Path
    """A corpus of the model's tokenizer: the tokens of its training rows stay."""
    min_count: int = Field(1, ge=1)
    """Remove tokens that are rarer, except special ones and single characters."""
    size: int | None = Field(None, ge=1)
    """Keep the most frequent of the used tokens, at most this many; replaces `min_count`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TrimKeys:
        if self.size is not None and "min_count" in self.model_fields_set:
            raise ValueError("size takes the place of min_count: remove one of them")
        return self


class PruneKeys(Keys):
    """Configure a model with fewer heads and neurons: pretrain/shrink/prune.py.

    Its output is a folder like the model's. A run that continues it (`student.init`, with the model
    before as teacher) wins back quality.
    """

    stage: Literal["prune"] = "prune"
    output: Path
    """Folder of the new model."""
    model: str
    """Run, folder or hub name, with the head of a task or a masked-language-model head."""
    shards: Path
    """Of its task, or a corpus for a masked language model."""
    heads: int | None = Field(None, ge=1)
    """Attention heads that stay in a layer, on average. None: all. No class of transformers loads
    fewer heads of the same width: they become zeros, and an export with ONNX leaves them out.
    """
    even_heads: bool = False
    """As many heads stay in each layer."""
    intermediate_size: int | None = Field(None, ge=1)
    """Neurons that stay in the feed-forward part of each layer. None: all."""
    multiple_of: int = Field(8, ge=1)
    """That `intermediate_size` is, as matrix products are faster so."""
    importance: Literal["self-supervised", "labels", "magnitude", "random"] = "self-supervised"
    """What chooses them: how the loss against the model before would change without them, how that
    of the labels would, the size of their weights, or chance.
    """
    rounds: int = Field(16, ge=1, le=1000)
    """In which they go, each by scores of what is left; of magnitude and random one."""
    documents: int = Field(512, ge=1)
    """Training rows that are read in each round."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of which rows, and of drawn labels."""

    @model_validator(mode="after")
    def _something_goes(self) -> PruneKeys:
        size, factor = self.intermediate_size, self.multiple_of
        if self.heads is None and size is None:
            raise ValueError("nothing would go: set heads or intermediate_size")
        measures = self.importance in ("self-supervised", "labels")
        if not measures and (unread := {"rounds", "documents"} & self.model_fields_set):
            raise ValueError(f"importance {self.importance} reads no rows: remove {min(unread)}")
        if size is not None and size % factor:
            below = size // factor * factor
            near = f"{below} or {below + factor}" if below else f"{factor}"
            raise ValueError(
                f"intermediate_size {size} is not a multiple of {factor}: take {near}, or set "
                "multiple_of: 1"
            )
        return self


class EvaluateKeys(Keys):
    """Configure a measurement of a recipe, as `distil evaluate MODELS --data DATA` makes it."""

    stage: Literal["evaluate"] = "evaluate"
    output: Path
    """Folder of the figures."""
    models: tuple[str, ...] = Field(min_length=1)
    """Runs, folders or ONNX files."""
    data: Path
    """Shards, or a table of pairs."""
    teacher: str | None = None
    """Model that is measured, too. None: the teacher of the runs."""
    rows: int | None = Field(None, ge=1)
    """Validation rows. None: 1,024, of sentence encoders 512 documents; of a task always all."""
    split: Split = "validation"
    """Of the shards."""
    same_vocabulary: bool = False
    """The models have the shards' vocabulary, though their tokenizer files do not say so."""
    timed: bool = False
    """Add the size of each model's weights, and the milliseconds of a text of 16 tokens on a
    core.
    """


class ExportKeys(Keys):
    """Configure an export of a recipe: `run`, with ONNX files any model, is written to `output`."""

    stage: Literal["export"] = "export"
    output: Path
    """Folder of the export."""
    run: Path
    """Run, or with ONNX files any model."""
    onnx: bool = False
    """Also write onnx/model.onnx."""
    int8: bool = False
    """Also in int8."""
    fp16: bool = False
    """Also in fp16."""
    max_drop: float = Field(0.005, ge=0, lt=1)
    """How much quality int8 may lose."""
    data: Path | None = None
    """What quality is measured on. None: the run's shards."""


class ScoresKeys(Keys):
    """Configure a comparison of runs on several tasks, which are the shards of the runs.

    A model is what runs have in common but task and seed: a list of runs, or a sweep, whose named
    entries are models of their own. `teacher` is the model that the others are compared with, and
    `without` lists tasks that a second average leaves out. `published` are rows of others' figures,
    by the names of columns, to be printed beside ours. Of `baseline` the difference of each other
    model is printed, whether its sign is resolved, and which share of the teacher's lead it is.
    `timed` adds the size of each model, and
    the seconds of a pass over the examples, one at a time on the CPU.
    """

    stage: Literal["scores"] = "scores"
    output: Path
    """Folder of the table."""
    models: dict[str, tuple[str, ...]] = Field(min_length=1)
    """Runs of each model: a list, or a sweep, whose named entries are models of their own."""
    teacher: str | None = None
    """Model that the others' retention is of."""
    baseline: str | None = None
    """Model from which the difference of each other one is printed, whether its sign is resolved,
    and which share of the teacher's lead it is.
    """
    without: tuple[str, ...] = ()
    """Tasks that a second average leaves out."""
    published: dict[str, dict[str, float]] = Field({})
    """Rows of others' figures, by the names of columns."""
    timed: bool = False
    """Add the size of each model, and the seconds of a pass, one example at a time on the CPU."""
    split: Split = "validation"
    """Of the shards."""

    @model_validator(mode="after")
    def names_are_models(self) -> ScoresKeys:
        """Refuse a teacher, or a baseline, that is not scored."""
        for key in ("teacher", "baseline"):
            if (name := getattr(self, key)) not in (None, *self.models):
                known = ", ".join(self.models)
                raise ValueError(f"{key} {name}: is none of models, which are {known}")
        return self


class SweepKeys(Keys):
    """Hold the runs that `sweep:` of a training run stands for, by what is added to its output."""

    stage: Literal["sweep"] = "sweep"
    output: Path
    """Folder of the table."""
    keep_weights: bool = False
    """Keep the weights of a sweep's finished runs, so that other runs can use them."""
    at_once: int | None = Field(None, ge=1)
    """Of a sweep: how many runs train together. None: as many as cores or GPUs allow."""
    sweep: dict[str, RunConfig]
    """Lists of values by key, or named sections of keys: a run for each combination of them."""
    groups: dict[str, str]
    """Maps each run to its table entry; runs of one entry differ only in the seed."""

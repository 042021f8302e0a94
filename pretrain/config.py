"""Define the config of a run: one typed, frozen model. Only `launch` reads it from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from data_prep.disk.credentials import masked
from data_prep.keys import Keys
from pretrain import RunError
from pretrain.device.precision import PrecisionName
from pretrain.export.owner_config import SHOWN, Card, PricePerHour, Slurm
from pretrain.kernels.products import ProductsName
from pretrain.model.model_config import Model, Student
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.known import Objective, with_objective, without_gone
from pretrain.objectives.own import Recorded, kept
from pretrain.tasks.folders import TASKS, AnyTask

# The most rows, and examples, of a run on CPUs that gives no `micro_batch_size`.
ROWS_ON_HOST, EXAMPLES_ON_HOST = 8, 16
_Share = Annotated[float, Field(ge=0, lt=1)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class MaskingConfig(Keys):
    """Select the tokens to predict."""

    probability: _Share | tuple[_Share, _Share] = 0.15
    """Share of each row's tokens that are to be predicted: 15 % as in BERT; [0.3, 0.15] changes in
    a line from the first step to the last. Objectives but distilbert and mlm have 0 by default.
    """
    mode: Literal["uniform", "smoothed", "whole_word"] = "uniform"
    """How they are drawn: uniformly, weighted by count ** -0.7 (`smoothed`, as DistilBERT's
    authors), or as whole words.
    """

    @field_validator("probability", mode="before")
    @classmethod
    def _one_or_two(cls, value: Any) -> Any:
        shares = value if isinstance(value, list | tuple) else [value, value]
        numbers = [share for share in shares if isinstance(share, int | float) and 0 <= share < 1]
        if len(shares) != 2 or len(numbers) != 2:
            raise ValueError("give one share, e.g. 0.3, or two: [at the first step, at the last]")
        return value

    @property
    def ends(self) -> tuple[float, float | None]:
        """Return the probability at the first step, and at the last if it changes."""
        return self.probability if isinstance(self.probability, tuple) else (self.probability, None)


class Optimizer(Keys):
    """Configure AdamW and its learning rate; the defaults are DistilBERT's."""

    learning_rate: float = Field(5.0e-4, gt=0, le=100)
    """The peak, at the end of the warm-up."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    """AdamW's; RoBERTa's second one is more stable in large batches."""
    eps: float = Field(1.0e-6, gt=0, le=1)
    """AdamW's; 1e-6 as in BERT, where torch has 1e-8."""
    weight_decay: float = Field(0.0, ge=0, le=100)
    """On matrices only."""
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    """Share of all steps in which the rate rises in a line."""
    max_grad_norm: float = Field(5.0, gt=0, le=1e9)
    """The whole gradient is scaled down to this norm before an update."""
    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    """How the rate falls to 0 after the warm-up: in a line, as half a cosine, or (wsd) in a line
    over the last steps.
    """
    decay_ratio: float = Field(0.1, gt=0, le=1)
    """With schedule wsd: share of all steps in which the rate falls."""

    @model_validator(mode="after")
    def schedule_fits(self) -> Optimizer:
        """Refuse a decay that another schedule would ignore, or that begins in the warm-up."""
        if (
            self.schedule != "wsd"
            and self.decay_ratio != Optimizer.model_fields["decay_ratio"].default
        ):
            raise ValueError(f"decay_ratio is for schedule wsd; schedule {self.schedule} has none")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError("warmup_ratio and decay_ratio are more than 1 together")
        return self

    def warmup(self, num_steps: int) -> int:
        """Return the number of steps of the warm-up."""
        return round(self.warmup_ratio * num_steps)

    def decay_start(self, num_steps: int) -> int:
        """Return the steps before the rate falls: those of the warm-up, and in wsd more."""
        if self.schedule == "wsd":
            return num_steps - max(1, round(self.decay_ratio * num_steps))
        return self.warmup(num_steps)


class Train(Keys):
    """Configure the length of training, its batches and its precision."""

    epochs: float = Field(3, gt=0, le=1e6)
    """Passes over the corpus; 3 as DistilBERT's authors."""
    max_steps: int | None = Field(None, ge=1, le=2**31)
    """Optimizer steps, instead of epochs."""
    global_batch_size: int = Field(4096, ge=1, le=2**24)
    """Rows of one optimizer step over all ranks, the paper's "up to 4K"; gradient accumulation
    follows from it.
    """
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Rows at a time of one rank. auto, the default on a GPU, is the most that fit, found before
    the first step; the default on a CPU is up to 8 rows, or 16 examples of a task.
    """
    precision: PrecisionName = "auto"
    """auto is bf16 or fp16 where the hardware is faster in it, else fp32."""
    products: ProductsName = "auto"
    """Library of a CPU's matrix products in fp32. auto takes onednn on an AMD with
    AVX-512, else mkl. head: oneDNN for logits; mixed: for all but gradients of weights.
    """
    seed: int = Field(0, ge=0, lt=2**64)
    """Of weights, order, masks and dropout."""
    num_workers: int = Field(1, ge=0, le=256)
    """Processes of a rank that make batches; one masks tens of millions of tokens a second."""
    skip_non_finite: int = Field(0, ge=0)
    """Steps that may be left out because their loss or gradient was not finite; one more stops the
    run.
    """
    compare_every: int = Field(500, ge=0)
    """Steps between comparisons of the ranks' weights, each a device sync; also before a
    checkpoint. 0: never.
    """
    activation_checkpointing: bool = False
    """Less memory for one more forward pass of the student."""


class Evaluation(Keys):
    """Evaluate on validation rows at the start, at the end, and in between."""

    every: int = Field(1000, ge=0)
    """Steps between those at the start and at the end. 0: only these."""
    rows: int = Field(512, ge=1)
    """Validation rows that are read; with 512 of 512 tokens the standard error of accuracy is 0.25
    points.
    """


class Checkpoint(Keys):
    """Save what a run needs to continue; the last step is always saved."""

    every: int = Field(500, ge=0)
    """Steps between checkpoints, the most work that a crash can cost. 0: only at the end, before a
    decay, and when a signal stops the run.
    """
    keep: int = Field(3, ge=1)
    """How many of the last ones stay, besides the one with the lowest validation loss and the one
    before a decay.
    """
    weights_only: bool = False
    """At the end, without the optimizer's state: a third of the disk, and it cannot be continued.
    """


class Logging(Keys):
    """Write lines of metrics."""

    every: int = Field(10, ge=1)
    """Steps between lines of metrics."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Who gets them, too: TensorBoard, Weights & Biases (extra trackers). W&B uploads them, unless
    WANDB_MODE=offline.
    """


SHAPE_NOTHING = ("evaluation", "checkpoint", "logging", "card", "slurm")  # sections
# Keys of a run's config.json: what computed the run, and what an own objective said.
COMPUTED_BY = ("hardware", "machine", "own")


_COPY = {
    "s3": "aws s3 cp --recursive {url} DIR",
    "gs": "gcloud storage cp --recursive {url} DIR",
    "hf": "hf download REPOSITORY --repo-type dataset --local-dir DIR",
}


class RunConfig(Keys):
    """Configure one training run."""

    output: Path
    """Folder of the run."""
    shards: Path
    """Folder that `distil prepare` wrote."""
    teacher: str | None = None
    """Folder, run or hub name of the teacher."""
    vectors: Path | None = None
    """File of the teacher's sentence vectors, for objective embedding. The first start writes it,
    from the texts of a corpus with `keep_text: true`. Without this key a teacher with the
    shards' vocabulary computes them in each step.
    """
    teacher_vocabulary: Literal["same"] | None = None
    """`same` asserts that a teacher without tokenizer files has the shards' vocabulary, or that
    case and accents may be treated differently than by its tokenizer.
    """
    model: Model | None = None
    """The model that objective mlm or finetune trains."""
    student: Student = Student()
    """The model that learns from the teacher."""
    objective: Objective = DistilBert()
    """What is learnt, one paper's losses."""
    objective_file: Literal["changed"] | None = None
    """`changed` continues a run whose own objective's file differs from the one it began with."""
    task: AnyTask = TASKS[DistilBert.tasks[0]](name=DistilBert.tasks[0])
    """What an example is."""
    masking: MaskingConfig = MaskingConfig()
    """Which tokens are to be predicted. Where they are, evaluation is uniform at 15 % in every run,
    so that runs compare.
    """
    optimizer: Optimizer = Optimizer()
    """AdamW and its learning rate; the defaults are DistilBERT's."""
    train: Train = Train()
    """Length, batches and precision."""
    evaluation: Evaluation = Evaluation()
    """Measurements on validation rows, also at the start and at the end."""
    checkpoint: Checkpoint = Checkpoint()
    """What is saved; the last step always is."""
    logging: Logging = Logging()
    """What is written while it trains."""
    card: Card = Card()
    """Licence, languages and an example for the model card. They may change after training: give
    the run's command with them again, and export.
    """
    slurm: Slurm = Slurm()
    """What the cluster asks for; no file of the run keeps it."""
    price_per_hour: PricePerHour = None
    """Of one GPU, or of a node without GPUs, for the price that `--dry-run` prints."""

    @field_validator("output", "shards", "vectors", mode="before")
    @classmethod
    def _is_local(cls, value: Any) -> Any:
        scheme, found, _ = value.partition("://") if isinstance(value, str) else ("", "", "")
        if found:
            copy = _COPY.get(scheme, "rclone copy {url} DIR").format(url=value)
            raise ValueError(
                f"{masked(value)} is not a folder of this machine, and rows are read at random: "
                f"copy it to every node's disk ({masked(copy)}), and give DIR"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _objective_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict):  # a run's config.json also says what computed it
            values = {key: value for key, value in values.items() if key not in COMPUTED_BY}
            if values.get("resume_from", "") is None:  # of an earlier version
                del values["resume_from"]
        return with_objective(values)

    @model_validator(mode="after")
    def _task_fits(self) -> RunConfig:
        if self.task.name not in self.objective.tasks:
            raise ValueError(
                f"objective {self.objective.name} is for task {' or '.join(self.objective.tasks)}, "
                f"not {self.task.name}: set task.name, or take another objective"
            )
        for part in self.objective.parts:
            if part.over not in self.task.counts:
                raise ValueError(
                    f"objective {self.objective.name}: averages a term over {part.over}, which "
                    f"task {self.task.name} does not count (only {', '.join(self.task.counts)})"
                )
        self.task.check(self)
        if (example := self.card.example) is not None:
            pipeline = self.task.use(self.objective).pipeline
            if pipeline not in SHOWN:
                raise ValueError(f"card.example: none is shown for {pipeline}: remove it")
            if pipeline == SHOWN[0] and example.count("[MASK]") != 1:
                raise ValueError(f"card.example: {example!r}: write [MASK] once")
        return self

    @model_serializer(mode="wrap")
    def _without_default_task(self, handler: Any) -> dict[str, Any]:
        # Configs of earlier versions have no such section, and are equal to new ones.
        values: dict[str, Any] = handler(self)
        if values.get("task") == {"name": self.objective.tasks[0]}:
            del values["task"]
        # Of a job, not of the run; its setup may hold a secret.
        for key in ("slurm", "price_per_hour"):
            values.pop(key, None)
        if self.card == Card():
            values.pop("card", None)  # absent where keys are chosen
        if (own := kept(self.objective)) is not None:
            values["own"] = own.model_dump(mode="json")
        return values

    @classmethod
    def recorded(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return the config that a run has recorded, without keys and masks that are gone since.

        Raises:
            ValidationError: the values are those of no run.
        """
        found = without_gone(values)
        if (own := Recorded.of(found)) is not None:  # nothing loads a user's file by itself
            found["objective"] = own
        return cls.model_validate(found)

    def unread(self) -> dict[str, str]:
        """Return the keys that this run does not read, each with the reason and the fix."""
        name, found = self.objective.name, dict[str, str]()
        if not any(self.masking.ends):
            found["masking.mode"] = (
                f"objective {name} masks nothing: remove it, or set masking.probability"
            )
        for key, lack in self.task.unread(self.objective).items():
            found[key] = f"objective {name} {lack}: remove it"
        return found

    def sources(self) -> dict[str, str]:
        """Return the models that the run reads, folders or hub names, by the key of each."""
        init = self.student.init if isinstance(self.student.init, str) else "teacher"
        models = {
            "teacher": self.teacher,
            "model.init": self.model.init if self.model is not None else None,
            "student.init": None if init in ("teacher", "random") else init,
        }
        return {key: name for key, name in models.items() if name is not None}

    @property
    def answers(self) -> Path | None:
        """Return the file of the teacher's vectors or logits, where one is named."""
        return self.vectors or getattr(self.task, "logits", None)

    @property
    def answers_key(self) -> str:
        """Return the key that names that file."""
        return "task.logits" if self.vectors is None else "vectors"

    def with_train(self, **changes: Any) -> RunConfig:
        """Return this configuration with other values in its section `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def shaping(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with its checkpoint.

        Paths, speed and frequencies may change.
        """
        freely_changed = {"micro_batch_size", "num_workers", "skip_non_finite", "compare_every"}
        freely_changed |= {"activation_checkpointing", "products"}
        others = ["output", "shards", "teacher", "teacher_vocabulary"]
        others += ["vectors", "objective_file", *SHAPE_NOTHING]
        exclude: Any = {**dict.fromkeys(others, True), "train": freely_changed, "task": {"logits"}}
        values = self.model_dump(mode="json", exclude=exclude)
        if "own" in values:
            values["own"] = {"objective": values["own"]["sha256"]}
        return values


def with_defaults(config: RunConfig, device: str, num_processes: int) -> RunConfig:
    """Fill in `micro_batch_size`. If it is missing it is `auto` on a GPU, which is resolved later.

    On a CPU both are the largest number of rows, up to 8, that divides a rank's share, and up to 16
    examples of a task, which are shorter. More are hardly faster there, and the system kills a
    process that runs out of memory.
    """
    if isinstance(config.train.micro_batch_size, int) or (
        device == "cuda" and config.train.micro_batch_size == "auto"
    ):
        return config
    share = config.train.global_batch_size // num_processes
    most = EXAMPLES_ON_HOST if config.task.has_head else ROWS_ON_HOST
    rows = next(rows for rows in range(most, 0, -1) if share % rows == 0)
    return config.with_train(micro_batch_size="auto" if device == "cuda" else rows)


def accumulation_steps(config: RunConfig, num_processes: int) -> int | None:
    """Return the micro-batches of a rank in one optimizer step; None while their size is unknown.

    Raises:
        RunError: the batches do not divide.
    """
    rows, micro = config.train.global_batch_size, config.train.micro_batch_size
    # `auto` and the default are a divisor of a rank's share, so only the ranks must divide.
    at_once = micro * num_processes if isinstance(micro, int) else num_processes
    if rows % at_once == 0:
        return rows // at_once if isinstance(micro, int) else None
    below, above = rows // at_once * at_once, (rows // at_once + 1) * at_once
    fits = f"take {below} or {above}" if below else f"take {above}"
    product, other = f"{num_processes} process(es)", ""
    if isinstance(micro, int):
        product = f"micro_batch_size {micro} x {product} = {at_once}"
        other = ", or another micro_batch_size"
    raise RunError(f"train.global_batch_size {rows} is not a multiple of {product}; {fits}{other}")

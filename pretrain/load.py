"""Load the inputs of a run: corpus, teacher, checkpoint and student, and the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn

from data_prep.shards import Manifest, load_manifest
from pretrain import RunError, checkpoint
from pretrain.checkpoint import Saved, check_optimizer, load_adapters
from pretrain.config import RunConfig, accumulation_steps, with_defaults
from pretrain.contracts.terms import SignalTerm, Term
from pretrain.data.hashing import root
from pretrain.data.order import Order
from pretrain.data.rows import Skip, StepDataset, with_skip
from pretrain.device.precision import PRECISIONS, choose
from pretrain.kernels import products
from pretrain.model import tokenizer_files
from pretrain.model.distillation import parameters_by_name
from pretrain.model.families import MaskedLM, family_of, has_types, shape_of
from pretrain.model.folder import load_model
from pretrain.model.loading import check_row_length, reinitialise
from pretrain.model.student import build_model, build_student
from pretrain.model.teacher import Teacher, load_teacher
from pretrain.model.word_vectors import check_vectors
from pretrain.monitor.metrics import Progress
from pretrain.objectives.own import checked, one_line
from pretrain.plan import num_steps
from pretrain.run_folder import another_run, recipe_changes
from pretrain.tasks.task import Examples, Start

_ADAPTERS = 5  # this use of the seed; order, masking, dropout and checksums have others


@dataclass
class TrainState:
    """Hold the position and the counts of a run.

    The learning rate, the rows, their masks and dropout are functions of the step and need no
    state. Weights and optimizer state are tensors, which a checkpoint keeps in other files.
    """

    step: int = 0  # optimizer steps made
    tokens: int = 0  # trained on, without padding
    skipped_steps: int = 0  # left out because they were not finite
    skip_rows: tuple[Skip, ...] = ()
    evaluation: dict[str, float] = field(default_factory=dict)  # the newest validation figures
    evaluation_step: int = 0
    scaler: dict[str, Any] | None = None  # state of fp16's loss scale

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> TrainState:
        """Build from the values of a checkpoint's state.json."""
        known = {key: values[key] for key in FIELDS}
        return cls(**{**known, "skip_rows": tuple(Skip(*skip) for skip in values["skip_rows"])})

    def write(self) -> dict[str, Any]:
        """Return the values for state.json, which `from_checkpoint` takes."""
        return asdict(self)


FIELDS = tuple(field.name for field in fields(TrainState))


@dataclass(frozen=True)
class Inputs:
    """Hold what a rank loads before the first collective call that depends on it."""

    config: RunConfig  # without `precision: auto`
    manifest: Manifest
    teacher: Teacher | None
    saved: Saved | None
    state: TrainState
    student: MaskedLM
    terms: tuple[Term, ...]
    adapters: nn.ModuleDict  # the objective's modules
    examples: Examples  # what the task reads besides the rows
    optimizer: dict[str, Tensor]
    dataset: StepDataset
    tokenizer: dict[str, bytes]  # its files, by name
    notes: tuple[str, ...]  # written at its first start, for the card

    def names(self, stop_after: int | None) -> dict[str, str]:
        """Return what all ranks must have loaded identically; only paths may differ."""
        settings = self.config.model_dump(
            mode="json", exclude={"output", "shards", "teacher", "vectors"}
        )
        return {
            "configuration": repr((settings, stop_after, self.dataset.skips)),
            "corpus": self.manifest.digest,
            "teacher": self.teacher.sha256 if self.teacher else "",
            **self.examples.identity(),
            "checkpoint": str(self.saved.step if self.saved else None),
        }


def load_inputs(
    config: RunConfig,
    ranks: PartialState,
    progress: Progress,
    skip_rows: Sequence[tuple[int, int]] = (),
) -> Inputs:
    """Load all inputs of the run and check them against the config.

    Raises:
        RunError: the batches do not divide, the teacher does not fit, the checkpoint is of another
            run, rows do not exist, or loader workers cannot send.
    """
    # Mistakes in the config come first, because they cost no reading of weights.
    manifest = load_manifest(config.shards)
    config = with_defaults(config, ranks.device.type, ranks.num_processes)
    accumulation_steps(config, ranks.num_processes)  # raises if they do not divide
    num_rows = manifest.splits["train"].rows
    order = Order(num_rows, config.train.global_batch_size, config.train.seed)
    steps = num_steps(config, num_rows)
    # Before precision and teacher: a resumed run keeps its precision.
    saved = checkpoint.newest(config.output / "checkpoints", progress.say)
    # What was noted at the first start is in every checkpoint; new notes are shown once.
    notes: list[str] = []
    config = resolve_precision(config, ranks.device, saved and saved.state, progress.say)
    config = resolve_products(config, ranks.device, saved and saved.state, progress.say)
    teacher = load_run_teacher(config, manifest)
    if config.objective.file_sha256:
        digest = config.objective.file_sha256[:16]
        note = f"objective {config.objective.name} is of a user's own file, sha256 {digest}"
        notes += [note] if saved is None or note not in saved.state["notes"] else []
    if teacher is not None and teacher.note and saved is None:
        notes.append(teacher.note)
    # One rank of each node reads all of an existing file. A checkpoint has the notes already.
    about: list[str] = []
    whole = ranks.is_local_main_process
    examples = config.task.examples(Start(config, manifest, teacher, about, whole, steps))
    parts = None
    if saved is None:
        notes += about
    else:
        check_same_run(config, manifest, teacher, examples, saved)
        parts = read_parts(saved)
    student = load_student(config, manifest, teacher, parts, notes)
    # Here, because they refuse sizes that do not fit, and a refusal writes nothing.
    theirs = examples.shape(shape_of(teacher.model) if teacher is not None else None)
    shapes = shape_of(student), theirs
    terms = checked(config.objective, *shapes)
    with one_line(f"objective {config.objective.name}: adapters()"):
        adapters = config.objective.adapters(*shapes)
    signals = any(isinstance(term, SignalTerm) and term.student for term in terms)
    if not family_of(student).attends and signals:
        raise RunError(
            f"objective {config.objective.name}: needs the layers of a Transformer, which a "
            f"{student.config.model_type} lacks; set objective.name: kd, or take another student"
        )
    if saved is not None:
        check_vectors(config.student, saved.state.get("notes", []))
    attached = dict(config.task.attach(student, manifest))
    assert not attached.keys() & adapters.keys(), "modules of task and objective share a name"
    adapters.update(attached)
    reinitialise(adapters, root(config.train.seed, _ADAPTERS))
    config.objective.begin(adapters)
    if parts is None:
        notes += config.task.begin(config, student, adapters)
    moments: dict[str, Tensor] = {}
    if parts is not None:
        moments = parts.optimizer
        load_adapters(adapters, parts.adapters)
        check_optimizer(moments, parameters_by_name(student, adapters))
    for note in notes:  # after the last refusal of models that do not fit
        progress.say(f"note: {note}")
    notes = [*(saved.state.get("notes", []) if saved else []), *notes]

    # Rows left out by an earlier start stay left out; new ones count from the present step on.
    state = TrainState.from_checkpoint(saved.state) if saved else TrainState()
    for first, last in skip_rows:
        state.skip_rows = with_skip(state.skip_rows, Skip(first, last, state.step))
    dataset = StepDataset(
        examples.shards,
        order,
        examples,
        rank=ranks.process_index,
        world=ranks.num_processes,
        skips=state.skip_rows,
    )
    positions = family_of(student).row_length(student.config)
    pairs = bool((examples.state().get("labels") or {}).get("pairs"))
    tokenizer = tokenizer_files.of_shards(
        config.shards, manifest, positions, types=pairs and has_types(student)
    )
    return Inputs(
        config,
        manifest,
        teacher,
        saved,
        state,
        student,
        terms,
        adapters,
        examples,
        moments,
        dataset,
        tokenizer,
        tuple(notes),
    )


def load_run_teacher(config: RunConfig, manifest: Manifest) -> Teacher | None:
    """Return the teacher of a run, compared with its shards; None if it has none.

    Raises:
        RunError, CorpusError: see `load_teacher`.
    """
    if config.teacher is None:
        return None
    return load_teacher(
        config.teacher,
        manifest,
        config.shards,
        same_vocabulary=config.teacher_vocabulary == "same",
        needs_head=config.objective.needs.logits,
        sentences=config.task.sentence_encoder,
        of_task=config.task.has_head,
        any_vocabulary=config.model is not None,
    )


class Parts(NamedTuple):
    """Hold the tensors of a checkpoint."""

    student: MaskedLM
    optimizer: dict[str, Tensor]
    adapters: dict[str, Tensor]


def read_parts(saved: Saved) -> Parts:
    """Read the tensors of a checkpoint; whether the student has an LM head, its objective says.

    Raises:
        RunError: a file cannot be read.
    """
    student = load_model(saved.folder / "student", needs_head=False)
    return Parts(student, saved.optimizer(), saved.adapters())


def load_student(
    config: RunConfig,
    manifest: Manifest,
    teacher: Teacher | None,
    parts: Parts | None,
    notes: list[str],
) -> MaskedLM:
    """Return the student of a checkpoint, or a new one; `notes` receives what to say about it.

    Raises:
        RunError: it cannot be read or built, or does not fit teacher and shards.
    """
    seed, needs_head = config.train.seed, config.objective.needs.logits
    student: MaskedLM
    # A checkpoint wins over `student.init`, so that the same command starts and resumes a run.
    if parts is not None:
        student = parts.student.train()
    elif config.model is not None:
        student = build_model(
            config.model,
            manifest,
            seed,
            notes,
            needs_head=needs_head,
            of_task=config.task.has_head,
            shards=config.shards,
        )
    else:
        assert teacher is not None
        student = build_student(
            config.student,
            teacher,
            seed,
            needs_head=needs_head,
            of_task=config.task.has_head,
            notes=notes,
        )
    key = "student.init" if config.model is None else "model.init"
    check_row_length(key, student.config, manifest)
    if parts is None and (note := family_of(student).note(student.config)):
        notes.append(note)
    return student


def resolve_precision(
    config: RunConfig,
    device: torch.device,
    state: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> RunConfig:
    """Replace `precision: auto` by the checkpoint's precision, or in a new run by `choose`.

    Args:
        config: the run.
        device: of this rank.
        state: of the checkpoint to continue from.
        say: shows the precision, and whether this machine would choose another.
    """
    if config.train.precision != "auto":
        return config
    precision, reason = choose(device)
    text = f"{precision} ({reason})"
    recorded = (state or {}).get("shaping", {}).get("train", {}).get("precision")
    if recorded in PRECISIONS:
        chosen, precision = precision, recorded
        if PRECISIONS[precision].scaled and device.type != "cuda":
            raise RunError(
                f"{config.output}: its checkpoint was made in {precision}, which needs a CUDA GPU, "
                f"and this is {device.type}; continue it on a GPU, or set another `output:`"
            )
        # The precision is a part of the recipe; a change in the middle would be another run.
        text = f"{precision}, as in the checkpoint"
        if chosen != precision:
            text += f"; this machine would choose {chosen} ({reason})"
    say(f"precision auto: {text}")
    return config.with_train(precision=precision)


def resolve_products(
    config: RunConfig,
    device: torch.device,
    state: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> RunConfig:
    """Replace `products: auto` by the checkpoint's choice, or in a new run by this CPU's."""
    if config.train.products != "auto":
        return config
    name, reason = products.choose()
    if state is not None:
        name, reason = state["config"]["train"]["products"], "as before"
    if device.type == "cpu" and config.train.precision == "fp32":
        say(f"products auto: {name} ({reason})")
    return config.with_train(products=name)


def check_same_run(
    config: RunConfig,
    manifest: Manifest,
    teacher: Teacher | None,
    examples: Examples,
    saved: Saved,
) -> None:
    """Refuse to continue a checkpoint with another recipe, other data or a different teacher."""
    changes = recipe_changes(saved.state, config, [])
    if saved.state["shards"] != manifest.digest:
        changes.append(f"the shards in {config.shards} have changed")
    before_sha256 = (saved.state["teacher"] or {}).get("sha256")
    if teacher is not None and before_sha256 not in (None, teacher.sha256):
        changes.append(f"the teacher {teacher.name} has different weights")
    changes += examples.changes(saved.state)
    if changes:
        raise another_run(saved.folder, changes)

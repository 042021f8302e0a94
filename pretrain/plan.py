"""Plan a run from its config and the config.json of its models, before any weights are read.

Nothing here imports torch, so a mistake is answered in half a second, and a recipe can check all
its runs before the first one trains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from data_prep.shards import load_manifest
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.contracts.terms import Sizes
from pretrain.data.order import Order
from pretrain.model.architectures import student_sizes
from pretrain.model.config_file import read_config
from pretrain.objectives.own import one_line
from pretrain.run_folder import sealed_state

FEWEST_STEPS = 200  # a student has hardly left its warm-up before


class Planned(NamedTuple):
    """Hold the training rows of shards, also of those that an earlier stage makes."""

    rows: int
    tokens: int
    row_length: int
    vocab_size: int


def flop(config: RunConfig, student: Sizes, teacher: Sizes | None, rows: Planned) -> float:
    """Return the operations of a run for one training token, two for a multiply-add.

    Forward, a layer of width D and inner width F takes 8 D^2 + 4 D F + 4 S D in texts of S tokens,
    and a head with vocabulary V 2 D^2 + 2 D V; a backward pass takes twice that.
    """
    objective = config.objective
    logits = [part for part in objective.parts if "logits" in part.reads]
    share = 1.0 if any(part.over == "tokens" for part in logits) else config.masking.ends[0] or 0.0
    # In a corpus a row is about one document; of a task it is one example, without its padding.
    span = rows.tokens / max(1, rows.rows) if config.task.has_head else rows.row_length

    def forward(sizes: Sizes) -> float:
        width, inner = sizes.hidden_size, sizes.intermediate_size
        layer = 8 * width**2 + 4 * width * inner + 4 * span * width
        head = share * (2 * width**2 + 2 * width * rows.vocab_size) if logits else 0.0
        return sizes.num_hidden_layers * layer + head

    compared = teacher if objective.needs.compares else None
    return 3 * forward(student) + (forward(compared) if compared else 0.0)


def parameters(sizes: Sizes, rows: Planned, *, head: bool) -> int:
    """Return the number of parameters of an encoder that reads these rows, and of its LM head."""
    width, inner, words = sizes.hidden_size, sizes.intermediate_size, rows.vocab_size
    if sizes.family == "modernbert":  # gated, without biases and positions
        layer, embeddings = 4 * width**2 + 3 * width * inner + 2 * width, (words + 1) * width
    else:
        layer = 4 * width**2 + 2 * width * inner + 9 * width + inner
        embeddings = (words + rows.row_length + 4) * width
    own = width**2 + 3 * width + words if head else 0  # the words' matrix is that of embeddings
    return embeddings + sizes.num_hidden_layers * layer + own


def default_layers(num_teacher_layers: int, num_layers: int, period: int = 1) -> tuple[int, ...]:
    """Return the teacher's layers that a student starts from.

    They are evenly spaced and end with the last one, whose output is what the student learns. Of
    every objective students are better so than from layer 0 on (docs/log, 2026-11-25).
    Where the kinds of layers repeat after `period`, each is of the kind that the student has at its
    place, and the first is layer 0, because ModernBERT's first layer has a norm less.
    """
    # From the last to the first: the nearest layer of its kind to (i + 1) L / n - 1, in order.
    layers = [num_teacher_layers]
    for i in reversed(range(num_layers)):
        evenly = (i + 1) * num_teacher_layers / num_layers - 1
        same_kind = range(i, 1 if i == 0 and period > 1 else layers[0], period)
        layers.insert(0, min(same_kind, key=lambda layer: abs(layer - evenly)))
    return tuple(layers[:-1])


class Plan(NamedTuple):
    """Hold what is known of a run before its weights are read."""

    student: Sizes | None  # None where a hub's name hides it
    lines: tuple[str, ...]  # to show, in plain words
    step_flop: float | None = None  # work of a step, where sizes and rows are known
    steps: int = 0  # after the last checkpoint
    disk: int = 0  # bytes of its checkpoints
    teacher: Sizes | None = None
    rows: Planned | None = None  # rows of the shards, where they are known

    @property
    def flop(self) -> float | None:
        """Return the operations of all steps to come."""
        return None if self.step_flop is None else self.step_flop * self.steps


def plan(
    config: RunConfig, made: Mapping[Path, Sizes | Planned | None], *, needs_shards: bool
) -> Plan:
    """Check the sizes of a run's models, and return what it would do.

    Args:
        config: the run.
        made: real paths of the outputs of stages that come before it, with their students' sizes or
            their rows, where these are known.
        needs_shards: refuse missing shards; otherwise a line says that they do not exist yet.

    Raises:
        RunError: sizes do not fit each other or the objective; names the key.
        CorpusError: the shards are missing, or their manifest cannot be read.
    """
    vectors = config.student.word_vectors
    sealed = sealed_state(config.output)
    begins = sealed is None  # otherwise a checkpoint holds them
    is_file = isinstance(vectors, str) and vectors != "teacher"
    if is_file and begins and not Path(str(vectors)).is_file():
        raise RunError(f"student.word_vectors {vectors}: no such file: check the path")
    teacher = _sizes_at(config.teacher, made)
    init = config.student.init
    student: Sizes | None = None
    if config.model is not None:
        own = config.model
        student = Sizes(own.architecture, *(getattr(own, field) for field in Sizes._fields[1:]))
        if own.init is not None:
            student = _sizes_at(own.init, made)
    elif isinstance(init, str) and init not in ("teacher", "random"):
        student = _sizes_at(init, made)
    elif teacher is not None:
        student = student_sizes(config.student, teacher)
    if student is not None and teacher is not None:
        with one_line(f"objective {config.objective.name}: check()"):
            config.objective.check(student.shape, teacher.shape)
    both = {"teacher": teacher, "student": student}
    lines = [f"{name}: {sizes}" for name, sizes in both.items() if sizes]
    if config.teacher is not None and teacher is None:
        lines.insert(0, f"teacher: {config.teacher}, whose sizes are read when it is loaded")
    if needs_shards or (config.shards / "manifest.json").exists():
        manifest = load_manifest(config.shards)
        split = manifest.splits["train"]
        size = manifest.tokenizer.vocab_size
        there = Planned(split.rows, split.tokens, manifest.row_length, size)
        about = ""
    else:
        planned = made.get(Path(os.path.realpath(config.shards)))
        if not isinstance(planned, Planned):
            lines.append(f"steps: known once {config.shards} exists")
            return Plan(student, tuple(lines))
        there, about = planned, "about "
    train, steps = config.train, num_steps(config, there.rows)
    epochs = steps * train.global_batch_size / there.rows
    tokens = round(there.tokens * epochs)
    lines.append(
        f"steps: {about}{steps:,} of {train.global_batch_size:,} rows x {there.row_length} tokens, "
        f"{epochs:.3g} epochs, {tokens:,} tokens"
    )
    lines += length_notes(config, there.rows)
    step = 0 if sealed is None else min(steps, sealed[1]["step"])
    if step:
        lines.append(f"done: {step:,} steps; the estimate is of the other {steps - step:,}")
    if student is None:
        return Plan(None, tuple(lines))
    # The newest checkpoints, and the one that is being written.
    num = config.checkpoint.keep + 1 if config.checkpoint.every else 1
    # Weights in fp32, and both moments.
    disk = 12 * num * parameters(student, there, head=config.objective.needs.logits)
    work = flop(config, student, teacher, there) * tokens / steps
    return Plan(student, tuple(lines), work, steps - step, disk, teacher, there)


def num_steps(config: RunConfig, num_rows: int) -> int:
    """Return the optimizer steps of a run over so many rows."""
    order = Order(num_rows, config.train.global_batch_size, config.train.seed)
    return config.train.max_steps or order.steps_for(config.train.epochs)


def length_notes(config: RunConfig, num_rows: int) -> Iterator[str]:
    """Yield what a user should know of a short run, and of a length that is given twice."""
    train, steps = config.train, num_steps(config, num_rows)
    epochs = steps * train.global_batch_size / num_rows
    yield from config.objective.notes(steps)
    written = train.model_fields_set
    if train.max_steps and "epochs" in written and written < set(type(train).model_fields):
        unused = f"epochs: {train.epochs:g} is not used"
        yield f"note: max_steps {steps:,} is {epochs:.2g} epochs; {unused}"
    if steps < FEWEST_STEPS:
        fix = "set train.max_steps to more"
        # The batch that makes enough steps of the same rows.
        rows = 2 ** max(0, (steps * train.global_batch_size // FEWEST_STEPS).bit_length() - 1)
        if rows < train.global_batch_size and train.max_steps is None:
            fix = f"set train.global_batch_size to {rows}, or train.epochs to more"
        yield f"warning: {steps:,} optimizer steps, and most models need hundreds: {fix}"
    if epochs < 1:
        yield (
            f"warning: {epochs:.0%} of the corpus is read: for all of its {num_rows:,} rows set "
            f"train.max_steps: {-(-num_rows // train.global_batch_size)}, or only train.epochs"
        )


def _sizes_at(name: str | None, made: Mapping[Path, Sizes | Planned | None]) -> Sizes | None:
    """Return the sizes of a model in a folder or run, made or to be made; None if not known."""
    if name is None:
        return None
    place = Path(os.path.realpath(name))
    sealed = sealed_state(place)
    if sealed is None and place in made:
        sizes = made[place]
        return sizes if isinstance(sizes, Sizes) else None
    folder = sealed[0] / "student" if sealed is not None else place
    try:
        return Sizes.of(read_config("", folder))
    except RunError:
        return None  # a hub's name, or a file that loading refuses

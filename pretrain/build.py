"""From a config to everything the loop touches, fresh or from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from data_prep.disk import Lock
from data_prep.shards import Manifest, ShardSet, load_manifest, open_shards
from pretrain import RunError, checkpoint
from pretrain.checkpoint import Saved, Writer, check_optimizer
from pretrain.config import Optimizer, RunConfig
from pretrain.distillation import Distillation
from pretrain.heartbeat import Heartbeat
from pretrain.metrics import Metrics, Progress
from pretrain.models import MaskedLM, check_row_length, load_model
from pretrain.order import Order
from pretrain.parallel import Parallel, parallelise
from pretrain.rows import Skip, StepDataset, build_masking, with_skip
from pretrain.safety import Spikes
from pretrain.student import build_bert, build_student
from pretrain.teacher import Teacher, load_teacher

# What a run continues from, in state.json.
_STATE = "evaluation evaluation_step scaler shaping shards skip_rows skipped_steps teacher tokens"
Ended = Literal["finished", "stopped", "interrupted", "up to date"]


@dataclass(frozen=True)
class Ingredients:
    """What a process reads before it meets the others."""

    manifest: Manifest
    teacher: Teacher | None
    saved: Saved | None
    student: MaskedLM
    moments: dict[str, Tensor]
    dataset: StepDataset
    accumulation: int

    def names(self) -> dict[str, str]:
        """What all processes of a run must have read alike."""
        return {
            "corpus": self.manifest.digest,
            "teacher": self.teacher.sha256 if self.teacher else "",
            "checkpoint": str(self.saved.step if self.saved else None),
        }


@dataclass
class Run:
    """Everything the loop touches; what is below `accumulation` moves, the rest stays."""

    config: RunConfig
    accelerator: Accelerator
    progress: Progress
    heartbeat: Heartbeat
    metrics: Metrics
    writer: Writer
    dataset: StepDataset
    held_out: ShardSet | None
    teacher: Teacher | None
    module: Distillation
    parallel: Parallel
    spikes: Spikes
    num_steps: int
    accumulation: int
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int = 0
    ended: Ended = "up to date"

    @property
    def student(self) -> MaskedLM:
        """The model that is trained."""
        return self.module.student

    @property
    def manifest(self) -> Manifest:
        """The shards'."""
        return self.dataset.shards.manifest

    def due(self, every: int) -> bool:
        """Every `every` steps (0: never in between) and at the last of the schedule."""
        return self.step == self.num_steps or (every > 0 and self.step % every == 0)


def gather(
    config: RunConfig,
    accelerator: Accelerator,
    progress: Progress,
    skip_rows: Sequence[tuple[int, int]] = (),
) -> Ingredients:
    """Read all that the run is made of, and hold it against the config.

    Raises:
        RunError: batches that do not divide, a teacher that does not fit, a checkpoint of another
            run, or rows that are not there.
    """
    manifest = load_manifest(config.shards)
    accumulation = accumulation_steps(config, accelerator.num_processes)
    saved = checkpoint.newest(config.output / "checkpoints", progress.say)
    teacher = load_teacher(config.teacher, manifest) if config.teacher is not None else None
    student: MaskedLM
    moments: dict[str, Tensor] = {}
    if saved is not None:
        check_same_run(config, manifest, teacher, saved)
        student = load_model(saved.folder / "student").train()
        if teacher and student.config.hidden_size != teacher.model.config.hidden_size:
            raise RunError(
                f"{saved.folder}: its student has width {student.config.hidden_size}, the teacher "
                f"{teacher.model.config.hidden_size}; continue from another checkpoint"
            )
        moments = saved.optimizer()
        check_optimizer(moments, student)
    elif teacher is not None:
        student = build_student(config.student, teacher, config.train.seed)
    else:
        assert config.model is not None
        student = build_bert(config.model, manifest, config.train.seed)
    check_row_length("student.init", student.config.max_position_embeddings, manifest)
    skips = [Skip(*skip) for skip in saved.state["skip_rows"]] if saved else []
    for first, last in skip_rows:
        skips = list(with_skip(skips, Skip(first, last, saved.step if saved else 0)))
    rows = open_shards(config.shards)
    dataset = StepDataset(
        rows,
        Order(len(rows), config.train.global_batch_size, config.train.seed),
        build_masking(config.masking, config.shards, manifest, config.train.seed),
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        skips=skips,
    )
    return Ingredients(manifest, teacher, saved, student, moments, dataset, accumulation)


def build(
    config: RunConfig,
    accelerator: Accelerator,
    read: Ingredients,
    *,
    progress: Progress,
    heartbeat: Heartbeat,
    lock: Lock | None,
) -> Run:
    """Put a run together; with a checkpoint, exactly as it was when that was written.

    All processes call it. `lock` is held by the first, which writes.
    """
    manifest, teacher, saved, student = read.manifest, read.teacher, read.saved, read.student
    if teacher is not None:
        teacher.model.to(accelerator.device)
    special = manifest.tokenizer.special_ids
    module = Distillation(
        student,
        teacher.model if teacher else None,
        config.objective.terms(),
        cls_id=special.cls,
        pad_id=special.pad,
    )
    student.to(accelerator.device)
    optimizer = build_optimizer(student, config.optimizer, accelerator.device)
    parallel = parallelise(accelerator, module, optimizer, config)
    if saved is not None:
        parallel.load(student, read.moments)
        parallel.load_scaler_state(saved.state["scaler"])

    step = saved.step if saved else 0
    if config.logging.tensorboard:
        accelerator.init_trackers("tensorboard")
    epochs = read.dataset.order.steps_for(config.train.epochs)
    return Run(
        config=config,
        accelerator=accelerator,
        progress=progress,
        heartbeat=heartbeat,
        metrics=Metrics(config.output / "metrics.jsonl", step, accelerator),
        writer=Writer(
            config.output / "checkpoints",
            tokenizer=config.shards / "tokenizer",
            keep=config.checkpoint.keep,
            phase=heartbeat.saving,
            fence=lock.check if lock else lambda: None,
            warn=progress.say,
        ),
        dataset=read.dataset,
        held_out=open_shards(config.shards, "validation") if has_validation(manifest) else None,
        teacher=teacher,
        module=module,
        parallel=parallel,
        spikes=Spikes(),
        num_steps=config.train.max_steps or epochs,
        accumulation=read.accumulation,
        step=step,
        tokens=saved.state["tokens"] if saved else 0,
        skipped_steps=saved.state["skipped_steps"] if saved else 0,
        evaluation=saved.state["evaluation"] if saved else {},
        evaluation_step=saved.state["evaluation_step"] if saved else 0,
    )


def save(run: Run, *, wait: bool = False) -> float:
    """Write a checkpoint of the run as it stands; all processes call it, the first writes.

    Returns the seconds that training stood still. With `wait` the checkpoint is on the disk after
    it; without, it is written while training goes on.

    Raises:
        OSError: with `wait`, in the first process: the disk is full or read-only.
    """
    weights, moments = run.parallel.weights(run.student), run.parallel.moments(run.student)
    if not run.accelerator.is_main_process:
        return 0.0
    return run.writer.save(
        run.step,
        student=run.student,
        weights=weights,
        optimizer=moments,
        state=state(run),
        wait=wait,
    )


def state(run: Run) -> dict[str, Any]:
    """All of a checkpoint that is no tensor. Dropout is a function of (seed, step, rank), and the
    learning rate, the rows and their masks of the step: there is nothing else to keep."""
    config, manifest, teacher = run.config, run.manifest, run.teacher
    return {
        "num_steps": run.num_steps,
        "tokens": run.tokens,
        "skip_rows": [[skip.first, skip.last, skip.step] for skip in run.dataset.skips],
        "skipped_steps": run.skipped_steps,
        "evaluation": run.evaluation,
        "evaluation_step": run.evaluation_step,
        "config": config.model_dump(mode="json"),
        "shaping": config.shaping(),
        "shards": manifest.digest,
        "sources": [source.model_dump(mode="json") for source in manifest.sources],
        "teacher": teacher
        and {
            "name": None if teacher.local else teacher.name,
            "revision": teacher.revision,
            "sha256": teacher.sha256,
        },
        "scaler": run.parallel.scaler_state(),
        "num_processes": run.accelerator.num_processes,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def accumulation_steps(config: RunConfig, num_processes: int) -> int:
    """Micro-batches a process works through in one optimizer step."""
    rows, micro = config.train.global_batch_size, config.train.micro_batch_size
    at_once = micro * num_processes
    if rows % at_once:
        below, above = rows // at_once * at_once, (rows // at_once + 1) * at_once
        fits = f"{below} or {above}" if below else f"{above}"
        raise RunError(
            f"train.global_batch_size {rows} is not a multiple of micro_batch_size {micro} x "
            f"{num_processes} process(es) = {at_once}; take {fits}, or another micro_batch_size"
        )
    return rows // at_once


def check_same_run(
    config: RunConfig, manifest: Manifest, teacher: Teacher | None, saved: Saved
) -> None:
    """Refuse to continue a checkpoint under another recipe, other data or another teacher."""
    if lacking := [key for key in _STATE.split() if key not in saved.state]:
        raise RunError(f"{saved.folder}: state.json lacks {lacking[0]}; continue from another one")
    before, now = flatten(saved.state["shaping"]), flatten(config.shaping())
    changes = [
        f"{key} was {before.get(key)} and is now {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if saved.state["shards"] != manifest.digest:
        changes.append(f"the shards in {config.shards} are other ones")
    before_sha256 = (saved.state["teacher"] or {}).get("sha256")
    if teacher is not None and before_sha256 not in (None, teacher.sha256):
        changes.append(f"the teacher {teacher.name} has other weights")
    if changes:
        raise RunError(
            f"{saved.folder} was made by another run: {'; '.join(changes)}. Take back the change, "
            "or give this run an `output:` of its own"
        )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def has_validation(manifest: Manifest) -> bool:
    """Whether there are held-out rows."""
    return "validation" in manifest.splits and manifest.splits["validation"].rows > 0


def build_optimizer(student: nn.Module, config: Optimizer, device: torch.device) -> AdamW:
    """AdamW with decay on matrices only: DistilBERT's norms defy a filter by name."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in student.parameters() if p.dim() > 1]},
        {"params": [p for p in student.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )

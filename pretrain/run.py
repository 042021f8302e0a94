"""Build a run: all parts that the loop uses, and the state that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW

from data_prep.disk import Lock
from data_prep.shards import Manifest, ShardSet, open_shards
from pretrain.checkpoint import Writer
from pretrain.config import Optimizer, RunConfig
from pretrain.data.rows import StepDataset, split
from pretrain.device.gpu import hardware_of
from pretrain.device.precision import PRECISIONS
from pretrain.distributed.parallel import DDP, Parallel, ZeRO, uses_deepspeed
from pretrain.distributed.processes import same_everywhere
from pretrain.load import Inputs, TrainState
from pretrain.model.distillation import Distillation, parameters_by_name
from pretrain.model.families import MaskedLM, family_of
from pretrain.model.teacher import Teacher
from pretrain.monitor.metrics import Metrics, Progress, SpikeDetector
from pretrain.monitor.status import Heartbeat
from pretrain.plan import num_steps
from pretrain.tasks.task import Measure

Ended = Literal["finished", "stopped", "interrupted", "up to date"]


@dataclass
class Run:
    """Hold all parts of a run. Each step changes `state`; the rest stays.

    Only `resolve_micro_batch` changes `config`, before the first step: afterwards
    `micro_batch_size` is a number, and `micro_batch` records where `auto` found it.
    """

    config: RunConfig
    hardware: dict[str, str]  # device, attention and LM head, by name
    accelerator: Accelerator
    progress: Progress
    heartbeat: Heartbeat
    metrics: Metrics
    writer: Writer
    manifest: Manifest
    dataset: StepDataset
    validation: ShardSet | None
    measure: Measure | None  # what is measured on the validation rows
    teacher: Teacher | None
    online: MaskedLM | None  # the teacher's model, if it runs in a step
    student: MaskedLM
    module: Distillation  # student and teacher on a micro-batch
    parallel: Parallel
    spikes: SpikeDetector
    num_steps: int
    state: TrainState
    ended: Ended = "up to date"
    micro_batch: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()  # written at its first start, for the card

    @property
    def share(self) -> int:
        """Return the number of rows of a rank in an optimizer step."""
        return self.config.train.global_batch_size // self.accelerator.num_processes

    @property
    def micro_batch_size(self) -> int:
        """Return the number of rows that a rank computes at a time."""
        rows = self.config.train.micro_batch_size
        assert isinstance(rows, int)
        return rows

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches of a rank in an optimizer step."""
        return self.share // self.micro_batch_size

    def due(self, every: int) -> bool:
        """Return whether the step is a multiple of `every` (0: none is) or the last one."""
        step = self.state.step
        return step == self.num_steps or (every > 0 and step % every == 0)


def build(
    accelerator: Accelerator,
    inputs: Inputs,
    *,
    progress: Progress,
    heartbeat: Heartbeat,
    lock: Lock | None,
) -> Run:
    """Build a run; with a checkpoint, exactly as it was when that was written.

    All ranks call it. The first rank holds `lock`, and writes.
    """
    config, manifest = inputs.config, inputs.manifest
    teacher, student, examples = inputs.teacher, inputs.student, inputs.examples
    device, train = accelerator.device, config.train
    # A teacher whose labels a file holds does not run.
    online = teacher.model if teacher is not None and examples.runs_teacher else None
    if online is not None:
        # The sha256 is computed and the student has its layers: fp32 is no longer needed.
        nn.Module.to(online, device, PRECISIONS[train.precision].dtype)
        examples.to(device)
    predecessor = None
    if config.objective.needs.modules:
        assert teacher is not None
        predecessor = teacher.model
        nn.Module.to(predecessor, device)
    student.to(device)
    with_head = config.objective.needs.logits
    kernels = hardware_of(
        student,
        device,
        train.precision,
        head=with_head,
        attends=family_of(student).attends,
    )
    same_everywhere(
        accelerator,
        {f"kernel for {name}": kernel for name, kernel in kernels.items() if name != "device"},
        "the machines differ: start on GPUs of one kind, with a C compiler on all of them or none",
    )
    module = Distillation(
        student,
        online,
        inputs.terms,
        pad_id=manifest.tokenizer.special_ids.pad,
        num_tokens=manifest.tokenizer.vocab_size,
        adapters=inputs.adapters.to(device),
        teacher_labels=examples.teacher_labels,
        recompute=train.activation_checkpointing,
        predecessor=predecessor,
    )
    if not config.objective.needs.logits:
        freeze_unreached(module, inputs, device)
    # Then wrap: DDP or ZeRO owns the optimizer from here on.
    optimizer = build_optimizer(module, config.optimizer, accelerator.device)
    parallel: Parallel = (ZeRO if uses_deepspeed() else DDP)(accelerator, module, optimizer, config)
    # After wrapping, because ZeRO loads into the partition of this rank.
    if inputs.saved is not None:
        parallel.load(
            parameters_by_name(student, module.adapters), inputs.optimizer, inputs.state.scaler
        )

    fence = lock.check if lock else lambda: None
    validates = "validation" in manifest.splits and manifest.splits["validation"].rows > 0
    validation = open_shards(config.shards, "validation") if validates else None
    measure = None
    if validation is not None:
        measure = config.task.measure(
            examples, validation, inputs.terms, teacher=online is not None
        )
    return Run(
        config=config,
        hardware=kernels,
        accelerator=accelerator,
        progress=progress,
        heartbeat=heartbeat,
        metrics=Metrics(config.output / "metrics.jsonl", accelerator, fence),
        writer=Writer(
            config.output / "checkpoints",
            tokenizer=inputs.tokenizer,
            keep=config.checkpoint.keep,
            phase=heartbeat.saving,
            fence=fence,
            warn=progress.say,
        ),
        manifest=manifest,
        dataset=inputs.dataset,
        validation=validation,
        measure=measure,
        teacher=teacher,
        online=online,
        student=student,
        module=module,
        parallel=parallel,
        spikes=SpikeDetector(),
        num_steps=num_steps(config, manifest.splits["train"].rows),
        state=inputs.state,
        notes=inputs.notes,
    )


def freeze_unreached(module: Distillation, inputs: Inputs, device: torch.device) -> None:
    """Freeze the parameters that no term reaches, such as an LM head without a term on logits.

    DDP would wait for their gradients, and ZeRO would decay their weights. One row's backward pass
    finds them; its gradients and random numbers are discarded.
    """
    row = next(split(inputs.dataset[inputs.state.step], 1))
    batch = inputs.examples.batch(row).to(device)
    plain = Distillation(
        module.student,
        module.teacher,
        module.terms,
        pad_id=module.pad_id,
        num_tokens=module.num_tokens,
        adapters=module.adapters,
        teacher_labels=inputs.examples.teacher_labels,
    )
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        # Without autocast, which would keep casts of weights for the first step.
        loss, _ = plain(batch, torch.ones(len(module.terms), device=device))
        loss.backward()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def write_checkpoint(run: Run, *, wait: bool = False) -> float:
    """Write a checkpoint of the run as it is; all ranks call it, the first one writes.

    Return the seconds that training paused. With `wait` the checkpoint is on disk on return.
    Without it a thread writes while training continues.

    Raises:
        OSError: with `wait`, on the first rank: the disk is full or read-only.
    """
    # Collective under ZeRO, so every rank takes part.
    weights, optimizer, run.state.scaler = run.parallel.save(
        parameters_by_name(run.student, run.module.adapters)
    )
    if not run.accelerator.is_main_process:
        return 0.0
    config, teacher = run.config, run.teacher
    if config.checkpoint.weights_only and run.state.step == run.num_steps:
        optimizer = {}
    state = {
        **run.state.write(),
        "num_steps": run.num_steps,
        "notes": run.notes,
        "config": config.model_dump(mode="json"),
        "micro_batch": run.micro_batch,
        "shaping": config.shaping(),
        "shards": run.manifest.digest,
        "sources": [source.model_dump(mode="json") for source in run.manifest.sources],
        "teacher": teacher
        and {
            "name": None if teacher.local else teacher.name,
            "revision": teacher.revision,
            "sha256": teacher.sha256,
        },
        "vectors": None,
        **run.dataset.examples.state(),
        "row_length": run.manifest.row_length,
        "num_processes": run.accelerator.num_processes,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    student: Any = run.student
    adapters = dict(run.module.adapters.state_dict())
    if weights is not None:
        adapters = {name: weights.pop(f"adapters.{name}") for name in adapters}
    if not config.objective.needs.logits:
        # Its LM head was never trained: the model is saved without it.
        student, prefix = student.base_model, f"{student.base_model_prefix}."
        own = {name: t for name, t in (weights or {}).items() if name.startswith(prefix)}
        weights = weights and {name.removeprefix(prefix): t for name, t in own.items()}
    return run.writer.save(
        run.state.step,
        student=student,
        weights=weights,
        adapters=adapters,
        optimizer=optimizer,
        state=state,
        wait=wait,
    )


def build_optimizer(module: nn.Module, config: Optimizer, device: torch.device) -> AdamW:
    """Build AdamW with decay on matrices only.

    The filter is the number of dimensions: DistilBERT's norms have names that no filter by name
    catches.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )

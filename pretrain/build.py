"""From a config to everything the loop touches, fresh or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.optim import AdamW

from data_prep.shards import Manifest, ShardSet, open_shards
from pretrain import RunError, checkpoint
from pretrain.checkpoint import Saved
from pretrain.config import Optimizer, RunConfig
from pretrain.distillation import Distillation
from pretrain.metrics import Metrics, Progress
from pretrain.models import MaskedLM, check_row_length, load_model
from pretrain.order import Order
from pretrain.student import build_bert, build_student
from pretrain.teacher import Teacher

_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass
class Run:
    """Everything the loop touches; `step`, `tokens` and `evaluation` move, the rest stays."""

    config: RunConfig
    accelerator: Accelerator
    progress: Progress
    metrics: Metrics
    train_rows: ShardSet
    held_out: ShardSet | None
    teacher: Teacher | None
    module: Distillation
    model: Any  # the module as Accelerate wrapped it
    optimizer: Any
    order: Order
    num_steps: int
    accumulation: int
    step: int = 0
    tokens: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int = 0

    @property
    def student(self) -> MaskedLM:
        """The model that is trained."""
        return self.module.student


def build_accelerator(config: RunConfig) -> Accelerator:
    """Accelerate's device and process set-up, with accumulation and saving left to us.

    Raises:
        RunError: fp16 without a GPU, where Accelerate would silently compute in fp32; or a
            tracker that is not installed.
    """
    # Without `cpu=True` Accelerate runs one process where several were started on CPUs.
    cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    device = PartialState(cpu=cpu).device
    if config.logging.tensorboard and find_spec("tensorboard") is None:
        raise RunError(
            "logging.tensorboard needs TensorBoard: pip install 'distil-pretraining[tensorboard]'"
        )
    if config.train.precision == "fp16" and device.type != "cuda":
        raise RunError(
            f"train.precision fp16 needs a CUDA GPU, this is {device.type}; use bf16 or fp32"
        )
    # Accelerate keeps the first precision of a process for ever; a second run may want another.
    AcceleratorState._reset_state()
    # The head's parameters get no gradient when no term looks at logits.
    unused = all(term.signal != "logits" for term in config.objective.terms())
    return Accelerator(
        cpu=cpu,
        mixed_precision=_MIXED[config.train.precision],
        log_with="tensorboard" if config.logging.tensorboard else None,
        project_dir=config.output,
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=unused,
            )
        ],
    )


def build(
    config: RunConfig,
    accelerator: Accelerator,
    manifest: Manifest,
    teacher: Teacher | None,
    saved: Saved | None,
    progress: Progress,
) -> Run:
    """Put a run together; with `saved`, exactly as it was when that checkpoint was written.

    Raises:
        RunError: batches that do not divide, a teacher that does not fit, or a checkpoint of
            another run.
    """
    train_rows = open_shards(config.shards)
    order = Order(len(train_rows), config.train.global_batch_size, config.train.seed)
    accumulation = accumulation_steps(config, accelerator.num_processes)
    student: MaskedLM
    if saved is not None:
        check_same_run(config, manifest, teacher, saved)
        student = load_model(saved.folder / "student").train()
    elif teacher is not None:
        student = build_student(config.student, teacher, config.train.seed)
    else:
        assert config.model is not None
        student = build_bert(config.model, manifest, config.train.seed)

    check_row_length("student.init", student.config.max_position_embeddings, manifest)

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
    if saved is not None:
        load_optimizer(optimizer, student, saved.optimizer())
    model, prepared = accelerator.prepare(module, optimizer)
    if saved is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(saved.state["scaler"])

    step = saved.step if saved else 0
    if config.logging.tensorboard:
        accelerator.init_trackers("tensorboard")
    return Run(
        config=config,
        accelerator=accelerator,
        progress=progress,
        metrics=Metrics(config.output / "metrics.jsonl", step, accelerator),
        train_rows=train_rows,
        held_out=open_shards(config.shards, "validation") if has_validation(manifest) else None,
        teacher=teacher,
        module=module,
        model=model,
        optimizer=prepared,
        order=order,
        num_steps=config.train.max_steps or order.steps_for(config.train.epochs),
        accumulation=accumulation,
        step=step,
        tokens=saved.state["tokens"] if saved else 0,
        evaluation=saved.state["evaluation"] if saved else {},
        evaluation_step=saved.state["evaluation_step"] if saved else 0,
    )


def save(run: Run) -> None:
    """Write a checkpoint of the run as it stands; the first process writes, the others wait."""
    accelerator, config = run.accelerator, run.config
    if accelerator.is_main_process:
        manifest = run.train_rows.manifest
        teacher = run.teacher
        checkpoint.save(
            config.output / "checkpoints",
            run.step,
            student=run.student,
            tokenizer=config.shards / "tokenizer",
            optimizer=optimizer_tensors(run.optimizer, run.student),
            state={
                "num_steps": run.num_steps,
                "tokens": run.tokens,
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
                "scaler": accelerator.scaler and accelerator.scaler.state_dict(),
                "num_processes": accelerator.num_processes,
                "versions": {name: version(name) for name in ("torch", "transformers")},
            },
            keep=config.checkpoint.keep,
        )
    accelerator.wait_for_everyone()


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


def optimizer_tensors(optimizer: Any, student: nn.Module) -> dict[str, Tensor]:
    """AdamW's state as `parameter name/moment` -> tensor, fit for safetensors."""
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in student.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: AdamW, student: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    for name, parameter in student.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{name}/{key}" in tensors:
                # A fused AdamW keeps its step counter beside the parameter, on a GPU too.
                optimizer.state[parameter][key] = tensors[f"{name}/{key}"].to(parameter.device)

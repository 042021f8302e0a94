"""Train one student on several ranks: each holds all of it (DDP) or a part of its optimizer (ZeRO).

Both classes have the same methods and give the same steps to 1e-5: the sum of all ranks'
gradients, clipped, through AdamW. Both save and load the whole optimizer state by parameter name,
so a run may change from one to the other and from any number of ranks to another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from pretrain.checkpoint.layout import MOMENTS, STEP
from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.device.precision import PRECISIONS


def uses_deepspeed() -> bool:
    """Return whether this process was started for DeepSpeed, by `accelerate launch`'s variable."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


class ParallelState(NamedTuple):
    """Hold what a checkpoint keeps of the update, next to the student's own weights."""

    weights: dict[str, Tensor] | None  # fp32 by name; None where the module's own are in fp32
    optimizer: dict[str, Tensor]  # whole, by `parameter/state`
    scaler: dict[str, Any] | None  # numbers of fp16's loss scale


class DDP:
    """Train on one rank, or on several under DDP: model and optimizer are whole on each."""

    name = ""

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizer: AdamW, config: RunConfig
    ) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(module, optimizer)

    def forward_backward(
        self,
        batch: Batch,
        factors_T: Tensor,
        scale: float,
        *,
        last: bool,
        running: Sequence[bool] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add a micro-batch's gradients times `scale`; return its loss [] and term sums [T].

        Only the `last` micro-batch of a step communicates. `running`: see `Objective`.
        """
        # DDP reduces gradients inside a backward pass. Without `no_sync` each micro-batch would
        # send all of them.
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            loss, sums_T = self.model(batch, factors_T, running)
            # DDP averages over ranks, but the loss needs the sum.
            self.accelerator.backward(loss * (scale * self.accelerator.num_processes))
        return loss.detach(), sums_T

    def clip(self, max_norm: float) -> Tensor:
        """Clip the step's gradients; return their norm before that [], the same on every rank."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        assert norm is not None
        return norm

    def step(self, learning_rate: float) -> None:
        """Update the weights; in fp16 an overflow of scaled gradients skips the update."""
        # The rate is a pure function of the step (`step.learning_rate`), so there is no
        # scheduler, and no state of one to save.
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def discard(self, *, clipped: bool = True) -> None:
        """Drop the step's gradients without an update."""
        if self.accelerator.scaler is not None and clipped:
            # `clip` has unscaled the gradients; without an update the next unscaling would fail.
            self.accelerator.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def loss_scale(self) -> float | None:
        """Return fp16's loss scale; None in other precisions."""
        scaler = self.accelerator.scaler
        return None if scaler is None else scaler.get_scale()

    def save(self, parameters: Mapping[str, nn.Parameter]) -> ParallelState:
        """Return what a checkpoint keeps of these; every rank calls it."""
        # By name and not by number: another layout, or ZeRO, may order the parameters otherwise.
        optimizer = {
            f"{name}/{key}": value
            for name, parameter in parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        scaler = self.accelerator.scaler
        return ParallelState(None, optimizer, None if scaler is None else scaler.state_dict())

    def load(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Mapping[str, Tensor],
        scaler: Mapping[str, Any] | None,
    ) -> None:
        """Continue from what `save` returned; the weights are loaded already.

        A loss scale that ZeRO has saved has other fields: the run then starts with a fresh one.
        """
        for name, parameter in parameters.items():
            for key in (STEP, *MOMENTS):
                if f"{name}/{key}" in optimizer:
                    # A fused AdamW keeps its step counter next to the parameter, on a GPU too.
                    value = optimizer[f"{name}/{key}"].to(parameter.device)
                    self.optimizer.state[parameter][key] = value
        if self.accelerator.scaler is not None and scaler and "_growth_tracker" in scaler:
            self.accelerator.scaler.load_state_dict(dict(scaler))


class ZeRO:
    """Train with DeepSpeed's ZeRO 1 or 2: each rank keeps and updates its share of the optimizer.

    The methods are those of `DDP`.
    """

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizer: AdamW, config: RunConfig
    ) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        self.accelerator = accelerator
        precision = PRECISIONS[config.train.precision]
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        # `forward_backward` marks the end of a step itself, so DeepSpeed counts no micro-batches.
        settings["gradient_accumulation_steps"] = 1
        micro = config.train.micro_batch_size
        # Only DeepSpeed's log reads it. The trial of `auto` comes later and needs the engine.
        settings["train_micro_batch_size_per_gpu"] = 1 if micro == "auto" else micro
        settings["gradient_clipping"] = config.optimizer.max_grad_norm
        self.scaled = precision.scaled
        exact = {name: p.detach().clone() for name, p in module.named_parameters() if self.scaled}
        # Autocast goes inside the engine, which ends one around its forward pass on a GPU.
        module.forward = precision.autocast(accelerator.device)(module.forward)
        self.engine, _ = accelerator.prepare(module, optimizer)
        self.zero = self.engine.optimizer
        self.name = f", ZeRO {self.engine.zero_optimization_stage()}"

        # DeepSpeed makes the optimizer state at the first step, and only that of the first group.
        # A checkpoint may be loaded or saved before that, so it is made here.
        self.states: list[dict[str, Tensor]] = []  # AdamW's, of each group's share
        for flat in self.zero.single_partition_of_fp32_groups:
            state = self.zero.optimizer.state[flat]
            state[STEP] = torch.zeros((), dtype=torch.float32, device=flat.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat)
            self.states.append(state)
        self.zero._lazy_init_hp_params_optimizer_state()
        # In fp16 DeepSpeed makes the fp32 weights from rounded ones; restore the exact ones.
        for name, parameter in module.named_parameters():
            if name in exact:
                safe_set_full_fp32_param(parameter, exact[name])

    def forward_backward(
        self,
        batch: Batch,
        factors_T: Tensor,
        scale: float,
        *,
        last: bool,
        running: Sequence[bool] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add a micro-batch's gradients; ZeRO 2 communicates at every micro-batch."""
        self.engine.set_gradient_accumulation_boundary(last)
        loss, sums_T = self.engine(batch, factors_T, running)
        self.engine.backward(loss * (scale * self.accelerator.num_processes))
        return loss.detach(), sums_T

    def clip(self, max_norm: float) -> Tensor:
        """Return the gradients' norm before clipping []; DeepSpeed clips in `step`."""
        # The gradients are still multiplied by fp16's loss scale here.
        norm = self.zero.scaled_global_norm() / self.zero.loss_scale
        return torch.where(norm < 0, torch.inf, norm)  # -1 is DeepSpeed's "not finite"

    def step(self, learning_rate: float) -> None:
        """Update the weights; in fp16 an overflow of scaled gradients skips the update."""
        for group in self.zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()

    def discard(self, *, clipped: bool = True) -> None:
        """Drop the step's gradients without an update, as DeepSpeed does after an overflow."""
        self.zero.zero_grad(set_to_none=True)
        # The next micro-batch is the first of a step again, and adds to no old gradient.
        self.zero.micro_step_id = -1
        for group in self.zero.averaged_gradients:
            self.zero.averaged_gradients[group] = None
            self.zero.all_grad_tensors[group] = None

    @property
    def loss_scale(self) -> float | None:
        """Return fp16's loss scale; None in other precisions."""
        return float(self.zero.loss_scale) if self.scaled else None

    def save(self, parameters: Mapping[str, nn.Parameter]) -> ParallelState:
        """Return what a checkpoint keeps, put together; every rank calls it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weights, optimizer, scaler = None, {}, None
        # DeepSpeed holds nothing of frozen parameters.
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        for name, parameter in trained.items():
            for key in MOMENTS:
                optimizer[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
            optimizer[f"{name}/{STEP}"] = self.states[0][STEP]
        if self.scaled:
            weights = {name: p.detach().float() for name, p in parameters.items()}
            weights |= {name: safe_get_full_fp32_param(p) for name, p in trained.items()}
            fields = vars(self.zero.loss_scaler)
            scaler = {key: value for key, value in fields.items() if isinstance(value, int | float)}
        return ParallelState(weights, optimizer, scaler)

    def load(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Mapping[str, Tensor],
        scaler: Mapping[str, Any] | None,
    ) -> None:
        """Continue from what `save` returned; the weights are loaded already."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, parameter in parameters.items():
            for key in MOMENTS if parameter.requires_grad else ():
                if f"{name}/{key}" in optimizer:
                    value = optimizer[f"{name}/{key}"].to(parameter.device)
                    safe_set_full_optimizer_state(parameter, value, key)
        # A checkpoint of step 0 may have none, because AdamW makes its state at the first step.
        steps = [value for name, value in optimizer.items() if name.endswith(f"/{STEP}")]
        for state in self.states if steps else []:
            state[STEP].copy_(steps[0])
        if self.scaled and scaler and "cur_scale" in scaler:
            vars(self.zero.loss_scaler).update(scaler)


Parallel = DDP | ZeRO

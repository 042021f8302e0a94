"""One student in several processes: each holds all of it (DDP), or a part of its optimizer (ZeRO).

Both give the same steps to 1e-5: the sum of all processes' gradients, clipped, through AdamW. Both
give and take the whole optimizer by parameter name, so that a run may change from one to the other
and from any number of processes to another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from pretrain.config import RunConfig
from pretrain.data.batch import MicroBatch

MOMENTS = ("exp_avg", "exp_avg_sq")


def uses_deepspeed() -> bool:
    """Return whether this process was started for DeepSpeed, as `accelerate launch` says it."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


class Replicated:
    """One process, or several under DDP: model and optimizer are whole in each."""

    name = ""

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: AdamW) -> None:
        self.accelerator, self.module = accelerator, module
        self.model, self.optimizer = accelerator.prepare(module, optimizer)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the run's precision, for a forward pass outside `forward_backward`."""
        return self.accelerator.autocast()

    def warm_up(self, inputs: MicroBatch, coefficients: Tensor) -> None:
        """Run one backward pass to no effect, so that a resumed run adds gradients up as before.

        DDP sorts its buckets anew after the first backward pass of a process; with three processes
        or more another order of summation gives other bits.
        """
        if self.accelerator.num_processes > 1:
            self.forward_backward(inputs, coefficients, 0.0, last=True)
            self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(
        self, inputs: MicroBatch, coefficients: Tensor, scale: float, *, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Add a micro-batch's gradients times `scale`; returns its loss [] and term sums [T].

        Only the `last` micro-batch of a step communicates.
        """
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            loss, sums = self.model(*inputs, coefficients)
            # DDP averages over processes; the sum over all of them is wanted.
            self.accelerator.backward(loss * (scale * self.accelerator.num_processes))
        return loss.detach(), sums

    def clip(self, max_norm: float) -> Tensor:
        """Clip the step's gradients; their norm before that [], the same in every process."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        assert norm is not None
        return norm

    def step(self) -> None:
        """Update the weights; fp16 skips where its scaled gradients overflowed."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def discard(self) -> None:
        """Drop the step's gradients, once clipped, without an update."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # it waits for the end of what `clip` unscaled
        self.optimizer.zero_grad(set_to_none=True)

    def set_learning_rate(self, rate: float) -> None:
        """For all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def loss_scale(self) -> float | None:
        """fp16's, or None."""
        scaler = self.accelerator.scaler
        return None if scaler is None else scaler.get_scale()

    def scaler_state(self) -> dict[str, Any] | None:
        """Return what fp16's loss scale needs to go on: numbers."""
        return self.accelerator.scaler and self.accelerator.scaler.state_dict()

    def load_scaler_state(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `scaler_state`; a run that had none starts with a fresh one."""
        if self.accelerator.scaler is not None and state and "_growth_tracker" in state:
            self.accelerator.scaler.load_state_dict(dict(state))

    def weights(self, student: nn.Module) -> dict[str, Tensor] | None:
        """Return all weights in fp32 by name where they are not the student's own; every process
        calls."""
        return None

    def moments(self, student: nn.Module) -> dict[str, Tensor]:
        """AdamW's state as `parameter/moment` -> tensor, whole; every process calls."""
        return {
            f"{name}/{key}": value
            for name, parameter in student.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load(self, student: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `moments`; the student's weights are loaded already."""
        for name, parameter in student.named_parameters():
            for key in ("step", *MOMENTS):
                if f"{name}/{key}" in tensors:
                    # A fused AdamW keeps its step counter beside the parameter, on a GPU too.
                    value = tensors[f"{name}/{key}"].to(parameter.device)
                    self.optimizer.state[parameter][key] = value


class Partitioned:
    """DeepSpeed's ZeRO 1 or 2: each process keeps, and updates, its share of the optimizer."""

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizer: AdamW, config: RunConfig
    ) -> None:
        self.accelerator, self.module = accelerator, module
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        # One window of accumulation is one step: its end is named in `forward_backward`.
        settings["gradient_accumulation_steps"] = 1
        micro = config.train.micro_batch_size
        # Only DeepSpeed's own log reads it; what `auto` stands for is found with its engine there.
        settings["train_micro_batch_size_per_gpu"] = 1 if micro == "auto" else micro
        settings["gradient_clipping"] = config.optimizer.max_grad_norm
        self._half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(config.train.precision)
        exact = {}
        if self._half is torch.float16:
            exact = {name: p.detach().clone() for name, p in module.named_parameters()}
        if self._half is not None:
            # Inside the engine: on a GPU it ends an autocast that it finds around its forward pass.
            module.forward = self.autocast()(module.forward)
        self.engine, _ = accelerator.prepare(module, optimizer)
        self.zero = self.engine.optimizer
        self.name = f", ZeRO {self.engine.zero_optimization_stage()}"
        self._initialise(exact)

    def autocast(self) -> torch.autocast:
        """Return the run's precision, for a forward pass outside `forward_backward`."""
        device = self.accelerator.device.type
        return torch.autocast(device, self._half, enabled=self._half is not None)

    def warm_up(self, inputs: MicroBatch, coefficients: Tensor) -> None:
        """Nothing: ZeRO's buckets do not move."""

    def forward_backward(
        self, inputs: MicroBatch, coefficients: Tensor, scale: float, *, last: bool
    ) -> tuple[Tensor, Tensor]:
        """As `Replicated.forward_backward`; ZeRO 2 communicates at every micro-batch."""
        self.engine.set_gradient_accumulation_boundary(last)
        loss, sums = self.engine(*inputs, coefficients)
        self.engine.backward(loss * (scale * self.accelerator.num_processes))
        return loss.detach(), sums

    def clip(self, max_norm: float) -> Tensor:
        """Return the gradients' norm before clipping []; DeepSpeed clips in `step`."""
        norm = self.zero.scaled_global_norm() / self.zero.loss_scale
        return torch.where(norm < 0, torch.inf, norm)  # -1 is DeepSpeed's "not finite"

    def step(self) -> None:
        """Update the weights; fp16 skips where its scaled gradients overflowed."""
        self.engine.step()

    def discard(self) -> None:
        """Drop the step's gradients without an update, as DeepSpeed does after an overflow."""
        self.zero.zero_grad(set_to_none=True)
        self.zero.micro_step_id = -1
        for group in self.zero.averaged_gradients:
            self.zero.averaged_gradients[group] = None
            self.zero.all_grad_tensors[group] = None

    def set_learning_rate(self, rate: float) -> None:
        """For all parameters."""
        for group in self.zero.param_groups:
            group["lr"] = rate

    @property
    def loss_scale(self) -> float | None:
        """fp16's, or None."""
        return float(self.zero.loss_scale) if self._half is torch.float16 else None

    def scaler_state(self) -> dict[str, Any] | None:
        """Return what fp16's loss scale needs to go on: numbers."""
        if self._half is not torch.float16:
            return None
        state = vars(self.zero.loss_scaler)
        return {k: v for k, v in state.items() if isinstance(v, int | float)}

    def load_scaler_state(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `scaler_state`; a run that had none starts with a fresh one."""
        if self._half is torch.float16 and state and "cur_scale" in state:
            vars(self.zero.loss_scaler).update(state)

    def weights(self, student: nn.Module) -> dict[str, Tensor] | None:
        """Return all weights in fp32 by name; every process calls."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self._half is not torch.float16:
            return None  # the student's own are fp32
        return {name: safe_get_full_fp32_param(p) for name, p in student.named_parameters()}

    def moments(self, student: nn.Module) -> dict[str, Tensor]:
        """AdamW's state as `parameter/moment` -> tensor, put together; every process calls."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self._state(0)["step"]
        tensors = {}
        for name, parameter in student.named_parameters():
            for key in MOMENTS:
                tensors[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
            tensors[f"{name}/step"] = step
        return tensors

    def load(self, student: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `moments`; the student's weights are loaded already."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, parameter in student.named_parameters():
            for key in MOMENTS:
                if f"{name}/{key}" in tensors:
                    value = tensors[f"{name}/{key}"].to(parameter.device)
                    safe_set_full_optimizer_state(parameter, value, key)
        # None before the first step: AdamW makes its state there.
        steps = [value for name, value in tensors.items() if name.endswith("/step")]
        for group in range(len(self.zero.optimizer.param_groups) if steps else 0):
            self._state(group)["step"].copy_(steps[0])

    def _state(self, group: int) -> dict[str, Tensor]:
        flat = self.zero.single_partition_of_fp32_groups[group]
        state: dict[str, Tensor] = self.zero.optimizer.state[flat]
        return state

    def _initialise(self, exact: Mapping[str, Tensor]) -> None:
        """Make the moments before the first step, and in fp16 set the `exact` fp32 weights.

        DeepSpeed makes both lazily: the moments at the first step, of the first group alone, and
        the master weights from those it has rounded to fp16.
        """
        from deepspeed.utils import safe_set_full_fp32_param

        for group, flat in enumerate(self.zero.single_partition_of_fp32_groups):
            state = self._state(group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat)
        self.zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.module.named_parameters():
            if name in exact:
                safe_set_full_fp32_param(parameter, exact[name])


Parallel = Replicated | Partitioned


def parallelise(
    accelerator: Accelerator, module: nn.Module, optimizer: AdamW, config: RunConfig
) -> Parallel:
    """Wrap the module as this process was started: DeepSpeed, DDP or alone."""
    if uses_deepspeed():
        return Partitioned(accelerator, module, optimizer, config)
    return Replicated(accelerator, module, optimizer)

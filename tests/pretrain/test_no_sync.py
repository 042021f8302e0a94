"""Check that a micro-step has no device sync, so that the host can run ahead of the GPU.

Without a GPU the micro-step runs on the meta device, which has no values: nearly every sync is an
error there, and `Waiting` finds the rest.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.batches import drawn_batch, terms_of
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.contracts.batch import Batch, send
from pretrain.contracts.terms import SignalTerm, Term, VocabularyTerm, constant
from pretrain.model.distillation import Distillation
from pretrain.objectives.distilbert import DistilBert
from pretrain.tasks.mlm.examples import masked_batch

PAD, CLS = 0, 2
CPU = torch.device("cpu")
OBJECTIVES = {
    "kl everywhere": DistilBert(),
    "kl masked": DistilBert(kl_positions="masked"),
    "no kl": DistilBert(kl=0),
    "no mlm": DistilBert(mlm=0),
}
Make = Callable[..., Distillation]


class WaitError(Exception):
    """Mark an operation at which the host would wait for a GPU."""


class FromNumbers(TorchFunctionMode):
    """Refuse tensors of Python numbers on the device: the host would wait for the copy."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = function in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
        if made and not result.is_cpu:
            raise WaitError(f"{function} on {result.device}")
        return result


class Waiting(TorchDispatchMode):
    """Refuse what the meta device lets pass: masks as indices, copies of unpinned memory."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        masks = [t for t in args[1] if t is not None] if "index_put" in function.name() else []
        if any(mask.dtype == torch.bool for mask in masks):
            raise WaitError(f"{function} by a mask")
        copies = function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        for tensor in tensors if any(not t.is_cpu for t in tensors) else ():
            # A kernel takes a number of no dimension along with its arguments.
            if tensor.is_cpu and (copies or tensor.dim()) and not tensor.is_pinned():
                raise WaitError(f"{function} of the host's memory")
        return result


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the meta device, with autocast off: torch has none for it."""
    answers = {"is_autocast_enabled": False, "get_autocast_dtype": torch.float32}

    def ask(real: Any, answer: Any, *args: Any, **more: Any) -> Any:
        return answer if args[:1] == ("meta",) else real(*args, **more)

    for name, answer in {**answers, "autocast": nullcontext()}.items():
        monkeypatch.setattr(torch, name, partial(ask, getattr(torch, name), answer))
    return torch.device("meta")


@pytest.fixture
def batch(packed_ids: Tensor) -> Batch:
    """Return packed rows on the host, in a loader's types."""
    drawn = drawn_batch(packed_ids)
    slots, labels = drawn.labels.values()
    tensors = drawn.input_ids.to(torch.uint16), slots.short(), labels.int()
    return masked_batch(*tensors, cls_id=CLS, pad_id=PAD)


@pytest.fixture
def make() -> Make:
    """Return a function that builds the trained module, with dropout."""

    def module(device: torch.device, objective: DistilBert, *more: Term) -> Distillation:
        student: Any = tiny_distilbert().train()
        teacher: Any = tiny_bert().requires_grad_(False)
        terms = [*terms_of(objective), *more]
        # A GPU's kernels for half precision; torch's for fp32 lacks a backward pass on meta.
        dtype = torch.bfloat16 if device.type == "meta" else torch.float32
        models = student.to(device, dtype), teacher.to(device, dtype)
        return Distillation(*models, terms, pad_id=PAD)

    return module


def micro_step(module: Distillation, inputs: Batch) -> None:
    """Run forward and backward as `DDP.forward_backward` does."""
    coefficients_T = inputs.input_ids.new_ones(len(module.terms), dtype=torch.float32)
    loss, _ = module(inputs, coefficients_T)
    (loss * 0.25).backward()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_micro_step_has_no_sync(
    objective: DistilBert, make: Make, batch: Batch, meta: torch.device
) -> None:
    module = make(meta, objective)
    inputs = batch.to(meta)
    with FromNumbers(), Waiting():
        micro_step(module, inputs)
    assert all(p.grad is not None and p.grad.is_meta for p in module.student.parameters())


class Reading(torch.autograd.Function):
    """Read a value in the backward pass only."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float(gradients[0].amax())


PLANTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda x, mask: x * x.sum().item(),
    "if": lambda x, mask: x if mask.any() else -x,
    "tolist": lambda x, mask: x * x.flatten().tolist()[0],
    "cpu": lambda x, mask: x * x.cpu().sum(),
    "nonzero": lambda x, mask: x * mask.nonzero().sum(),
    "masked_select": lambda x, mask: x * x.masked_select(mask).sum(),
    "index by a mask": lambda x, mask: x * x[mask].sum(),
    "assignment by a mask": lambda x, mask: x.index_put((mask,), x.sum()),
    "unique": lambda x, mask: x * len(mask.long().unique()),
    "repeat_interleave": lambda x, mask: (
        x * x.repeat_interleave(mask.flatten().long()[:1], 0).sum()
    ),
    "slice": lambda x, mask: x * x[: mask.sum()].sum(),
    "equal": lambda x, mask: x if torch.equal(x, x) else -x,
    "tensor": lambda x, mask: x * torch.tensor([2.0], device=x.device),
    "new_tensor": lambda x, mask: x * x.new_tensor(2.0),
    "array": lambda x, mask: x * torch.ones(1).to(x.device, non_blocking=True),
    "item in the backward pass": lambda x, mask: Reading.apply(x),
}
HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where": lambda x, mask: torch.where(mask, x, 0),
    "masked_fill": lambda x, mask: x.masked_fill(mask, 0.0),
    "a number": lambda x, mask: x * torch.tensor(2.0),
    "new on the device": lambda x, mask: x * torch.ones(1, device=x.device),
}


def with_term(
    values: Callable[[Tensor, Tensor], Tensor], where: Any, make: Make, device: torch.device
) -> Distillation:
    """Return the module with a term of a user, in the chunks of the head or outside."""

    def of(signal: Tensor) -> Tensor:
        return values(signal.mean(-1), signal[..., 0] > 0)

    term: Term
    if where == "logits":
        term = VocabularyTerm("theirs", constant(1.0), "masked", lambda s, t, labels: of(s), False)
    else:
        term = SignalTerm(
            "theirs",
            constant(1.0),
            "tokens",
            lambda s, t, batch, _: (of(s.last_hidden_state) * batch.packing.token_mask).sum(),
            False,
        )
    return make(device, DistilBert(kl_positions="masked"), term)


@pytest.mark.parametrize("where", ["logits", "last_hidden_state"])
@pytest.mark.parametrize("what", PLANTED)
def test_a_term_that_waits_is_found(
    what: str, where: str, make: Make, batch: Batch, meta: torch.device
) -> None:
    micro_step(with_term(PLANTED[what], where, make, CPU), batch.to(CPU))  # nothing else is wrong
    module, inputs = with_term(PLANTED[what], where, make, meta), batch.to(meta)
    found = r"(?i)meta tensor|on meta|nonzero\(\)|host's memory|by a mask"
    with pytest.raises((WaitError, RuntimeError), match=found), FromNumbers(), Waiting():
        micro_step(module, inputs)


@pytest.mark.parametrize("where", ["logits", "last_hidden_state"])
@pytest.mark.parametrize("what", HARMLESS)
def test_a_term_without_a_sync_is_accepted(
    what: str, where: str, make: Make, batch: Batch, meta: torch.device
) -> None:
    module, inputs = with_term(HARMLESS[what], where, make, meta), batch.to(meta)
    with FromNumbers(), Waiting():
        micro_step(module, inputs)


def test_to_converts_a_batch_for_the_model(batch: Batch) -> None:
    assert batch.input_ids.dtype == torch.uint16
    for device in (CPU, torch.device("meta")):
        inputs = batch.to(device)
        assert (inputs.input_ids.dtype, inputs.cu_seqlens.dtype) == (torch.int64, torch.int32)
        tensors = (inputs.input_ids, inputs.cu_seqlens, *inputs.labels.values())
        assert len(tensors) == 4 and all(tensor.device == device for tensor in tensors)
        assert (inputs.max_length, inputs.counts) == (batch.max_length, batch.counts)
    wide = torch.tensor([[65_535, 32_768, 1]])
    narrow = torch.from_numpy(wide.numpy().astype("uint16"))
    assert torch.equal(batch._replace(input_ids=narrow).to(CPU).input_ids, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_host_never_waits_for_a_gpu(
    objective: DistilBert, dtype: torch.dtype, make: Make, batch: Batch
) -> None:
    """Let torch report syncs; it does not report copies of unpinned memory."""
    device = torch.device("cuda")
    module = make(device, objective)

    def step() -> None:
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            micro_step(module, batch.to(device))

    for _ in range(2):  # kernels are loaded and compiled
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with FromNumbers(), Waiting():
            step()
            send(torch.ones(3), device)
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(3, device=device).sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")

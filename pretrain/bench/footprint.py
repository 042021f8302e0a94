"""Count exactly what a training step costs: operations, bytes moved, bytes alive.

A `Counter` sees every operator that torch dispatches, also in backward passes. Unlike timings the
counts are the same on every machine. Under `shapes_only` tensors have no memory, and BERT-base at
64 x 512 takes seconds. It has the device's autocast, which torch's `meta` device lacks. It does not
see the memory inside a kernel, the allocator's rounding, and Triton's kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from math import inf, prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pretrain.bench.measure import Alive, storage_key, tensors_in
from pretrain.kernels import cpu_layers
from pretrain.kernels.attention.dispatch import flash
from pretrain.kernels.head import closed_form, vocabulary
from pretrain.kernels.relations import compare as relations
from pretrain.model.distillation import Distillation

attention = import_module("pretrain.kernels.attention.attend")  # its function has this name, too
aten = torch.ops.aten
Module = TypeVar("Module", bound=nn.Module)

# torch's formulas (a multiplication and an addition are two), also for operators without one.
_LIKE = {
    aten.addmm_: aten.addmm,
    aten.baddbmm_: aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
_FLOPS: dict[Any, Any] = flop_registry | {op: flop_registry[like] for op, like in _LIKE.items()}
if torch.backends.mkldnn.is_available():
    _FLOPS[torch.ops.mkldnn._linear_pointwise] = lambda input, weight, *_, **__: (
        2 * input.numel() * weight.shape[0]
    )
_DEVICE = torch.ops.prim.device.default  # every second call on shapes; it has no cost
_WHOLE: set[Any] = set()  # operators that do not decompose into others
_ALLOCATE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
_OVERWRITE = {aten.copy_, aten.fill_, aten.zero_}  # they do not read what they write
_PICK = {aten.gather, aten.index, aten.index_select, aten.embedding}
_PLACE = {aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_put_, aten.index_copy_}


class Footprint(NamedTuple):
    """Hold the counts of a piece of work."""

    flops: int  # of matrix products and attention
    bytes: int  # every operator's inputs read once and its outputs written once
    peak: int  # most bytes alive at a time, above what was alive before
    largest: int  # bytes of the largest single piece of memory allocated


class Counter(Alive):
    """Count what is done `with Counter() as counter:`, up to reading `counter.footprint`.

    Memory is alive from the operator that returns it until its last tensor or view is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.largest = 0

    @property
    def footprint(self) -> Footprint:
        """Return the counts up to now."""
        return Footprint(self.flops, self.bytes, self.peak, self.largest)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        packet, kwargs = func.overloadpacket, kwargs or {}
        if func not in _WHOLE:
            # Outside autograd (inference mode) composite operators arrive in one piece.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            _WHOLE.add(func)
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)

        # Bytes read and written, unless the operator only returns views or allocates.
        known = {storage_key(tensor) for tensor in inputs}
        new = [tensor for tensor in outputs if storage_key(tensor) not in known]
        if packet not in _ALLOCATE and (new or func._schema.is_mutable):
            most: float = inf  # elements touched of each tensor, where an index picks some
            if packet in _PICK | _PLACE:
                most = max(
                    t.numel() for t in (outputs if packet in _PICK else tensors_in(args[1:]))
                )
            unread = {id(args[0])} if packet in _OVERWRITE else set()
            out = [a.name for a in func._schema.arguments if a.is_out and a.name in kwargs]
            unread |= {id(kwargs[name]) for name in out}
            for t in chain((t for t in inputs if id(t) not in unread), outputs):
                # An expanded dimension has a stride of 0: its elements exist once.
                sizes = zip(t.shape, t.stride(), strict=True)
                elements = prod(n for n, stride in sizes if stride)
                self.bytes += int(min(elements, most)) * t.element_size()

        for tensor in new:
            if storage_key(tensor) not in self.sizes:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        self.add(new)
        return result


class _HostValues(TorchDispatchMode):
    """Compute real values from tensors with values, under a mode that has shapes only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = tensors_in((args, kwargs))
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs or {})
        return func(*args, **kwargs or {})


@contextmanager
def shapes_only(module: Module, device: str = "cpu") -> Iterator[Module]:
    """Yield a copy of a module without values; all tensors made inside are shapes on `device`.

    Compiled code and Triton's kernels are replaced by plain torch. Tensors from outside keep their
    values, and so do results computed from them alone. "cuda" needs a GPU, but none of its memory.
    """
    # Distillation does not register its frozen models.
    frozen = (getattr(module, name, (None,))[0] for name in ("_teacher", "_predecessor"))
    modules: list[nn.Module] = [module, *(model for model in frozen if model is not None)]
    shapes: dict[int, Any] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _HostValues(), torch.compiler.set_stance("force_eager"):
        for t in chain.from_iterable([*m.parameters(), *m.buffers()] for m in modules):
            shape = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            if isinstance(t, nn.Parameter):
                shape = nn.Parameter(shape, t.requires_grad)
            shapes[id(t)] = shape
        twin = copy.deepcopy(module, shapes)
        if isinstance(twin, Distillation):
            twin.backend = "torch"
        yield twin


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Use a GPU's chunks, attention and layers inside the block, which are far fewer operators.

    In fp32, too, where a GPU's is memory-efficient attention: torch 2.13 has no backward pass of
    that on shapes, and the counts are the same.
    """
    changes: list[tuple[Any, str, Any]] = [
        (vocabulary, "CHUNK", {}),
        (closed_form, "_BLOCK", {}),
        (relations, "_ELEMENTS", {**relations._ELEMENTS, "cpu": relations._ELEMENTS["cuda"]}),
        (attention, "usable", lambda *_: [flash]),
        (vocabulary, "have_product", lambda *_: False),
        (cpu_layers.Linear, "forward", nn.Linear.forward),
        (cpu_layers.Dropout, "forward", nn.Dropout.forward),
    ]
    before = [getattr(where, name) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for (where, name, _), value in zip(changes, before, strict=True):
            setattr(where, name, value)

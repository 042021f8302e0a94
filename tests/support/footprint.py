"""Count exactly what a training step costs: operations, bytes moved, bytes alive.

A `Counter` sees every operator that torch dispatches, also in backward passes. Unlike timings the
counts are the same on every machine. Under `shapes_only` tensors have no memory, and BERT-base at
64 x 512 takes seconds. It has the device's autocast, which torch's `meta` device lacks. It does not
see the memory inside a kernel, the allocator's rounding, and Triton's kernels.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from math import inf, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pretrain.contracts.batch import Batch
from pretrain.kernels import cpu_layers
from pretrain.kernels.attention.dispatch import flash
from pretrain.kernels.head import closed_form, vocabulary, vocabulary_losses
from pretrain.kernels.relations import compare as relations
from pretrain.model.distillation import Distillation
from pretrain.model.families import family_of

attention = import_module("pretrain.kernels.attention.dispatch")  # its function has this name, too
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


class Alive(TorchDispatchMode):
    """Count the bytes that are alive on a CPU, as torch's allocator does on a GPU.

    A piece of memory is alive from the operator that returns it until its last tensor or view is
    freed. The memory inside a kernel is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0  # bytes above what was alive before
        self.sizes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        self.add(t for t in tensors_in(result) if storage_key(t) not in known)
        return result

    def add(self, made: Iterable[Tensor]) -> None:
        """Count tensors whose memory an operator has returned."""
        for tensor in made:
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Return what tells pieces of memory apart."""
    return tensor.untyped_storage()._cdata


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


def of_micro_step(
    module: Distillation,
    batch_size: int,
    row_length: int,
    *,
    autocast: torch.dtype | None = None,
    segments: int = 1,
    masked: float = 0.15,
    device: str = "cpu",
) -> Footprint:
    """Count the forward and backward pass of one micro-batch without padding.

    The peak includes the batch and the gradients of all parameters, but not the weights.

    Args:
        module: the module to train, on any device; it is not changed.
        batch_size, row_length: rows, and tokens of each.
        autocast: the half precision, or None.
        segments: documents of a row, all of the same length.
        masked: the share of tokens that is predicted.
        device: where it would run, "cpu" or "cuda"; see `shapes_only`.
    """
    B, L, K = batch_size, row_length, max(1, round(masked * row_length))
    begins = [row * L + i * L // segments for row in range(B) for i in range(segments)]
    cu_seqlens = torch.tensor([*begins, B * L], dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    pairs = B * L * L // segments
    counts: dict[str, int] = {"tokens": B * L, "masked": B * K}
    counts |= {"sequences": B * segments, "pairs": pairs}
    with shapes_only(module, device) as shapes, Counter() as counter:
        ids = torch.zeros(B, L, dtype=torch.int64, device=device)
        slots = torch.zeros(B, K, dtype=torch.int64, device=device)
        labels = {"positions": slots, "masked": slots.clone()}
        documents = np.stack([begins, cu_seqlens.diff().numpy()], axis=1)
        batch = Batch(ids, cu_seqlens, longest, labels, counts, documents)
        with torch.autocast(device, autocast, enabled=autocast is not None):
            loss, _ = shapes(batch, torch.ones(len(shapes.terms), device=device))
        (loss * (1 / batch.counts["tokens"])).backward()
    return counter.footprint


def of_head(
    module: Distillation,
    batch_size: int,
    row_length: int,
    *,
    autocast: torch.dtype | None = None,
    masked: float = 0.15,
    device: str = "cpu",
) -> Footprint:
    """Count the LM head and its losses alone: what a step needs above its encoders.

    The arguments are those of `of_micro_step`. The peak includes the gradients of the student's
    inputs (hidden states and embeddings), but not the inputs themselves.
    """
    tokens, slots = batch_size * row_length, batch_size * max(1, round(masked * row_length))
    terms = module.vocabulary_terms
    rows = tokens if any(term.over == "tokens" for term in terms) else slots
    with shapes_only(module, device) as shapes:
        cast = partial(torch.autocast, device, autocast, enabled=autocast is not None)
        with torch.no_grad(), cast():
            needs_teacher = any(term.needs_teacher for term in terms)
            heads = []  # the head's inputs, as the models hand them over
            for model in (shapes.student, shapes.teacher if needs_teacher else None):
                if model is not None:
                    size = rows, model.config.hidden_size
                    hidden = torch.zeros(size, dtype=model.dtype, device=device)
                    heads.append(family_of(model).projection(model, hidden))
        student, teacher = heads[0], heads[1] if len(heads) > 1 else None
        student.hidden_ND.requires_grad_()
        labels = torch.zeros(slots, dtype=torch.int64, device=device)
        inputs = student, teacher, labels, terms, torch.ones(len(terms), device=device)
        with Counter() as counter:
            with cast():
                loss, _ = vocabulary_losses(*inputs, backend=shapes.backend)
            (loss * (1 / tokens)).backward()
    return counter.footprint

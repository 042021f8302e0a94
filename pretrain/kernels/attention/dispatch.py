"""Attend within the documents of packed rows, with the kernel for the device and the dtype.

It computes torch's `scaled_dot_product_attention` with a block-diagonal mask: documents of a row do
not attend to one another. The walk over the layers (`pretrain/model/families`) calls it in student
and teacher. Given the bounds of the documents it calls the kernel of the device, without a mask of
[rows, length, length].

Every kernel takes (query, key, value [B, H, L, D], cu_seqlens [S + 1], max_length, dropout, scale,
window), returns [B, L, H, D], and needs no sync. All compute what `masked` computes.

Shapes: B rows, H heads, L row length, D head width, N = B * L positions, S documents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.contracts.batch import apart
from pretrain.contracts.packing import Packing, block_diagonal_mask, document_numbers
from pretrain.kernels.attention.cpu import Heads, by_document

Backend = Callable[[Heads, Packing, float, float, int | None], Tensor]
_HALF = (torch.float16, torch.bfloat16)
MULTIPLE = 8  # `flash` and `memory_efficient` need multiples as head width; `attend` pads with 0


def usable(
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    window: int | None = None,
    dropout: float = 0.0,
) -> list[Backend]:
    """Return the kernels that can be used, the fastest first and `masked`, which always can, last.

    Besides `masked`, only `flash` supports a window and, on GPUs, dropout.

    The meta device counts as a GPU of compute capability 9.0.
    """
    if device.type == "cpu":
        return [by_document, masked] if window is None else [masked]
    if device.type == "meta":
        capability = (9, 0)
    elif device.type == "cuda" and torch.version.cuda:
        capability = torch.cuda.get_device_capability(device)
    else:
        return [masked]
    # The kernels' own limits of dtype, head width and compute capability.
    found: list[Backend] = []
    if dtype in _HALF and capability >= (8, 0) and head_width <= 192:
        found.append(flash)
    dtypes = (torch.float32, *_HALF) if capability >= (8, 0) else (torch.float32, torch.float16)
    # With the bounds of documents, torch's forward pass begins every document's and head's draws at
    # the same number and its backward pass does not, so it drops others (torch 2.11 and 2.13).
    if dtype in dtypes and window is None and not dropout:
        found.append(memory_efficient)
    return [*found, masked]


def flash(
    qkv: Heads, packing: Packing, dropout: float, scale: float, window: int | None = None
) -> Tensor:
    """Attend by FlashAttention 2: half precision on GPUs of compute capability 8.0 or more."""
    q_NHD, k_NHD, v_NHD = (_positions(t) for t in qkv)
    cu, most = packing.cu_seqlens, packing.max_length
    output: Tensor = torch.ops.aten._flash_attention_forward(
        *(q_NHD, k_NHD, v_NHD, cu, cu, most, most, dropout, False, False),
        scale=scale,
        window_size_left=window,
        window_size_right=window,
    )[0]
    return output.unflatten(0, qkv[0].shape[::2])


def memory_efficient(
    qkv: Heads, packing: Packing, dropout: float, scale: float, window: int | None = None
) -> Tensor:
    """Attend by the kernels of xFormers, without dropout: older GPUs, and fp32."""
    assert window is None and not dropout  # `usable` leaves this kernel out
    q_1NHD, k_1NHD, v_1NHD = (_positions(t)[None] for t in qkv)
    cu, most = packing.cu_seqlens, packing.max_length
    output: Tensor = torch.ops.aten._efficient_attention_forward(
        *(q_1NHD, k_1NHD, v_1NHD, None, cu, cu, most, most, 0.0, 0, True),
        scale=scale,
    )[0]
    return output[0].unflatten(0, qkv[0].shape[::2])


def masked(
    qkv: Heads, packing: Packing, dropout: float, scale: float, window: int | None = None
) -> Tensor:
    """Attend with a mask: any device and dtype, and the reference for the other kernels."""
    cu, max_length = packing.cu_seqlens, packing.max_length
    rows, heads, length, width = qkv[0].shape
    documents, index = len(cu) - 1, torch.arange(max(length, max_length), device=cu.device)
    near = None
    if window is not None:
        near = (index[:, None] - index).abs() <= window
    if documents * max_length**2 >= rows * length**2:
        # [rows, 1, length, length]: the memory that the other kernels avoid.
        mask = block_diagonal_mask(cu, rows, length)
        mask = mask if near is None else mask & near[:length, :length]
        output = F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, dropout_p=dropout, scale=scale
        )
        return output.transpose(1, 2)
    # Documents apart take less: [documents, 1, 1, longest] without a window.
    index, begins = index[:max_length], cu[:-1].long()
    there = index < cu.diff()[:, None]
    places = torch.where(there, begins[:, None] + index, -1)
    # An empty document has one key, too: a softmax over none would be NaN.
    mask = (there | (index == 0))[:, None, None]
    mask = mask if near is None else mask & near[:max_length, :max_length]
    query, key, value = (
        apart(t.transpose(1, 2).flatten(2), places)[0].unflatten(-1, (heads, width)).transpose(1, 2)
        for t in qkv
    )
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    every = torch.arange(rows * length, device=cu.device)
    numbers = document_numbers(cu, every)
    slots = numbers * max_length + every - begins[numbers]
    return output.transpose(1, 2).flatten(0, 1).index_select(0, slots).unflatten(0, (rows, length))


def _positions(t_BHLD: Tensor) -> Tensor:
    """Return [N, H, D]; this copies nothing if a model split the heads off its width."""
    return t_BHLD.transpose(1, 2).flatten(0, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    num_heads: int,
    dropout: float,
    window: int | None = None,
) -> Tensor:
    """Attend with all heads; query, key, value and the result are [B, L, H * D].

    With a `window` a query attends to keys at a distance of at most so many tokens.
    """
    device, split = query.device, (*query.shape[:2], num_heads, -1)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        # As sdpa does: compute in the half precision of the autocast region.
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = (
            t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
        )
    query, key, value = (t.view(split) for t in (query, key, value))
    width = query.shape[-1]
    # Chosen at each call, because autocast decides the dtype.
    kernel = usable(device, query.dtype, width, window, dropout)[0]
    if (missing := -width % MULTIPLE) and kernel in (flash, memory_efficient):
        # Numbers of 0 change no product of query and key, and give outputs of 0.
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    qkv = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output = kernel(qkv, packing, dropout, width**-0.5, window)
    return output[..., :width].flatten(2)

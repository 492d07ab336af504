"""Which of attention's kernels CUDA runs, and what each allocates for itself. Runs in the worker's process.

The choice is that of `ATen/native/transformers/cuda/sdp_utils.cpp`; the sizes are those of `flash_attn/flash_api.cpp`
and `mem_eff_attention/kernel_backward.h` beside it. Queries, keys and values are (batch, heads, rows, width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.memory.allocator import rounded
from gpumagic.worker.fake import backend
from gpumagic.worker.fake.backend import OURS
from gpumagic.worker.fake.calls import Given
from gpumagic.worker.fake.reductions import ceil_div

_HALVES = {torch.float16, torch.bfloat16}
_AMPERE = 8
"""The first major compute capability that runs the flash kernels, and bfloat16 in the memory-efficient ones."""
_FLASH_WIDEST = 256
_FLASH_ROWS = 64
"""Queries that one block of the flash kernel's forward pass takes."""
_FLASH_ROWS_BACKWARD = 128
"""What the backward pass rounds the number of queries up to."""
_MOST_SPLITS = 128
_FULL_ENOUGH = 0.8
"""From this share of the GPU on, blocks of whole rows are not split."""
_NEARLY_BEST = 0.85
"""The fewest splits are taken that fill the GPU to this share of the best."""
_ROW_ALIGNMENT = 16
"""Of this many bytes a row of an operand has to be a multiple, for the memory-efficient kernel to take it."""
_MASK_ALIGNMENT = 16
"""To a multiple of this many elements the rows of a mask are padded, so that the same kernel can read it."""


def attend(
    composite: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute attention with the kernel that CUDA would choose: flash, memory-efficient, or none of its own.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`, which is also the first: as a
    composite of other operators, it computes what no fused kernel takes.

    Raises:
        RuntimeError: the operands' dtypes differ.
    """
    if torch.is_autocast_enabled(OURS):
        query = _autocast(query)
        key = _autocast(key)
        value = _autocast(value)
    dtypes = {query.dtype, key.dtype, value.dtype}
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        dtypes.add(attn_mask.dtype)
    if len(dtypes) > 1:
        raise RuntimeError(
            "Expected query, key, value and a mask that is not of truths to have the same dtype"
        )
    if _takes_flash(query, key, value, attn_mask, is_causal):
        return _attend_flash(query, key, value, dropout_p, is_causal, scale)
    if _takes_efficient(query, value, enable_gqa):
        return _attend_efficient(
            query, key, value, attn_mask, dropout_p, is_causal, scale
        )
    return composite(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype(OURS))


def _takes_flash(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool
) -> bool:
    if backend.gpu.major < _AMPERE or query.dtype not in _HALVES:
        return False
    if query.dim() != 4 or attn_mask is not None:
        return False
    width = query.shape[-1]
    if width != value.shape[-1] or width > _FLASH_WIDEST:
        return False
    is_square = query.shape[-2] == key.shape[-2]
    return is_square or not is_causal


def _attend_flash(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    """Pad the operands to a width that the kernel takes, and cut its result to their own."""
    width = query.shape[-1]
    missing = -width % 8
    if missing:
        pad = torch.nn.functional.pad
        query = pad(query, (0, missing))
        key = pad(key, (0, missing))
        value = pad(value, (0, missing))
    if scale is None:
        scale = width**-0.5  # the default of the padded width would be another
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )
    return result[0][..., :width]


def _takes_efficient(query: Any, value: Any, enable_gqa: bool) -> bool:
    if query.dim() != 4 or enable_gqa:
        return False
    if query.dtype == torch.bfloat16 and backend.gpu.major < _AMPERE:
        return False
    for tensor in (query, value):
        row_bytes = tensor.shape[-1] * tensor.itemsize
        if row_bytes % _ROW_ALIGNMENT:
            return False
    return True


def _attend_efficient(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    keeps_sums = torch.is_grad_enabled() and needs_gradient
    bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
    options: dict[str, Any] = {}
    if scale is not None:
        options["scale"] = scale
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, keeps_sums, dropout_p, is_causal, **options
    )
    return result[0]


def _as_bias(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask as the kernel takes it: numbers, in rows whose beginnings are aligned, one for each head."""
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype)
        mask = bias.masked_fill_(mask.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    missing = -columns % _MASK_ALIGNMENT
    if missing:
        padded = torch.nn.functional.pad(mask, (0, missing))
        mask = padded[..., :columns]
    batch, heads, rows, _ = query.shape
    return mask.expand(batch, heads, rows, key.shape[2])


# ---- What the kernels allocate


def _copied(*operands: torch.Tensor) -> list[int]:
    """Return the bytes of those operands that are copied, as the kernels take the rows before the heads."""
    return [
        operand.nbytes
        for operand in operands
        if not operand.transpose(1, 2).is_contiguous()
    ]


def flash(given: Given) -> list[int]:
    """Return what the flash kernel allocates in a forward pass: nothing unless several blocks share a row's keys.

    Each of those blocks leaves its sum and its part of the result for every query, in float32.
    """
    if given["dropout_p"]:
        return []
    batch, heads, rows, width = given["query"].shape
    _, key_heads, columns, _ = given["key"].shape
    if (
        rows == 1 and heads > key_heads
    ):  # the queries that share a head of keys become its rows
        rows = heads // key_heads
        heads = key_heads
    row_blocks = batch * heads * ceil_div(rows, _FLASH_ROWS)
    key_blocks = ceil_div(columns, _flash_columns(width))
    splits = _splits(row_blocks, key_blocks, 2 * backend.gpu.multiprocessors)
    if splits == 1:
        return []
    sums = 4 * splits * batch * heads * rows
    return [sums, sums * _flash_width(width)]


def _flash_columns(width: int) -> int:
    """Return how many keys a block of the flash kernel takes at a time."""
    if width <= 64:
        return 256
    return 128 if width <= 128 else 64


def _flash_width(width: int) -> int:
    """Return the width that the flash kernel computes in."""
    return rounded(width, 32 if width <= 128 else 64)


def _splits(row_blocks: int, key_blocks: int, room: int) -> int:
    """Return into how many parts the keys are split: the fewest that fill the GPU nearly as well as any.

    Args:
        row_blocks: blocks without a split.
        key_blocks: how many blocks of keys each of them goes through.
        room: how many blocks the GPU runs at once.
    """
    if row_blocks >= _FULL_ENOUGH * room:
        return 1
    filled: dict[int, float] = {}
    for splits in range(1, min(_MOST_SPLITS, room, key_blocks) + 1):
        is_shorter = splits == 1 or (
            ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1)
        )
        if is_shorter:
            waves = row_blocks * splits / room
            filled[splits] = waves / math.ceil(waves)
    enough = _NEARLY_BEST * max(filled.values())
    return min(splits for splits, share in filled.items() if share >= enough)


def flash_backward(given: Given) -> list[int]:
    """Return what the flash kernel allocates in a backward pass.

    These are copies of operands, a sum for each query, the queries' gradient in float32, and where heads share keys,
    the gradients of keys and values of each head.
    """
    query = given["query"]
    key = given["key"]
    batch, heads, rows, width = query.shape
    _, key_heads, columns, _ = key.shape
    allocated = _copied(given["grad_out"], given["out"])
    sums = 4 * batch * heads * rounded(rows, _FLASH_ROWS_BACKWARD)
    allocated += [sums, sums * _flash_width(width)]
    if heads != key_heads:
        of_each_head = batch * columns * heads * width * key.itemsize
        allocated += [of_each_head, of_each_head]
    return allocated


def efficient_backward(given: Given) -> list[int]:
    """Return what the memory-efficient kernel allocates in a backward pass.

    First it may copy the gradient. Then it multiplies gradient and result, and adds the products up for each query,
    in float32; when the products are gone, it allocates the gradients that its blocks accumulate. The larger counts.
    """
    query = given["query"]
    batch, heads, rows, _ = query.shape
    sums = 4 * batch * heads * rows
    products = []
    if query.dtype not in _HALVES:
        result = given["out"]
        products = [4 * result.numel(), sums, sums]
    accumulated = [sums, batch * heads * _efficient_accumulators(given)]
    larger = max(products, accumulated, key=sum)
    return _copied(given["grad_out_"]) + larger


def _efficient_accumulators(given: Given) -> int:
    """Return the bytes in which the memory-efficient kernel accumulates the gradients of one head.

    The kernel's blocks are as large as the GPU's shared memory lets them be (`kernel_backward.h`).
    """
    query = given["query"]
    batch, heads, rows, width = query.shape
    columns = given["key"].shape[2]
    value_width = given["value"].shape[3]
    widest = max(width, value_width)
    shared_kib = backend.gpu.shared_per_block_optin >> 10
    is_half = query.dtype in _HALVES
    is_roomy = shared_kib >= 128

    widest_in_registers = 128 if is_roomy or shared_kib <= 64 else 96
    keeps_keys = not is_half or widest <= widest_in_registers
    takes_wide_blocks = is_roomy or (is_half and (keeps_keys or widest > 128))
    block_rows = 128 if takes_wide_blocks and widest > 64 else 64
    block_width = 128 if is_half and is_roomy and 64 < widest <= 128 else 64

    blocks = ceil_div(rows, block_rows) * ceil_div(width, block_width)
    nbytes = blocks * (4 * block_rows * block_width + 16)
    if (
        not keeps_keys
    ):  # the gradients of keys and values are then accumulated in memory, too
        splits = min(ceil_div(columns, 64), 200 // (batch * heads))
        splits = max(1, splits)
        for padded in (rounded(width, 128), rounded(value_width, 128)):
            nbytes += splits * 4 * 64 * padded
    return nbytes

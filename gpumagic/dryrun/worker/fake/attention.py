"""Attention as CUDA runs it: which kernel, and what that allocates besides its results.

The choice is that of `ATen/native/transformers/cuda/sdp_utils.cpp`. The memory is that of flash attention
(`flash_attn/flash_api.cpp`) and of the memory-efficient kernels (`mem_eff_attention/kernel_backward.h`) on an A100:
a backward pass adds up the queries' gradient in tiles of float32, and few heads with long keys are split among
processors, which leave their part results in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.dryrun.worker.fake.backend import OURS
from gpumagic.dryrun.worker.fake.calls import Call

PROCESSORS = 108
"""Of an A100, which is what an imagined device is."""
_HALF = (torch.float16, torch.bfloat16)
_LOCK = 16
"""Bytes before each tile: a lock, a counter, and room that aligns it."""


def attention(
    composite: Callable[..., Any], query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Return attention's result from the kernel that CUDA would choose: flash, or the memory-efficient one.

    Its choice is in `ATen/native/transformers/cuda/sdp_utils.cpp`.
    """
    if torch.is_autocast_enabled(OURS):
        dtype = torch.get_autocast_dtype(OURS)
        query, key, value = (each.to(dtype) if each.is_floating_point() else each for each in (query, key, value))
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    width = query.shape[-1]
    if query.dim() == 4 and _takes_flash(query, key, attn_mask, is_causal):
        options.setdefault("scale", width**-0.5)  # which is not that of what is padded
        parts = [torch.nn.functional.pad(each, (0, -width % 8)) if width % 8 else each for each in (query, key, value)]
        return torch.ops.aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, **options)[0][
            ..., :width
        ]
    if query.dim() == 4 and not enable_gqa and width * query.itemsize % 16 == 0:
        wanted = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        mask = _additive(attn_mask, query, key)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, wanted, dropout_p, is_causal, **options
        )[0]
    return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _takes_flash(query: Any, key: Any, mask: Any, is_causal: bool) -> bool:
    is_half = query.dtype in _HALF
    same = query.shape[-2] == key.shape[-2]
    return is_half and mask is None and query.shape[-1] <= 256 and (same or not is_causal)


def _additive(mask: Any, query: Any, key: Any) -> Any:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def scratch(call: Call, name: str) -> list[int]:
    """Return the bytes that a kernel of attention's allocates for itself; nothing for other operators.

    Args:
        call: the call.
        name: the operator's, without its overload.
    """
    rule = _RULES.get(name)
    return [] if rule is None else rule(**{argument.name: value for argument, value in call.named()})


def _efficient(query: Any, **_: Any) -> list[int]:
    """Wide heads of half precision are added up in float32 first."""
    return [4 * query.numel()] if query.dtype in _HALF and query.shape[-1] > 128 else []


def _efficient_backward(query: Any, key: Any, **_: Any) -> list[int]:
    batch, heads, length, width = query.shape
    is_half, is_narrow = query.dtype in _HALF, width <= 64
    rows, columns = 64 if is_narrow else 128, 128 if is_half and 64 < width <= 128 else 64
    tiles = -(-length // rows) * -(-width // columns) * (4 * rows * columns + _LOCK)
    if is_half and width > 128:  # so are the gradients of keys and values, of each part that the keys are split into
        parts = max(1, min(-(-key.shape[-2] // 64), 200 // (batch * heads)))
        tiles += 2 * 4 * parts * 64 * _up(width, 128)
    workspace, delta = batch * heads * tiles, 4 * batch * heads * length
    product = 4 * query.numel()
    if not is_half and product + delta > workspace:
        return [delta, product, delta]  # of the product of two tensors the rows are summed, before there are tiles
    return [delta, workspace]


def _flash(query: Any, key: Any, dropout_p: float = 0.0, **_: Any) -> list[int]:
    batch, heads, length, width = query.shape
    if length == 1 and heads > key.shape[1] and not dropout_p:  # one token: its heads are the rows of the keys'
        heads, length = key.shape[1], heads // key.shape[1]
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * -(-length // 64)
    splits = 1 if dropout_p else _splits(blocks, 2 * PROCESSORS, -(-key.shape[-2] // block))
    rows = 4 * splits * batch * heads * length
    return [] if splits == 1 else [rows, rows * _padded(width)]


def _flash_backward(grad_out: Any, query: Any, key: Any, out: Any, **_: Any) -> list[int]:
    batch, heads, length, width = query.shape
    copied = [each.nbytes for each in (grad_out, out) if not each.transpose(1, 2).is_contiguous()]
    rows = 4 * batch * heads * _up(length, 128)
    spread = query.itemsize * batch * heads * key.shape[-2] * width
    return [*copied, rows, rows * _padded(width), *([spread] * 2 if key.shape[1] != heads else ())]


_RULES: dict[str, Callable[..., list[int]]] = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}


def _splits(blocks: int, processors: int, most: int) -> int:
    """Return into how many parts keys are split, as `num_splits_heuristic` does."""
    if blocks >= 0.8 * processors:
        return 1
    choices = [
        splits for splits in range(1, min(128, processors, most) + 1)
        if splits == 1 or -(-most // splits) != -(-most // (splits - 1))
    ]  # fmt: skip
    waves = {splits: blocks * splits / processors for splits in choices}
    efficiency = {splits: each / math.ceil(each) for splits, each in waves.items()}
    return next(splits for splits in choices if efficiency[splits] >= 0.85 * max(efficiency.values()))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _padded(width: int) -> int:
    """Return how wide a head is in flash attention's own memory."""
    return _up(width, 32) if width <= 128 else _up(width, 64)

"""Which of attention's kernels CUDA runs, and what each takes for itself.

The choice is that of `ATen/native/transformers/cuda/sdp_utils.cpp`; the sizes are those of `flash_attn/flash_api.cpp`
and `mem_eff_attention/kernel_backward.h` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.worker.fake import backend
from gpumagic.worker.fake.backend import OURS

_HALVES = {torch.float16, torch.bfloat16}
_FLASH_ROWS, _MOST_SPLITS = 64, 128


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
    """Return attention's result from the kernel that CUDA would choose: flash, or the memory-efficient one."""
    if torch.is_autocast_enabled(OURS):
        dtype = torch.get_autocast_dtype(OURS)
        query, key, value = (
            each.to(dtype) if each.is_floating_point() else each for each in (query, key, value)
        )
    masks = set() if attn_mask is None or attn_mask.dtype == torch.bool else {attn_mask.dtype}
    if len({query.dtype, key.dtype, value.dtype} | masks) > 1:
        raise RuntimeError(
            "Expected query, key, value and a mask that is not of truths to have the same dtype"
        )
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    width, is_square = query.shape[-1], query.shape[-2] == key.shape[-2]
    is_flash = backend.gpu.major >= 8 and query.dtype in _HALVES and width == value.shape[-1] <= 256
    if query.dim() == 4 and is_flash and attn_mask is None and (is_square or not is_causal):
        options.setdefault("scale", width**-0.5)  # which is not that of what is padded
        parts = [
            torch.nn.functional.pad(each, (0, -width % 8)) if width % 8 else each
            for each in (query, key, value)
        ]
        return torch.ops.aten._scaled_dot_product_flash_attention(
            *parts, dropout_p, is_causal, False, **options
        )[0][..., :width]
    widths = {width * query.itemsize % 16, value.shape[-1] * query.itemsize % 16}
    is_taken = backend.gpu.major >= 8 or query.dtype != torch.bfloat16
    if query.dim() == 4 and is_taken and not enable_gqa and widths == {0}:
        wanted = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
                mask.logical_not(), float("-inf")
            )
        if mask is not None:
            columns = mask.shape[-1]
            if columns % 16:  # its rows have to begin where the kernel can read them
                mask = torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, wanted, dropout_p, is_causal, **options
        )[0]
    return composite(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def flash(given: dict[str, Any]) -> list[int]:
    """Return the bytes of what the flash kernel's blocks leave, where they share the keys of a row."""
    (batch, heads, rows, width), (_, groups, columns, _) = given["query"].shape, given["key"].shape
    if given["dropout_p"]:
        return []
    if rows == 1 and heads > groups:  # the heads of a group are then its rows
        heads, rows = groups, heads // groups
    tiles = -(-columns // (256 if width <= 64 else 128 if width <= 128 else 64))
    splits = _splits(
        batch * heads * -(-rows // _FLASH_ROWS), tiles, 2 * backend.gpu.multiprocessors
    )
    sums = 4 * splits * batch * heads * rows
    return [sums, sums * _flash_width(width)] if splits > 1 else []


def _splits(blocks: int, tiles: int, room: int) -> int:
    """Return among how many blocks the keys are divided: the fewest that fill the GPU nearly as well as any."""
    if blocks >= 0.8 * room:
        return 1
    best: dict[int, float] = {}
    for splits in range(1, min(_MOST_SPLITS, room, tiles) + 1):
        if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1)):
            waves = blocks * splits / room
            best[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in best.items() if share >= 0.85 * max(best.values()))


def _flash_width(width: int) -> int:
    return -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64


def flash_backward(given: dict[str, Any]) -> list[int]:
    """Return the bytes of copied operands, of sums for each row, and of gradients in float32 or of each head."""
    (batch, heads, rows, width), (_, groups, columns, _) = given["query"].shape, given["key"].shape
    copied = [
        each.nbytes
        for each in (given["grad_out"], given["out"])
        if not each.transpose(1, 2).is_contiguous()
    ]
    sums = 4 * batch * heads * -(-rows // 128) * 128
    expanded = (
        [batch * columns * heads * width * given["key"].itemsize] * 2 if heads != groups else []
    )
    return [*copied, sums, sums * _flash_width(width), *expanded]


def efficient_backward(given: dict[str, Any]) -> list[int]:
    """Return the bytes of a copied gradient, of its product with the result, and of the kernel's own gradients."""
    query, out, gradient = given["query"], given["out"], given["grad_out_"]
    (batch, heads, rows, width), columns = query.shape, given["key"].shape[2]
    copied = [] if gradient.transpose(1, 2).is_contiguous() else [gradient.nbytes]
    is_half, sums = query.dtype in _HALVES, 4 * batch * heads * rows
    widths, shared = (width, given["value"].shape[3]), backend.gpu.shared_per_block_optin >> 10
    widest, is_roomy = max(widths), shared >= 128
    keeps_keys = not is_half or widest <= (128 if is_roomy or shared <= 64 else 96)
    is_small = widest <= 64 or not (is_roomy or (is_half and (keeps_keys or widest > 128)))
    block, tile = (
        64 if is_small else 128,
        128 if is_half and is_roomy and 64 < widest <= 128 else 64,
    )
    own = -(-rows // block) * -(-width // tile) * (4 * block * tile + 16)
    if not keeps_keys:  # in a block's own memory
        splits = max(1, min(-(-columns // 64), 200 // (batch * heads)))
        own += sum(splits * 4 * 64 * -(-each // 128) * 128 for each in widths)
    products = [] if is_half else [4 * out.numel(), sums, sums]
    return copied + max(products, [sums, batch * heads * own], key=sum)

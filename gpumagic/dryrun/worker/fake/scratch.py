"""What CUDA's kernels allocate besides their results, by torch's own rules; and which of attention's kernels CUDA runs.

A sum over many rows is split among blocks of threads, which leave their part sums in memory, and a sum in a wider type
copies what it sums (`ATen/native/cuda/Reduce.cuh`). A matrix whose rows do not lie as cuBLAS takes them is copied, such
as an expanded gradient (`ATen/native/cuda/Blas.cpp`); norms, softmax, pooling and resizing copy what is not contiguous.
With small models and large batches that is most of what a backward pass holds for a moment.

The choice of attention's kernel is that of `ATen/native/transformers/cuda/sdp_utils.cpp`. What its kernels take for
themselves is left out, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.dryrun.worker.fake.backend import OURS, PROCESSORS
from gpumagic.dryrun.worker.fake.calls import Call

THREADS_A_PROCESSOR = 2048
_VECTOR, _MOST_THREADS, _WARP = 4, 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""A thread's, between which the input is divided among blocks."""
_WIDEN = frozenset({"sum", "prod", "mean", "nansum"})
_PARTS = {
    **dict.fromkeys(("sum", "prod", "mean", "nansum", "norm", "linalg_vector_norm"), "sum"),
    **dict.fromkeys(("amax", "amin"), "value"),
    **dict.fromkeys(("all", "any"), "truth"),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), "place"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), "moments"),
}
"""What a block leaves in memory, by operator."""
_CONTIGUOUS = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), ("input",)),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), ("grad_out", "input")),
    **dict.fromkeys(("_softmax", "_log_softmax"), ("self",)),
    "_softmax_backward_data": (), "_log_softmax_backward_data": ("grad_output", "output"),
    "native_batch_norm_backward": ("grad_out",),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward",
                     "max_pool2d_with_indices_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward",
                     "upsample_bicubic2d_backward"), ("grad_output",)),
}  # fmt: skip
"""Operands that kernels copy where they are not contiguous."""
_LOSSES = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"})
"""What is computed for each element, and then reduced."""
_ANY_FORMAT = ("2d", "batch_norm")
"""What the names have of kernels that also take images with their channels last."""
UNKNOWN = (
    "linalg_", "_linalg", "cholesky", "_cholesky", "_fft", "geqrf", "ormqr", "triangular_solve", "lu_", "sort", "msort",
    "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "unique", "_unique", "multinomial", "randperm",
    "embedding_dense_backward", "_embedding_bag", "_index_put_impl", "index_put", "cumsum", "cumprod", "logcumsumexp",
    "cummax", "cummin", "histc", "bincount", "_histogramdd", "_cdist", "_ctc_loss", "_cudnn", "_thnn",
    "_scaled_dot_product", "scatter_reduce",
)  # fmt: skip
"""How operators begin whose kernels sort, scan, attend or call a library, with memory of their own."""


def scratch(call: Call) -> list[int]:
    """Return the bytes that an operator's kernel allocates for itself on CUDA, in order; nothing for most."""
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    given = {argument.name: value for argument, value in call.named()}
    if name in _CONTIGUOUS:
        return _copied(name, given)
    if name in _LOSSES and given.get("reduction", 1):
        losses = _losses(given)
        return [losses.nbytes, *_reducing("sum", {"self": losses})]
    if name in {"native_group_norm", "native_group_norm_backward"}:
        return _of_groups(given, name.endswith("backward"))
    if name not in {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation"}:
        return _reducing(name, given)
    factors = {"mat1", "mat2", "batch1", "batch2", *(["self"] if name in {"mm", "bmm"} else [])}
    return [
        each.numel() * each.itemsize
        for argument, each in call.tensors()
        if argument.name in factors and _is_copied(each)
    ]


def _copied(name: str, given: dict[str, Any]) -> list[int]:
    if name == "_softmax_backward_data":  # it works on the gradient times the output, laid out as either
        gradient, output = given["grad_output"], given["output"]
        is_turned = not gradient.is_contiguous() and 0 not in gradient.stride()
        return [output.nbytes] * (1 + is_turned)
    if name == "native_batch_norm_backward" and not (given["train"] and _is_of_cudnn(given)):
        return []
    takes_any = any(each in name for each in _ANY_FORMAT)
    operands = (given[argument] for argument in _CONTIGUOUS[name])
    return [each.nbytes for each in operands if not _is_contiguous(each, takes_any)]


def as_left(call: Call, returned: Any) -> Any:
    """Return an operator's results as CUDA's kernel leaves them, where torch's meta kernel tells another storage.

    Args:
        call: the call.
        returned: what the meta kernel returned.
    """
    name = call.op._schema.name.removeprefix("aten::")
    given = {argument.name: value for argument, value in call.named()}
    if name == "native_batch_norm" and not given["training"] and _is_of_cudnn(given):
        return returned[0], returned[1].new_empty(0), returned[2].new_empty(0)
    if name == "log_sigmoid_forward":
        return returned[0], returned[1].new_empty(0)
    if name in {"mse_loss", "smooth_l1_loss"} and given.get("reduction", 1):
        return _losses(given).resize_(())  # the mean lies where the loss of each element was to be
    return returned


def _losses(given: dict[str, Any]) -> torch.Tensor:
    """Return the loss of each element, on torch's meta device."""
    one, other = given["self"], given["target"]
    shape = torch.broadcast_shapes(one.shape, other.shape)
    return torch.empty(shape, dtype=torch.result_type(one, other), device="meta")


def _is_of_cudnn(given: dict[str, Any]) -> bool:
    """Return whether cuDNN computes a norm of batches."""
    weight = given["weight"]
    return weight is not None and weight.dtype == torch.float32


def _is_contiguous(operand: torch.Tensor, takes_any_format: bool) -> bool:
    is_image = takes_any_format and operand.dim() == 4
    return operand.is_contiguous() or (is_image and operand.is_contiguous(memory_format=torch.channels_last))


def _of_groups(given: dict[str, Any], is_backward: bool) -> list[int]:
    """Return what a norm of groups keeps of each channel and group (`ATen/native/cuda/group_norm_kernel.cu`)."""
    dtype = given["input"].dtype
    wide = max(4, dtype.itemsize)
    channels, groups = given["N"] * given["C"] * wide, given["N"] * given["group"] * wide
    scales = given["HxW"] > 1 and any(given.get(each) is not None for each in ("weight", "bias"))
    if is_backward:
        of_input = [groups, groups, *([channels] if scales else [])] if given["output_mask"][0] else []
        return [channels, channels, *of_input]
    return [*([groups, groups] if dtype.itemsize < wide else []), *([channels, channels] if scales else [])]


def _is_copied(matrix: torch.Tensor) -> bool:
    """Return whether neither rows nor columns lie one after the other."""
    if not matrix.numel() or matrix.is_contiguous():
        return False
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    return not ((down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns)))


def _reducing(name: str, given: dict[str, Any]) -> list[int]:
    whole = given.get("self")
    if name not in _PARTS or not isinstance(whole, torch.Tensor) or not whole.numel():
        return []
    part = "value" if _PARTS[name] == "place" and name in {"max", "min"} and "dim" not in given else _PARTS[name]
    dtype = _summed_in(name, whole.dtype, given.get("dtype"))
    wide = max(4, dtype.itemsize) if dtype.is_floating_point or dtype.is_complex else dtype.itemsize
    sizes = {"sum": wide, "value": dtype.itemsize, "truth": 1, "place": 16, "moments": 4 * wide}
    copied = [whole.numel() * dtype.itemsize] if dtype != whole.dtype else []
    dims = given.get("dim")
    dims = {each % max(1, whole.dim()) for each in ([dims] if isinstance(dims, int) else dims or range(whole.dim()))}
    steps = [math.prod(whole.shape[each + 1 :]) for each in range(whole.dim())] if copied else whole.stride()
    walk = list(zip(whole.shape, steps, strict=True))
    reduced = _merged(sorted((walk[each] for each in dims if walk), key=lambda pair: pair[1]))
    kept = _merged([walk[each] for each in reversed(range(len(walk))) if each not in dims])
    return copied + _part_sums(reduced, kept, sizes[part], 0 if copied else whole.storage_offset())


def _summed_in(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type that the kernel reads; it takes half precision into a sum of float32 as it is."""
    if name not in _WIDEN:
        return dtype
    if wanted is None:
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        return torch.int64 if is_whole and name != "mean" else dtype
    return dtype if dtype.itemsize == 2 and wanted == torch.float32 else wanted


Walk = list[tuple[int, int]]
"""How a kernel goes through dimensions, the innermost first: extents and strides."""


def _merged(pairs: Walk) -> Walk:
    """Return a walk with neighbours that lie one after the other as one."""
    merged: Walk = []
    for extent, step in pairs:
        if merged and merged[-1][0] * merged[-1][1] == step:
            merged[-1] = merged[-1][0] * extent, merged[-1][1]
        elif extent != 1:
            merged.append((extent, step))
    return merged


def _part_sums(reduced: Walk, kept: Walk, part: int, offset: int) -> list[int]:
    """Return the bytes of the part sums and of the blocks' counters; nothing where one block does it all.

    It is `setReduceConfig`'s choice of blocks for an input that begins at an offset. A part has so many bytes.
    """
    inputs, outputs = (math.prod(extent for extent, _ in walk) for walk in (reduced, kept))
    along = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
    across, down = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    """How many neighbouring outputs a thread works on."""
    if along:
        if reduced and reduced[0][1] == 1 and across >= 128 and len(reduced) == 1:
            across //= _VECTOR
    elif kept[0][1] == 1:
        vector = math.gcd(_VECTOR, offset, kept[0][0], *(step for _, step in (*reduced, *kept[1:])))
        across //= vector
    width, height = _block(across, down, _MOST_THREADS // vector)
    values = -(-inputs // width) if along else inputs
    if values < min(height * 16, _MOST_VALUES):
        return []
    values = -(-values // height)
    grid = -(-(outputs // vector) // (1 if along else width))
    target = PROCESSORS * (THREADS_A_PROCESSOR // (width * height))
    if values < _MOST_VALUES or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return [part * outputs * blocks * (1 if along else width * vector), 4 * grid] if blocks > 1 else []


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Return the width and height of a block of threads."""
    width, height = (most if each >= most else 1 << max(0, each.bit_length() - 1) for each in (across, down))
    rows = min(height, most // min(width, _WARP))
    return min(width, most // rows), rows


def attention(
    composite: Callable[..., Any], query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Return attention's result from the kernel that CUDA would choose: flash, or the memory-efficient one."""
    if torch.is_autocast_enabled(OURS):
        dtype = torch.get_autocast_dtype(OURS)
        query, key, value = (each.to(dtype) if each.is_floating_point() else each for each in (query, key, value))
    masks = set() if attn_mask is None or attn_mask.dtype == torch.bool else {attn_mask.dtype}
    if len({query.dtype, key.dtype, value.dtype} | masks) > 1:
        raise RuntimeError("Expected query, key, value and a mask that is not of truths to have the same dtype")
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    width, is_square = query.shape[-1], query.shape[-2] == key.shape[-2]
    is_half = query.dtype in {torch.float16, torch.bfloat16}
    if query.dim() == 4 and is_half and attn_mask is None and width <= 256 and (is_square or not is_causal):
        options.setdefault("scale", width**-0.5)  # which is not that of what is padded
        parts = [torch.nn.functional.pad(each, (0, -width % 8)) if width % 8 else each for each in (query, key, value)]
        return torch.ops.aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, **options)[0][
            ..., :width
        ]
    if query.dim() == 4 and not enable_gqa and width * query.itemsize % 16 == 0:
        wanted = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        if mask is not None:
            mask = mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, wanted, dropout_p, is_causal, **options
        )[0]
    return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

"""What CUDA's kernels allocate besides their results, by torch's own rules; and which of attention's kernels CUDA runs.

A sum over many rows is split among blocks of threads, which leave their part sums in memory, and a sum in a wider type
copies what it sums (`ATen/native/cuda/Reduce.cuh`). A matrix whose rows do not lie as cuBLAS takes them is copied, such
as an expanded gradient (`ATen/native/cuda/Blas.cpp`). With small models and large batches that is most of what a
backward pass holds for a moment.

The choice of attention's kernel is that of `ATen/native/transformers/cuda/sdp_utils.cpp`. What its kernels take for
themselves is left out, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.dryrun.worker.fake.backend import OURS, PROCESSORS
from gpumagic.dryrun.worker.fake.calls import Call

THREADS_A_PROCESSOR = 2048
_HALF = (torch.float16, torch.bfloat16)
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
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation"})
_FACTORS = frozenset({"mat1", "mat2", "batch1", "batch2"})
_UNKNOWN = (
    "linalg_", "_linalg", "cholesky", "_cholesky", "_fft", "geqrf", "ormqr", "triangular_solve", "lu_", "sort", "msort",
    "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "unique", "_unique", "multinomial", "randperm",
    "embedding_dense_backward", "_embedding_bag", "_index_put_impl", "index_put", "cumsum", "cumprod", "logcumsumexp",
    "cummax", "cummin", "histc", "bincount", "_histogramdd", "_cdist", "_ctc_loss", "_cudnn", "_thnn",
    "_scaled_dot_product",
)  # fmt: skip
"""How operators begin whose kernels sort, scan, attend or call a library, with memory of their own."""


def without_rule(names: Iterable[str]) -> list[str]:
    """Return those of some operators whose kernels take memory for themselves by rules that are not here."""
    return sorted({name.partition(".")[0] for name in names if name.startswith(_UNKNOWN)})


def scratch(call: Call) -> list[int]:
    """Return the bytes that an operator's kernel allocates for itself on CUDA, in order; nothing for most."""
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    if name in _PRODUCTS:
        return [
            each.numel() * each.itemsize
            for argument, each in call.tensors()
            if argument.name in _FACTORS or (argument.name == "self" and name in {"mm", "bmm"})
            if _is_copied(each)
        ]
    given = {argument.name: value for argument, value in call.named()}
    return _reducing(name, given)


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
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(whole.dim()))
    dtype = _summed_in(name, whole.dtype, given.get("dtype"))
    copied = [whole.numel() * dtype.itemsize] if dtype != whole.dtype else []
    stride = tuple(math.prod(whole.shape[each + 1 :]) for each in range(whole.dim())) if copied else whole.stride()
    walk = _Walk.of(whole.shape, stride, {each % max(1, whole.dim()) for each in dims})
    offset = 0 if copied else whole.storage_offset()
    return copied + _Launch(walk, dtype.itemsize, _part_size(part, dtype), offset).global_memory()


def _summed_in(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type that the kernel reads; it takes half precision into a sum of float32 as it is."""
    if name not in _WIDEN:
        return dtype
    if wanted is None:
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        return torch.int64 if is_whole and name != "mean" else dtype
    return dtype if dtype.itemsize == 2 and wanted == torch.float32 else wanted


def _part_size(part: str, dtype: torch.dtype) -> int:
    wide: int = max(4, dtype.itemsize) if dtype.is_floating_point or dtype.is_complex else dtype.itemsize
    sizes: dict[str, int] = {"sum": wide, "value": dtype.itemsize, "truth": 1, "place": 16, "moments": 4 * wide}
    return sizes[part]


@dataclass(frozen=True)
class _Walk:
    """How a kernel goes through its input: extents and strides, the reduced dimensions first, neighbours merged."""

    reduced: list[tuple[int, int]]
    kept: list[tuple[int, int]]

    @staticmethod
    def of(shape: torch.Size, stride: tuple[int, ...], dims: set[int]) -> _Walk:
        reduced = sorted(((shape[each], stride[each]) for each in dims if shape), key=lambda pair: pair[1])
        kept = [(shape[each], stride[each]) for each in reversed(range(len(shape))) if each not in dims]
        return _Walk(_merged(reduced), _merged(kept))


def _merged(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for extent, step in pairs:
        if merged and merged[-1][0] * merged[-1][1] == step:
            merged[-1] = merged[-1][0] * extent, merged[-1][1]
        elif extent != 1:
            merged.append((extent, step))
    return merged


@dataclass(frozen=True)
class _Launch:
    """A kernel's launch, as `setReduceConfig` decides it."""

    walk: _Walk
    itemsize: int
    part: int
    """Bytes of what a block leaves in memory for an output."""
    offset: int

    def global_memory(self) -> list[int]:
        """Return the bytes of the part sums and of the blocks' counters; nothing where one block does it all."""
        inputs = math.prod(extent for extent, _ in self.walk.reduced)
        outputs = math.prod(extent for extent, _ in self.walk.kept)
        along = not self.walk.kept or (bool(self.walk.reduced) and self.walk.reduced[0][1] < self.walk.kept[0][1])
        across, down = (inputs, outputs) if along else (outputs, inputs)
        vector = 1
        if along:
            if self.walk.reduced and self.walk.reduced[0][1] == 1 and across >= 128 and len(self.walk.reduced) == 1:
                across //= _VECTOR
        elif self.walk.kept[0][1] == 1:
            vector = self._vector()
            across //= vector
        width, height = _block(across, down, _MOST_THREADS // vector)
        values = -(-inputs // width) if along else inputs
        columns = 1 if along else width
        if values < min(height * 16, _MOST_VALUES):
            return []
        values = -(-values // height)
        grid = -(-(outputs // vector) // columns)
        target = PROCESSORS * (THREADS_A_PROCESSOR // (width * height))
        if values < _MOST_VALUES or grid > target:
            return []
        blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
        if blocks <= 1:
            return []
        return [self.part * outputs * blocks * (1 if along else width * vector), 4 * grid]

    def _vector(self) -> int:
        """Return how many neighbouring outputs a thread works on."""
        steps = [step for _, step in (*self.walk.reduced, *self.walk.kept[1:])]
        return math.gcd(_VECTOR, self.offset, self.walk.kept[0][0], *steps)


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

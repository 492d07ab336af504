"""What a reduction allocates on CUDA besides its result, by the rules of `ATen/native/cuda/Reduce.cuh`.

A sum over many rows is split among blocks of threads, which leave their partial sums in memory, and a sum in a wider
type first copies what it sums. With small models and large batches that is most of what a backward pass holds for a
moment. Runs in the worker's process.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from gpumagic.worker.fake import backend
from gpumagic.worker.fake.calls import Given

_VECTOR = 4
"""Neighbouring elements that a thread reads at once."""
_MOST_THREADS = 512
"""Of a block."""
_WARP = 32
_LEAST_VALUES = 16
"""Values of a thread below which an input is split no further."""
_MOST_VALUES = 256
"""Values of a thread from which on an input is split among blocks."""
_WIDENING = frozenset({"sum", "prod", "mean", "nansum"})
"""Reductions that may be computed in a wider type than their input has."""


class Partial(Enum):
    """What a block leaves in memory for each output."""

    SUM = auto()
    VALUE = auto()
    TRUTH = auto()
    PLACE = auto()
    """A value and its index."""
    MOMENTS = auto()
    """A mean, the sum of squared differences from it, and counts."""


PARTIALS = {
    **dict.fromkeys(
        ("sum", "prod", "mean", "nansum", "norm", "linalg_vector_norm"), Partial.SUM
    ),
    **dict.fromkeys(("amax", "amin"), Partial.VALUE),
    **dict.fromkeys(("all", "any"), Partial.TRUTH),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), Partial.PLACE),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), Partial.MOMENTS),
}
"""The reductions, by the operator's name."""


def ceil_div(number: int, divisor: int) -> int:
    """Return how many parts of a size cover a number of elements."""
    return -(-number // divisor)


def allocated_by(name: str, given: Given) -> list[int]:
    """Return the bytes of each block that a reduction allocates for itself.

    Args:
        name: the operator's.
        given: its arguments by name.
    """
    whole = given.get("self")
    if name not in PARTIALS or not isinstance(whole, torch.Tensor) or not whole.numel():
        return []
    dtype = _reads_as(name, whole.dtype, given.get("dtype"))
    if dtype == whole.dtype:
        copied = []
        strides = whole.stride()
        offset = whole.storage_offset()
    else:
        copied = [whole.numel() * dtype.itemsize]
        strides = _contiguous_strides(whole.shape)
        offset = 0
    dims = _reduced_dims(given.get("dim"), whole.dim())
    reduced: Walk = []
    kept: Walk = []
    for dim in range(whole.dim()):
        walk = reduced if dim in dims else kept
        walk.append(Dimension(whole.shape[dim], strides[dim]))
    reduced.sort(key=attrgetter("stride"))
    kept.reverse()
    size = _partial_size(name, dtype, has_dim="dim" in given)
    return copied + _partial_results(_merged(reduced), _merged(kept), size, offset)


def _reads_as(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type in which the kernel reads its input.

    Half precision is read as it is where it is summed in float32.
    """
    if name not in _WIDENING:
        return dtype
    if wanted is None:
        is_integral = not (dtype.is_floating_point or dtype.is_complex)
        return torch.int64 if is_integral and name != "mean" else dtype
    is_read_as_it_is = dtype.itemsize == 2 and wanted == torch.float32
    return dtype if is_read_as_it_is else wanted


def _partial_size(name: str, dtype: torch.dtype, *, has_dim: bool) -> int:
    """Return the bytes of what a block leaves for one output."""
    partial = PARTIALS[name]
    if partial is Partial.PLACE and name in {"max", "min"} and not has_dim:
        partial = Partial.VALUE
    size: int = dtype.itemsize
    accumulated = size
    if dtype.is_floating_point or dtype.is_complex:
        accumulated = max(4, size)
    sizes = {
        Partial.SUM: accumulated,
        Partial.VALUE: size,
        Partial.TRUTH: 1,
        Partial.PLACE: 16,
        Partial.MOMENTS: 4 * accumulated,
    }
    return sizes[partial]


def _reduced_dims(dim: Any, number: int) -> set[int]:
    """Return the dimensions that are reduced, each from 0 on; all where none is named."""
    dims = dim or range(number)
    if isinstance(dim, int):
        dims = [dim]
    return {index % max(1, number) for index in dims}


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    strides.reverse()
    return strides


# ---- How the kernel shares the work out


class Dimension(NamedTuple):
    """A dimension that a kernel goes through."""

    extent: int
    stride: int


Walk = list[Dimension]
"""The dimensions that a kernel goes through, the innermost first."""


def _merged(walk: Walk) -> Walk:
    """Return a walk in which dimensions that lie one after the other in memory are one, and those of extent 1 none."""
    merged: Walk = []
    for outer in walk:
        inner = merged[-1] if merged else None
        if inner is not None and inner.extent * inner.stride == outer.stride:
            merged[-1] = Dimension(inner.extent * outer.extent, inner.stride)
        elif outer.extent != 1:
            merged.append(outer)
    return merged


def _elements(walk: Walk) -> int:
    return math.prod(dimension.extent for dimension in walk)


def _partial_results(reduced: Walk, kept: Walk, size: int, offset: int) -> list[int]:
    """Return the bytes of the blocks' partial results and of their counters; nothing where one block does it all.

    It is `setReduceConfig`'s choice of blocks.

    Args:
        reduced: the dimensions that are reduced.
        kept: the others.
        size: of what a block leaves for one output, in bytes.
        offset: where in its storage the input begins, in elements.
    """
    inputs = _elements(reduced)
    outputs = _elements(kept)
    reduces_rows = _reduces_rows(reduced, kept)
    vector = 1
    """Neighbouring outputs that a thread works on."""
    if reduces_rows:
        across = inputs
        down = outputs
        is_contiguous = len(reduced) == 1 and reduced[0].stride == 1
        if is_contiguous and across >= 128:
            across //= _VECTOR
    else:
        across = outputs
        down = inputs
        vector = _output_vector(reduced, kept, offset)
        across //= vector
    width, height = _block(across, down, _MOST_THREADS // vector)

    values = ceil_div(inputs, width) if reduces_rows else inputs
    if values < min(height * 16, _MOST_VALUES):
        return []
    values = ceil_div(values, height)
    outputs_of_a_block = 1 if reduces_rows else width
    grid = ceil_div(outputs // vector, outputs_of_a_block)
    target = backend.gpu.multiprocessors * (
        backend.gpu.threads_per_multiprocessor // (width * height)
    )
    if values < _MOST_VALUES or grid > target:
        return []
    splits = min(ceil_div(target, grid), ceil_div(values, _LEAST_VALUES))
    splits = max(splits, ceil_div(values, _MOST_VALUES))
    if splits == 1:
        return []
    partials = size * outputs * splits
    if not reduces_rows:
        partials *= width * vector
    return [partials, 4 * grid]


def _reduces_rows(reduced: Walk, kept: Walk) -> bool:
    """Return whether neighbours in memory are added up; else they are neighbours in the result, too."""
    if not kept:
        return True
    if not reduced:
        return False
    return reduced[0].stride < kept[0].stride


def _output_vector(reduced: Walk, kept: Walk, offset: int) -> int:
    """Return how many neighbouring outputs a thread works on, which extents, strides and the offset have to allow."""
    innermost, *others = kept
    if innermost.stride != 1:
        return 1
    strides = [dimension.stride for dimension in (*reduced, *others)]
    return math.gcd(_VECTOR, offset, innermost.extent, *strides)


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Return the width and height of a block of threads, powers of two.

    Args:
        across: elements along the block's width.
        down: elements along its height.
        most: threads that it may have.
    """
    width = _power_of_two_within(across, most)
    height = _power_of_two_within(down, most)
    height = min(height, most // min(width, _WARP))
    return min(width, most // height), height


def _power_of_two_within(number: int, most: int) -> int:
    """Return the largest power of two that is no larger than a number, 1 for none, or the most that is allowed."""
    if number >= most:
        return most
    return 1 << max(0, number.bit_length() - 1)

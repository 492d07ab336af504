"""What a reduction leaves in memory between blocks of threads, by the rules of `ATen/native/cuda/Reduce.cuh`.

A sum over many rows is split among blocks, which leave their part sums in memory, and a sum in a wider type copies what
it sums. With small models and large batches that is most of what a backward pass holds for a moment.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gpumagic.worker.fake import backend

_VECTOR, _MOST_THREADS, _WARP = 4, 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""A thread's, between which the input is divided among blocks."""
_WIDEN = frozenset({"sum", "prod", "mean", "nansum"})
PARTS = {
    **dict.fromkeys(("sum", "prod", "mean", "nansum", "norm", "linalg_vector_norm"), "sum"),
    **dict.fromkeys(("amax", "amin"), "value"),
    **dict.fromkeys(("all", "any"), "truth"),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), "place"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), "moments"),
}
"""What a block leaves in memory, by operator."""


def parts_of(name: str, given: dict[str, Any]) -> list[int]:
    """Return the bytes that a reduction takes for itself."""
    whole = given.get("self")
    if name not in PARTS or not isinstance(whole, torch.Tensor) or not whole.numel():
        return []
    part = (
        "value"
        if PARTS[name] == "place" and name in {"max", "min"} and "dim" not in given
        else PARTS[name]
    )
    dtype = _summed_in(name, whole.dtype, given.get("dtype"))
    wide = max(4, dtype.itemsize) if dtype.is_floating_point or dtype.is_complex else dtype.itemsize
    sizes = {"sum": wide, "value": dtype.itemsize, "truth": 1, "place": 16, "moments": 4 * wide}
    copied = [whole.numel() * dtype.itemsize] if dtype != whole.dtype else []
    dims = given.get("dim")
    dims = {
        each % max(1, whole.dim())
        for each in ([dims] if isinstance(dims, int) else dims or range(whole.dim()))
    }
    steps = (
        [math.prod(whole.shape[each + 1 :]) for each in range(whole.dim())]
        if copied
        else whole.stride()
    )
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
    target = backend.gpu.multiprocessors * (
        backend.gpu.threads_per_multiprocessor // (width * height)
    )
    if values < _MOST_VALUES or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return (
        [part * outputs * blocks * (1 if along else width * vector), 4 * grid] if blocks > 1 else []
    )


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Return the width and height of a block of threads."""
    width, height = (
        most if each >= most else 1 << max(0, each.bit_length() - 1) for each in (across, down)
    )
    rows = min(height, most // min(width, _WARP))
    return min(width, most // rows), rows

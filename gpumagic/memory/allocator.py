"""The torch allocator's own statistics, for any backend, without initialising one.

"Allocated" are bytes in live tensors, "reserved" what the allocator took from the driver for them and for
reuse, "peak" the highest "allocated" since the process began or the user last reset it. Asking a backend that
nobody has used yet would create a context of some hundred MiB (pytorch#86493), so only
initialised backends are read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from gpumagic import _compat
from gpumagic._compat import torch_private
from gpumagic.backends import IN_TREE, Allocator, backend_named
from gpumagic.memory import Device


class AllocatorStats(NamedTuple):
    """One device's allocator at one moment, in bytes."""

    allocated: int
    reserved: int
    peak: int | None
    """Highest ``allocated`` since the user last reset the counter, which we never do; None where none is kept (MPS)."""
    allocations: int = 0
    """How many there have ever been; 0 where that is not counted."""
    frees: int = 0

    @property
    def events(self) -> int:
        """Allocations and frees together: how far the allocator's history has come."""
        return self.allocations + self.frees


def accelerators() -> list[str]:
    """Return the devices torch can use here, such as ``["cuda:0", "cuda:1"]``. Imports torch.

    Counting asks NVML where it can; `is_available` would call cuInit, which freezes CUDA_VISIBLE_DEVICES and
    makes forking unsafe (vllm PR#15951).
    """
    found: list[str] = []
    for backend in _backends():
        module = device_module(backend)
        if module is not None:
            found += [f"{backend}:{index}" for index in range(module.device_count())]
    return found


def current_device(backend: str) -> str:
    """Return the backend's current device, such as ``"cuda:0"``, without initialising it."""
    module = device_module(backend)
    if (
        module is None
        or not is_initialised(backend)
        or not hasattr(module, "current_device")
    ):
        return f"{backend}:0"
    return f"{backend}:{module.current_device()}"


def device_stats(device: str) -> AllocatorStats | None:
    """Return a device's allocator statistics, or None where it has no counting allocator or is not in use yet."""
    if "torch" not in sys.modules:
        return None
    backend, index = Device.parse(device)
    module = _stats_module(backend)
    if module is None:
        return None
    return _read_stats(backend, module, index)


def _stats_module(backend: str) -> ModuleType | None:
    """Return the module of a backend that is in use and whose allocator counts; an out-of-tree one may not."""
    module = device_module(backend)
    if module is None or not is_initialised(backend):
        return None
    has_figures = backend_named(backend).allocator is Allocator.METAL
    return module if has_figures or hasattr(module, "memory_stats") else None


def _read_stats(backend: str, module: ModuleType, index: int) -> AllocatorStats:
    if backend_named(backend).allocator is Allocator.METAL:
        return AllocatorStats(
            allocated=module.current_allocated_memory(),
            reserved=module.driver_allocated_memory(),
            peak=None,
        )
    # Flattened, as `memory_stats` has them, torch takes far longer to sort them.
    stats: Mapping[str, Any]
    if hasattr(module, "memory_stats_as_nested_dict"):  # CUDA and XPU
        stats = module.memory_stats_as_nested_dict(index)
    elif backend not in IN_TREE and torch_private.DEVICE_STATS.is_there():
        stats = torch_private.DEVICE_STATS.get()(index)
    else:
        stats = module.memory_stats(index)

    def figure(name: str, which: str) -> int:
        if name in stats:
            return int(stats[name]["all"][which])
        # CUDA has none before its allocator is first used.
        return int(stats.get(f"{name}.all.{which}", 0))

    return AllocatorStats(
        allocated=figure("allocated_bytes", "current"),
        reserved=figure("reserved_bytes", "current"),
        peak=figure("allocated_bytes", "peak"),
        allocations=figure("allocation", "allocated"),
        frees=figure("allocation", "freed"),
    )


# The constants of torch's c10/cuda/CUDACachingAllocator.cpp, in bytes, with their names there. XPU's and simgpu's
# allocators have the same.
MIN_BLOCK = 512
"""Blocks are multiples of it (kMinBlockSize)."""
SMALL = 1 << 20
"""Requests up to it share segments; what is left of a larger one is split off only if it is larger (kSmallSize)."""
SMALL_SEGMENT = 2 << 20
"""What is asked of the driver for requests up to `SMALL` (kSmallBuffer)."""
MIN_LARGE = 10 << 20
"""Requests from it have a segment of their own size, rounded up to `SEGMENT_ROUNDING` (kMinLargeAlloc)."""
LARGE_SEGMENT = 20 << 20
"""What is asked of the driver for requests between `SMALL` and `MIN_LARGE` (kLargeBuffer)."""
SEGMENT_ROUNDING = 2 << 20
"""Large segments are multiples of it (kRoundLarge)."""


def rounded(nbytes: int, multiple: int = MIN_BLOCK) -> int:
    """Return what the allocator counts for a request: at the least whole blocks; 0 for none."""
    return -(-nbytes // multiple) * multiple


def segment_size(nbytes: int) -> int:
    """Return what the allocator asks of the driver for a block of these bytes, where its cache has no room."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < MIN_LARGE:
        return LARGE_SEGMENT
    return rounded(nbytes, SEGMENT_ROUNDING)


def granule(device: str) -> int:
    """Return what a device's allocator rounds sizes up to; 1 where it does not round, or not in a known way."""
    backend = backend_named(Device.parse(device).backend)
    if backend.allocator is not Allocator.CACHING or device_stats(device) is None:
        return 1
    return MIN_BLOCK


def all_device_stats() -> dict[str, AllocatorStats]:
    """Return the statistics of every device in use, each read once: this runs around every guarded cell."""
    if "torch" not in sys.modules:
        return {}
    found: dict[str, AllocatorStats] = {}
    for backend in _backends():
        module = _stats_module(backend)
        if module is None:
            continue
        for index in range(module.device_count()):
            found[f"{backend}:{index}"] = _read_stats(backend, module, index)
    return found


def mem_get_info(device: str) -> tuple[int, int] | None:
    """Return a device's free and total bytes as its driver reports them, or None where it is not in use or cannot."""
    backend, index = Device.parse(device)
    module = device_module(backend)
    if (
        module is None
        or not is_initialised(backend)
        or not hasattr(module, "mem_get_info")
    ):
        return None
    free, total = module.mem_get_info(index)
    return int(free), int(total)


def cap(device: str) -> int | None:
    """Return the bytes that this process may reserve on a device that is in use, or None where torch cannot tell."""
    backend, index = Device.parse(device)
    memory = mem_get_info(device)
    if memory is None:
        return None
    fraction = _compat.memory_fraction(device_module(backend), index)
    return None if fraction is None else round(fraction * memory[1])


def empty_caches() -> None:
    """Empty the cache of every backend in use."""
    for backend in _backends():
        module = device_module(backend)
        if (
            module is not None
            and is_initialised(backend)
            and hasattr(module, "empty_cache")
        ):
            module.empty_cache()


def is_initialised(backend: str) -> bool:
    """Return whether the backend has been used in this process; asking does not change it."""
    import torch

    module = device_module(backend)
    if module is None:
        return False
    if hasattr(module, "is_initialized"):
        return bool(module.is_initialized())
    # MPS, which has no context to create.
    return bool(torch.backends.mps.is_available())


def device_module(backend: str) -> ModuleType | None:
    """Return ``torch.cuda`` for ``"cuda"`` and so on, or None where torch has no such accelerator."""
    import torch

    if backend not in _backends():
        return None
    module = getattr(torch, backend, None)
    return module if isinstance(module, ModuleType) else None


def _backends() -> tuple[str, ...]:
    """Return the types of accelerators that torch knows; an out-of-tree one comes first, as in torch."""
    import torch

    out_of_tree = torch_private.OUT_OF_TREE_BACKEND.get()()
    if isinstance(getattr(torch, out_of_tree, None), ModuleType):
        return (out_of_tree, *IN_TREE)
    return IN_TREE

"""The allocator's segments and blocks, from `memory_snapshot`, read without changing anything.

CUDA, XPU and simgpu have one. What cannot be read, or does not match the allocator's own statistics, is not guessed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from gpumagic import _compat
from gpumagic._compat import torch_private
from gpumagic.backends import BACKENDS
from gpumagic.memory import Device, allocator
from gpumagic.memory.allocator import AllocatorStats

_IN_USE = "active_allocated"
_CACHED = "inactive"
_DEFAULT_POOL = (0, 0)
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class MemoryBlock(NamedTuple):
    """A block of a segment."""

    address: int
    """What a storage that lies there says."""
    size: int
    is_free: bool
    is_owned: bool
    """Whether the allocator counts it as allocated; what awaits another stream, or a CUDA graph's end, is neither."""


class Segment(NamedTuple):
    """What the allocator got from the driver in one piece; its blocks lie in their order, without gaps."""

    address: int
    is_small: bool
    is_open: bool
    """Whether what is free in it serves a request of the default stream."""
    blocks: list[MemoryBlock]
    stream: int = 0
    """The number of the stream whose requests it serves; 0 for the default one."""


def read_segments(device: str, figures: AllocatorStats) -> list[Segment] | None:
    """Return a device's segments by address; None if they cannot be read or do not match its statistics."""
    backend, index = Device.parse(device)
    snapshot = _snapshot(allocator.device_module(backend))
    if snapshot is None:
        return None
    segments: list[Segment] = []
    try:
        for entry in snapshot:
            if entry["device"] != index:
                continue
            if entry.get("is_expandable", False):
                return (
                    None  # how far such a segment can still grow is not in the snapshot
                )
            segments.append(_segment(entry))
        segments.sort()
    except (KeyError, TypeError, ValueError):
        return None
    reserved = 0
    allocated = 0
    for segment in segments:
        for block in segment.blocks:
            reserved += block.size
            allocated += block.size if block.is_owned else 0
    is_consistent = reserved == figures.reserved and allocated == figures.allocated
    return segments if is_consistent else None


def _segment(entry: Mapping[str, Any]) -> Segment:
    """Return one segment of a snapshot."""
    is_private = tuple(entry.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL
    stream = entry.get("stream", 0)
    blocks: list[MemoryBlock] = []
    for address, block in _blocks_of(entry):
        state = block["state"]
        is_free = state == _CACHED and not is_private
        blocks.append(
            MemoryBlock(address, block["size"], is_free, is_owned=state == _IN_USE)
        )
    return Segment(
        address=entry["address"],
        is_small=entry["segment_type"] == "small",
        is_open=not is_private and not stream,
        blocks=blocks,
        stream=stream,
    )


def _blocks_of(entry: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each block of a segment of a snapshot with its address; not every torch tells that."""
    address = entry["address"]
    for block in entry["blocks"]:
        yield block.get("address", address), block
        address += block["size"]


class AllocatedBlock(NamedTuple):
    """A block that is handed out."""

    device: str
    address: int
    size: int
    requested: int
    """What was asked for; the block may be larger."""


def allocated_blocks(backend: str) -> list[AllocatedBlock]:
    """Return what an allocator counts as allocated on all of its devices; nothing where it cannot be read."""
    found: list[AllocatedBlock] = []
    try:
        for entry in _snapshot(allocator.device_module(backend)) or ():
            device = f"{backend}:{entry['device']}"
            for address, block in _blocks_of(entry):
                if block["state"] == _IN_USE:
                    size = block["size"]
                    requested = block.get("requested_size", size)
                    found.append(AllocatedBlock(device, address, size, requested))
    except (KeyError, TypeError, ValueError):
        return []
    return found


class OccupiedBytes:
    """What storages occupy of their device, in bytes: whole blocks.

    A block is a multiple of 512 bytes, and by up to a MiB larger where the rest was too small to be split off
    (kSmallSize of `CUDACachingAllocator.cpp`): what the allocator's snapshot says counts.
    """

    def __init__(self) -> None:
        self._granule = functools.cache(allocator.granule)
        self._sizes: dict[int, int] = {}
        """Of the blocks that are handed out, by their addresses."""
        for backend in BACKENDS:
            if backend.exceeds_requests and allocator.is_initialised(backend.name):
                for block in allocated_blocks(backend.name):
                    self._sizes[block.address] = block.size

    def of(self, device: str, address: int, nbytes: int) -> int:
        """Return the bytes that a storage takes from its allocator."""
        granule = self._granule(device)
        if granule == 1 or not nbytes:
            return nbytes
        return max(allocator.rounded(nbytes, granule), self._sizes.get(address, 0))


def may_be_expandable() -> bool:
    """Return whether the environment lets segments grow: their gaps can then be filled by others' pages."""
    return any(
        "expandable_segments:True" in os.environ.get(name, "") for name in _SETTINGS
    )


def _snapshot(module: ModuleType | None) -> Sequence[Mapping[str, Any]] | None:
    read = getattr(module, "memory_snapshot", None)
    if read is None:
        return None
    try:
        found: Sequence[Mapping[str, Any]] = _compat.snapshot_without_traces(read)
    except RuntimeError:  # cudaMallocAsync has no snapshot
        return None
    return found


KIB = 1024
CLEAR_WORKSPACES = torch_private.CLEAR_WORKSPACES
"""Frees what torch keeps for cuBLAS, on every device; the next matrix product takes a new workspace."""
_WORKSPACE_SETTINGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "HIPBLAS_WORKSPACE_CONFIG",
    "ROCBLAS_WORKSPACE_CONFIG",
)
_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
_LARGER_WORKSPACE = 32 * 1024 * KIB
_LARGEST_WORKSPACE = 128 * 1024 * KIB


def workspace_sizes() -> set[int]:
    """Return the bytes that a workspace of cuBLAS may have here.

    They are what the environment says, in pairs of a size in KiB and a number (``":4096:2:16:8"``), or else torch's
    default: 8.1 MiB; 32 MiB for Hopper and Blackwell, the latter not in every version; 32 or 128 MiB for AMD
    (``parseChosenWorkspaceSize`` in torch's `aten/src/ATen/cuda/CublasHandlePool.cpp`).
    """
    import torch

    configured = ""
    for name in _WORKSPACE_SETTINGS:
        configured = configured or os.environ.get(name, "")
    pairs = re.findall(r":(\d+):(\d+)", configured)
    if pairs:
        return {KIB * sum(int(size) * int(number) for size, number in pairs)}
    if torch.version.hip:
        return {_WORKSPACE, _LARGER_WORKSPACE, _LARGEST_WORKSPACE}
    sizes = {_WORKSPACE}
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_properties(index).major >= 9:
            sizes.add(_LARGER_WORKSPACE)
    return sizes

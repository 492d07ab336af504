"""The allocator's segments and blocks, from `memory_snapshot`, read without changing anything.

CUDA, XPU and simgpu have one. What cannot be read, or does not match the allocator's own statistics, is not guessed.

Workspaces are what torch keeps for cuBLAS in its own allocator: no tensor shows it, and one call gives it back.
The first matrix product of a thread on a stream takes a workspace and keeps it: 8.1 MiB, 32 MiB on Hopper, or what
`CUBLAS_WORKSPACE_CONFIG` says. The backward pass has a thread of its own, so a training step has two; cuBLASLt had
further ones of 1 MiB until torch 2.10 (`aten/src/ATen/cuda/CublasHandlePool.cpp`).

Python is not told of them and a size is no proof, so they are read where torch keeps them: two `std::map` from (handle,
stream) to memory, laid out as libstdc++ does. They are read through ``/proc/self/mem``, which refuses a wrong address
where a pointer would end the process, and only what is a whole block of the allocator counts. Where that is not
possible (Windows; cudaMallocAsync, which has no blocks to show), nothing is found and nothing is claimed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
    found = _snapshot(allocator.device_module(backend))
    if found is None:
        return None
    try:
        mine = [each for each in found if each["device"] == index]
        if any(each.get("is_expandable", False) for each in mine):
            return None  # how far such a segment can still grow is not in the snapshot
        segments = []
        for each in mine:
            is_private = tuple(each.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL
            stream, is_small = each.get("stream", 0), each["segment_type"] == "small"
            blocks = [
                MemoryBlock(address, size, state == _CACHED and not is_private, state == _IN_USE)
                for address, size, state in _blocks_of(each)
            ]
            segments.append(
                Segment(each["address"], is_small, not is_private and not stream, blocks, stream)
            )
        segments.sort()
    except (KeyError, TypeError, ValueError):
        return None
    blocks = [block for segment in segments for block in segment.blocks]
    reserved, allocated = (
        sum(each.size for each in blocks),
        sum(each.size for each in blocks if each.is_owned),
    )
    return segments if (reserved, allocated) == (figures.reserved, figures.allocated) else None


def _blocks_of(segment: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yield the address, the size and the state of each block; not every torch tells the address."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block["size"], block["state"]
        address += block["size"]


class AllocatedBlock(NamedTuple):
    """A block that is handed out."""

    device: str
    address: int
    size: int


def allocated_blocks(backend: str) -> list[AllocatedBlock]:
    """Return what an allocator counts as allocated on all of its devices; nothing where it cannot be read."""
    found: list[AllocatedBlock] = []
    try:
        for segment in _snapshot(allocator.device_module(backend)) or ():
            device, blocks = f"{backend}:{segment['device']}", _blocks_of(segment)
            found += [
                AllocatedBlock(device, address, size)
                for address, size, state in blocks
                if state == _IN_USE
            ]
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
        for backend in BACKENDS:
            if backend.exceeds_requests and allocator.is_initialised(backend.name):
                for block in allocated_blocks(backend.name):
                    self._sizes[block.address] = block.size

    def of(self, device: str, address: int, nbytes: int) -> int:
        """Return the bytes that a storage takes from its allocator."""
        granule = self._granule(device)
        if granule == 1:
            return nbytes
        return max(allocator.rounded(nbytes, granule), self._sizes.get(address, 0)) if nbytes else 0


def may_be_expandable() -> bool:
    """Return whether the environment lets segments grow: their gaps can then be filled by others' pages."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in _SETTINGS)


def _snapshot(module: ModuleType | None) -> Sequence[Mapping[str, Any]] | None:
    read = getattr(module, "memory_snapshot", None)
    if read is None:
        return None
    try:
        found: Sequence[Mapping[str, Any]] = _compat.snapshot_without_traces(read)
    except RuntimeError:  # cudaMallocAsync has no snapshot
        return None
    return found


CLEAR_WORKSPACES = torch_private.CLEAR_WORKSPACES
"""Frees all of them, on every device; the next matrix product takes a new one."""


def find_workspaces() -> list[AllocatedBlock]:
    """Return the blocks of this process that are workspaces; none where CUDA is not in use. Changes nothing."""
    if "torch" not in sys.modules or not allocator.is_initialised("cuda"):
        return []
    addresses = set(_addresses())
    return [
        block
        for block in (allocated_blocks("cuda") if addresses else ())
        if block.address in addresses
    ]


def workspace_bytes() -> dict[str, int]:
    """Return how many bytes they take of each device that has any."""
    totals = Counter[str]()
    for each in find_workspaces():
        totals[each.device] += each.size
    return totals


_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")
_MAPS = ("cublas_handle_stream_to_workspace", "cublaslt_handle_stream_to_workspace")
_WORDS = 8
_ROOT, _COUNT = 2, 5
"""Where a map has its first node and their number, in words; it begins with an empty comparison and the end node."""
_LEFT, _RIGHT, _MEMORY = 2, 3, 6
"""Where a node has its neighbours, in words; its key of two pointers begins at 4, the memory's `DataPtr` follows."""
_MOST = 4096


def _addresses() -> Iterator[int]:
    """Yield the addresses of the workspaces that torch has, as far as they can be read."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return
    try:
        for place in _maps():
            yield from _of_map(memory, place)
    except (OSError, OverflowError, struct.error):  # another layout, or changed while it is read
        return
    finally:
        os.close(memory)


def _maps() -> Iterator[int]:
    """Yield where the maps are; torch makes one when it is first asked for it."""
    import torch

    for library in _LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / library
        try:
            loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        for name in _MAPS:
            function = getattr(loaded, f"_ZN2at4cuda{len(name)}{name}Ev", None)
            if function is not None:
                function.restype = ctypes.c_void_p
                yield function()


def _of_map(memory: int, place: int) -> Iterator[int]:
    def read(address: int, words: int) -> tuple[int, ...]:
        return struct.unpack(f"{words}Q", os.pread(memory, _WORDS * words, address))

    words = read(place, _COUNT + 1)
    waiting = [words[_ROOT]]
    for _ in range(min(words[_COUNT], _MOST)):
        while waiting and not waiting[-1]:
            waiting.pop()
        if not waiting:
            return
        node = read(waiting.pop(), _MEMORY + 1)
        waiting += (node[_LEFT], node[_RIGHT])
        yield node[_MEMORY]

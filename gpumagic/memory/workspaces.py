"""What torch keeps for cuBLAS in its own allocator: no tensor shows it, and one call gives it back.

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
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpumagic.memory import allocator, segments

CLEAR_WORKSPACES = "torch._C._cuda_clearCublasWorkspaces()"
"""Frees all of them, on every device; the next matrix product takes a new one."""


class Workspace(NamedTuple):
    """A block of the allocator that is a workspace."""

    device: str
    address: int
    nbytes: int


def find_workspaces() -> list[Workspace]:
    """Return the workspaces of this process; none where CUDA is not in use. Changes nothing."""
    if "torch" not in sys.modules or not allocator.is_initialised("cuda"):
        return []
    addresses = set(_addresses())
    if not addresses:
        return []
    blocks = segments.allocated_blocks("cuda")
    return [Workspace(*block) for block in blocks if block.address in addresses]


def workspace_bytes() -> dict[str, int]:
    """Return how many bytes they take of each device that has any."""
    totals = Counter[str]()
    for each in find_workspaces():
        totals[each.device] += each.nbytes
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
    words = _read(memory, place, _COUNT + 1)
    count, waiting = words[_COUNT], [words[_ROOT]]
    for _ in range(min(count, _MOST)):
        while waiting and not waiting[-1]:
            waiting.pop()
        if not waiting:
            return
        node = _read(memory, waiting.pop(), _MEMORY + 1)
        waiting += (node[_LEFT], node[_RIGHT])
        yield node[_MEMORY]


def _read(memory: int, address: int, words: int) -> tuple[int, ...]:
    return struct.unpack(f"{words}Q", os.pread(memory, _WORDS * words, address))

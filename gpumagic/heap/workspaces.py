"""What torch keeps for cuBLAS in its own allocator, told by its documented size: no tensor shows it.

The first matrix product of a thread on a stream takes a workspace and keeps it. The backward pass has a thread of its
own, so a training step has two. Python is not told of them; what is handed out, has exactly such a size, and is no
tensor's, gradient's or graph's memory is taken for one. On the GPUs whose workspaces have a round size, 32 MiB, memory
that only C++ knows may be among them. cuBLASLt had further ones of 1 MiB until torch 2.10, which are not told.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection
from typing import Any

from gpumagic.heap.kinds import Graphs, gradients_of, non_leaves, subclasses
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.memory import allocator, segments
from gpumagic.memory.segments import AllocatedBlock


def find_workspaces(known: Collection[int] | None = None) -> list[AllocatedBlock]:
    """Return the blocks of this process that are workspaces; none where CUDA is not in use. Changes nothing.

    Args:
        known: the addresses of all storages; they are looked for without.
    """
    if "torch" not in sys.modules or not allocator.is_initialised("cuda"):
        return []
    sizes = segments.workspace_sizes()
    candidates = [
        block for block in segments.allocated_blocks("cuda") if block.requested in sizes
    ]
    if not candidates:
        return []
    if known is None:
        known = _addresses_in_use()
    return [block for block in candidates if block.address not in known]


def workspace_bytes(known: Collection[int] | None = None) -> dict[str, int]:
    """Return how many bytes workspaces take of each device that has any.

    Args:
        known: as in `find_workspaces`.
    """
    totals: Counter[str] = Counter()
    for block in find_workspaces(known):
        totals[block.device] += block.size
    return totals


def _addresses_in_use() -> set[int]:
    """Return the addresses of the storages of all tensors, of their gradients, and of what their graphs keep."""
    import torch

    kinds = subclasses(torch.Tensor)
    table = StorageTable()
    graphs = Graphs()
    with gc_disabled(), undisturbed():
        # A comprehension, since there may be a million objects.
        tensors: list[Any] = [
            value for value in gc.get_objects() if type(value) in kinds
        ]
        for result in non_leaves(tensors):
            tensors += graphs.walk(result.grad_fn) or ()
        for tensor in (*tensors, *gradients_of(tensors)):
            table.find(tensor)
        tensors.clear()
        graphs.release()
    return {storage.address for storage in table.storages.values()}

"""The CUDA allocator's own history of a cell: each allocation with its stack, for torch's memory_viz."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpumagic import _compat

MAX_ENTRIES = 100_000
"""Allocations and frees that are kept; of more, the last."""
_PACKAGE = str(Path(__file__).parents[1])


class AllocatorHistory:
    """Records what torch's CUDA allocator does, unless the user has it recorded already.

    Args:
        device: the device that is asked about; the allocator records all of them.

    Attributes:
        snapshot: what `torch.cuda.memory._snapshot` returned at the end, or why there is none.
    """

    def __init__(self, device: str) -> None:
        self.snapshot: dict[str, Any] | str = (
            f"memory_viz reads the history of torch's CUDA allocator; {device} has none"
        )
        self._is_cuda = device.startswith("cuda")
        self._is_on = self._is_ours = False

    def start(self) -> None:
        """Begin to record."""
        if not self._is_cuda:
            return
        import torch

        try:
            self._is_ours = not torch._C._cuda_isHistoryEnabled()
            self._is_on = True
            if self._is_ours:
                torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)
        except RuntimeError as error:  # cudaMallocAsync keeps no history
            self._is_on = self._is_ours = False
            self.snapshot = str(error).partition("\n")[0]

    def stop(self) -> None:
        """Keep the history, and end the recording if this has begun it; idempotent."""
        if not self._is_on:
            return
        import torch

        self._is_on = False
        try:
            with _compat.names_of_stacks():
                self.snapshot = torch.cuda.memory._snapshot()
        finally:
            if self._is_ours:
                torch.cuda.memory._record_memory_history(None)


def write(snapshot: Mapping[str, Any], path: Path) -> Path:
    """Write a snapshot as `torch.cuda.memory._dump_snapshot` would, without frames of this package."""
    seen: set[int] = set()
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for each in (*snapshot["segments"], *blocks, *(entry for trace in snapshot["device_traces"] for entry in trace)):
        stack = each.get("frames")
        if stack and id(stack) not in seen:  # many share one list
            seen.add(id(stack))
            stack[:] = [frame for frame in stack if not frame["filename"].startswith(_PACKAGE)]
    path.write_bytes(pickle.dumps(snapshot))
    return path

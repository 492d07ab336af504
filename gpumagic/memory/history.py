"""The allocator's own history of a cell: each block handed out or taken back, in order.

CUDA's keeps it for torch's memory_viz, with the stack of each allocation; simgpu's keeps what a trace needs of it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats, rounded
from gpumagic.memory.devices import Device

MAX_ENTRIES = 100_000
"""Allocations and frees that are kept; of more, the last."""
_PACKAGE = str(Path(__file__).parents[1])


class BlockEvent(NamedTuple):
    """A block that was handed out, or taken back."""

    address: int
    nbytes: int
    """Negative where it was taken back."""
    at: float
    """When, by `time.perf_counter`."""


class AllocatorHistory:
    """Records what the allocators of a backend do.

    Args:
        device: the device that is asked about; all of its backend are recorded.

    Attributes:
        before: the allocators' statistics where the recording begins.
        after: those where it ends.
        snapshot: what `torch.cuda.memory._snapshot` returned at the end, or why there is none.
    """

    def __init__(self, device: str) -> None:
        self.before: dict[str, AllocatorStats] = {}
        self.after: dict[str, AllocatorStats] = {}
        self.snapshot: dict[str, Any] | str = (
            f"memory_viz reads the history of torch's CUDA allocator; {device} has none"
        )
        self._backend = Device.parse(device).backend
        self._module: Any = allocator.device_module(self._backend)
        self._is_on = self._is_ours = False
        self._events: dict[str, list[BlockEvent]] = {}

    def start(self) -> None:
        """Begin to record, unless the user has it recorded already."""
        if self._backend == "cuda":
            self._start_cuda()
        elif hasattr(self._module, "record_history"):
            self._is_on, self._is_ours = True, not _recording
            _recording.append(self)
            if self._is_ours:
                self._module.record_history(True)
        self._started = time.perf_counter(), time.time()
        self.before = allocator.all_device_stats()

    def _start_cuda(self) -> None:
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
        self._is_on = False
        self.after = allocator.all_device_stats()
        try:
            if self._backend == "cuda":
                self._read_cuda()
            else:
                for device in self._devices():
                    entries = self._module.history(Device.parse(device).index)
                    self._keep(device, [BlockEvent(*each) for each in entries])
        finally:
            _recording[:] = [each for each in _recording if each is not self]
            if self._is_ours and self._backend == "cuda":
                self._module.memory._record_memory_history(None)
            elif not _recording and self._backend != "cuda":
                self._module.record_history(False)

    def _read_cuda(self) -> None:
        self.snapshot = snapshot = self._module.memory._snapshot()
        ahead = self._started[1] - self._started[0]
        for device in self._devices():
            trace = snapshot["device_traces"][Device.parse(device).index]
            entries = (
                BlockEvent(
                    each["addr"],
                    _SIGNS[each["action"]] * rounded(each["size"]),
                    each["time_us"] / 1e6 - ahead,
                )
                for each in trace
                if each["action"] in _SIGNS
            )
            self._keep(device, list(entries))

    def _devices(self) -> list[str]:
        return [each for each in self.after if Device.parse(each).backend == self._backend]

    def _keep(self, device: str, entries: list[BlockEvent]) -> None:
        """Keep what the counters say was done meanwhile: others may have begun to record before."""
        before = self.before.get(device, AllocatorStats(0, 0, 0)).events
        count = self.after[device].events - before
        self._events[device] = entries[-count:] if count > 0 else []

    def events(self) -> Mapping[str, list[BlockEvent]]:
        """Return what each device did, the last of it where that was too much; empty where there is no history."""
        return self._events


_recording: list[object] = []
"""Who has simgpu's allocators record, which know only whether somebody does."""
_SIGNS = {"alloc": 1, "free_requested": -1}


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

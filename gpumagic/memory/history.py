"""The allocator's own history of a cell: each block handed out or taken back, in order.

CUDA's is what torch's memory_viz shows, here without stacks, which cost more than the allocations; simgpu's keeps what
a trace needs of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpumagic.memory import allocator
from gpumagic.memory.allocator import MIN_BLOCK, AllocatorStats
from gpumagic.memory.devices import Device

MAX_ENTRIES = 100_000
"""Allocations and frees that are kept; of more, the last."""


class BlockEvents(NamedTuple):
    """Blocks that were handed out or taken back, in order: arrays of NumPy, an entry each."""

    address: Any
    nbytes: Any
    """Negative where it was taken back."""
    turn: Any
    """When the turn began in which it was, in nanoseconds of `time.perf_counter`: see `AllocatorHistory.begin_turn`."""

    def last(self, count: int) -> BlockEvents:
        """Return the last of them."""
        return BlockEvents(*(each[max(0, len(each) - count) :] for each in self))


class AllocatorHistory:
    """Records what the allocators of a backend do.

    Args:
        device: the device that is asked about; all of its backend are recorded.

    Attributes:
        before: the allocator's statistics where the recording begins.
        after: those where it ends.
        started: when it began, in nanoseconds of `time.perf_counter`.
        ahead: by how many nanoseconds `time.time` is ahead of that clock.
        begin_turn: called with the time by that clock, as text, says when what this thread does from now on begins:
            entries of CUDA's history have it, exactly.
        events: what the device did, the last of it where that was too much; None where there is no history.
        snapshot: what `torch.cuda.memory._snapshot` returned at the end, or why there is none.
    """

    def __init__(self, device: str) -> None:
        self.before = self.after = _NOTHING
        self.events: BlockEvents | None = None
        self.snapshot: dict[str, Any] | str = (
            f"memory_viz reads the history of torch's CUDA allocator; {device} has none"
        )
        self._device = device
        self._backend, self._index = Device.parse(device)
        self._module: Any = allocator.device_module(self._backend)
        self._is_on = self._is_ours = False
        self.begin_turn: Callable[[str], object] = lambda _: None
        self._earlier_metadata = ""

    def start(self) -> None:
        """Begin to record, unless the user has it recorded already."""
        if self._backend == "cuda":
            self._start_cuda()
        elif hasattr(self._module, "record_history"):
            self._is_on, self._is_ours = True, not _recording
            _recording.append(self)
            if self._is_ours:
                self._module.record_history(True)
        self.started = time.perf_counter_ns()
        self.ahead = time.time_ns() - self.started
        self.before = allocator.device_stats(self._device) or _NOTHING

    def _start_cuda(self) -> None:
        import torch

        try:
            self._is_ours = not torch._C._cuda_isHistoryEnabled()
            self._is_on = True
            if self._is_ours:
                torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_ENTRIES)
        except RuntimeError as error:  # cudaMallocAsync keeps no history
            self._is_on = self._is_ours = False
            self.snapshot = str(error).partition("\n")[0]
        if self._is_on and hasattr(torch._C, "_cuda_setMemoryMetadata"):  # since torch 2.10
            self._earlier_metadata = torch._C._cuda_getMemoryMetadata()  # type: ignore[attr-defined, unused-ignore]
            self.begin_turn = torch._C._cuda_setMemoryMetadata

    def stop(self) -> None:
        """Keep the history, and end the recording if this has begun it; idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        self.after = allocator.device_stats(self._device) or _NOTHING
        try:
            # As many as the counters say: others may have begun to record before.
            found = self._read_cuda() if self._backend == "cuda" else _columns(self._module.history(self._index))
            self.events = found.last(self.after.events - self.before.events)
        finally:
            _recording[:] = [each for each in _recording if each is not self]
            if self._backend == "cuda":
                self._stop_cuda()
            elif not _recording:
                self._module.record_history(False)

    def _stop_cuda(self) -> None:
        self.begin_turn(self._earlier_metadata)
        if self._is_ours:
            self._module.memory._record_memory_history(None)

    def _read_cuda(self) -> BlockEvents:
        import numpy as np

        self.snapshot = snapshot = self._module.memory._snapshot()
        trace = [each for each in snapshot["device_traces"][self._index] if each["action"] in _SIGNS]
        sign = np.array([_SIGNS[each["action"]] for each in trace], np.int64)
        address, size = (np.array([each[name] for each in trace], np.int64) for name in ("addr", "size"))
        return BlockEvents(address, -(-size // MIN_BLOCK) * MIN_BLOCK * sign, turns(trace, self.ahead))


def turns(trace: Sequence[Mapping[str, Any]], ahead: int) -> Any:
    """Return when the turn of each entry of one device in CUDA's history began.

    Entries of other threads say nothing of it: they have their own time, but at least that of the entry before.
    """
    import numpy as np

    said = [each.get("user_metadata") for each in trace]  # or something that the user has set
    noted = np.array([int(each) if each and each.isdigit() else 0 for each in said], np.int64)
    own = np.array([each["time_us"] for each in trace], np.int64) * 1000 - ahead
    return np.maximum.accumulate(np.where(noted, noted, own))


_recording: list[object] = []
"""Who has simgpu's allocators record, which know only whether somebody does."""
_SIGNS = {"alloc": 1, "free_requested": -1}
_NOTHING = AllocatorStats(0, 0, 0)


def _columns(entries: Sequence[tuple[int, int, float]]) -> BlockEvents:
    """Return the events that simgpu has recorded."""
    import numpy as np

    address, nbytes, at = np.array(entries, float).reshape(-1, 3).T
    return BlockEvents(address.astype(np.int64), nbytes.astype(np.int64), (at * 1e9).astype(np.int64))

"""The allocator's own history of a cell: each block handed out or taken back, in order.

CUDA's is what torch's memory_viz shows, here without stacks, which cost more than the allocations; simgpu's keeps what
a trace needs of it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats, rounded
from gpumagic.memory.devices import Device

MAX_ENTRIES = 100_000
"""Allocations and frees that are kept; of more, the last."""


class BlockEvent(NamedTuple):
    """A block that was handed out, or taken back."""

    address: int
    nbytes: int
    """Negative where it was taken back."""
    at: float
    """When, by `time.perf_counter`; CUDA's clock has microseconds."""
    turn: float
    """When the turn began in which it was: see `AllocatorHistory.begin_turn`; else the same."""


class AllocatorHistory:
    """Records what the allocators of a backend do.

    Args:
        device: the device that is asked about; all of its backend are recorded.

    Attributes:
        before: the allocators' statistics where the recording begins.
        after: those where it ends.
        started: when it began, by `time.perf_counter`.
        is_kept: whether there is a history.
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
        self._is_on = self._is_ours = self.is_kept = False
        self._before_turns = ""
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
        self.started = time.perf_counter()
        self._ahead = time.time() - self.started
        self.before = allocator.all_device_stats()

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
        if self._is_on and _set_metadata() is not None:
            self._before_turns = torch._C._cuda_getMemoryMetadata()  # type: ignore[attr-defined, unused-ignore]
            self.begin_turn = self._begin_turn  # type: ignore[method-assign]

    def begin_turn(self, at: float) -> None:
        """Note when what the calling thread does from now on begins: entries of CUDA's history have it, exactly."""

    def _begin_turn(self, at: float) -> None:
        _set_metadata()(repr(at))

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
                    self._keep(device, [BlockEvent(address, nbytes, at, at) for address, nbytes, at in entries])
            self.is_kept = True
        finally:
            _recording[:] = [each for each in _recording if each is not self]
            if self._backend == "cuda":
                self._stop_cuda()
            elif not _recording:
                self._module.record_history(False)

    def _stop_cuda(self) -> None:
        if _set_metadata() is not None:
            _set_metadata()(self._before_turns)
        if self._is_ours:
            self._module.memory._record_memory_history(None)

    def _read_cuda(self) -> None:
        self.snapshot = snapshot = self._module.memory._snapshot()
        for device in self._devices():
            trace = snapshot["device_traces"][Device.parse(device).index]
            entries = [
                BlockEvent(each["addr"], _SIGNS[each["action"]] * rounded(each["size"]), self._time_of(each), turn)
                for each, turn in self.turns(trace)
                if each["action"] in _SIGNS
            ]
            self._keep(device, entries)

    def _time_of(self, entry: Mapping[str, Any]) -> float:
        return float(entry["time_us"] / 1e6 - self._ahead)

    def turns(self, trace: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the entries of one device in CUDA's history, each with the time by which its turn is known.

        Entries of other threads say none, and have their own time, but at least that of the entry before.
        """
        latest = 0.0
        for entry in trace:
            try:
                turn = float(entry.get("user_metadata") or "")
            except ValueError:  # none, or what the user has set
                turn = self._time_of(entry)
            latest = max(latest, turn)
            yield entry, latest

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


def _set_metadata() -> Any:
    """Return what says of the calling thread's allocations what they are; None before torch 2.10."""
    import torch

    return getattr(torch._C, "_cuda_setMemoryMetadata", None)


def write(snapshot: Mapping[str, Any], path: Path) -> Path:
    """Write a snapshot as `torch.cuda.memory._dump_snapshot` would."""
    path.write_bytes(pickle.dumps(snapshot))
    return path

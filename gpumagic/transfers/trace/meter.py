"""What a run has used until now: time, memory, transfers and syncs.

Memory is that of the run's device, in the allocator's running sums, which nobody resets: bytes ever allocated, and
bytes allocated now.
"""

from __future__ import annotations

import time
from threading import get_ident
from typing import NamedTuple

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.transfers.recorder import Recorder


class Reading(NamedTuple):
    """The running sums at one moment."""

    at: float
    """When it was taken, by `time.perf_counter`."""
    seconds: float
    """The same without the time that the trace itself had taken until then."""
    memory: AllocatorStats | None
    """None in threads other than the run's: the allocator does not tell them apart."""
    transfers: int
    transferred: int
    syncs: int


class Meter:
    """Reads the running sums of a run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.device = str(recorder.device)
        self.memory = allocator.reader(self.device)
        """Returns the allocator's figures for the run's device; None where nothing counts."""
        self.own_seconds = 0.0
        """What the trace itself has taken: no line's and no module's time."""

    def read(self) -> Reading:
        """Return the sums for the calling thread: the run's own thread has those of all that work for it."""
        at = time.perf_counter()
        is_own = get_ident() == self._recorder.thread
        worker = self._recorder.by_thread.get(get_ident())
        logs = [self._recorder.log] if is_own else []
        logs += [each.log for each in list(self._recorder.by_thread.values()) if is_own or each is worker]
        logs = [each for each in logs if not each.is_unrelated]
        return Reading(
            at, at - self.own_seconds, self.memory() if is_own else None, sum(log.transfers for log in logs),
            sum(log.transferred for log in logs), sum(log.waits for log in logs),
        )  # fmt: skip

    def restart(self, reading: Reading) -> Reading:
        """Return a reading with the time as it is now, and count what has passed since as the trace's own."""
        at = time.perf_counter()
        self.own_seconds += at - reading.at
        return reading._replace(at=at, seconds=at - self.own_seconds)

"""The figures of each line: the difference of the running sums between its start and its end.

A line that calls another one of the trace includes it. Where a line runs within itself, by recursion, its time and
memory count once and its runs each time; a comprehension on its line is part of it. The line that is open in the run's
thread has what other threads allocate meanwhile, autograd's among them: the allocator does not tell threads apart. Its
sums are those of its running counters, which nobody resets.

The peak of a line is in the allocator's history, where there is one. Without, it is at least the higher of the readings
at the line's start and end, or of those of the lines in it, and at most the first plus what was allocated since; where
the allocator's own highest rises, that says it exactly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType
from typing import NamedTuple

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.transfers.recorder import Recorder
from gpumagic.transfers.trace.memory import Levels, TracedMemory

Place = tuple[str, int]
"""File and line."""


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


@dataclass(slots=True)
class LineSum:
    """The figures of one line."""

    hits: int = 0
    seconds: float = 0.0
    allocated: int | None = None
    freed: int | None = None
    peak: int | None = None
    peak_at_most: int | None = None
    transfers: int = 0
    transferred: int = 0
    syncs: int = 0

    def add(self, first: Reading, last: Reading) -> None:
        """Add one run of the line."""
        self.seconds += last.seconds - first.seconds
        self.transfers += last.transfers - first.transfers
        self.transferred += last.transferred - first.transferred
        self.syncs += last.syncs - first.syncs
        if first.memory is not None and last.memory is not None and _has_sums(last.memory):
            self.allocated = (self.allocated or 0) + last.memory.total - first.memory.total
            self.freed = (self.freed or 0) + last.memory.freed - first.memory.freed

    def raise_peak(self, high: _High, *, has_sums: bool) -> None:
        """Note the highest of one run of the line."""
        self.peak = max(self.peak or 0, high.least)
        if has_sums:
            self.peak_at_most = max(self.peak_at_most or 0, high.most)


@dataclass(slots=True)
class _High:
    """What the highest was at least, and at most."""

    least: int = 0
    most: int = 0

    def raise_to(self, other: _High) -> None:
        self.least, self.most = max(self.least, other.least), max(self.most, other.most)


@dataclass(slots=True)
class _Activation:
    """Code that runs in a thread, and its line that is open."""

    code: CodeType
    place: Place = ("", 0)
    start: Reading | None = None
    high: _High = field(default_factory=_High)
    within: bool = False
    """Whether the same line is open further out."""


class _Run(NamedTuple):
    """A run of a line in which memory was taken or given back, until its peak is looked up in the history."""

    place: Place
    start: AllocatorStats
    end: AllocatorStats
    high: _High


class LineLog:
    """The sums of one run, filled by `events`.

    Args:
        meter: reads the running sums.
        memory: is told which line of the cell is the innermost.
        is_own: tells whether a line is one of the cell, and not of a function that `--trace` names.
        place: returns the file and the line that a line of some code is shown as.
    """

    def __init__(
        self, meter: Meter, memory: TracedMemory, is_own: Callable[[CodeType], bool],
        place: Callable[[CodeType, int], Place],
    ) -> None:  # fmt: skip
        self.sums: dict[Place, LineSum] = {}
        self._meter = meter
        self._memory = memory
        self._is_own = is_own
        self._place = place
        self._thread = get_ident()
        self._stacks: dict[int, list[_Activation]] = defaultdict(list)
        self._before = meter.memory()
        self._runs: list[_Run] = []

    # ---- What runs

    def enter(self, code: CodeType) -> None:
        """Code begins in this thread."""
        self._stacks[get_ident()].append(_Activation(code))

    def line(self, code: CodeType, line: int) -> None:
        """A line begins in this thread."""
        stack = self._stacks[get_ident()]
        if not stack or stack[-1].code is not code:
            stack.append(_Activation(code))  # it was running already
        now = self._read()
        self._end_line(stack, now)
        self._begin_line(stack, line, self._meter.restart(now))
        self._tell(now)

    def leave(self, code: CodeType) -> None:
        """Code ends in this thread."""
        stack = self._stacks[get_ident()]
        if all(each.code is not code for each in stack):
            return  # it began before the trace
        now = self._read()
        while True:
            self._end_line(stack, now)
            if stack.pop().code is code:
                self._tell(now)
                self._meter.restart(now)
                return

    def close(self) -> None:
        """End the lines that are open still."""
        now = self._read()
        for stack in self._stacks.values():
            is_run = stack is self._stacks.get(self._thread)
            while stack:
                self._end_line(stack, now if is_run else now._replace(memory=None))
                stack.pop()

    def find_peaks(self, levels: Levels | None) -> None:
        """Look up the peaks in the allocator's history; without, they are known by the readings, as ranges."""
        for run in self._runs:
            exact = None if levels is None else levels.highest(run.start, run.end)
            high = run.high if exact is None else _High(exact, exact)
            self.sums[run.place].raise_peak(high, has_sums=_has_sums(run.end))
        self._runs.clear()

    def _read(self) -> Reading:
        """Read the sums at the start or end of a line; raise the highest of the innermost of the run's thread."""
        now = self._meter.read()
        before, self._before = self._before, now.memory or self._before
        stack = self._stacks[self._thread]
        if before is not None and now.memory is not None and stack:
            stack[-1].high.raise_to(_highest_between(before, now.memory))
        return now

    def _tell(self, now: Reading) -> None:
        """Tell which line of the cell is the innermost in the run's thread."""
        if get_ident() == self._thread:
            own = (each.place[1] or None for each in reversed(self._stacks[self._thread]) if self._is_own(each.code))
            self._memory.line_runs(next(own, None), now.at, now.memory)

    # ---- Lines

    def _begin_line(self, stack: list[_Activation], line: int, start: Reading) -> None:
        top = stack[-1]
        top.place = self._place(top.code, line)
        top.within = any(each.place == top.place for each in stack[:-1])
        same = sum(each.code is top.code for each in stack)
        found = self.sums.setdefault(top.place, LineSum())
        found.hits += not top.within or same > 1
        allocated = start.memory.allocated if start.memory is not None else 0
        top.start, top.high = start, _High(allocated, allocated)

    def _end_line(self, stack: list[_Activation], now: Reading) -> None:
        top = stack[-1]
        start, top.start = top.start, None
        if start is None:
            return
        if not top.within:
            self._add_run(top, start, now)
        if len(stack) > 1:
            stack[-2].high.raise_to(top.high)

    def _add_run(self, top: _Activation, start: Reading, now: Reading) -> None:
        found = self.sums[top.place]
        found.add(start, now)
        if start.memory is not None and now.memory is not None:
            if start.memory.events == now.memory.events:
                found.raise_peak(top.high, has_sums=_has_sums(now.memory))
            else:
                self._runs.append(_Run(top.place, start.memory, now.memory, top.high))


def _has_sums(now: AllocatorStats) -> bool:
    """Return whether an allocator keeps the sums of what it has ever handed out; MPS does not."""
    return bool(now.total or not now.allocated)


def _highest_between(before: AllocatorStats, now: AllocatorStats) -> _High:
    """Return what the highest between two readings was at least, and at most."""
    if before.peak is not None and now.peak is not None and now.peak > before.peak:
        return _High(now.peak, now.peak)
    least = max(before.allocated, now.allocated)
    most = before.allocated + now.total - before.total if now.freed > before.freed else least
    if now.peak is not None and now.peak == before.peak:
        most = min(most, now.peak)
    return _High(least, max(least, most))

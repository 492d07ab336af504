"""The figures of each line: the difference of the running sums between its start and its end.

A line that calls another one of the trace includes it. Where a line runs within itself, by recursion, its time and
memory count once and its runs each time; a comprehension on its line is part of it. The line that is open in the run's
thread has what other threads allocate meanwhile, autograd's among them: the allocator does not tell threads apart.

The peak of a line is known without resetting the allocator's counter: between two readings the highest is at least the
higher of both, and at most the first plus what was allocated since. Readings are taken around each operator, so the two
differ only where an operator frees what it has allocated. Where the counter rises, it says the highest itself.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType
from typing import Any

from gpumagic.memory.allocator import AllocatorStats
from gpumagic.transfers.trace.meter import Meter, Reading
from gpumagic.transfers.trace.report import MAX_SPANS
from gpumagic.transfers.trace.streams import StreamLog

Place = tuple[str, int]
"""File and line."""


@dataclass(slots=True)
class LineSum:
    """The figures of one line."""

    hits: int = 0
    seconds: float = 0.0
    device_seconds: float | None = None
    idle_seconds: float | None = None
    allocated: int | None = None
    freed: int | None = None
    peak: int | None = None
    peak_at_most: int | None = None
    transfers: int = 0
    transferred: int = 0
    syncs: int = 0

    def add(self, first: Reading, last: Reading, high: _High) -> None:
        """Add one run of the line."""
        self.seconds += last.seconds - first.seconds
        self.transfers += last.transfers - first.transfers
        self.transferred += last.transferred - first.transferred
        self.syncs += last.syncs - first.syncs
        if first.memory is not None and last.memory is not None:
            self.peak = max(self.peak or 0, high.least)
            if last.memory.total or not last.memory.allocated:  # else this allocator keeps no sums
                self.allocated = (self.allocated or 0) + last.memory.total - first.memory.total
                self.freed = (self.freed or 0) + last.memory.freed - first.memory.freed
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
    line: int | None = None
    start: Reading | None = None
    mark: Any = None
    """An event on the device's stream at its start."""
    high: _High = field(default_factory=_High)
    within: bool = False
    """Whether the same line is open further out."""

    @property
    def place(self) -> Place:
        return self.code.co_filename, self.line or 0


class LineLog:
    """The sums of one run, filled by `events`."""

    def __init__(self, meter: Meter) -> None:
        self.sums: dict[Place, LineSum] = {}
        self.spans: list[tuple[Place, int, float, float]] = []
        """Place, thread, start and end of single runs."""
        self.device = meter.device
        self._meter = meter
        self._thread = get_ident()
        self._stacks: dict[int, list[_Activation]] = defaultdict(list)
        self._memory = meter.memory()
        self.streams = StreamLog(meter.device, lambda: meter.own_seconds)

    # ---- What runs

    def enter(self, code: CodeType) -> None:
        """Code begins in this thread."""
        self._stacks[get_ident()].append(_Activation(code))

    def line(self, code: CodeType, line: int) -> None:
        """A line begins in this thread."""
        stack = self._stacks[get_ident()]
        if not stack or stack[-1].code is not code:
            stack.append(_Activation(code))  # it was running already
        now, mark = self._read()
        self._end_line(stack, now, mark)
        self._begin_line(stack, line, self._meter.restart(now), mark)

    def leave(self, code: CodeType) -> None:
        """Code ends in this thread."""
        stack = self._stacks[get_ident()]
        if all(each.code is not code for each in stack):
            return  # it began before the trace
        now, mark = self._read()
        while True:
            self._end_line(stack, now, mark)
            if stack.pop().code is code:
                self._meter.restart(now)
                return

    def close(self) -> None:
        """End the lines that are open still, and wait for the device to come to their ends."""
        now, mark = self._read()
        for stack in self._stacks.values():
            is_own = stack is self._stacks.get(self._thread)
            while stack:
                self._end_line(stack, now if is_own else now._replace(memory=None), mark)
                stack.pop()
        self.streams.close()

    def _read(self) -> tuple[Reading, Any]:
        """Read the sums at the start or end of a line, and in the run's thread mark it on the device's stream."""
        now = self._meter.read()
        self._note(now.memory)
        if get_ident() != self._thread:
            return now, None
        if not self.streams.reason and (lines := self._open_lines()):  # none once the cell has ended
            self.streams.still_idle(lines)
        return now, self.streams.mark()

    # ---- Operators

    def before_operator(self, *, allocates: bool) -> None:
        """Read the memory before an operator, and whether the device has waited for it."""
        if not self.streams.reason:
            self.streams.still_idle(self._open_lines())
        if allocates:
            self._note(self._meter.memory())

    def after_operator(self, *, allocates: bool) -> AllocatorStats | None:
        """Read the memory after an operator."""
        self.streams.after_operator()
        now = self._meter.memory() if allocates else None
        self._note(now)
        return now

    def _open_lines(self) -> list[LineSum]:
        """Return the lines of the run's thread, the innermost last."""
        stack = self._stacks[self._thread]
        return [self.sums[each.place] for each in stack if each.start is not None and not each.within]

    def _note(self, now: AllocatorStats | None) -> None:
        """Raise the highest of the innermost line of the run's thread."""
        before, self._memory = self._memory, now or self._memory
        stack = self._stacks[self._thread]
        if before is None or now is None or not stack:
            return
        if now.total != before.total or now.allocated > before.allocated:  # else it only fell
            stack[-1].high.raise_to(_highest_between(before, now))

    # ---- Lines

    def _begin_line(self, stack: list[_Activation], line: int, start: Reading, mark: Any) -> None:
        top = stack[-1]
        top.line = line
        top.within = any(each.place == top.place for each in stack[:-1])
        same = sum(each.code is top.code for each in stack)
        found = self.sums.setdefault(top.place, LineSum())
        found.hits += not top.within or same > 1
        allocated = start.memory.allocated if start.memory is not None else 0
        top.start, top.mark, top.high = start, mark, _High(allocated, allocated)

    def _end_line(self, stack: list[_Activation], now: Reading, mark: Any) -> None:
        top = stack[-1]
        start, top.start = top.start, None
        if start is None:
            return
        found = self.sums[top.place]
        if not top.within:
            found.add(start, now, top.high)
            self.streams.add_line(found, top.mark, mark)
            if len(self.spans) < MAX_SPANS:
                self.spans.append((top.place, get_ident(), start.at, now.at))
        if len(stack) > 1:
            stack[-2].high.raise_to(top.high)


def _highest_between(before: AllocatorStats, now: AllocatorStats) -> _High:
    """Return what the highest between two readings was at least, and at most."""
    if before.peak is not None and now.peak is not None and now.peak > before.peak:
        return _High(now.peak, now.peak)
    least = max(before.allocated, now.allocated)
    most = before.allocated + now.total - before.total if now.freed > before.freed else least
    if now.peak is not None and now.peak == before.peak:
        most = min(most, now.peak)
    return _High(least, max(least, most))

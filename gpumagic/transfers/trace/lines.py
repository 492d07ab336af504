"""Which lines run, how often and how long, and from when to when, as `events` tells.

A line that calls another one of the trace includes it. Where a line runs within itself, by recursion, its time counts
once and its runs each time; a comprehension on its line is part of it. Only times are noted while the cell runs: the
memory of a line is found afterwards in the allocator's history, by when the line ran, see `memory`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from types import CodeType

Place = tuple[str, int]
"""File and line."""


@dataclass(slots=True)
class LineSum:
    """The figures of one line."""

    hits: int = 0
    seconds: float = 0.0
    allocated: int | None = None
    freed: int | None = None
    peak: int | None = None


@dataclass(slots=True)
class _Running:
    """Code that runs in a thread, and its line that is open."""

    code: CodeType
    place: Place = ("", 0)
    own_line: int | None = None
    """The line's number where it is one of the cell, and not of a function that `--trace` names."""
    start: float | None = None
    within: bool = False
    """Whether the same line is open further out."""


class LineLog:
    """The lines of one run, filled by `events`.

    Args:
        place: returns the file and the line that a line of some code is shown as.
        is_own: tells whether code is the cell's, and not that of a function that `--trace` names.
        tell: called in the run's thread with the innermost line of the cell that runs from now on, and the time.
    """

    def __init__(
        self,
        place: Callable[[CodeType, int], Place],
        is_own: Callable[[CodeType], bool],
        tell: Callable[[int | None, float], None],
    ) -> None:
        self.sums: dict[Place, LineSum] = {}
        self._place = place
        self._is_own = is_own
        self._tell = tell
        self._thread = get_ident()
        self._stacks: dict[int, list[_Running]] = defaultdict(list)
        # Each run of a line in the run's thread. Arrays: there may be millions.
        self._lines: list[LineSum] = []
        self._starts, self._ends = array("d"), array("d")

    def runs(self) -> Iterator[tuple[LineSum, float, float]]:
        """Yield each run of a line in the run's thread: the line's figures, its start and its end."""
        return zip(self._lines, self._starts, self._ends, strict=True)

    def enter(self, code: CodeType) -> None:
        """Code begins in this thread."""
        self._stacks[get_ident()].append(_Running(code))

    def line(self, code: CodeType, line: int) -> None:
        """A line begins in this thread."""
        thread = get_ident()
        stack = self._stacks[thread]
        if not stack or stack[-1].code is not code:
            stack.append(_Running(code))  # it was running already
        top, now = stack[-1], perf_counter()
        if top.start is not None:
            self._end(top, now, thread)
        top.place = place = self._place(code, line)
        top.own_line = place[1] if self._is_own(code) else None
        top.start, top.within = now, False
        found = self.sums.get(place)
        if found is None:
            found = self.sums[place] = LineSum()
        if len(stack) > 1:
            top.within = any(each.place == place for each in stack[:-1])
        if not top.within or sum(each.code is code for each in stack) > 1:
            found.hits += 1
        if thread == self._thread:
            self._tell(top.own_line or _innermost(stack), now)

    def leave(self, code: CodeType) -> None:
        """Code ends in this thread."""
        thread = get_ident()
        stack = self._stacks[thread]
        if all(each.code is not code for each in stack):
            return  # it began before the trace
        now, left = perf_counter(), None
        while left is not code:
            top = stack.pop()
            left = top.code
            self._end(top, now, thread)
        if thread == self._thread:
            self._tell(_innermost(stack), now)

    def close(self) -> None:
        """End the lines that are open still."""
        now = perf_counter()
        for thread, stack in self._stacks.items():
            while stack:
                self._end(stack.pop(), now, thread)

    def _end(self, top: _Running, now: float, thread: int) -> None:
        start, top.start = top.start, None
        if start is None or top.within:
            return
        found = self.sums[top.place]
        found.seconds += now - start
        if thread == self._thread:
            self._lines.append(found)
            self._starts.append(start)
            self._ends.append(now)


def _innermost(stack: list[_Running]) -> int | None:
    """Return the innermost line of the cell that is open."""
    return next((each.own_line for each in reversed(stack) if each.own_line), None)

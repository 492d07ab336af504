"""Which lines run, how often, and from when to when, as `events` tells.

A line that calls another one of the trace includes it. Where a line runs within itself, by recursion, its time counts
once and its runs each time; a comprehension on its line is part of it. Only times are noted while the cell runs: the
memory of a line is found afterwards in the allocator's history, by when the line ran, see `run`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from types import CodeType
from typing import Any

import numpy as np

Place = tuple[str, int]
"""File and line."""
_NONE = -1
"""Stands for no line."""


@dataclass(slots=True)
class _Running:
    """Code that runs in a thread, and its line that is open."""

    code: CodeType
    number: int = _NONE
    start: int = 0
    within: bool = False
    """Whether the same line is open further out."""


class LineLog:
    """The lines of one run by number, filled by `events`.

    Args:
        place: returns the file and the line that a line of some code is shown as.
        tell: called with the time at which a line begins, or goes on, in the run's thread.

    Attributes:
        places: the number of each line.
        hits: how often each line began, by number.
        runs: of each time that a line ran, its number, start and end in nanoseconds: those of other threads, and those
            of the run's own. Arrays: there may be millions.
        turns: times, each with the number of the line that is the innermost in the run's thread from then on.
    """

    def __init__(self, place: Callable[[CodeType, int], Place], tell: Callable[[int], object]) -> None:
        self.places: dict[Place, int] = {}
        self.hits: list[int] = []
        self.runs, self.turns = (array("q"), array("q")), array("q")
        self._place = place
        self._tell = tell
        self._thread = get_ident()
        self._stacks: dict[int, list[_Running]] = defaultdict(list)
        self._numbers: dict[tuple[int, int], int] = {}  # by `id`: hashing code takes longer than to run it

    def enter(self, code: CodeType) -> None:
        """Code begins in this thread."""
        self._stacks[get_ident()].append(_Running(code))

    def line(self, code: CodeType, line: int) -> None:
        """A line begins in this thread."""
        now, thread = perf_counter_ns(), get_ident()
        stack = self._stacks[thread]
        if not stack or stack[-1].code is not code:
            stack.append(_Running(code))  # it was running already
        top = stack[-1]
        self._end(top, now, thread)
        number = self._numbers.get((id(code), line))
        if number is None:
            number = self._numbers[id(code), line] = self._number(code, line)
        top.number, top.start, top.within = number, now, False
        if len(stack) > 1:
            top.within = number in [each.number for each in stack[:-1]]
        if not top.within or sum(each.code is code for each in stack) > 1:
            self.hits[number] += 1
        if thread == self._thread:
            self.turns.extend((now, number))
            self._tell(now)

    def leave(self, code: CodeType) -> None:
        """Code ends in this thread."""
        now, thread = perf_counter_ns(), get_ident()
        stack, left = self._stacks[thread], None
        if not stack or (stack[-1].code is not code and all(each.code is not code for each in stack)):
            return  # it began before the trace
        while left is not code:
            top = stack.pop()
            left = top.code
            self._end(top, now, thread)
        if thread == self._thread:
            self.turns.extend((now, stack[-1].number if stack else _NONE))
            self._tell(now)

    def close(self) -> None:
        """End the lines that are open still."""
        now = perf_counter_ns()
        for thread, stack in self._stacks.items():
            while stack:
                self._end(stack.pop(), now, thread)

    def own_runs(self) -> Any:
        """Return the number, start and end of each time that a line ran in the run's thread, a row each."""
        return np.array(self.runs[True]).reshape(-1, 3)

    def seconds(self) -> list[float]:
        """Return how long each line ran, by number."""
        number, start, end = np.array(self.runs[True] + self.runs[False]).reshape(-1, 3).T
        found: list[float] = np.bincount(number, (end - start) / 1e9, len(self.hits)).tolist()
        return found

    def _number(self, code: CodeType, line: int) -> int:
        place = self._place(code, line)
        if place not in self.places:
            self.places[place] = len(self.hits)
            self.hits.append(0)
        return self.places[place]

    def _end(self, top: _Running, now: int, thread: int) -> None:
        if top.number != _NONE and not top.within:
            self.runs[thread == self._thread].extend((top.number, top.start, now))
        top.number = _NONE

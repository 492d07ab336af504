"""Which lines run, how often, and from when to when; and which code is followed.

A line that calls another one of the trace includes it. Where a line runs within itself, by recursion, its time counts
once and its runs each time; a comprehension on its line is part of it. Only times are noted while the cell runs: the
memory of a line is found afterwards in the allocator's history, by when the line ran, see `tracing`.

From Python 3.12 on `sys.monitoring` has several tools at a time, so debuggers and coverage go on beside this one; code
that is not followed runs at full speed. Before, there is one trace function a thread: where a debugger or coverage
has it, lines are not traced.
"""

from __future__ import annotations

import inspect
import sys
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.source import frames

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
    """The lines of one run by number, filled by the events.

    Args:
        place: returns the file and the line that a line of some code is shown as.
        tell: called with the time at which a line begins, or goes on, in the run's thread.

    Attributes:
        places: the number of each line.
        hits: how often each line began, by number.
        own_runs: of each time that a line ran in the run's own thread, its number, start and end in nanoseconds. An
            array: there may be millions.
        other_runs: the same of other threads.
    """

    def __init__(
        self, place: Callable[[CodeType, int], Place], tell: Callable[[int], object]
    ) -> None:
        self.places: dict[Place, int] = {}
        self.hits: list[int] = []
        self.own_runs = array("q")
        self.other_runs = array("q")
        self._place = place
        self._tell = tell
        self._thread = get_ident()
        self._stacks: dict[int, list[_Running]] = defaultdict(list)
        self._numbers: dict[tuple[int, int], int] = {}
        """By a line and the `id` of its code, which to hash takes longer than to run it."""

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
        top.number = number
        top.start = now
        top.within = False
        if len(stack) > 1:  # a comprehension, since this runs at each line
            top.within = number in [outer.number for outer in stack[:-1]]
        if not top.within or sum(running.code is code for running in stack) > 1:
            self.hits[number] += 1
        if thread == self._thread:
            self._tell(now)

    def leave(self, code: CodeType) -> None:
        """Code ends in this thread."""
        now, thread = perf_counter_ns(), get_ident()
        stack = self._stacks[thread]
        if not stack:
            return
        if stack[-1].code is not code and all(
            running.code is not code for running in stack
        ):
            return  # it began before the trace
        left = None
        while left is not code:
            top = stack.pop()
            left = top.code
            self._end(top, now, thread)
        if thread == self._thread:
            self._tell(now)

    def close(self) -> None:
        """End the lines that are open still."""
        now = perf_counter_ns()
        for thread, stack in self._stacks.items():
            while stack:
                self._end(stack.pop(), now, thread)

    def seconds(self) -> list[float]:
        """Return how long each line ran, by number."""
        import numpy as np

        number, start, end = np.array(self.own_runs + self.other_runs).reshape(-1, 3).T
        seconds: list[float] = np.bincount(
            number, (end - start) / 1e9, len(self.hits)
        ).tolist()
        return seconds

    def _number(self, code: CodeType, line: int) -> int:
        place = self._place(code, line)
        if place not in self.places:
            self.places[place] = len(self.hits)
            self.hits.append(0)
        return self.places[place]

    def _end(self, top: _Running, now: int, thread: int) -> None:
        if top.number != _NONE and not top.within:
            runs = self.own_runs if thread == self._thread else self.other_runs
            runs.extend((top.number, top.start, now))
        top.number = _NONE


Follows = Callable[[CodeType, FrameType], bool]
"""Tells whether some code is followed, of which a frame is given that runs it."""


_monitoring: Any = getattr(sys, "monitoring", None)
_NAME = "gpumagic"
_TOOLS = (4, 3, 2)
"""Numbers that `sys.monitoring` has for tools without one of their own, and a profiler's."""


class _MonitoringEvents:
    def __init__(self, lines: LineLog, follows: Follows) -> None:
        self._lines = lines
        self._follows = follows
        self._tool: int | None = None
        self._followed: dict[
            int, CodeType
        ] = {}  # by `id`: to hash code takes as long as to run it

    def start(self) -> str:
        """Begin, or return why that is not possible."""
        self._tool = self._free_tool()
        if self._tool is None:
            return "other tools use all of sys.monitoring"
        _monitoring.use_tool_id(self._tool, _NAME)
        for event, callback in self._callbacks().items():
            _monitoring.register_callback(self._tool, event, callback)
        _monitoring.restart_events()  # an earlier run has turned some off for good
        for frame in frames.stack(sys._getframe(1)):
            self._is_followed(frame.f_code, frame)
        names = _monitoring.events
        events = names.PY_START | names.PY_RESUME | names.PY_UNWIND | names.PY_THROW
        _monitoring.set_events(self._tool, events)
        return ""

    def _free_tool(self) -> int | None:
        for tool in _TOOLS:
            if _monitoring.get_tool(tool) is None:
                return tool
        return None

    def stop(self) -> None:
        tool, self._tool = self._tool, None
        if tool is None or _monitoring.get_tool(tool) != _NAME:
            return
        _monitoring.set_events(tool, 0)
        for code in self._followed.values():
            _monitoring.set_local_events(tool, code, 0)
        for event in self._callbacks():
            _monitoring.register_callback(tool, event, None)
        _monitoring.free_tool_id(tool)

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        names = _monitoring.events
        return {
            names.PY_START: self._enter,
            names.PY_RESUME: self._enter,
            names.PY_THROW: self._enter,
            names.LINE: self._lines.line,
            names.PY_RETURN: self._leave,
            names.PY_YIELD: self._leave,
            names.PY_UNWIND: self._leave,
        }

    def _enter(self, code: CodeType, _: int, thrown: object = None) -> Any:
        if self._is_followed(code, sys._getframe(1)):
            self._lines.enter(code)
        elif thrown is None:
            return _monitoring.DISABLE  # for this code only
        return None

    def _leave(self, code: CodeType, _: int, __: object) -> None:
        if id(code) in self._followed:
            self._lines.leave(code)

    def _is_followed(self, code: CodeType, frame: FrameType) -> bool:
        if (
            id(code) not in self._followed
            and self._tool is not None
            and self._follows(code, frame)
        ):
            self._followed[id(code)] = code
            names = _monitoring.events
            events = names.LINE | names.PY_RETURN | names.PY_YIELD
            _monitoring.set_local_events(self._tool, code, events)
        return id(code) in self._followed


class _TraceEvents:
    def __init__(self, lines: LineLog, follows: Follows) -> None:
        self._lines = lines
        self._follows = follows
        self._thread: int | None = None
        self._running: list[FrameType] = []

    def start(self) -> str:
        if sys.gettrace() is not None or threading.gettrace() is not None:
            return "a debugger or coverage traces this code"
        for frame in frames.stack(sys._getframe(1)):
            if frame.f_trace is None and self._follows(frame.f_code, frame):
                self._running.append(frame)
                frame.f_trace = self._inside
        self._thread = threading.get_ident()
        sys.settrace(self._call)
        threading.settrace(self._call)
        return ""

    def stop(self) -> None:
        while self._running:
            self._running.pop().f_trace = None
        thread, self._thread = self._thread, None
        if thread is not None and threading.gettrace() == self._call:
            threading.settrace(None)
        if thread == threading.get_ident() and sys.gettrace() == self._call:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        # Threads that go on keep their trace function when the trace has ended.
        if (
            self._thread is None
            or event != "call"
            or not self._follows(frame.f_code, frame)
        ):
            return None
        self._lines.enter(frame.f_code)
        return self._inside

    def _inside(self, frame: FrameType, event: str, _: object) -> Any:
        if self._thread is None:
            return None
        if event == "line":
            self._lines.line(frame.f_code, frame.f_lineno)
        elif event == "return":
            self._lines.leave(frame.f_code)
        return self._inside


Events: type[_MonitoringEvents | _TraceEvents] = (
    _TraceEvents if _monitoring is None else _MonitoringEvents
)
"""The events of code that is followed, of which a log is told; `start` says why not where they cannot be had."""


# ---- The functions that `--trace=FUNCTION,...` names

Function = str | Callable[..., Any]
"""A function, a method or a module of torch's; or its name."""


def find_functions(
    functions: Iterable[Function], namespace: Mapping[str, Any]
) -> dict[str, CodeType]:
    """Return the code of each function by its name.

    Raises:
        OptionError: there is nothing by this name, or it is not written in Python.
    """
    codes = {}
    for function in functions:
        if isinstance(function, str):
            name = function
            value = _look_up(name, namespace)
        else:
            name = getattr(function, "__qualname__", type(function).__name__)
            value = function
        codes[name] = _code_of(name, value)
    return codes


def _look_up(name: str, namespace: Mapping[str, Any]) -> Any:
    """Return what a dotted name is bound to: a variable's attribute, or one of a module that has been imported."""
    first, *rest = name.split(".")
    value = namespace.get(first, sys.modules.get(first))
    if value is None:
        raise OptionError(
            f"--trace: there is no {first}; functions that the cell itself defines are traced anyway"
        )
    path = first
    for attribute in rest:
        if not hasattr(value, attribute):
            raise OptionError(f"--trace: {path} has no {attribute}")
        value = getattr(value, attribute)
        path = f"{path}.{attribute}"
    return value


def _code_of(name: str, value: Any) -> CodeType:
    if isinstance(value, type):
        raise OptionError(
            f"--trace: {name} is a class; name a method, such as {name}.forward"
        )
    if not inspect.isroutine(value):
        value = getattr(value, "forward", value)  # a module of torch's
    code = getattr(inspect.unwrap(value), "__code__", None)
    if not isinstance(code, CodeType):
        raise OptionError(
            f"--trace: {name} is no function written in Python, so it has no lines"
        )
    return code

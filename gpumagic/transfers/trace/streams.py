"""What the device did during each line, from events on its streams: CUDA and XPU have them.

A line has the time from an event at its start to one at its end, less the time that the streams had nothing to do. They
are known to be idle from the end of one operator's work to the start of the next, where all of it is done by then; what
is done only in between counts as busy, so that the idle time is the least that it can have been. Asking waits for
nothing. Work that no operator of torch's launches, such as a kernel of Triton's or a CUDA graph, is seen where it still
runs at the next operator or line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from gpumagic import fakecuda
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device

POLL = 1e-4
"""Seconds between two questions whether the device has come to an event."""
_SETTLED_AT = 1_000


class Figures(Protocol):
    """The device's part of a line's figures."""

    device_seconds: float | None
    idle_seconds: float | None


class _Window(NamedTuple):
    """What lies between two events: a line, or a time in which the streams had nothing to do."""

    start: Any
    end: Any
    is_idle: bool
    lines: Sequence[Figures]
    """The line; or those that were open, the innermost last."""
    own_seconds: float
    """What the trace itself took of it."""


class StreamLog:
    """Device time and idle time by line.

    Args:
        device: the run's device.
        own_seconds: returns the time that the trace itself has taken until now.
    """

    def __init__(self, device: str, own_seconds: Callable[[], float]) -> None:
        self.reason = _why_not(device)
        """Why nothing is measured; "" where it is."""
        self.idle = 0.0
        """Seconds for which the streams certainly had nothing to do."""
        self._device = device
        self._module: Any = None if self.reason else allocator.device_module(Device.parse(device).backend)
        self._own_seconds = own_seconds
        self._streams: dict[int, Any] = {}
        self._last: tuple[Any, float] | None = None
        self._windows: list[_Window] = []

    def mark(self) -> Any:
        """Record an event on the current stream; None where nothing is measured."""
        stream = self._stream()
        if stream is None:
            return None
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def after_operator(self) -> None:
        """Note the end of what an operator has launched."""
        if self._module is not None:
            mark = self.mark()
            self._last = None if mark is None else (mark, self._own_seconds())

    def still_idle(self, lines: Sequence[Figures]) -> None:
        """Give the time since the last operator's work to the open lines, if all of it is done."""
        if self._stream() is None or not all(each.query() for each in self._streams.values()):
            return
        before, self._last = self._last, (self.mark(), self._own_seconds())
        if before is not None:
            (start, own), (end, now) = before, self._last
            self._add(_Window(start, end, is_idle=True, lines=lines, own_seconds=now - own))

    def add_line(self, line: Figures, start: Any, end: Any) -> None:
        """Add a run of a line, between two marks."""
        if start is not None and end is not None:
            self._add(_Window(start, end, is_idle=False, lines=(line,), own_seconds=0.0))

    def close(self) -> None:
        """Wait for the last events; a sync would be one that the cell does not make."""
        for each in self._windows:
            while not each.end.query():
                time.sleep(POLL)
        self._settle()

    def _stream(self) -> Any:
        """Return the current stream; None where none is used yet, or where an event would become part of a graph."""
        if self._module is None or not self._module.is_initialized():
            return None
        if getattr(self._module, "is_current_stream_capturing", bool)():
            return None
        stream = self._module.current_stream(self._device)
        return self._streams.setdefault(stream.stream_id, stream)

    def _add(self, window: _Window) -> None:
        self._windows.append(window)
        if len(self._windows) > _SETTLED_AT:
            self._settle()

    def _settle(self) -> None:
        """Add up the windows that the device has passed."""
        done = 0
        for window in self._windows:
            if not window.end.query():
                break
            self._count(window, window.start.elapsed_time(window.end) / 1e3)
            done += 1
        del self._windows[:done]

    def _count(self, window: _Window, seconds: float) -> None:
        for line in window.lines:
            line.device_seconds = (line.device_seconds or 0.0) + (-seconds if window.is_idle else seconds)
        if window.is_idle:
            waited = max(0.0, seconds - window.own_seconds)
            self.idle += waited
            for line in window.lines[-1:]:
                line.idle_seconds = (line.idle_seconds or 0.0) + waited


def _why_not(device: str) -> str:
    if not device.startswith(("cuda", "xpu")):
        return f"{device} has no events that measure time"
    return "kernels do not run over the fake CUDA runtime" if fakecuda.is_enabled() else ""

"""Events in the trace-event format of Chrome, which Perfetto and chrome://tracing open.

The format: "Trace Event Format", Google, as JSON object with `traceEvents`; times in it are microseconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROCESS = 1
MICRO = 1e6


class ChromeTrace:
    """Events to be written.

    Args:
        title: the name of the process.
    """

    def __init__(self, title: str) -> None:
        self._events: list[dict[str, Any]] = []
        self._add("M", "process_name", args={"name": title})

    def thread(self, number: int, name: str) -> None:
        """Name a row of spans."""
        self._add("M", "thread_name", tid=number, args={"name": name})

    def span(self, name: str, thread: int, start: float, seconds: float, **args: object) -> None:
        """Add what ran from a time on, in seconds from the start; spans of a thread must lie in each other."""
        self._add("X", name, tid=thread, ts=start * MICRO, dur=max(0.0, seconds) * MICRO, cat="python", args=args)

    def counter(self, name: str, at: float, values: Mapping[str, int]) -> None:
        """Add the values of a counter at a time; several are drawn one on the other."""
        self._add("C", name, ts=at * MICRO, args=dict(values))

    def write(self, path: str | Path) -> Path:
        """Write the file and return its path."""
        found = {"traceEvents": self._events, "displayTimeUnit": "ms"}
        path = Path(path)
        path.write_text(json.dumps(found), encoding="utf-8")
        return path

    def _add(self, phase: str, name: str, *, tid: int = 0, **fields: Any) -> None:
        self._events.append({"ph": phase, "name": name, "pid": PROCESS, "tid": tid, **fields})


@functools.singledispatch
def events_of(report: object) -> ChromeTrace:
    """Return the events of a report; the module `chrome` of the folder it is defined in registers how."""
    raise TypeError(f"{type(report).__name__} has no events")

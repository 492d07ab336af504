"""The trace of one run: which code it follows, and the reports at its end."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

import numpy as np

from gpumagic.source import frames
from gpumagic.source.lines import WatchedCode
from gpumagic.transfers.recorder import Recorder
from gpumagic.transfers.trace.events import Events, Follower, events
from gpumagic.transfers.trace.lines import LineLog, Place
from gpumagic.transfers.trace.modules import CALLS, ModuleLog
from gpumagic.transfers.trace.report import LineReport, LineRow, ModuleReport


class Trace:
    """Follows the lines of a cell or block and of functions, and the modules that run.

    Args:
        recorder: counts transfers and syncs, for the device whose memory is followed.
        code: the cell or block.
        block: the code that a block stands in; None for a cell.
        named: the functions that are followed too, by the names that they were asked for.
    """

    def __init__(
        self,
        recorder: Recorder,
        code: WatchedCode,
        block: CodeType | None,
        named: Mapping[str, CodeType],
    ) -> None:
        self._device = str(recorder.device)
        self._modules = ModuleLog(self._device, code.namespace)
        self._memory = self._modules.memory
        self._sites = recorder.log.sites
        self._code = code
        self._named = {name: tuple(frames.code_objects(each)) for name, each in named.items()}
        self._block = _ids(() if block is None else frames.code_objects(block))
        self._others = _ids(each for codes in self._named.values() for each in codes) - self._block
        self._calls = _ids(CALLS)
        self._lines = LineLog(self._place, self._memory.begin_turn)
        self._events: Events = events(self._lines, self._follow)
        self._reason = ""

    def start(self) -> None:
        """Begin to follow lines and modules, if nobody else has what it takes."""
        self._memory.start()
        self._reason = self._events.start()

    def stop(self) -> None:
        """End it; idempotent, so that it can be called after an interrupt anywhere."""
        self._events.stop()
        self._modules.close()
        self._memory.stop(perf_counter_ns())

    def by_module(self) -> ModuleReport:
        """Return the sums by module."""
        return self._modules.report()

    def snapshot(self) -> Any:
        """Return the snapshot of torch's CUDA allocator with its history of the cell, or why there is none."""
        return self._memory.snapshot(np.array(self._lines.turns).reshape(-1, 2), self._lines.places)

    def by_line(self, lines: Sequence[tuple[int, str]], elapsed: float) -> LineReport:
        """Return the sums by line; ``lines`` are those of the cell or block."""
        self._lines.close()
        seconds, memory = self._lines.seconds(), self._memory.by_line(self._lines.own_runs())
        file = (self._sites.filename if self._code.line is None else self._code.filename) or ""

        def row(function: str | None, file: str, line: int, code: str) -> LineRow | None:
            number = self._lines.places.get((file, line))
            if number is None:  # it is empty, or only says something to the reader
                return None
            figures = self._lines.hits[number], seconds[number], *memory.get(number, (None, None, None))
            return LineRow(function, line, code, *figures)

        # The head of a `with` block runs before the block, and once more as it is left.
        rows = [row(None, file, number, text) for number, text in lines if number != self._code.line]
        files = {name: codes[0].co_filename for name, codes in self._named.items()}
        rows += [row(name, files[name], *line) for name, codes in self._named.items() for line in _text(codes)]
        found = tuple(each for each in rows if each is not None)
        return LineReport(self._device, found, elapsed, files, self._reason, self._memory.missing())

    def _place(self, code: CodeType, line: int) -> Place:
        return (code.co_filename, line) if id(code) in self._others else self._sites.place(code, line)

    def _follow(self, code: CodeType, frame: FrameType) -> Follower | None:
        if id(code) in self._others:
            return self._lines
        if id(code) in self._calls:
            return self._modules
        if id(code) in self._block:
            self._sites.is_own(frame)  # finds out on which lines the block stands
            return self._lines
        if self._block or self._code.line is not None:
            return None
        return self._lines if self._sites.is_own(frame) else None


def _ids(codes: Iterable[CodeType]) -> frozenset[int]:
    """Return by what code is known here: to hash it takes as long as to run it."""
    return frozenset(map(id, codes))


def _text(codes: Sequence[CodeType]) -> list[tuple[int, str]]:
    """Return the numbered lines of a function."""
    file = codes[0].co_filename
    numbers = [line for code in codes for *_, line in code.co_lines() if line]
    found = [(line, linecache.getline(file, line).rstrip()) for line in range(min(numbers), max(numbers) + 1)]
    indent = min((len(text) - len(text.lstrip()) for _, text in found if text), default=0)
    return [(line, text[indent:]) for line, text in found]

"""The trace of one run: which code it follows, and the reports at its end."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from gpumagic.source import frames
from gpumagic.source.lines import WatchedCode
from gpumagic.transfers.recorder import Recorder
from gpumagic.transfers.trace.events import Events, events
from gpumagic.transfers.trace.lines import LineLog, LineSum, Place
from gpumagic.transfers.trace.modules import ModuleLog
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
        self._block = set() if block is None else set(frames.code_objects(block))
        self._code = code
        self._named = {name: set(frames.code_objects(each)) for name, each in named.items()}
        self._others = {each for codes in self._named.values() for each in codes} - self._block
        self._lines = LineLog(self._place, lambda code: code not in self._others, self._memory.line_runs)
        self._events: Events = events(self._lines, self._is_followed)
        self._reason = ""

    def start(self) -> None:
        """Begin to follow lines, if nobody else has what it takes, and modules."""
        self._modules.watch(self._code.namespace)
        self._memory.start()
        self._reason = self._events.start()

    def stop(self) -> None:
        """End it; idempotent, so that it can be called after an interrupt anywhere."""
        self._events.stop()
        self._modules.unwatch()
        self._memory.stop(perf_counter())

    def by_module(self) -> ModuleReport:
        """Return the sums by module."""
        return self._modules.report()

    def snapshot(self, lines: Sequence[tuple[int, str]]) -> Mapping[str, Any] | str:
        """Return the snapshot of torch's CUDA allocator with its history of the cell, or why there is none."""
        return self._memory.snapshot(self._code.filename or self._sites.filename or "", {**dict(lines)})

    def by_line(self, lines: Sequence[tuple[int, str]], elapsed: float) -> LineReport:
        """Return the sums by line; ``lines`` are those of the cell or block."""
        self._lines.close()
        self._memory.add_to_lines(self._lines.runs())
        sums = self._lines.sums
        file = self._sites.filename if self._code.line is None else self._code.filename
        # The head of a `with` block runs before the block, and once more as it is left.
        own = [(number, text) for number, text in lines if number != self._code.line]
        rows = [_row(None, number, text, sums.get((file or "", number))) for number, text in own]
        files = {}
        for name, codes in self._named.items():
            place = next(iter(codes)).co_filename
            files[name] = place
            rows += [_row(name, number, text, sums.get((place, number))) for number, text in _text(codes)]
        found = tuple(each for each in rows if each is not None)
        return LineReport(self._device, found, elapsed, files, self._reason, self._memory.missing())

    def _place(self, code: CodeType, line: int) -> Place:
        return (code.co_filename, line) if code in self._others else self._sites.place(code, line)

    def _is_followed(self, code: CodeType, frame: FrameType) -> bool:
        if code in self._others:
            return True
        if code in self._block:
            self._sites.is_own(frame)  # finds out on which lines the block stands
            return True
        if self._block or self._code.line is not None:
            return False
        return self._sites.is_own(frame)


def _text(codes: set[CodeType]) -> list[tuple[int, str]]:
    """Return the numbered lines of a function."""
    file = next(iter(codes)).co_filename
    numbers = [line for code in codes for *_, line in code.co_lines() if line]
    found = [(line, linecache.getline(file, line).rstrip()) for line in range(min(numbers), max(numbers) + 1)]
    indent = min((len(text) - len(text.lstrip()) for _, text in found if text), default=0)
    return [(line, text[indent:]) for line, text in found]


def _row(function: str | None, line: int, code: str, found: LineSum | None) -> LineRow | None:
    """Return a line's row; None for one that is empty, or that only says something to the reader."""
    if found is None:
        return None
    values: dict[str, Any] = {name: getattr(found, name) for name in LineSum.__slots__}
    return LineRow(function, line, code, **values)

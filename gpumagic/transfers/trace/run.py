"""The trace of one run: which code it follows, and the reports at its end."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.history import AllocatorHistory
from gpumagic.source import frames
from gpumagic.source.lines import WatchedCode
from gpumagic.transfers.recorder import Recorder
from gpumagic.transfers.trace import functions
from gpumagic.transfers.trace.events import Events, events
from gpumagic.transfers.trace.lines import LineLog, LineSum
from gpumagic.transfers.trace.meter import Meter
from gpumagic.transfers.trace.modules import ModuleLog
from gpumagic.transfers.trace.report import LineReport, LineRow, ModuleReport, Span


class Trace:
    """Follows the lines of a cell or block and of functions, and the modules that run.

    Args:
        recorder: counts transfers and syncs, for the device whose memory is followed.
        code: the cell or block.
        block: the code that a block stands in; None for a cell.
        named: the functions that are followed too, by the names that they were asked for.
        started: when the cell began, by `time.perf_counter`.
    """

    def __init__(
        self,
        recorder: Recorder,
        code: WatchedCode,
        block: CodeType | None,
        named: Mapping[str, CodeType],
        started: float,
    ) -> None:
        self._meter = meter = Meter(recorder)
        self._started = started
        self.history = AllocatorHistory(meter.device)
        self._lines = LineLog(meter)
        self._modules = ModuleLog(meter, code.namespace)
        self._sites = recorder.log.sites
        self._block = set() if block is None else set(functions.nested(block))
        self._code = code
        self._named = {name: set(functions.nested(each)) for name, each in named.items()}
        self._others = {each for codes in self._named.values() for each in codes}
        self._events: Events = events(self._lines, self._is_followed)
        self._reason = ""

    def start(self) -> None:
        """Begin to follow lines, if nobody else has what it takes, and modules."""
        self._modules.watch(self._code.namespace)
        self.history.start()
        self._reason = self._events.start()

    def stop(self) -> None:
        """End it; idempotent, so that it can be called after an interrupt anywhere."""
        self._events.stop()
        self._modules.unwatch()
        self.history.stop()

    def before_operator(self, *, allocates: bool) -> None:
        """Read the figures before an operator that is more than a view: memory if it may allocate any."""
        self._lines.before_operator(allocates=allocates)

    def took(self, seconds: float) -> None:
        """Count time that the trace itself has taken."""
        self._meter.own_seconds += seconds

    def after_operator(self, addresses: Iterable[int], *, allocates: bool) -> AllocatorStats | None:
        """Read them after the operator, which has put its results there, and return the memory."""
        now = self._lines.after_operator(allocates=allocates)
        self._modules.made(addresses, now)
        return now

    def by_module(self) -> ModuleReport:
        """Return the sums by module."""
        return self._modules.report(self._started)

    def by_line(self, lines: Sequence[tuple[int, str]], elapsed: float) -> LineReport:
        """Return the sums by line; ``lines`` are those of the cell or block."""
        self._lines.close()
        sums, streams = self._lines.sums, self._lines.streams
        file = self._sites.filename if self._code.line is None else self._code.filename
        # The head of a `with` block runs before the block, and once more as it is left.
        own = [(number, text) for number, text in lines if number != self._code.line]
        rows = [_row(None, number, text, sums.get((file or "", number))) for number, text in own]
        files = {}
        for name, codes in self._named.items():
            place = next(iter(codes)).co_filename
            files[name] = place
            rows += [_row(name, number, text, sums.get((place, number))) for number, text in _text(codes)]
        spans = tuple(self._spans(dict(own), file or ""))
        return LineReport(
            self._lines.device, tuple(each for each in rows if each is not None), elapsed, files, self._reason, spans,
            idle=None if streams.reason else streams.idle, idle_reason=streams.reason,
            traced=max(0.0, elapsed - self._meter.own_seconds),
        )  # fmt: skip

    def _spans(self, own: Mapping[int, str], file: str) -> Iterator[Span]:
        """Yield the single runs of lines, those of functions by the name that was asked for."""
        names = {
            (code.co_filename, line): name
            for name, codes in self._named.items() for code in codes for *_, line in code.co_lines()
        }  # fmt: skip
        for (place, line), thread, start, end in self._lines.spans:
            is_own = place == file and line in own
            if is_own or (place, line) in names:
                function = None if is_own else names[place, line]
                code = own[line] if is_own else linecache.getline(place, line)
                yield Span(code.strip() or f"line {line}", thread, start - self._started, end - start, function, line)

    def _is_followed(self, code: CodeType, frame: FrameType) -> bool:
        if code in self._others or code in self._block:
            return True
        if self._block or self._code.line is not None:
            return False
        file = self._sites.filename
        if file is None and frame.f_globals is self._sites.namespace and not frames.is_function_frame(frame):
            file = self._sites.filename = code.co_filename  # a cell that begins only now
        return code.co_filename == file


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

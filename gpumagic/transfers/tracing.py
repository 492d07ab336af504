"""`--trace`: the time and memory of each line of a run, its functions' lines among them where they are named.

While the cell runs only turns are noted: which line runs from when on. CUDA's history says of each entry when the turn
of its thread began (torch has it as metadata), so entries of the run's thread find their turn exactly; those of
autograd's threads, and of other allocators, find it by the clock. At the end the history is gone through once, by
columns: a step of small operators has some ninety entries, and an object of Python's for each would take as long as
the step.

No dispatch mode is needed for that, and none may be on: under one autograd adds no gradients in place, so that a
traced cell would have a higher peak than the same cell alone. No counter is read at a line: that takes 12 to 30 us.
"""

from __future__ import annotations

import linecache
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np

from gpumagic._compat import torch_private
from gpumagic._compat.private_names import MissingName
from gpumagic.memory import allocator
from gpumagic.memory.allocator import MIN_BLOCK, AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.notebook.interrupts import locked
from gpumagic.source import frames
from gpumagic.source.frames import WatchedCode
from gpumagic.transfers.lines import Events, LineLog, Place
from gpumagic.transfers.report import LineReport, LineRow
from gpumagic.transfers.sites import CallSites


class Trace:
    """Follows the lines of a cell or block and of functions, and the memory of the run's device.

    Args:
        device: the one whose memory is followed.
        sites: tells which lines are the cell's.
        code: the cell or block.
        block: the code that a block stands in; None for a cell.
        named: the functions that are followed too, by the names that they were asked for.
    """

    def __init__(
        self,
        device: str,
        sites: CallSites,
        code: WatchedCode,
        block: CodeType | None,
        named: Mapping[str, CodeType],
    ) -> None:
        self._device = device
        self._history = AllocatorHistory(self._device)
        self._sites = sites
        self._code = code
        self._named = {
            name: tuple(frames.code_objects(code)) for name, code in named.items()
        }
        self._block = frozenset[int]()
        if block is not None:
            self._block = _ids(frames.code_objects(block))
        others: set[int] = set()
        for codes in self._named.values():
            others |= _ids(codes)
        self._others = frozenset(others - self._block)
        self._lines = LineLog(self._place, lambda at: self._history.begin_turn(str(at)))
        self._events = Events(self._lines, self._follows)
        self._reason = ""

    def start(self) -> None:
        """Begin to follow lines, if nobody else has what it takes."""
        self._history.start()
        self._reason = self._events.start()

    def stop(self) -> None:
        """End it; idempotent, so that it can be called after an interrupt anywhere."""
        self._events.stop()
        self._history.stop()

    def by_line(self, lines: Sequence[tuple[int, str]], elapsed: float) -> LineReport:
        """Return the sums by line; ``lines`` are those of the cell or block."""
        self._lines.close()
        seconds = self._lines.seconds()
        memory = self._memory_of_lines()

        def row(
            function: str | None, file: str, line: int, code: str
        ) -> Iterator[LineRow]:
            number = self._lines.places.get((file, line))
            if (
                number is not None
            ):  # else it is empty, or only says something to the reader
                hits = self._lines.hits[number]
                figures = memory.get(number, (None, None, None))
                yield LineRow(function, line, code, hits, seconds[number], *figures)

        whose = self._sites if self._code.line is None else self._code
        rows: list[LineRow] = []
        for line, text in lines:
            # The head of a `with` block runs before the block, and once more as it is left.
            if line != self._code.line:
                rows += row(None, whose.filename or "", line, text)
        files = {}
        for name, codes in self._named.items():
            files[name] = codes[0].co_filename
            for line, text in _text(codes):
                rows += row(name, files[name], line, text)
        return LineReport(
            self._device,
            tuple(rows),
            elapsed,
            files,
            self._reason,
            missing=self._missing(),
        )

    def _missing(self) -> str:
        """Return why lines have no memory, or those before what the history has kept; empty where all have."""
        history = self._history
        if history.events is None:
            backend = Device.parse(self._device).backend
            if backend in ("cpu", "meta"):
                return ""
            return f"Lines have no memory: the allocator of {backend} keeps no history."
        _, turns = history.events
        count, kept = history.after.events - history.before.events, len(turns)
        if count <= kept:
            return ""
        return f"The allocator's history has the last {kept:,} of {count:,} events."

    def _memory_of_lines(self) -> dict[int, list[int]]:
        """Return for each line the bytes allocated and freed while it ran, and the most that were allocated at once."""
        if self._history.events is None:
            return {}
        runs = np.array(self._lines.own_runs).reshape(-1, 3)
        nbytes, turn = self._history.events
        if self._missing():
            runs = runs[runs[:, 1] >= turn[0]]
        lines, starts, ends = runs.T
        # Each run's events are those from the first up to the last, and it ends at the level before that.
        first = np.searchsorted(turn, starts)
        last = np.searchsorted(turn, ends)
        levels = _sums(nbytes)
        levels += self._history.after.allocated - levels[-1]
        allocated = _sums(np.maximum(nbytes, 0))
        taken = allocated[last] - allocated[first]
        grown = levels[last] - levels[first]
        # The highest from the event before each run's first to its last; what it finds for the gaps is left out.
        spans = np.stack([first, last + 1], axis=1).ravel()
        peaks = first
        if len(spans):
            peaks = np.maximum.reduceat(np.append(levels, 0), spans)[::2]
        sums = np.zeros((3, lines.max(initial=-1) + 1), np.int64)
        np.add.at(sums[0], lines, taken)
        np.add.at(sums[1], lines, taken - grown)
        np.maximum.at(sums[2], lines, peaks)
        return {line: sums[:, line].tolist() for line in np.unique(lines).tolist()}

    def _place(self, code: CodeType, line: int) -> Place:
        if id(code) in self._others:
            return code.co_filename, line
        return self._sites.place(code, line)

    def _follows(self, code: CodeType, frame: FrameType) -> bool:
        if id(code) in self._others:
            return True
        if id(code) in self._block:
            self._sites.is_own(frame)  # finds out on which lines the block stands
            return True
        return not self._block and self._code.line is None and self._sites.is_own(frame)


def _ids(codes: Iterable[CodeType]) -> frozenset[int]:
    """Return by what code is known here: to hash it takes as long as to run it."""
    return frozenset(map(id, codes))


def _sums(values: Any) -> Any:
    """Return the sums of the first none, one, two and so on."""
    return np.concatenate([[0], np.cumsum(values)])


def _text(codes: Sequence[CodeType]) -> list[tuple[int, str]]:
    """Return the numbered lines of a function."""
    file = codes[0].co_filename
    numbers: set[int] = set()
    for code in codes:
        numbers.update(line for *_, line in code.co_lines() if line)
    lines = range(min(numbers), max(numbers) + 1)
    texts = [linecache.getline(file, line).rstrip() for line in lines]
    indents = [len(text) - len(text.lstrip()) for text in texts if text]
    indent = min(indents, default=0)
    return [(line, text[indent:]) for line, text in zip(lines, texts, strict=True)]


# ---- The allocator's own history of the cell: each block handed out or taken back, in order. CUDA's is recorded
# without stacks, which cost more than the allocations.

MAX_ENTRIES = 100_000
"""Allocations and frees that are kept; of more, the last."""


class AllocatorHistory:
    """Records what the allocators of a backend do.

    Args:
        device: the device that is asked about; all of its backend are recorded.

    Attributes:
        before: the allocator's statistics where the recording begins.
        after: those where it ends.
        begin_turn: called with a time in nanoseconds of `time.perf_counter`, as text, says when what this thread does
            from now on begins: entries of CUDA's history have it, exactly.
        events: of each block that the device handed out or took back, in order, its bytes, negative where it was taken
            back, and by the same clock when the turn began in which it was; of too many the last, and None where there
            is no history.
    """

    def __init__(self, device: str) -> None:
        self.before = self.after = _NOTHING
        self.events: tuple[Any, Any] | None = None
        self._device = device
        self._backend, self._index = Device.parse(device)
        self._module: Any = allocator.device_module(self._backend)
        self._is_on = self._is_ours = False
        self._record_history: Callable[..., object] = lambda _: None
        self._read_history: Callable[[], Any] = lambda: None
        self.begin_turn: Callable[[str], object] = lambda _: None
        self._earlier_metadata = ""

    def start(self) -> None:
        """Begin to record, unless the user has it recorded already."""
        if self._backend == "cuda":
            self._start_cuda()
        elif hasattr(self._module, "record_history"):
            with locked(_LOCK):
                self._is_on = True
                _recording.append(self)
                if len(_recording) == 1:
                    self._module.record_history(True)
        self._ahead = time.time_ns() - time.perf_counter_ns()
        self.before = allocator.device_stats(self._device) or _NOTHING

    def _start_cuda(self) -> None:
        try:
            self._read_history = torch_private.SNAPSHOT.get()
            self._record_history = torch_private.RECORD_HISTORY.get()
            self._is_ours = not torch_private.HISTORY_IS_ON.get()()
            self._is_on = True
            if self._is_ours:
                self._record_history(context=None, max_entries=MAX_ENTRIES)
        except (RuntimeError, MissingName):  # cudaMallocAsync keeps no history
            self._is_on = self._is_ours = False
        names = (torch_private.METADATA, torch_private.SET_METADATA)
        if self._is_on and all(name.is_there() for name in names):
            self._earlier_metadata = torch_private.METADATA.get()()
            self.begin_turn = torch_private.SET_METADATA.get()

    def stop(self) -> None:
        """Keep the history, and end the recording if this has begun it; idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        self.after = allocator.device_stats(self._device) or _NOTHING
        try:
            read = self._read_cuda if self._backend == "cuda" else self._read_simgpu
            nbytes, turn = read()
            # As many as the counters say: others may have begun to record before.
            count = self.after.events - self.before.events
            first = max(0, len(turn) - count)
            self.events = nbytes[first:], turn[first:]
        finally:
            if self._backend == "cuda":
                self.begin_turn(self._earlier_metadata)
                if self._is_ours:
                    self._record_history(None)
            else:
                self._end_record_of_simgpu()

    def _end_record_of_simgpu(self) -> None:
        with locked(_LOCK):
            _recording[:] = [history for history in _recording if history is not self]
            if not _recording:
                self._module.record_history(False)

    def _read_cuda(self) -> tuple[Any, Any]:
        traces = self._read_history()["device_traces"]
        entries = [entry for entry in traces[self._index] if entry["action"] in _SIGNS]
        columns = []
        for entry in entries:
            sign = _SIGNS[entry["action"]]
            columns.append((sign, entry["size"], entry["time_us"], _noted_turn(entry)))
        sign, size, microseconds, noted = np.array(columns, np.int64).reshape(-1, 4).T
        whole_blocks = -(-size // MIN_BLOCK) * MIN_BLOCK
        # Entries of other threads name no turn: they have their own time, but at least that of the one before.
        own = microseconds * 1000 - self._ahead
        turn = np.maximum.accumulate(np.where(noted, noted, own))
        return whole_blocks * sign, turn

    def _read_simgpu(self) -> tuple[Any, Any]:
        history = np.array(self._module.history(self._index), float)
        _, nbytes, at = history.reshape(-1, 3).T
        return nbytes.astype(np.int64), (at * 1e9).astype(np.int64)


def _noted_turn(entry: Mapping[str, Any]) -> int:
    """Return when the turn began that an entry of CUDA's history names; 0 for one that names none."""
    text = entry.get("user_metadata")  # or something that the user has set
    return int(text) if text and text.isdigit() else 0


_recording: list[object] = []
"""Who has simgpu's allocators record, which know only whether somebody does."""
_LOCK = threading.RLock()
"""Held while that changes: two threads may trace at once."""
_SIGNS = {"alloc": 1, "free_requested": -1}
_NOTHING = AllocatorStats(0, 0, 0)

"""Allocated memory over a cell, device by device: the records, and the log that they are made from.

A sample is what the allocators' counters say at one moment. An excursion between two samples shows in the peak counter,
which is never reset: where that has risen, the line responsible is one of those that ran between the two samples
(`lines_between`). `sampler` samples by the clock; a traced cell has a sample of every block that was taken or
given back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from gpumagic.errors import GpuMagicError
from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.report.base import grouped, to_figure
from gpumagic.source.lines import lines_between

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A stretch of the time of a cell; with ``--trace``, of its operators."""

    seconds: float
    """When its first sample was taken, from the start of the cell."""
    low: int
    """Fewest bytes allocated at any sample in it."""
    high: int
    """Most of them; or the allocator's peak between two samples, where that is higher."""
    last: int
    """Bytes at the last sample in it."""
    look: int = 0
    """The number of that first sample; with ``--trace`` there is one of each block taken or given back."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """With ``--trace``, bytes that were certainly there throughout, by what they are for, as in `DeviceTimeline.parts`:
    what had come by its begin and stayed to the end of the cell. Empty without."""


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """One device's allocated bytes from the start of a cell to its end."""

    device: str
    before: int
    after: int
    peak: int | None
    """The cell's own by the allocator's counter; None where the cell did not raise that, and `seen` is all we know."""
    seen: int
    """Most bytes at any sample; the true peak may be higher."""
    lines: tuple[int, int] | None
    """The first and the last line between which `peak`, or without it `seen`, was reached; None if that is unknown."""
    code: str | None
    """That line, where it is one."""
    points: tuple[MemoryPoint, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were there from the start to the end, and so at the peak, by what modules and optimizers of the
    notebook have them for: ``"parameters"``, ``"gradients"``, ``"optimizer state"``, ``"buffers"``. The rest of the
    peak is activations and what else came and went. Empty where that is not known."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """The same of what came during the cell and was there at its end."""
    capacity: int | None = None
    """Bytes of the device; None where its driver does not tell."""

    @property
    def line(self) -> int | None:
        """The line on which it was highest, where it is certain which one."""
        return self.lines[0] if self.lines is not None and self.lines[0] == self.lines[1] else None

    @property
    def highest(self) -> int:
        """The peak, or else the most seen."""
        return self.seen if self.peak is None else self.peak


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """What a cell had allocated while it ran, and how that was found."""

    courses: tuple[DeviceTimeline, ...]
    """One per device whose allocator did anything."""
    seconds: float
    looks: int
    """How often the allocators' figures were read, the start and the end included."""
    every_operator: bool = False
    """Whether each block is known that was taken or given back; else the figures were read by the clock."""

    def share(self, point: MemoryPoint) -> float:
        """Return where a point is, from 0 for the start to 1 for the end: in time, or in blocks."""
        at, whole = (point.look, self.looks) if self.every_operator else (point.seconds, self.seconds)
        return at / whole if whole else 0.0


def plot(timeline: MemoryTimeline | None) -> Figure:
    """Return a matplotlib figure of a timeline.

    Raises:
        GpuMagicError: matplotlib is not installed, or there is no timeline.
    """
    if timeline is None:
        raise GpuMagicError("there is no timeline to plot: the cell touched no device's memory")
    return to_figure(timeline)


class KeptStorage(NamedTuple):
    """A storage: where, what for, its bytes, and the address of the first."""

    device: str
    part: str
    nbytes: int
    address: int


class DeviceEvent(NamedTuple):
    """A block that was taken or given back, as an allocator's history has it."""

    device: str
    at: float
    """When, by `time.perf_counter`."""
    allocated: int
    """The device's bytes after it."""
    line: int | None
    address: int
    """Where a block was taken; 0 where one was given back."""


KeptStorages = Mapping[int, KeptStorage]
"""By the storage's number."""


def kept_by_part(before: KeptStorages, after: KeptStorages) -> dict[str, dict[str, int]]:
    """Return by device the bytes of each part of what both samples have, the largest first."""
    sums: dict[str, Counter[str]] = {}
    for number in before.keys() & after.keys():
        device, part, nbytes, _ = after[number]
        sums.setdefault(device, Counter())[part] += nbytes
    return {device: dict(found.most_common()) for device, found in sums.items()}


def new_storages(before: KeptStorages, after: KeptStorages) -> dict[str, list[KeptStorage]]:
    """Return by device the storages that only the later sample has."""
    return grouped((after[number].device, after[number]) for number in after.keys() - before.keys())


MAX_POINTS = 200
"""The most points of a timeline."""
_FINEST_WIDTH = 1e-6
"""Seconds of a stretch at first; they double whenever there would be too many."""
_END = -1
"""Stands for the last line of the code, which is not read before it has run."""
_NOTHING = AllocatorStats(0, 0, 0)
"""What a backend had allocated before anybody used it."""


class _Downsampler:
    """One figure over time, or over samples, in at most so many points."""

    def __init__(self, most: int, *, by_sample: bool = False) -> None:
        self._most = most
        self._by_sample = by_sample
        self._width = 1.0 if by_sample else _FINEST_WIDTH
        self._found: dict[int, MemoryPoint] = {}

    def add(self, seconds: float, look: int, high: int, last: int) -> None:
        at = look if self._by_sample else seconds
        while at >= self._most * self._width:
            self._halve()
        self._put(int(at / self._width), MemoryPoint(seconds, last, high, last, look))

    def points(self) -> tuple[MemoryPoint, ...]:
        return tuple(self._found[place] for place in sorted(self._found))

    def _halve(self) -> None:
        finer, self._found, self._width = self._found, {}, 2 * self._width
        for place in sorted(finer):
            self._put(place // 2, finer[place])

    def _put(self, place: int, new: MemoryPoint) -> None:
        old = self._found.get(place, new)
        self._found[place] = MemoryPoint(
            old.seconds, min(old.low, new.low), max(old.high, new.high), new.last, old.look
        )


class _DeviceLog:
    """One device."""

    def __init__(self, before: AllocatorStats, fold: _Downsampler) -> None:
        self.before, self.now = before.allocated, before.allocated
        self._allocations = before.allocations
        self.is_touched = False
        self._counter = before.peak or 0
        self.peak: int | None = None
        self.seen = before.allocated
        self.line: int | None = None
        """The line of the highest, where it is certain."""
        self.between: tuple[int | None, int | None] = (None, None)
        """Else the lines at the samples before and after it."""
        self.fold = fold
        self.fold.add(0.0, 0, before.allocated, before.allocated)

    def add(self, seconds: float, look: int, figures: AllocatorStats, since: int | None, line: int | None) -> bool:
        """Add a sample with its time and number; return whether there is a new maximum.

        The lines are those that ran at the previous sample and at this one.
        """
        self.now = high = figures.allocated
        self.is_touched |= (figures.allocated, figures.allocations) != (self.before, self._allocations)
        counter, is_new = self._counter if figures.peak is None else figures.peak, False
        if counter > self._counter:
            self.is_touched = True
            high = max(high, counter)
            if self.peak is None or counter > self.peak:
                self.peak, self.line, self.between, is_new = counter, None, (since, line), True
        self._counter = counter  # lower than it was where the cell's own code has reset it
        if figures.allocated > self.seen:
            self.seen = figures.allocated
            if self.peak is None:
                self.line, is_new = line, True
        self.fold.add(seconds, look, high, figures.allocated)
        return is_new

    def settle_peak(self, after: AllocatorStats) -> None:
        """Take the peak from the allocator's counter where it rose, with the line of the most that was seen."""
        if (after.peak or 0) > self._counter:
            self.peak = self._counter = after.peak or 0


class TimelineLog:
    """The samples of one cell.

    Args:
        before: the allocators' statistics as the cell begins.
        line: the line that runs then.
        max_points: the most points to keep.
        by_event: whether a point stands for a number of events of the allocator, rather than for a time.
    """

    def __init__(
        self, before: Mapping[str, AllocatorStats], line: int | None = None, max_points: int = MAX_POINTS,
        *, by_event: bool = False,
    ) -> None:  # fmt: skip
        self._before, self._first_line, self._max_points = before, line, max_points
        self.started = time.perf_counter()
        self._ended: float | None = None
        self._new_fold = partial(_Downsampler, max_points, by_sample=by_event)
        self._tracks = {device: _DeviceLog(figures, self._new_fold()) for device, figures in before.items()}
        self._line = line
        self._samples = 1
        self._seconds = 0.0
        self._is_every_operator = by_event
        self._born: dict[tuple[str, int], int] = {}
        """The event by which a block was last taken at an address of a device: that is there at the end."""
        self._lock = Lock()

    def add(self, figures: Mapping[str, AllocatorStats], line: int | None) -> None:
        """Add a sample of some devices, and the line that runs.

        A sample taken while another is being added is dropped: it may come from a finalizer that runs meanwhile.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._seconds = self._now()
            for device, now in figures.items():
                self._track(device).add(self._seconds, self._samples, now, self._line, line)
            self._samples += 1
            self._line = line
        finally:
            self._lock.release()

    def of_events(self, events: Sequence[DeviceEvent], after: Mapping[str, AllocatorStats]) -> TimelineLog:
        """Return the same by the allocators' histories, in which every block is, in the place of samples."""
        log = TimelineLog(self._before, self._first_line, self._max_points, by_event=True)
        log.started, log._ended = self.started, self._ended
        for event in events:
            log._add_event(event)
        for device, track in log._tracks.items():
            track.settle_peak(after.get(device, _NOTHING))
        return log

    def _add_event(self, event: DeviceEvent) -> None:
        if event.address:
            self._born[event.device, event.address] = self._samples
        now = AllocatorStats(event.allocated, 0, None)
        if self._track(event.device).add(event.at - self.started, self._samples, now, event.line, event.line):
            self._track(event.device).line = event.line
        self._samples += 1

    def finished(
        self,
        after: Mapping[str, AllocatorStats],
        code: Callable[[], Mapping[int, str]] = dict,
        parts: Mapping[str, Mapping[str, int]] | None = None,
        grown: Mapping[str, Sequence[KeptStorage]] | None = None,
    ) -> MemoryTimeline | None:
        """Return the timeline with the final statistics, or None where no device's memory changed.

        Args:
            after: the final statistics.
            code: returns the code's lines by number.
            parts: by device, the bytes that were there throughout, by what for.
            grown: by device, the storages that only the end has.
        """
        self.add(after, _END)
        touched = {device: track for device, track in sorted(self._tracks.items()) if track.is_touched}
        if not touched:
            return None
        lines = code()
        arrivals = {
            device: [(self._born.get((each.device, each.address)), each.part, each.nbytes) for each in storages]
            for device, storages in (grown or {}).items()
        }
        courses = tuple(
            _device_timeline(device, track, lines, (parts or {}).get(device, {}), arrivals.get(device, ()))
            for device, track in touched.items()
        )
        return MemoryTimeline(courses, self._seconds, self._samples, self._is_every_operator)

    def end(self) -> None:
        """Stop the clock: what follows is not part of the cell."""
        self._ended = self._ended or time.perf_counter()

    def _now(self) -> float:
        return (self._ended or time.perf_counter()) - self.started

    def _track(self, device: str) -> _DeviceLog:
        if device not in self._tracks:
            self._tracks[device] = _DeviceLog(_NOTHING, self._new_fold())
        return self._tracks[device]


_Arrival = tuple[int | None, str, int]
"""At which sample, if that is known; what for; how many bytes."""


def _device_timeline(
    device: str, track: _DeviceLog, code: Mapping[int, str], parts: Mapping[str, int], arrivals: Sequence[_Arrival]
) -> DeviceTimeline:
    first, last = (max(code, default=None) if line == _END else line for line in track.between)
    lines = lines_between(code, first, last) if track.line is None else (track.line, track.line)
    is_one = lines is not None and lines[0] == lines[1]
    text = code.get(lines[0], "").strip() if lines is not None and is_one else ""
    room = allocator.mem_get_info(device)
    return DeviceTimeline(
        device, track.before, track.now, track.peak, track.seen, lines, text or None,
        tuple(_with_parts(track.fold.points(), parts, arrivals)), parts, _sums(arrivals), room[1] if room else None,
    )  # fmt: skip


def _with_parts(
    points: Iterable[MemoryPoint], lasting: Mapping[str, int], arrivals: Sequence[_Arrival]
) -> Iterator[MemoryPoint]:
    """Yield the points with what was certainly there, where it is known when any of it came."""
    timed = [each for each in arrivals if each[0] is not None]
    always: list[_Arrival] = [(0, part, nbytes) for part, nbytes in lasting.items()]
    for point in points:
        come = [each for each in timed if each[0] is not None and each[0] <= point.look]
        parts = _sums([*always, *come]) if timed else {}
        # A module's memory that another library's allocator owns is not among what was allocated.
        yield replace(point, parts=parts) if 0 < sum(parts.values()) <= point.low else point


def _sums(arrivals: Iterable[_Arrival]) -> dict[str, int]:
    found = Counter[str]()
    for _, part, nbytes in arrivals:
        found[part] += nbytes
    return dict(found.most_common())

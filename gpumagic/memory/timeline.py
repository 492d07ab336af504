"""Allocated memory over a cell, device by device: the records, and the log that they are made from.

A sample is what the allocators' counters say at one moment. An excursion between two samples shows in the peak counter,
which is never reset: where that has risen, the line responsible is one of those that ran between the two samples
(`lines_between`). `sampler` samples by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.source.lines import lines_between


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A stretch of the time of a cell."""

    seconds: float
    """When its first sample was taken, from the start of the cell."""
    low: int
    """Fewest bytes allocated at any sample in it."""
    high: int
    """Most of them; or the allocator's peak between two samples, where that is higher."""
    last: int
    """Bytes at the last sample in it."""


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

    def share(self, point: MemoryPoint) -> float:
        """Return where a point is, from 0 for the start to 1 for the end."""
        return point.seconds / self.seconds if self.seconds else 0.0


MAX_POINTS = 200
"""The most points of a timeline."""
_FINEST_WIDTH = 1e-6
"""Seconds of a stretch at first; they double whenever there would be too many."""
_END = -1
"""Stands for the last line of the code, which is not read before it has run."""
_NOTHING = AllocatorStats(0, 0, 0)
"""What a backend had allocated before anybody used it."""


class _Downsampler:
    """One figure over time, in at most `MAX_POINTS` points."""

    def __init__(self) -> None:
        self._width = _FINEST_WIDTH
        self._found: dict[int, MemoryPoint] = {}

    def add(self, seconds: float, high: int, last: int) -> None:
        while seconds >= MAX_POINTS * self._width:
            self._halve()
        self._put(int(seconds / self._width), MemoryPoint(seconds, last, high, last))

    def points(self) -> tuple[MemoryPoint, ...]:
        return tuple(self._found[place] for place in sorted(self._found))

    def _halve(self) -> None:
        finer, self._found, self._width = self._found, {}, 2 * self._width
        for place in sorted(finer):
            self._put(place // 2, finer[place])

    def _put(self, place: int, new: MemoryPoint) -> None:
        old = self._found.get(place, new)
        self._found[place] = MemoryPoint(old.seconds, min(old.low, new.low), max(old.high, new.high), new.last)


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
        self.fold.add(0.0, before.allocated, before.allocated)

    def add(self, seconds: float, figures: AllocatorStats, since: int | None, line: int | None) -> None:
        """Add a sample with its time; the lines are those that ran at the previous sample and at this one."""
        self.now = high = figures.allocated
        self.is_touched |= (figures.allocated, figures.allocations) != (self.before, self._allocations)
        counter = self._counter if figures.peak is None else figures.peak
        if counter > self._counter:
            self.is_touched = True
            high = max(high, counter)
            if self.peak is None or counter > self.peak:
                self.peak, self.line, self.between = counter, None, (since, line)
        self._counter = counter  # lower than it was where the cell's own code has reset it
        if figures.allocated > self.seen:
            self.seen = figures.allocated
            if self.peak is None:
                self.line = line
        self.fold.add(seconds, high, figures.allocated)


class TimelineLog:
    """The samples of one cell.

    Args:
        before: the allocators' statistics as the cell begins.
        line: the line that runs then.
    """

    def __init__(self, before: Mapping[str, AllocatorStats], line: int | None = None) -> None:
        self.started = time.perf_counter()
        self._ended: float | None = None
        self._tracks = {device: _DeviceLog(figures, _Downsampler()) for device, figures in before.items()}
        self._line = line
        self._samples = 1
        self._seconds = 0.0
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
                self._track(device).add(self._seconds, now, self._line, line)
            self._samples += 1
            self._line = line
        finally:
            self._lock.release()

    def finished(
        self, after: Mapping[str, AllocatorStats], code: Callable[[], Mapping[int, str]] = dict
    ) -> MemoryTimeline | None:
        """Return the timeline with the final statistics, or None where no device's memory changed.

        Args:
            after: the final statistics.
            code: returns the code's lines by number.
        """
        self.add(after, _END)
        touched = {device: track for device, track in sorted(self._tracks.items()) if track.is_touched}
        if not touched:
            return None
        lines = code()
        courses = tuple(_device_timeline(device, track, lines) for device, track in touched.items())
        return MemoryTimeline(courses, self._seconds, self._samples)

    def end(self) -> None:
        """Stop the clock: what follows is not part of the cell."""
        self._ended = self._ended or time.perf_counter()

    def _now(self) -> float:
        return (self._ended or time.perf_counter()) - self.started

    def _track(self, device: str) -> _DeviceLog:
        if device not in self._tracks:
            self._tracks[device] = _DeviceLog(_NOTHING, _Downsampler())
        return self._tracks[device]


def _device_timeline(device: str, track: _DeviceLog, code: Mapping[int, str]) -> DeviceTimeline:
    first, last = (max(code, default=None) if line == _END else line for line in track.between)
    lines = lines_between(code, first, last) if track.line is None else (track.line, track.line)
    is_one = lines is not None and lines[0] == lines[1]
    text = code.get(lines[0], "").strip() if lines is not None and is_one else ""
    room = allocator.mem_get_info(device)
    return DeviceTimeline(
        device, track.before, track.now, track.peak, track.seen, lines, text or None, track.fold.points(),
        room[1] if room else None,
    )  # fmt: skip

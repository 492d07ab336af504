"""Memory over the course of a cell, as every report that has a timeline shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumagic.memory.timeline import DeviceTimeline, MemoryTimeline
from gpumagic.report.document import Block, Fold, Paragraph, Sparkline
from gpumagic.report.units import count, duration, size

COLUMNS = 60
MIN_POINTS = 4
"""Points from which on there is something to draw."""


def timeline_blocks(timeline: MemoryTimeline | None) -> Iterator[Block]:
    """Yield a picture of the device with most memory; the other devices and how it was measured are folded."""
    drawn = sorted(drawable_devices(timeline), key=lambda each: -each.highest)
    if timeline is None or not drawn:
        return
    first, *others = drawn
    yield from _device_blocks(first, timeline)
    if others:
        names = ", ".join(f"{each.device} (peak {size(each.highest)})" for each in others)
        yield Fold(f"Memory on {names}", [block for each in others for block in _device_blocks(each, timeline)])
    yield Fold(_method(timeline), [Paragraph(text) for text in _details(drawn)])


def drawable_devices(timeline: MemoryTimeline | None) -> tuple[DeviceTimeline, ...]:
    """Return the devices with enough points to draw."""
    courses = () if timeline is None else timeline.courses
    return tuple(each for each in courses if len(each.points) >= MIN_POINTS and each.highest)


def heights(series: DeviceTimeline, timeline: MemoryTimeline, columns: int = COLUMNS) -> list[int]:
    """Return the most bytes in each of so many equal parts of the cell; without a sample, the last value seen."""
    found: list[int | None] = [None] * columns
    last = [series.before] * columns
    for point in series.points:
        place = min(columns - 1, int(columns * timeline.share(point)))
        found[place] = max(point.high, found[place] or 0)
        last[place:] = [point.last] * (columns - place)
    return [last[place] if most is None else most for place, most in enumerate(found)]


def _device_blocks(series: DeviceTimeline, timeline: MemoryTimeline) -> Iterator[Block]:
    shown = heights(series, timeline)
    said = f"Memory on {series.device}: {size(series.before)} before, {size(series.after)} after"
    yield Paragraph(said, muted=True)
    shares = [each / series.highest for each in shown]
    note = _peak_note(series)
    yield Sparkline(shares, shown.index(max(shown)), note, f"{said}, {note}")


def _peak_note(series: DeviceTimeline) -> str:
    """Return the note at the highest column, with its line as far as that is certain."""
    return f"{_kind_of_highest(series)} {size(series.highest)}{_place(series)}"


def _kind_of_highest(series: DeviceTimeline) -> str:
    return "peak" if series.peak is not None else "highest sample"


def _place(series: DeviceTimeline) -> str:
    if series.lines is None:
        return ""
    return f", line {series.line}" if series.line is not None else ", lines {}-{}".format(*series.lines)


def _method(timeline: MemoryTimeline) -> str:
    apart = timeline.seconds / max(1, timeline.looks - 1)
    return f"Memory was sampled {count(timeline.looks, 'time')}, about every {duration(apart)}"


def _details(drawn: Sequence[DeviceTimeline]) -> Iterator[str]:
    for series in drawn:
        code = f": {series.code}" if series.code else ""
        yield f"{series.device}: {_peak_note(series)}{code}."
    if any(each.peak is None for each in drawn):
        yield "A peak between two samples is seen only where it is higher than any before the cell."
    else:
        yield "Peaks between two samples are from the allocator's counter. --trace has that of each line."

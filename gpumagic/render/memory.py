"""Memory over the course of a cell, as every report that has a timeline shows it."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.render.document import Block, Course, Fold, Paragraph
from gpumagic.render.units import count, duration, size, sparkline
from gpumagic.reports import MemoryCourse, MemoryTimeline

COLUMNS = 60
ENOUGH = 4
"""Points from which on there is something to draw."""
SHOWN = 3


def blocks(timeline: MemoryTimeline | None, better: str = "") -> Iterator[Block]:
    """Yield what is to be shown of a timeline: the devices with the most, the others folded away.

    Args:
        timeline: the timeline.
        better: what to do to learn the line of a peak, where it is not certain.
    """
    if timeline is None:
        return
    drawn = sorted(drawable(timeline), key=lambda each: -each.highest)
    for course in drawn[:SHOWN]:
        yield from _course(course, timeline.seconds)
    if drawn[SHOWN:]:
        names = ", ".join(each.device for each in drawn[SHOWN:])
        inner = [block for course in drawn[SHOWN:] for block in _course(course, timeline.seconds)]
        yield Fold(f"memory on {names}", inner)
    if drawn:
        unknown = better and any(each.line is None for each in drawn[:SHOWN])
        yield Paragraph(f"{_how(timeline, drawn)}{f' {better}' if unknown else ''}", muted=True)


def drawable(timeline: MemoryTimeline | None) -> tuple[MemoryCourse, ...]:
    """Return the devices of which more is known than the start and the end."""
    courses = () if timeline is None else timeline.courses
    return tuple(each for each in courses if len(each.points) >= ENOUGH and each.highest)


def course_of(timeline: MemoryTimeline | None, device: str) -> MemoryCourse | None:
    """Return one device's part of a timeline, if it has one."""
    return next((each for each in (timeline.courses if timeline is not None else ()) if each.device == device), None)


def small(timeline: MemoryTimeline | None, device: str, columns: int) -> str:
    """Return one device's course as a few blocks, or "" where there is nothing to draw."""
    course = next((each for each in drawable(timeline) if each.device == device), None)
    if course is None or timeline is None:
        return ""
    return sparkline([float(each) for each in heights(course, timeline.seconds, columns)], high=float(course.highest))


def heights(course: MemoryCourse, seconds: float, columns: int = COLUMNS) -> list[int]:
    """Return the most bytes in each of so many equal parts of the time; where nobody looked, what was seen last."""
    found: list[int | None] = [None] * columns
    last = [course.before] * columns
    for point in course.points:
        place = min(columns - 1, int(columns * point.seconds / seconds)) if seconds else 0
        found[place] = max(point.high, found[place] or 0)
        last[place:] = [point.last] * (columns - place)
    return [last[place] if most is None else most for place, most in enumerate(found)]


def _course(course: MemoryCourse, seconds: float) -> Iterator[Block]:
    most = "at its peak" if course.peak is not None else "seen at most"
    said = (
        f"Memory on {course.device} over {duration(seconds)}: {size(course.before)} before, "
        f"{size(course.highest)} {most}, {size(course.after)} after"
    )
    yield Paragraph(f"{said}.")
    shown = heights(course, seconds)
    if course.parts:
        parts = ", ".join(f"{part} {size(nbytes)}" for part, nbytes in course.parts.items())
        yield Paragraph(f"Of it, there all the time: {parts}; the rest is activations and what else came and went.")
    yield Course([each / course.highest for each in shown], shown.index(max(shown)), _mark(course), said)


def _mark(course: MemoryCourse) -> str:
    """Return what the highest column is, with its line as far as it is certain."""
    most = f"{'peak' if course.peak is not None else 'most seen'} {size(course.highest)}"
    if course.line is not None:
        return f"{most}, line {course.line}" + (f": {course.code}" if course.code else "")
    if course.lines is not None:
        return f"{most}, between lines {course.lines[0]} and {course.lines[1]}"
    return most


def _how(timeline: MemoryTimeline, drawn: list[MemoryCourse]) -> str:
    if timeline.every_operator:
        return "Allocated bytes after every operator."
    apart = timeline.seconds / max(1, timeline.looks - 1)
    said = f"Allocated bytes, looked at {count(timeline.looks, 'time')}, some {duration(apart)} apart"
    if any(each.peak is None for each in drawn):
        return f"{said}: a peak in between shows only where it is higher than any before the cell."
    return f"{said}; peaks in between are the allocator's own figure."

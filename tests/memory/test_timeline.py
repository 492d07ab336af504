"""Folding of looks into a timeline, the lines that can have run between two, and how it is drawn."""

from __future__ import annotations

import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.timeline import DeviceTimeline, MemoryPoint, MemoryTimeline, TimelineLog
from gpumagic.memory.view import heights
from gpumagic.report.base import to_html, to_text
from gpumagic.source import lines
from gpumagic.transfers.report import TransferReport

MIB = 1024**2
DEVICE = "cuda:0"


def figures(allocated: int, peak: int | None = None) -> AllocatorStats:
    return AllocatorStats(allocated, allocated, allocated if peak is None else peak)


# -- looks ------------------------------------------------------------------------------------------------

CODE = {1: "%%ondevice 0", 2: "a = make()", 3: "b = make()", 4: "del a"}


def course(*looks: tuple[int, int, int], before: int = 0, peak: int = 0) -> DeviceTimeline:
    """Return the course of a cell of four lines from ``(allocated, peak, line)`` at each look."""
    log = TimelineLog({DEVICE: figures(before, peak)}, 1)
    for allocated, highest, line in looks:
        log.add({DEVICE: figures(allocated, highest)}, line)
    last = looks[-1]
    timeline = log.finished({DEVICE: figures(last[0], last[1])}, lambda: CODE)
    assert timeline is not None
    return timeline.courses[0]


def test_the_peak_is_the_allocators_and_its_line_the_one_that_ran_from_look_to_look() -> None:
    found = course((10, 10, 2), (10, 10, 3), (40, 90, 3), (30, 90, 4))
    assert (found.before, found.peak, found.seen, found.after) == (0, 90, 40, 30)
    assert (found.line, found.code) == (3, "b = make()")
    assert max(point.high for point in found.points) == 90, "it is in the stretch in which the counter rose"


def test_a_peak_between_looks_on_different_lines_has_a_span_and_no_line() -> None:
    found = course((10, 10, 2), (10, 10, 2), (40, 90, 3), (0, 90, 4))
    assert (found.lines, found.line, found.code) == ((2, 3), None, None)
    assert course((10, 10, 2), (40, 90, 4)).lines is None, "that it was on one of all lines says nothing"


def test_what_the_counter_did_not_tell_is_not_called_a_peak() -> None:
    """An earlier cell had allocated more, and nobody resets its counter."""
    found = course((10, 100, 2), (60, 100, 3), (20, 100, 4), peak=100)
    assert (found.peak, found.seen, found.line) == (None, 60, 3)


def test_a_counter_that_the_cell_itself_resets_is_followed_down() -> None:
    found = course((50, 100, 2), (50, 50, 3), (50, 70, 3), (20, 70, 4), peak=100)
    assert (found.peak, found.line) == (70, 3)


def test_a_cell_that_touches_no_memory_has_no_timeline() -> None:
    log = TimelineLog({DEVICE: figures(512)}, 1)
    log.add({DEVICE: figures(512)}, 2)
    assert log.finished({DEVICE: figures(512)}) is None


def test_a_device_that_comes_to_life_in_the_cell_began_with_nothing() -> None:
    log = TimelineLog({}, 1)
    log.add({"cuda:1": figures(512)}, 2)
    timeline = log.finished({"cuda:1": figures(512)}, lambda: CODE)
    assert timeline is not None
    assert (timeline.courses[0].before, timeline.courses[0].peak) == (0, 512)


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 10**12)), min_size=1, max_size=300))
def test_points_are_few_in_order_and_lose_neither_the_highest_nor_the_lowest(steps: list[tuple[float, int]]) -> None:
    """However many looks there are and however long they take."""
    from gpumagic.memory.timeline import MAX_POINTS, _Downsampler

    fold, now = _Downsampler(), 0.0
    for pause, allocated in steps:
        now += pause
        fold.add(now, allocated, allocated)
    points = fold.points()
    assert len(points) <= MAX_POINTS
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    assert max(point.high for point in points) == max(allocated for _, allocated in steps)
    assert min(point.low for point in points) == min(allocated for _, allocated in steps)
    assert points[-1].last == steps[-1][1]


def test_a_look_that_comes_while_another_is_noted_is_left_out() -> None:
    """It may come from a finalizer, in the thread that is noting one: waiting would be for ever."""
    log = TimelineLog({DEVICE: figures(0)}, 1)
    with log._lock:
        log.add({DEVICE: figures(512)}, 2)
    assert log.finished({DEVICE: figures(0)}) is None


# -- lines ------------------------------------------------------------------------------------------------

CELL = textwrap.dedent(
    """\
    %%ondevice 0
    a = 1
    for i in a:
        b = i
        c = i
    d = f(
        1,
        2)
    with g:
        h = 1
        k = 2
    m = 1
    if a:
        n = 1
    else:
        o = 2"""
)


@pytest.mark.parametrize(
    ("first", "last", "span"),
    [
        (1, 2, (2, 2)),  # before the first line there is only the magic
        (2, 2, (2, 2)),
        (2, 4, (2, 5)),  # a loop may have come to its end and back
        (4, 4, (3, 5)),
        (7, 7, (6, 8)),  # a statement of several lines ends where it began
        (10, 10, (10, 10)),
        (9, 10, (9, 11)),
        (9, 9, (9, 11)),  # it may be entered or left
        (11, 12, (9, 12)),
        (12, 12, (12, 12)),
        (13, 14, (13, 16)),
        (2, 99, None),
        (None, 2, None),
        (1, 16, None),  # all of it
    ],
)
def test_the_lines_between_two_are_those_that_can_have_run(first: int, last: int, span: tuple[int, int]) -> None:
    assert lines.lines_between(dict(enumerate(CELL.splitlines(), 1)), first, last) == span


@given(st.integers(0, 2**32))
def test_no_line_that_ran_between_two_is_outside_the_span(seed: int) -> None:
    """Of a random program, run with a trace of its lines."""
    import random

    from gpumagic.source.lines import lines_between

    chance = random.Random(seed)
    lines = _program(chance, 0)
    ran: list[int] = []
    code = compile("\n".join(lines), "<random program>", "exec")
    _trace_lines(code, ran, chance)
    first, last = sorted(chance.choices(range(len(ran)), k=2))
    span = lines_between(dict(enumerate(lines, 1)), ran[first], ran[last])
    whole = (1, len(lines))
    low, high = span or whole
    assert all(low <= line <= high for line in ran[first : last + 1]), (lines, ran[first : last + 1], span)


def _program(chance: object, depth: int) -> list[str]:
    from random import Random

    assert isinstance(chance, Random)
    lines: list[str] = []
    for _ in range(chance.randint(1, 4)):
        kind = chance.choice(("x = 1", "f(", "for", "with", "if", "try") if depth < 3 else ("x = 1", "f("))
        if kind == "f(":
            lines += ["x = f(f(1),", "  f(2),", "  f(3))"]
        elif kind == "x = 1":
            lines.append(kind)
        else:
            inner = ["    " + line for line in _program(chance, depth + 1)]
            head = {"for": "for i in range(n()):", "with": "with c:", "if": "if n():", "try": "try:"}[kind]
            lines += [head, *inner, *(["finally:", "    x = 2"] if kind == "try" else [])]
    return lines


def _trace_lines(code: object, ran: list[int], chance: object) -> None:
    import contextlib
    from random import Random
    from types import CodeType

    assert isinstance(chance, Random)
    assert isinstance(code, CodeType)

    def local(frame: object, event: str, argument: object) -> object:
        if event == "line":
            ran.append(frame.f_lineno)  # type: ignore[attr-defined]
        return local

    def trace(frame: object, event: str, argument: object) -> object:
        return local if frame.f_code is code else None  # type: ignore[attr-defined]

    names = {"f": lambda *_: 0, "n": lambda: chance.randint(0, 2), "c": contextlib.nullcontext()}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(code, names)
    finally:
        sys.settrace(before)


# -- drawing ----------------------------------------------------------------------------------------------


def timeline(lines: tuple[int, int] | None = (5, 5), peak: int | None = 100 * MIB, **more: bool) -> MemoryTimeline:
    heights = (10, 10, 40, 100, 60, 20)
    points = tuple(MemoryPoint(second, n * MIB, n * MIB, n * MIB) for second, n in enumerate(heights))
    code = "y = model(x)" if lines is not None and lines[0] == lines[1] else None
    found = DeviceTimeline(DEVICE, 10 * MIB, 20 * MIB, peak, 100 * MIB, lines, code, points)
    return MemoryTimeline((found,), 6.0, 7, **more)


def lines_of(report_timeline: MemoryTimeline, width: int = 80, *, unicode: bool = True) -> list[str]:
    report = TransferReport(DEVICE, (), timeline=report_timeline, peak={DEVICE: 100 * MIB})
    return to_text(report, width, unicode).splitlines()


def test_a_report_draws_its_timeline_and_marks_the_peak_with_its_line() -> None:
    assert lines_of(timeline())[1:] == [
        "cuda:0, 0 us",
        "Memory on cuda:0: 10.0 MiB before, 20.0 MiB after",
        "▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▄▄▄▄▄▄▄▄▄▄██████████▅▅▅▅▅▅▅▅▅▅▂▂▂▂▂▂▂▂▂▂",
        "       peak 100.0 MiB, line 5 ↑",
        "Memory was sampled 7 times, about every 1 s",
    ]


def test_the_mark_stands_under_the_highest_and_within_the_width() -> None:
    for width in (40, 80, 200):
        shown = lines_of(timeline(), width)
        at = next(place for place, line in enumerate(shown) if "↑" in line)
        assert len(shown[at]) <= width
        assert len(shown[at - 1]) <= width
        if shown[at].endswith("↑"):
            assert shown[at - 1][len(shown[at]) - 1] == "█"


def test_without_unicode_it_is_drawn_with_ascii() -> None:
    shown = "\n".join(lines_of(timeline(), unicode=False))
    assert shown.isascii()
    assert "######" in shown
    assert "^" in shown


def test_what_is_not_certain_is_said_to_be() -> None:
    assert "peak 100.0 MiB, lines 4-7" in "\n".join(lines_of(timeline((4, 7))))
    unknown = "\n".join(lines_of(timeline(None, peak=None)))
    assert " highest sample 100.0 MiB ↑\n" in unknown


def test_in_html_the_columns_carry_the_characters_that_show_where_styles_are_stripped() -> None:
    import re

    html = to_html(TransferReport(DEVICE, (), timeline=timeline()))
    assert "<svg" not in html
    stripped = re.sub(r' style="[^"]*"', "", html)
    plain = re.sub(r"<[^>]+>", "", stripped)
    assert "▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▄▄▄▄▄▄▄▄▄▄██████████" in plain
    assert 'role="img" aria-label="Memory on cuda:0: 10.0 MiB before' in html


def test_hostile_code_cannot_leave_the_mark() -> None:
    found = DeviceTimeline(
        DEVICE, 0, MIB, MIB, MIB, (1, 1), "<img src=x onerror=alert(1)>\x1b[2J",
        tuple(MemoryPoint(second, 0, MIB, MIB) for second in range(5)),
    )  # fmt: skip
    report = TransferReport(DEVICE, (), timeline=MemoryTimeline((found,), 5.0, 6))
    assert "<img" not in to_html(report)
    assert "\x1b" not in to_text(report, 80)


def test_two_points_are_not_drawn() -> None:
    points = (MemoryPoint(0, 0, 0, 0), MemoryPoint(0.01, MIB, MIB, MIB))
    quick = DeviceTimeline(DEVICE, 0, MIB, MIB, MIB, None, None, points)
    report = TransferReport(DEVICE, (), timeline=MemoryTimeline((quick,), 0.01, 2), peak={DEVICE: MIB})
    assert to_text(report, 80).endswith("peak 1.0 MiB on cuda:0")


@given(st.lists(st.tuples(st.floats(0, 9.9), st.integers(0, 10**9)), min_size=1, max_size=50), st.integers(1, 60))
def test_no_column_hides_the_highest(found: list[tuple[float, int]], columns: int) -> None:
    points = tuple(MemoryPoint(second, n, n, n) for second, n in sorted(found))
    course = DeviceTimeline(DEVICE, 0, points[-1].last, None, 0, None, None, points)
    found_heights = heights(course, MemoryTimeline((course,), 10.0, 2), columns)
    assert len(found_heights) == columns
    assert max(found_heights) == max(n for _, n in found)

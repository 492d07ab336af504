"""The part of `%%ondevice --engines`: a row an engine, what to change, and each engine's own report."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.cluster.view import engines, numbers
from gpumagic.report.document import Block, Cell, Column, Fold, Heading, Paragraph, Segment, Table
from gpumagic.report.units import count, duration, size
from gpumagic.transfers import view
from gpumagic.transfers.report import TransferReport

MOST_ROWS = 32
MOST_REPORTS = 8
DIRECTIONS = ("host-to-device", "device-to-host", "device-to-device")


def cells(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, TransferReport)]
    blocks: list[Block] = [_table(found[:MOST_ROWS])]
    if len(found) > MOST_ROWS:
        blocks.append(Paragraph(f"and {count(len(found) - MOST_ROWS, 'more engine')}", muted=True))
    blocks += [Paragraph(text) for text in _advice(found)]
    each = [block for one in found[:MOST_REPORTS] for block in _whole(*one)]
    return _heading(found), [*blocks, Fold("Each engine's own report; in code, report.reports[engine]", each)]


Found = Sequence[tuple[EngineAnswer, TransferReport]]


def _heading(found: Found) -> str:
    devices = list(dict.fromkeys(report.device for _, report in found))
    where = ", ".join(devices) if len(devices) <= 3 else count(len(devices), "device")
    slowest = max(found, key=lambda each: each[1].elapsed)
    took = duration(slowest[1].elapsed)
    return f"on {where} for {took}" + (f" at the longest (engine {slowest[0].place})" if len(found) > 1 else "")


def _table(found: Found) -> Table:
    most = max(_moved(report) for _, report in found) or 1
    columns = [
        Column("Engine"), Column("Host", priority=3), Column("Device"), Column("Time", "right"),
        Column("New tensors", "right", 1), Column("Moved", "right"), Column("To device", "right", 2),
        Column("To host", "right", 2), Column("Between", "right", 3), Column("Waits", "right", 2),
        Column("Peak", "right", 1),
    ]  # fmt: skip
    grid = [_row(answer, report, most) for answer, report in found]
    one_host = len({answer.origin.host for answer, _ in found}) == 1  # which the heading names
    shown = [
        place
        for place, column in enumerate(columns)
        if any(row[place] for row in grid) and not (one_host and column.title == "Host")
    ]
    return Table([columns[place] for place in shown], [[row[place] for place in shown] for row in grid], "Each engine")


def _row(answer: EngineAnswer, report: TransferReport, most: int) -> list[Cell | str]:
    moved = _moved(report)
    ways = [sum(row.nbytes for row in report.moves if row.direction == way) for way in DIRECTIONS]
    created = f"{sum(number for number, _ in report.created.values()):,}"
    bar = (Segment(moved / most),) if moved else ()
    peak, waits = report.peak.get(report.device), sum(report.syncs.values())
    return [
        answer.place, answer.origin.host, report.device, duration(report.elapsed), created, Cell(size(moved), bar),
        *(size(way) if way else "" for way in ways), f"{waits:,}" if waits else "", "" if peak is None else size(peak),
    ]  # fmt: skip


def _moved(report: TransferReport) -> int:
    return sum(row.nbytes for row in report.moves)


def _advice(found: Found) -> list[str]:
    said: dict[str, list[EngineAnswer]] = {}
    for answer, report in found:
        for advice in report.advice:
            said.setdefault(advice, []).append(answer)
    return [
        f"→ {advice}" + ("" if len(who) == len(found) else f" ({engines(who).lower()})") for advice, who in said.items()
    ]


def _whole(answer: EngineAnswer, report: TransferReport) -> list[Block]:
    return [Heading(f"Engine {numbers([answer])}", apart=True), *view.view_transfers(report).blocks]

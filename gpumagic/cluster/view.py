"""The view of reports of many engines: what they show together, and each engine's own report of a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpumagic.cluster.gpus_view import gpu_blocks
from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer, engine_ranges, engines_label
from gpumagic.cluster.tensors_view import tensor_blocks
from gpumagic.oom.report import OomReport
from gpumagic.oom.view import view_failure
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Paragraph,
    Segment,
    Table,
    document_of,
)
from gpumagic.report.units import count, duration, size
from gpumagic.transfers.report import TransferReport
from gpumagic.transfers.view import view_transfers


@document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> Document:
    """Return the report of the engines that answered, then what is to be said of the others."""
    heading, blocks = _BODIES[report.magic](report) if report.reports else (_empty_heading(report), [])
    blocks = [Heading(f"{heading} · {_engines(report)}"), *blocks]
    blocks += [Paragraph(text) for text in _engines_without_report(report)]
    notes = report.notes if report.magic == "oomguard" else (*report.notes, *_notes(report))  # has them in each report
    blocks += [Paragraph(note, muted=True) for note in notes]
    return Document(tuple(blocks))


def _engines(report: ClusterReport) -> str:
    told = sum(answer.report is not None for answer in report.engines)
    number = count(len(report.engines), "engine")
    if told < len(report.engines) and report.magic != "oomguard":
        number = f"{told} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    where = hosts.pop() if len(hosts) == 1 else count(len(hosts), "host")
    return f"{number} on {where}" if where != "0 hosts" else number


def _empty_heading(report: ClusterReport) -> str:
    """Return the heading where no engine has a report."""
    return f"%%{report.magic}" if report.magic in {"ondevice", "oomguard"} else "No answer"


def _engines_without_report(report: ClusterReport) -> Iterator[str]:
    """Tell of the engines that lack something, those of a host of which the same is to be said in one line."""
    several = len({answer.origin.host for answer in report.engines}) > 1
    alike: dict[tuple[str, str, str], list[EngineAnswer]] = {}
    for answer in report.engines:
        if answer.state not in (ANSWERED, "out of memory"):
            host = f" on {answer.origin.host}" if several and answer.origin.host else ""
            alike.setdefault((host, answer.state, answer.detail), []).append(answer)
    for (host, state, detail), answers in alike.items():
        yield f"{engines_label(answers)}{host}: {state}" + (f", {detail}" if detail else "")


def _notes(report: ClusterReport) -> list[str]:
    """Return what the engines' own reports remark, once each, with the engines where it is not all of them."""
    said: dict[str, list[EngineAnswer]] = {}
    for answer in report.engines:
        for note in getattr(answer.report, "notes", ()):
            said.setdefault(note, []).append(answer)
    told = sum(answer.report is not None for answer in report.engines)
    return [note if len(who) == told else f"{engines_label(who)}: {note}" for note, who in said.items()]


MAX_ROWS = 32
MAX_REPORTS = 8
DIRECTIONS = ("host-to-device", "device-to-host", "device-to-device")


def cell_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, TransferReport)]
    blocks: list[Block] = [_table(found[:MAX_ROWS])]
    if len(found) > MAX_ROWS:
        blocks.append(Paragraph(f"and {count(len(found) - MAX_ROWS, 'more engine')}", muted=True))
    blocks += [Paragraph(text) for text in _advice_lines(found)]
    each = [block for one in found[:MAX_REPORTS] for block in _full_transfers(*one)]
    return _heading(found), [*blocks, Fold("Each engine's own report; in code, report.reports[engine]", each)]


Found = Sequence[tuple[EngineAnswer, TransferReport]]


def _heading(found: Found) -> str:
    devices = list(dict.fromkeys(report.device for _, report in found))
    where = ", ".join(devices) if len(devices) <= 3 else count(len(devices), "device")
    slowest = max(found, key=lambda each: each[1].elapsed)
    took = duration(slowest[1].elapsed)
    return f"on {where} for {took}" + (f" at the longest (engine {slowest[0].label})" if len(found) > 1 else "")


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
        answer.label, answer.origin.host, report.device, duration(report.elapsed), created, Cell(size(moved), bar),
        *(size(way) if way else "" for way in ways), f"{waits:,}" if waits else "", "" if peak is None else size(peak),
    ]  # fmt: skip


def _moved(report: TransferReport) -> int:
    return sum(row.nbytes for row in report.moves)


def _advice_lines(found: Found) -> list[str]:
    said: dict[str, list[EngineAnswer]] = {}
    for answer, report in found:
        for advice in report.advice:
            said.setdefault(advice, []).append(answer)
    return [
        f"→ {advice}" + ("" if len(who) == len(found) else f" ({engines_label(who).lower()})")
        for advice, who in said.items()
    ]


def _full_transfers(answer: EngineAnswer, report: TransferReport) -> list[Block]:
    return [Heading(f"Engine {engine_ranges([answer])}", apart=True), *view_transfers(report).blocks]


MAX_FULL_REPORTS = 2
"""Reports that are shown whole; of more the headline is, and in a notebook the rest folded."""


def failure_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, OomReport)]
    out = [answer for answer, own in found if not own.recovered]
    blocks: list[Block] = []
    for place, (answer, own) in enumerate(found):
        blocks += _full_failure(answer, own) if place < MAX_FULL_REPORTS else [_folded_failure(answer, own)]
    if not out:
        return ("Passed after running out of memory" if found else "%%oomguard"), blocks
    passed = sum(answer.state == "answered" for answer in report.engines)
    others = f"; the cell passed on {count(passed, 'other')}" if passed else ""
    return f"Out of memory on engine {engine_ranges(out)}{others}", blocks


def _full_failure(answer: EngineAnswer, report: OomReport) -> list[Block]:
    heading, *rest = view_failure(report).blocks
    assert isinstance(heading, Heading)
    return [Heading(f"Engine {answer.label}: {heading.text}", apart=True), *rest]


def _folded_failure(answer: EngineAnswer, report: OomReport) -> Fold:
    heading, *rest = _full_failure(answer, report)
    assert isinstance(heading, Heading)
    return Fold(heading.text, rest)


_BODIES: Mapping[str, Callable[[ClusterReport], tuple[str, list[Block]]]] = {
    "gpuinfo": gpu_blocks,
    "devices": tensor_blocks,
    "ondevice": cell_blocks,
    "oomguard": failure_blocks,
}

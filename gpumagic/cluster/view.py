"""The view of a `ClusterReport`: what the engines show together, and each engine's own report of a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpumagic.cluster.gpus_view import gpu_blocks
from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer, engine_ranges, engines_label
from gpumagic.cluster.tensors_view import tensor_blocks
from gpumagic.oom.report import OomReport
from gpumagic.oom.view import first_step, view_failure
from gpumagic.report.base import grouped
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

MAX_ROWS = 32
MAX_TRANSFER_REPORTS = 8
MAX_OOM_REPORTS = 2
"""Reports that are shown whole; of others the heading is, and the rest folded."""


@document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> Document:
    """Return the report of the engines that answered, then what is known of the others."""
    if report.reports:
        heading, blocks = _BODIES[report.magic](report)
    else:
        heading, blocks = f"%%{report.magic}" if report.magic in {"ondevice", "oomguard"} else "No answer", []
    blocks = [Heading(heading), Paragraph(_engines(report), muted=True), *blocks]
    blocks += [Paragraph(text) for text in _engines_without_report(report)]
    notes = report.notes if report.magic == "oomguard" else (*report.notes, *_notes(report))  # has them in each report
    blocks += [Paragraph(note, muted=True) for note in notes]
    return Document(tuple(blocks))


def _engines(report: ClusterReport) -> str:
    number = count(len(report.engines), "engine")
    if len(report.reports) < len(report.engines) and report.magic != "oomguard":
        number = f"{len(report.reports)} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    if not hosts:
        return number
    return f"{number} on {hosts.pop() if len(hosts) == 1 else count(len(hosts), 'host')}"


def _engines_without_report(report: ClusterReport) -> Iterator[str]:
    """Return the states of engines that did not answer, one line for those of a host in the same state."""
    several = len({answer.origin.host for answer in report.engines}) > 1
    alike = grouped(
        ((answer.origin.host if several else "", answer.state, answer.detail), answer)
        for answer in report.engines
        if answer.state not in (ANSWERED, "out of memory")
    )
    for (host, state, detail), answers in alike.items():
        where = f" on {host}" if host else ""
        yield f"{engines_label(answers)}{where}: {state}" + (f", {detail}" if detail else "")


def _notes(report: ClusterReport) -> list[str]:
    """Return the notes of the engines' reports, once each, with the engines where not all have it."""
    notes = grouped((note, answer) for answer in report.engines for note in getattr(answer.report, "notes", ()))
    return [
        note if len(answers) == len(report.reports) else f"{engines_label(answers)}: {note}"
        for note, answers in notes.items()
    ]


Transfers = Sequence[tuple[EngineAnswer, TransferReport]]


def transfer_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks of `%%ondevice`."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, TransferReport)]
    blocks: list[Block] = [Paragraph(_durations(found), muted=True), _transfer_table(found[:MAX_ROWS])]
    if len(found) > MAX_ROWS:
        blocks.append(Paragraph(f"and {count(len(found) - MAX_ROWS, 'more engine')}", muted=True))
    first, *others = _changes(found) or [""]
    blocks += [Paragraph(f"→ {each}") for each in others]
    each: list[Block] = []
    for answer, own in found[:MAX_TRANSFER_REPORTS]:
        each += [Heading(f"Engine {answer.label}", apart=True), *view_transfers(own).blocks]
    return first or _nothing_to_change(found), [
        *blocks,
        Fold("Each engine's own report; in code, report.reports[engine]", each),
    ]


def _changes(found: Transfers) -> list[str]:
    """Return what to change, with the engines where not all should."""
    alike = grouped((str(advice), answer) for answer, own in found for advice in own.advice)
    return [
        advice if len(answers) == len(found) else f"{advice} ({engines_label(answers).lower()})"
        for advice, answers in alike.items()
    ]


def _nothing_to_change(found: Transfers) -> str:
    copied = sum(_moved(report) for _, report in found)
    return f"{size(copied)} copied, nothing to change found" if copied else "No transfers between devices"


def _durations(found: Transfers) -> str:
    devices = list(dict.fromkeys(report.device for _, report in found))
    where = ", ".join(devices) if len(devices) <= 3 else count(len(devices), "device")
    engine, slowest = max(found, key=lambda each: each[1].elapsed)
    longest = f" at the longest (engine {engine.label})" if len(found) > 1 else ""
    return f"on {where} for {duration(slowest.elapsed)}{longest}"


def _transfer_table(found: Transfers) -> Table:
    most = max(_moved(report) for _, report in found) or 1
    columns = [
        Column("Engine"), Column("Host", priority=3), Column("Device"), Column("Time", "right"),
        Column("New tensors", "right", 1), Column("Copied", "right"), Column("To device", "right", 2),
        Column("To host", "right", 2), Column("Between", "right", 3), Column("Syncs", "right", 2),
        Column("Peak", "right", 1),
    ]  # fmt: skip
    grid = [_transfer_cells(answer, report, most) for answer, report in found]
    one_host = len({answer.origin.host for answer, _ in found}) == 1  # which the heading names
    shown = [
        place
        for place, column in enumerate(columns)
        if any(row[place] for row in grid) and not (one_host and column.title == "Host")
    ]
    return Table([columns[place] for place in shown], [[row[place] for place in shown] for row in grid], "Each engine")


def _transfer_cells(answer: EngineAnswer, report: TransferReport, most: int) -> list[Cell | str]:
    moved = _moved(report)
    by_direction = [
        sum(row.nbytes for row in report.moves if row.direction == direction)
        for direction in ("host-to-device", "device-to-host", "device-to-device")
    ]
    created = f"{sum(number for number, _ in report.created.values()):,}"
    bar = (Segment(moved / most),) if moved else ()
    peak, waits = report.peak.get(report.device), sum(report.syncs.values())
    return [
        answer.label, answer.origin.host, report.device, duration(report.elapsed), created, Cell(size(moved), bar),
        *(size(nbytes) if nbytes else "" for nbytes in by_direction), f"{waits:,}" if waits else "",
        "" if peak is None else size(peak),
    ]  # fmt: skip


def _moved(report: TransferReport) -> int:
    return sum(row.nbytes for row in report.moves)


def oom_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks of `%%oomguard`."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, OomReport)]
    out = [answer for answer, own in found if not own.recovered]
    blocks: list[Block] = []
    for place, (answer, own) in enumerate(found):
        first, *rest = view_failure(own).blocks
        assert isinstance(first, Heading)
        heading = f"Engine {answer.label}: {first.text}"
        blocks += [Heading(heading, apart=True), *rest] if place < MAX_OOM_REPORTS else [Fold(heading, rest)]
    if not out:
        return ("Passed after running out of memory" if found else "%%oomguard"), blocks
    passed = sum(answer.state == ANSWERED and answer not in out for answer in report.engines)
    others = f"; the cell passed on {count(passed, 'other')}" if passed else ""
    return f"Out of memory on engine {engine_ranges(out)}{others}. {_first_steps(out)}", blocks


def _first_steps(out: Sequence[EngineAnswer]) -> str:
    """Return what to do, of the first engine where they are told different things."""
    steps = grouped((first_step(answer.report), answer) for answer in out)
    step, answers = next(iter(steps.items()))
    return step if len(steps) == 1 else f"{engines_label(answers)}: {step}"


_BODIES: Mapping[str, Callable[[ClusterReport], tuple[str, list[Block]]]] = {
    "gpuinfo": gpu_blocks,
    "devices": tensor_blocks,
    "ondevice": transfer_blocks,
    "oomguard": oom_blocks,
}

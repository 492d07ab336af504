"""The view of `%%oomguard`: why a cell ran out of memory, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.records import ON_THE_CPU, Advice
from gpumagic.advice.view import how, worth
from gpumagic.oom.report import WORKSPACE, OomReport
from gpumagic.report.base import Holder
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Listing,
    Paragraph,
    Segment,
    Table,
    document_of,
)
from gpumagic.report.units import LARGE, count, size, size_of

SHOWN_ADVICE = 5
SHOWN_HOLDERS = 20
SHORT = 40
"""Characters of code that the first line has room for."""
NAMED_HOLDERS = 3


@document_of.register(OomReport)
def view_failure(report: OomReport) -> Document:
    """Return the verdict and the first suggestion, then the others and the memory; all else is folded away."""
    heading, failure = Heading(_headline(report)), list(_failure(report))
    if report.recovered:
        return Document((heading, Fold(f"Why it ran out at first: {report.verdict}", failure)))
    before, after = report.allocated_at_failure, report.allocated_after
    said = [report.verdict] if report.advice else []  # else it is in the first line
    said += (
        [f"Freed {size(before - after)}."]
        if before is not None and after is not None and after < before
        else []
    )
    return Document((heading, *([Paragraph(" ".join(said))] if said else []), *failure))


def _failure(report: OomReport) -> Iterator[Block]:
    yield from _advice(report)
    if report.allocated_at_failure is not None:
        yield _memory(report)
    if report.code is not None:
        yield Fold(f"Failed in {report.code}", [Listing([(report.line or 0, report.code, "")])])
    yield from _parts(report)
    yield from _holders(report)
    if report.notes:
        yield Fold(report.notes[0], [Paragraph(note, muted=True) for note in report.notes])


def _headline(report: OomReport) -> str:
    """Return where it ran out, and the first thing to do."""
    device = f" on {report.device}" if report.device else ""
    line = f", line {report.line}" if report.line is not None else ""
    where = f"{'Probably out' if report.certainty == 'probable' else 'Out'} of memory{device}{line}"
    if report.recovered:
        keep = f". To keep it: {report.place}" if report.place else ""
        return f"{where}; passed {_way(report)}{keep}"
    if report.retries:
        where += f", also {_way(report)}"
    first = (
        f"{report.advice[0].title}{_short(report.advice[0])}" if report.advice else report.verdict
    )
    return f"{where}. {first}"


def _short(advice: Advice) -> str:
    """Return the code of a suggestion where that is one short statement to run, and what it is worth."""
    code = "" if advice.changes else advice.first or advice.edit or ""
    is_short = code.startswith(("del ", "%xdel ")) and "\n" not in code and len(code) <= SHORT
    return f" ({code}){worth(advice)}" if is_short and code != advice.title else worth(advice)


def _way(report: OomReport) -> str:
    """Return what was different in the last run."""
    last = report.tries[-1] if report.tries else None
    if last is not None and last.device is not None:
        return f"on {last.device}"
    if last is not None and last.size != report.tries[0].size:
        return f"with {report.shrunk} = {last.size}"
    return f"after {count(report.retries, 'retry', 'retries')}"


Bar = tuple[str, int | None, int | None, int]
"""When it was or with what, what was allocated, what was reserved, and what was asked for besides."""


def _memory(report: OomReport) -> Table:
    """Return what was allocated over the cell, with the request that failed, and what each change tried would need."""
    bars: list[Bar] = [
        ("Before the cell", report.allocated_before, report.reserved_before, 0),
        (
            "At the failure",
            report.allocated_at_failure,
            report.reserved_at_failure,
            report.requested or 0,
        ),
        ("Now", report.allocated_after, report.reserved_after, 0),
    ]
    bars += [
        (f"{number}. {each.title}", each.trial.needs, None, 0)
        for number, each in enumerate(report.advice[:SHOWN_ADVICE], 1)
        if _is_tried_here(each) and each.trial is not None and each.trial.needs is not None
    ]
    capacity = report.capacity or 0
    whole = max(
        capacity,
        *(max(allocated or 0, reserved or 0) + asked for _, allocated, reserved, asked in bars),
    )

    def allocated(bar: Bar) -> Cell:
        """Return a cell whose ground is the device: the request, or what a change needs too much, sticks out of it."""
        _, allocated, reserved, asked = bar
        if allocated is None or not capacity:
            return Cell(size(allocated))
        cached, beyond = max(0, (reserved or 0) - allocated), max(0, allocated - capacity)
        inside, request = (
            Segment((allocated - beyond) / whole),
            Segment((beyond + asked) / whole, "other"),
        )
        text = f"{size(allocated)} + {size(asked)}" if asked else size(allocated)
        return Cell(
            text,
            (inside, Segment(cached / whole, "second"), request),
            ground=min(1.0, capacity / whole),
        )

    columns: tuple[Column[Bar], ...] = (
        Column(report.device or "Memory", lambda bar: bar[0], shrinks=True),
        Column(f"Allocated of {size(capacity)}" if capacity else "Allocated", allocated, "right"),
        Column(
            "Cached",
            lambda bar: size(bar[2] - bar[1]) if bar[1] is not None and bar[2] is not None else "",
            "right",
            priority=1,
        ),
    )
    return Table.of(
        bars, columns, "Memory before, at the failure, now, and with each suggestion that was tried"
    )


def _is_tried_here(advice: Advice) -> bool:
    """Return whether a dry run was made of a suggestion for the device that failed."""
    return advice.trial is not None and not advice.gpu and advice.title != ON_THE_CPU


def _parts(report: OomReport) -> Iterator[Block]:
    """Say what the cell needs memory for at its peak, folded: the largest part in a line, the table behind it."""
    need = report.need
    rows = (
        sorted((each for each in need.parts.items() if each[1] >= LARGE), key=lambda row: -row[1])
        if need
        else []
    )
    if rows and need is not None:
        columns: tuple[Column[tuple[str, int]], ...] = (
            Column("At the peak", lambda row: row[0]),
            Column("Size", lambda row: size(row[1]), "right", bar=lambda row: {row[0]: row[1]}),
        )
        table = Table.of(
            rows, columns, "What the cell needs memory for at its peak", whole=need.needed
        )
        yield Fold(f"At its peak: {rows[0][0]} {size_of(rows[0][1], need.needed)}", [table])


def _holders(report: OomReport) -> Iterator[Block]:
    if not report.holders:
        return
    large = [
        holder for holder in report.holders if holder.nbytes >= LARGE
    ]  # they come largest first
    shown = [f"{holder.name} {size(holder.nbytes)}" for holder in large[:NAMED_HOLDERS]]
    rest = report.holders[len(shown) :]
    shown += (
        [f"{count(len(rest), 'name')} {size(sum(holder.nbytes for holder in rest))}"]
        if rest
        else []
    )
    whole = report.allocated_after or sum(holder.nbytes for holder in report.holders) or 1
    columns: tuple[Column[Holder], ...] = (
        Column("Kept by", lambda holder: holder.name, shrinks=True),
        Column("What", lambda holder: holder.kind, priority=1),
        Column(
            "Frees"
            if any(holder.kind == WORKSPACE for holder in report.holders[:SHOWN_HOLDERS])
            else "Freed by del",
            lambda holder: size(holder.nbytes),
            "right",
            bar=lambda holder: holder.nbytes,
        ),
    )
    table = Table.of(
        report.holders[:SHOWN_HOLDERS], columns, "Names that hold memory on the device", whole=whole
    )
    yield Fold(f"Held now: {', '.join(shown)}", [table])


def _advice(report: OomReport) -> Iterator[Block]:
    if not report.advice:
        return
    first, *others = report.advice
    yield from how(first)
    needs_more, tried = (
        report.need is not None and report.need.fits is False,
        filter(_is_tried_here, report.advice),
    )
    if report.untried:
        yield Paragraph(f"None of it was tried: {report.untried}.", muted=True)
    elif needs_more and all(each.covers is False for each in tried):
        yield Paragraph(f"Nothing that was tried fits on {report.device}.")
    for number, each in enumerate(others[: SHOWN_ADVICE - 1], 2):
        yield Fold(f"{number}. {each.title}{worth(each)}", list(how(each)))

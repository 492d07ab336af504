"""The view of `%%oomguard`: why a cell ran out of memory, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
    heading = Heading(_headline(report))
    rest = list(_below_headline(report))
    if report.recovered:
        return Document(
            (heading, Fold(f"Why it ran out at first: {report.verdict}", rest))
        )
    sentences = []
    if report.advice:  # else the verdict is in the first line
        sentences.append(report.verdict)
    before, after = report.allocated_at_failure, report.allocated_after
    if before is not None and after is not None and after < before:
        sentences.append(f"Freed {size(before - after)}.")
    if sentences:
        rest.insert(0, Paragraph(" ".join(sentences)))
    return Document((heading, *rest))


def _below_headline(report: OomReport) -> Iterator[Block]:
    yield from _advice(report)
    if report.allocated_at_failure is not None:
        yield _memory(report)
    if report.code is not None:
        yield Fold(
            f"Failed in {report.code}", [Listing([(report.line or 0, report.code, "")])]
        )
    yield from _parts(report)
    yield from _holders(report)
    if report.notes:
        yield Fold(
            report.notes[0], [Paragraph(note, muted=True) for note in report.notes]
        )


def _headline(report: OomReport) -> str:
    """Return where it ran out, and the first thing to do."""
    what = "Probably out" if report.certainty == "probable" else "Out"
    where = f"{what} of memory"
    if report.device:
        where += f" on {report.device}"
    if report.line is not None:
        where += f", line {report.line}"
    if report.recovered:
        keep = f". To keep it: {report.place}" if report.place else ""
        return f"{where}; passed {_difference_of_last_run(report)}{keep}"
    if report.retries:
        where += f", also {_difference_of_last_run(report)}"
    if not report.advice:
        return f"{where}. {report.verdict}"
    first = report.advice[0]
    return f"{where}. {first.title}{_code_and_worth(first)}"


def _code_and_worth(advice: Advice) -> str:
    """Return what a suggestion is worth, with its code where all there is to do is a short deletion."""
    code = advice.deletion
    is_short = "\n" not in code and len(code) <= SHORT
    if code and is_short and code != advice.title:
        return f" ({code}){worth(advice)}"
    return worth(advice)


def _difference_of_last_run(report: OomReport) -> str:
    """Return what was different in the last run, as the end of a sentence."""
    if report.tries:
        last = report.tries[-1]
        if last.device is not None:
            return f"on {last.device}"
        if last.size != report.tries[0].size:
            return f"with {report.shrunk} = {last.size}"
    return f"after {count(report.retries, 'retry', 'retries')}"


class _Bar(NamedTuple):
    """One row of the memory table."""

    title: str
    """When it was, or with which suggestion."""
    allocated: int | None
    reserved: int | None = None
    requested: int = 0
    """What was asked for besides."""


def _memory(report: OomReport) -> Table:
    """Return what was allocated over the cell, with the request that failed, and what each change tried would need."""
    bars = list(_bars(report))
    capacity = report.capacity or 0
    whole = capacity
    for bar in bars:
        held = max(bar.allocated or 0, bar.reserved or 0)
        whole = max(whole, held + bar.requested)

    def allocated(bar: _Bar) -> Cell:
        """Return a cell whose ground is the device: the request, or what a change needs too much, sticks out of it."""
        if bar.allocated is None or not capacity:
            return Cell(size(bar.allocated))
        text = size(bar.allocated)
        if bar.requested:
            text += f" + {size(bar.requested)}"
        cached = max(0, (bar.reserved or 0) - bar.allocated)
        beyond = max(0, bar.allocated - capacity)
        segments = (
            Segment((bar.allocated - beyond) / whole),
            Segment(cached / whole, "second"),
            Segment((beyond + bar.requested) / whole, "other"),
        )
        return Cell(text, segments, ground=min(1.0, capacity / whole))

    columns: tuple[Column[_Bar], ...] = (
        Column(report.device or "Memory", lambda bar: bar.title, shrinks=True),
        Column(
            f"Allocated of {size(capacity)}" if capacity else "Allocated",
            allocated,
            "right",
        ),
        Column("Cached", _cached, "right", priority=1),
    )
    return Table.of(
        bars,
        columns,
        "Memory before, at the failure, now, and with each suggestion that was tried",
    )


def _bars(report: OomReport) -> Iterator[_Bar]:
    yield _Bar("Before the cell", report.allocated_before, report.reserved_before)
    yield _Bar(
        "At the failure",
        report.allocated_at_failure,
        report.reserved_at_failure,
        report.requested or 0,
    )
    yield _Bar("Now", report.allocated_after, report.reserved_after)
    for number, advice in enumerate(report.advice[:SHOWN_ADVICE], 1):
        if (
            advice.trial is not None
            and advice.trial.needs is not None
            and _is_tried_here(advice)
        ):
            yield _Bar(f"{number}. {advice.title}", advice.trial.needs)


def _cached(bar: _Bar) -> str:
    if bar.allocated is None or bar.reserved is None:
        return ""
    return size(bar.reserved - bar.allocated)


def _is_tried_here(advice: Advice) -> bool:
    """Return whether a dry run was made of a suggestion for the device that failed."""
    return advice.trial is not None and not advice.gpu and advice.title != ON_THE_CPU


class _Part(NamedTuple):
    """What some of the memory is for, such as activations."""

    name: str
    nbytes: int


def _parts(report: OomReport) -> Iterator[Block]:
    """Say what the cell needs memory for at its peak, folded: the largest part in a line, the table behind it."""
    need = report.need
    if need is None:
        return
    parts = [
        _Part(name, nbytes) for name, nbytes in need.parts.items() if nbytes >= LARGE
    ]
    if not parts:
        return
    parts.sort(key=lambda part: -part.nbytes)
    columns: tuple[Column[_Part], ...] = (
        Column("At the peak", lambda part: part.name),
        Column(
            "Size",
            lambda part: size(part.nbytes),
            "right",
            bar=lambda part: {part.name: part.nbytes},
        ),
    )
    table = Table.of(
        parts, columns, "What the cell needs memory for at its peak", whole=need.needed
    )
    largest = parts[0]
    yield Fold(
        f"At its peak: {largest.name} {size_of(largest.nbytes, need.needed)}", [table]
    )


def _holders(report: OomReport) -> Iterator[Block]:
    """Say who holds memory now, folded: the largest in a line, the table behind it."""
    if not report.holders:
        return
    # They come largest first.
    named = [
        holder for holder in report.holders[:NAMED_HOLDERS] if holder.nbytes >= LARGE
    ]
    words = [f"{_names(holder)} {size(holder.nbytes)}" for holder in named]
    rest = report.holders[len(named) :]
    if rest:
        words.append(
            f"{count(len(rest), 'name')} {size(sum(holder.nbytes for holder in rest))}"
        )
    in_table = report.holders[:SHOWN_HOLDERS]
    has_workspace = any(holder.kind == WORKSPACE for holder in in_table)
    columns: tuple[Column[Holder], ...] = (
        Column("Kept by", _names, shrinks=True),
        Column("What", lambda holder: holder.kind, priority=1),
        Column(
            "Frees" if has_workspace else "Freed by del",
            lambda holder: size(holder.nbytes),
            "right",
            bar=lambda holder: holder.nbytes,
        ),
    )
    whole = (
        report.allocated_after or sum(holder.nbytes for holder in report.holders) or 1
    )
    table = Table.of(
        in_table, columns, "Names that hold memory on the device", whole=whole
    )
    yield Fold(f"Held now: {', '.join(words)}", [table])


def _names(holder: Holder) -> str:
    return ", ".join(holder.names)


def _advice(report: OomReport) -> Iterator[Block]:
    """Show the first suggestion, and the titles of some others, whose code is folded away."""
    if not report.advice:
        return
    first, *others = report.advice
    yield from how(first)
    needs_more = report.need is not None and report.need.fits is False
    tried = [advice for advice in report.advice if _is_tried_here(advice)]
    if report.untried:
        yield Paragraph(f"None of it was tried: {report.untried}.", muted=True)
    elif needs_more and all(advice.covers is False for advice in tried):
        yield Paragraph(f"Nothing that was tried fits on {report.device}.")
    for number, advice in enumerate(others[: SHOWN_ADVICE - 1], 2):
        yield Fold(f"{number}. {advice.title}{worth(advice)}", list(how(advice)))

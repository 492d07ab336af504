"""The view of `%%oomguard`: why a cell ran out of memory, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpumagic.memory.view import timeline_blocks
from gpumagic.oom.report import WORKSPACE, Advice, OomReport, Try
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
from gpumagic.report.units import NOT_AVAILABLE, count, duration, shape, size


def tries_table(tries: Sequence[Try], name: str) -> Table:
    """Return the runs of a cell, in order; `name` is the int that varied, "" for none."""
    lost = any(each.lost for each in tries)
    columns = [
        Column("run", "right"), *([Column(name, "right")] if name else []), Column("ended"), Column("in use", "right"),
        Column("time", "right", priority=1), *([Column("could not be undone", shrinks=True)] if lost else []),
    ]  # fmt: skip
    rows: list[list[Cell | str]] = [
        [
            str(each.number),
            *([str(each.size)] if name else []),
            _ending(each),
            "" if each.allocated is None else size(each.allocated),
            duration(each.seconds),
            *([", ".join(each.lost)] if lost else []),
        ]
        for each in tries
    ]
    return Table(columns, rows, caption="Runs of the cell")


def _ending(each: Try) -> str:
    where = f" on {each.device}" if each.device else ""
    if each.fits:
        return f"fits{where}"
    asked = f", asked for {size(each.requested)}" if each.requested is not None else ""
    line = f" in line {each.line}" if each.line is not None else ""
    return f"out of memory{where}{line}{asked}"


SHOWN_ADVICE = 5
SHOWN_HOLDERS = 6
WORTH_A_ROW = 1024**2


@document_of.register(OomReport)
def view_failure(report: OomReport) -> Document:
    """Return the report with its verdict first; a cell that passed in the end has all of the failure folded away."""
    heading, failure = Heading(_headline(report)), _failure(report)
    if not report.recovered:
        return Document((heading, Paragraph(report.verdict), *failure))
    blocks: list[Block] = [heading]
    if report.place:
        blocks.append(Paragraph(f"To keep it, {report.place}"))
    blocks += _tries(report)
    return Document((*blocks, Fold(f"why it ran out at first: {report.verdict}", failure)))


def _failure(report: OomReport) -> list[Block]:
    blocks: list[Block] = []
    if report.code is not None:
        blocks.append(Listing([(report.line or 0, report.code, "")]))
    blocks += _operation(report)
    if not report.recovered:
        blocks += _tries(report)
    blocks += _advice(report.advice)
    blocks += _actions(report)
    if report.allocated_at_failure is not None:
        blocks += [Heading("Memory", apart=True), _memory(report)]
    blocks += timeline_blocks(report.timeline)
    blocks += _shares(report)
    if report.holders:
        blocks += _holders(report)
    return [*blocks, *(Paragraph(note, muted=True) for note in report.notes)]


def _tries(report: OomReport) -> Iterator[Block]:
    if report.tries:
        yield tries_table(report.tries, report.shrunk)


def _headline(report: OomReport) -> str:
    where = f" on {report.device}" if report.device else ""
    parts = [f"Out of memory{where}" + (f", line {report.line}" if report.line is not None else "")]
    if report.certainty == "probable":
        parts[0] = f"Probably o{parts[0][1:]}"
    if report.retries:
        parts.append(f"passed {_way(report)}" if report.recovered else f"also {_way(report)}")
    freed = _freed(report)
    if freed is not None and freed > 0 and not report.recovered:
        parts.append(f"{size(freed)} given back")
    return " · ".join(parts)


def _way(report: OomReport) -> str:
    """Return what was different in the last run."""
    last = report.tries[-1] if report.tries else None
    if last is not None and last.device is not None:
        return f"on {last.device}"
    if last is not None and last.size != report.tries[0].size:
        return f"with {report.shrunk} = {last.size}"
    return f"after {count(report.retries, 'retry', 'retries')}"


def _freed(report: OomReport) -> int | None:
    if report.allocated_at_failure is None or report.allocated_after is None:
        return None
    return report.allocated_at_failure - report.allocated_after


def _memory(report: OomReport) -> Table:
    stages = (
        ("before the cell", report.allocated_before, report.reserved_before),
        ("at the failure", report.allocated_at_failure, report.reserved_at_failure),
        ("now", report.allocated_after, report.reserved_after),
    )
    columns = [
        Column(report.device or "memory"),
        Column("allocated" + (f" of {size(report.capacity)}" if report.capacity else ""), "right"),
        Column("cached", "right", priority=1),
    ]
    rows: list[list[Cell | str]] = [
        [stage, _bar(allocated, reserved, report.capacity), _cached(allocated, reserved)]
        for stage, allocated, reserved in stages
    ]
    return Table(columns, rows, caption="Memory before, at the failure and now")


def _bar(allocated: int | None, reserved: int | None, capacity: int | None) -> Cell:
    if allocated is None or not capacity:
        return Cell(size(allocated))
    cached = max(0, (reserved or allocated) - allocated)
    return Cell(size(allocated), (Segment(allocated / capacity), Segment(cached / capacity, "second")))


def _cached(allocated: int | None, reserved: int | None) -> str:
    return NOT_AVAILABLE if allocated is None or reserved is None else size(reserved - allocated)


def _operation(report: OomReport) -> Iterator[Block]:
    instant = report.instant
    shapes = [f"{each.name} {shape(each.shape)} {each.dtype}" for each in instant.operands]
    if not shapes:
        return
    is_sign = bool(instant.operator) and not instant.operator[-1].isalnum()
    operation = f" {instant.operator} ".join(shapes) if is_sign else f"{instant.operator}({', '.join(shapes)})"
    yield Paragraph(operation, muted=True)


def _shares(report: OomReport) -> Iterator[Block]:
    """Say what the device was full of, folded: the parts in a line, the table behind it."""
    shown = [share for share in report.instant.shares if share.nbytes >= WORTH_A_ROW]
    if not shown:
        return
    whole = sum(share.nbytes for share in shown)
    columns = [Column("at the failure"), Column("names", priority=1, shrinks=True), Column("bytes", "right")]
    rows: list[list[Cell | str]] = [
        [share.what, ", ".join(share.names), Cell(size(share.nbytes), (Segment(share.nbytes / whole),))]
        for share in shown
    ]
    parts = ", ".join(f"{size(share.nbytes)} {share.what}" for share in shown)
    yield Fold(f"It was full of {parts}", [Table(columns, rows, caption="What occupied the device at the failure")])


def _actions(report: OomReport) -> Iterator[Block]:
    """Offer the lines that stand under no suggestion yet."""
    shown = report.advice[:SHOWN_ADVICE]
    said = {line for each in shown for code in (each.first, each.edit) for line in (code or "").splitlines()}
    lines = [("run", each.code, each.note) for each in report.actions if each.code not in said]
    if lines:
        yield Heading("To run now", apart=True)
        yield Listing(lines, whole=True)


def _holders(report: OomReport) -> Iterator[Block]:
    large = sum(holder.nbytes >= WORTH_A_ROW for holder in report.holders)  # they come largest first
    shown = report.holders[: min(SHOWN_HOLDERS, max(1, large))]
    rest = report.holders[len(shown) :]
    yield _holder_table(shown, report.allocated_after)
    if rest:
        more = size(sum(holder.nbytes for holder in rest))
        yield Fold(f"and {count(len(rest), 'more name')} with {more}", [_holder_table(rest, report.allocated_after)])


def _holder_table(holders: tuple[Holder, ...], allocated: int | None) -> Table:
    whole = allocated or sum(holder.nbytes for holder in holders) or 1
    worth = "frees" if any(holder.kind == WORKSPACE for holder in holders) else "freed by del"
    columns = [Column("held by", shrinks=True), Column("what", priority=1), Column(worth, "right")]
    rows: list[list[Cell | str]] = [
        [holder.name, holder.kind, Cell(size(holder.nbytes), (Segment(holder.nbytes / whole),))] for holder in holders
    ]
    return Table(columns, rows, caption="Names that hold memory on the device")


def _advice(advice: tuple[Advice, ...]) -> Iterator[Block]:
    if not advice:
        return
    yield Heading("What would help", apart=True)
    for number, each in enumerate(advice[:SHOWN_ADVICE], 1):
        yield from _suggestion(number, each)
    rest = list(enumerate(advice[SHOWN_ADVICE:], SHOWN_ADVICE + 1))
    if rest:
        blocks = [block for number, each in rest for block in _suggestion(number, each)]
        yield Fold(f"and {len(rest)} more: " + "; ".join(each.title for _, each in rest), blocks)


def _suggestion(number: int, advice: Advice) -> Iterator[Block]:
    yield Paragraph(f"{number}. {advice.title}{_worth(advice)}")
    code = _code(advice)
    if code:
        yield Listing(code, whole=True)
    why = [f"Why: {advice.evidence}." if advice.evidence else "", f"Cost: {advice.cost}." if advice.cost else ""]
    if any(why):
        yield Paragraph(" ".join(filter(None, why)), muted=True)


def _code(advice: Advice) -> list[tuple[int | str, str, str]]:
    """Return what is to be run first, then the cell's new lines, or where there is no telling which, just the code."""
    place = _place(advice)
    before = (advice.first or "").splitlines()
    lines = (advice.edit or "").splitlines() if advice.changes or not before else []
    return [*(("first", line, "") for line in before), *((place(i), line, "") for i, line in enumerate(lines))]


def _place(advice: Advice) -> Callable[[int], int | str]:
    """Return what stands before each of the new lines: its number in the cell, with the cell where it is another."""
    changes = sorted(advice.changes, key=lambda change: (change.line, change.column))
    if not changes:
        return lambda _offset: "use"
    start = changes[0].line + changes[0].new.startswith("\n")
    cell = f"{changes[0].cell} " if changes[0].cell else ""
    return lambda offset: f"{cell}{start + offset}"


def _worth(advice: Advice) -> str:
    about = "about " if advice.estimated else ""
    enough = {True: "which should be enough" if advice.estimated else "which is enough",
              False: "not enough alone", None: ""}[advice.covers]  # fmt: skip
    if advice.frees is not None:
        return f": frees {', '.join(filter(None, (about + size(advice.frees), enough)))}"
    return f": {enough.removeprefix('which is ').removeprefix('which ')}" if enough else ""

"""The view of `%%ondevice`: what was created where, what moved, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.render.document import Block, Cell, Column, Document, Fold, Heading, Paragraph, Segment, Table
from gpumagic.render.units import NOT_AVAILABLE, count, duration, size
from gpumagic.reports import TransferReport, TransferRow

SHOWN = 12

_COLUMNS = (
    Column("Line", "right"),
    Column("Code", shrinks=True, priority=1),
    Column("Variable", shrinks=True),
    Column("By"),
    Column("From → to"),
    Column("Moves", "right"),
    Column("Size", "right"),
    Column("Time", "right", priority=2),
)


def view(report: TransferReport) -> Document:
    """Return the document of one cell's transfers."""
    blocks: list[Block] = [Heading(_headline(report))]
    if report.moves:
        blocks.append(_moves(report.moves[:SHOWN], "moves between devices"))
    if len(report.moves) > SHOWN:
        rest = report.moves[SHOWN:]
        total = size(sum(row.nbytes for row in rest))
        blocks.append(Fold(f"and {count(len(rest), 'smaller row')} ({total}), in .to_pandas()", [_moves(rest, "more")]))
    blocks += [Paragraph(text) for text in _sentences(report)]
    blocks += [Paragraph(f"→ {advice}") for advice in report.advice]
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _headline(report: TransferReport) -> str:
    made = sum(number for number, _ in report.created.values())
    moves = sum(row.count for row in report.moves)
    moved = size(sum(row.nbytes for row in report.moves))
    what = f"{count(moves, 'move')}, {moved}" if moves else "nothing moved between devices"
    ended = f", ended by {report.error}" if report.error else ""
    return f"on {report.device} for {duration(report.elapsed)}{ended}: {count(made, 'new tensor')}; {what}"


def _moves(rows: Sequence[TransferRow], caption: str) -> Table:
    largest = max(row.nbytes for row in rows) if len(rows) > 1 else 0  # one bar alone says nothing
    return Table(_COLUMNS, [_row(row, largest) for row in rows], caption)


def _row(row: TransferRow, largest: int) -> list[Cell | str]:
    line = Cell(NOT_AVAILABLE, muted=True, title="outside the cell's own code") if row.line is None else str(row.line)
    return [
        line,
        row.code or "",
        row.name or "",
        row.cause,
        f"{row.source} → {row.target}",
        f"{row.count:,}",
        Cell(size(row.nbytes), bar=(Segment(row.nbytes / largest),) if largest else ()),
        duration(row.seconds),
    ]


def _sentences(report: TransferReport) -> list[str]:
    sentences = []
    if report.created:
        parts = [f"{device} {count(n, 'tensor')}, {size(nbytes)}" for device, (n, nbytes) in report.created.items()]
        sentences.append("Created: " + "; ".join(parts) + ".")
    if report.syncs:
        lines = "; ".join(f"line {line}, {count(n, 'time')}" for line, n in report.syncs.items())
        sentences.append(f"The host waited for the device at {lines}.")
    if report.peak:
        sentences.append("Peak: " + "; ".join(f"{device} {size(n)}" for device, n in report.peak.items()) + ".")
    if report.elsewhere:
        names = ", ".join(f"{each.name} ({each.device}, {size(each.nbytes)})" for each in report.elsewhere)
        sentences.append(f"Used here but living elsewhere: {names}.")
    return sentences

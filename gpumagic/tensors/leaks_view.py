"""`%devices --leaks`, `--free` and `--why` as documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Table, Tree, document_of
from gpumagic.report.units import count, size
from gpumagic.tensors.leaks_report import FreedReport, FreedRow, WhyReport
from gpumagic.tensors.report import LeakReport, LeakRow, TensorRow
from gpumagic.tensors.view import (
    STORAGE_COLUMNS,
    Line,
    fold,
    graph_pattern,
    holder_text,
    shape_text,
    size_cell,
    storage_cells,
)

_SEVERAL = 4
"""Holders in a sentence, and commands, before the rest is counted."""


@document_of.register(LeakReport)
@document_of.register(FreedReport)
def view_leaks(report: LeakReport | FreedReport) -> Document:
    """Return the document of what is held, or of what was released and what is still held."""
    blocks = _release(report) if isinstance(report, FreedReport) else _leaks(report)
    return Document((*blocks, *(Paragraph(note, muted=True) for note in report.notes)))


def _leaks(report: LeakReport) -> list[Block]:
    if not report.leaks:
        return [Heading("No leaks: a variable reaches every live tensor")]
    sums = ", ".join(f"{size(nbytes)} on {device}" for device, nbytes in _sums(report.leaks).items())
    summary = f"No variable reaches {count(len(report.leaks), 'storage')}: {sums}"
    first, *others = _commands(report.leaks)
    return [Heading(first.text), Paragraph(summary, muted=True), *_largest(report), *others]


def _sums(rows: Sequence[LeakRow]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.device] = sums.get(row.device, 0) + (row.nbytes or 0)
    return dict(sorted(sums.items(), key=lambda each: -each[1]))


def _largest(report: LeakReport) -> Iterator[Block]:
    lines = fold(report.leaks)
    shown = lines if report.limit is None else lines[: report.limit]
    wholes = _sums(report.leaks)
    columns = [Column("No.", "right"), Column("Held by", shrinks=True, cut="middle"), *STORAGE_COLUMNS]
    yield Table(columns, [_cells(line, wholes[line.row.device]) for line in shown], caption="Held tensors")
    rest = lines[len(shown) :]
    if rest:
        storages = sum(len(line.members) for line in rest)
        nbytes = sum(line.nbytes for line in rest)
        yield Paragraph(f"and {count(storages, 'more storage', 'more storages')}, {size(nbytes)}", muted=True)


def _cells(line: Line[LeakRow], whole: int) -> list[Cell]:
    row = line.row
    times = f" × {len(line.members):,}" if len(line.members) > 1 else ""
    by = (line.name.strip("()") if times and row.holder else row.place) or row.holder or "unknown"
    held_by = Cell(f"{by}{times}", muted=row.holder is None)
    nbytes = size_cell(None if row.nbytes is None else line.nbytes, whole, row.kind)
    return [Cell(str(row.number)), held_by, *storage_cells(row, nbytes)]


def _commands(rows: Sequence[LeakRow]) -> Iterator[Paragraph]:
    """Yield a sentence for each line that frees some of it, the one that frees most first."""
    lines = sorted(promises(rows), key=lambda each: -sum(row.nbytes or 0 for row in each[1]))
    for line, freed in lines[:_SEVERAL]:
        nbytes, said = sum(row.nbytes or 0 for row in freed), line.replace("\n", " and then ")
        yield Paragraph(f"{said} frees {size(nbytes)}: {_holders(freed)}")
    if rest := [row for _, freed in lines[_SEVERAL:] for row in freed]:
        total = size(sum(row.nbytes or 0 for row in rest))
        yield Paragraph(
            f"and {count(len(lines) - _SEVERAL, 'more line')} that free {total}: see .to_pandas()", muted=True
        )
    if others := [row for row in rows if row.command is None]:
        total = size(sum(row.nbytes or 0 for row in others))
        yield Paragraph(f"No single line frees {total}, kept by {_holders(others)}", muted=True)


def promises(rows: Sequence[LeakRow]) -> list[tuple[str, list[LeakRow]]]:
    """Return lines, each with the rows that it frees: lines that have a statement in common are one."""
    found: list[tuple[list[str], list[LeakRow]]] = []
    for row in rows:
        if row.command is not None:
            statements = [row.command] if "\n" in row.command else row.command.split("; ")
            freed = [row]
            for each in [each for each in found if not set(each[0]).isdisjoint(statements)]:
                found.remove(each)
                statements, freed = list(dict.fromkeys([*each[0], *statements])), [*each[1], *freed]
            found.append((statements, freed))
    return [("; ".join(statements), freed) for statements, freed in found]


def _holders(rows: Sequence[LeakRow]) -> str:
    names = list(dict.fromkeys(graph_pattern(row.holder) or "C++ or what was not followed" for row in rows))
    rest = len(names) - _SEVERAL
    return ", ".join(names[:_SEVERAL]) + (f" and {rest} more" if rest > 0 else "")


def _release(report: FreedReport) -> Iterator[Block]:
    changed = [row for row in report.freed if row.freed or row.storages]
    if not report.released:
        yield Heading("Nothing to free: no output and no error keeps a tensor that no variable reaches")
    else:
        came_back = ", ".join(f"{size(row.freed)} on {row.device}" for row in changed) or "nothing"
        yield Heading(f"Freed {came_back}")
        yield Paragraph(f"Cleared: {', '.join(report.released)}")
    if changed:
        yield _freed(changed)
    if report.left.leaks:
        sums = ", ".join(f"{device} {size(nbytes)}" for device, nbytes in _sums(report.left.leaks).items())
        yield Paragraph(f"Still held: {sums}")
        yield from _commands(report.left.leaks)


def _freed(rows: Sequence[FreedRow]) -> Table:
    columns = [Column("Device"), *(Column(title, "right") for title in ("Freed", "Storages", "Allocated", "Now"))]
    cells = [
        [row.device, size(row.freed), f"{row.storages:,}", size(row.allocated_before), size(row.allocated_after)]
        for row in rows
    ]
    return Table(columns, cells, caption="Allocated before and after, by the allocator's own figures")


_MAX_PATHS = 8


@document_of.register(WhyReport)
def view_why(report: WhyReport) -> Document:
    """Return the document of one tensor's holders."""
    blocks: list[Block] = [Heading(_remedy(report)), Paragraph(_tensor(report.tensor), muted=True)]
    blocks += [Tree(way.steps) for way in report.ways[:_MAX_PATHS]]
    if len(report.ways) > _MAX_PATHS:
        blocks.append(Paragraph(f"and {count(len(report.ways) - _MAX_PATHS, 'more holder')}", muted=True))
    if others := dict.fromkeys(way.root for way in report.ways if way.command is None):
        blocks.append(Paragraph(f"{'It also' if report.lines() else 'It'} has to go from {', '.join(others)}"))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _tensor(row: TensorRow) -> str:
    name = row.name or holder_text(row.place or row.holder)
    return f"{name}: {size(row.nbytes)} on {row.device}, {shape_text(row.shape)} {row.dtype}, {row.kind}"


def _remedy(report: WhyReport) -> str:
    """Return who keeps the tensor, and what frees it."""
    kept = f"Kept by {count(len(report.ways), 'holder')}" if report.ways else "No holder was found"
    commands = report.lines()
    if not commands:
        return kept
    more = report.frees is not None and report.frees != report.tensor.nbytes
    total = f" ({size(report.frees)} with all that goes with it)" if more else ""
    return f"{kept}. To free it: {', then '.join(commands)}{total}"

"""`%devices --held`, `--release-held` and `--why` as documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Table, Tree, document_of
from gpumagic.report.units import count, size
from gpumagic.tensors.held_report import FreedRow, ReleaseReport, WhyReport
from gpumagic.tensors.report import HeldReport, HeldRow, TensorRow
from gpumagic.tensors.view import (
    STORAGE_COLUMNS,
    Line,
    fold,
    graph_pattern,
    holder_text,
    name_pattern,
    shape_text,
    size_cell,
    storage_cells,
)

_SEVERAL = 4
"""Holders in a sentence, and commands, before the rest is counted."""


@document_of.register(HeldReport)
@document_of.register(ReleaseReport)
def view_held(report: HeldReport | ReleaseReport) -> Document:
    """Return the document of what is held, or of what was released and what is still held."""
    blocks = _release(report) if isinstance(report, ReleaseReport) else _held(report)
    return Document((*blocks, *(Paragraph(note, muted=True) for note in report.notes)))


def _held(report: HeldReport) -> list[Block]:
    if not report.held:
        return [Heading("Nothing is held: a variable reaches every live tensor")]
    sums = ", ".join(f"{device} {size(nbytes)}" for device, nbytes in _sums(report.held).items())
    number = count(len(report.held), "storage")
    return [Heading(f"{number} that no variable reaches: {sums}"), *_largest(report), *_commands(report.held)]


def _sums(rows: Sequence[HeldRow]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.device] = sums.get(row.device, 0) + (row.nbytes or 0)
    return dict(sorted(sums.items(), key=lambda each: -each[1]))


def _largest(report: HeldReport) -> Iterator[Block]:
    lines = fold(report.held)
    shown = lines if report.limit is None else lines[: report.limit]
    wholes = _sums(report.held)
    columns = [Column("No.", "right"), Column("Held by", shrinks=True, cut="middle"), *STORAGE_COLUMNS]
    yield Table(columns, [_cells(line, wholes[line.row.device]) for line in shown], caption="Held tensors")
    rest = lines[len(shown) :]
    if rest:
        storages = sum(len(line.members) for line in rest)
        nbytes = sum(line.nbytes for line in rest)
        yield Paragraph(f"and {count(storages, 'more storage', 'more storages')}, {size(nbytes)}", muted=True)


def _cells(line: Line[HeldRow], whole: int) -> list[Cell]:
    row = line.row
    times = f" × {len(line.members):,}" if len(line.members) > 1 else ""
    by = (line.name.strip("()") if times and row.holder else row.place) or row.holder or "unknown"
    held_by = Cell(f"{by}{times}", muted=row.holder is None)
    nbytes = size_cell(None if row.nbytes is None else line.nbytes, whole)
    return [Cell(str(row.number)), held_by, *storage_cells(row, nbytes)]


def _commands(rows: Sequence[HeldRow]) -> Iterator[Block]:
    """Yield a sentence for each command that frees some of it, the one that frees most first."""
    by: dict[str | None, list[HeldRow]] = {}
    for row in rows:
        by.setdefault(row.command and name_pattern(row.command), []).append(row)
    ordered = sorted(by.items(), key=lambda each: (each[0] is None, -sum(row.nbytes or 0 for row in each[1])))
    lines = [each for each in ordered if each[0] is not None]
    for command, freed in [*lines[:_SEVERAL], *ordered[len(lines) :]]:
        total = size(sum(row.nbytes or 0 for row in freed))
        if command is not None:
            line = freed[0].command if len({row.command for row in freed}) == 1 else command
            yield Paragraph(f"{line} frees {total}: {_holders(freed)}")
        else:
            yield Paragraph(f"No one line frees {total}, kept by {_holders(freed)}", muted=True)
    if rest := [row for _, freed in lines[_SEVERAL:] for row in freed]:
        total = size(sum(row.nbytes or 0 for row in rest))
        yield Paragraph(
            f"and {count(len(lines) - _SEVERAL, 'more line')} that free {total}: see .to_pandas()", muted=True
        )


def _holders(rows: Sequence[HeldRow]) -> str:
    names = list(dict.fromkeys(graph_pattern(row.holder) or "C++ or what was not followed" for row in rows))
    rest = len(names) - _SEVERAL
    return ", ".join(names[:_SEVERAL]) + (f" and {rest} more" if rest > 0 else "")


def _release(report: ReleaseReport) -> Iterator[Block]:
    changed = [row for row in report.freed if row.freed or row.storages]
    if not report.released:
        yield Heading("Nothing to release: no output and no error keeps a tensor that no variable reaches")
    else:
        came_back = ", ".join(f"{size(row.freed)} on {row.device}" for row in changed) or "nothing"
        yield Heading(f"Came back: {came_back}")
        yield Paragraph(f"Forgotten: {', '.join(report.released)}")
    if changed:
        yield _freed(changed)
    if report.left.held:
        sums = ", ".join(f"{device} {size(nbytes)}" for device, nbytes in _sums(report.left.held).items())
        yield Paragraph(f"Still held: {sums}")
        yield from _commands(report.left.held)


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
    blocks: list[Block] = [Heading(_heading(report.tensor))]
    if report.ways:
        blocks.append(Paragraph(f"kept by {count(len(report.ways), 'holder')}:"))
    blocks += [Tree(way.steps) for way in report.ways[:_MAX_PATHS]]
    if len(report.ways) > _MAX_PATHS:
        blocks.append(Paragraph(f"and {count(len(report.ways) - _MAX_PATHS, 'more holder')}", muted=True))
    blocks += _remedies(report)
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _heading(row: TensorRow) -> str:
    name = row.name or holder_text(row.place or row.holder)
    return f"{name}: {size(row.nbytes)} on {row.device}, {shape_text(row.shape)} {row.dtype}, {row.kind}"


def _remedies(report: WhyReport) -> Iterator[Block]:
    commands = dict.fromkeys(way.command for way in report.ways if way.command is not None)
    if commands:
        yield Paragraph(f"To free it: {'; '.join(commands)}")
    if others := dict.fromkeys(way.root for way in report.ways if way.command is None):
        yield Paragraph(f"{'It also' if commands else 'It'} has to go from {', '.join(others)}")

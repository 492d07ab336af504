"""The lines of a trace: of the cell first, then of each function that was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from gpumagic.memory.ledger import OF_MODULES
from gpumagic.report import document as doc
from gpumagic.report.document import Column, Table
from gpumagic.report.tree import OUTSIDE, tree_blocks
from gpumagic.report.units import count, duration, size
from gpumagic.transfers.trace.report import BACKWARD, LineReport, LineRow, ModuleReport, ModuleRow

SHOWN_LINES = 24
"""Lines of a table; of a longer cell or function those that took most, and the rest folded."""


@doc.document_of.register(LineReport)
def view_lines(report: LineReport) -> doc.Document:
    """Return the lines as a report of their own."""
    return doc.Document((doc.Heading(_headline(report)), *line_blocks(report)))


Changes = Mapping[int, tuple[str, ...]]
"""What to change about a line of the cell, by its number."""
_NONE: Changes = MappingProxyType({})


def line_blocks(
    report: LineReport, changes: Changes = _NONE, columns: Sequence[Column[LineRow]] = ()
) -> Iterator[doc.Block]:
    """Yield a table of the cell's lines, each with what to change about it, and one of each function's.

    The lines of the cell have further ``columns``.
    """
    if report.reason:
        yield doc.Paragraph(f"Lines were not traced: {report.reason}.", muted=True)
    elif report.missing:
        yield doc.Paragraph(report.missing, muted=True)
    for function in dict.fromkeys([None, *report.files]):
        rows = [row for row in report.lines if row.function == function]
        if function is not None:
            yield doc.Heading(f"{function}: {_sum(rows)}" if rows else f"{function} did not run in Python", apart=True)
        if rows:
            yield from _tables(rows, changes, columns) if function is None else _tables(rows)


def _headline(report: LineReport) -> str:
    own = [row for row in report.lines if row.function is None]
    if not own:
        return "No line was traced"
    slowest = max(own, key=lambda row: row.seconds)
    highest = max(own, key=lambda row: row.peak or 0)
    memory = f"; line {highest.line} has the peak, {size(highest.peak)} on {report.device}" if highest.peak else ""
    return f"Line {slowest.line} took {duration(slowest.seconds)} of {duration(report.elapsed)}{memory}"


def _sum(rows: Sequence[LineRow]) -> str:
    return f"{duration(sum(row.seconds for row in rows))} in {count(len(rows), 'line')}"


def _tables(
    rows: Sequence[LineRow], changes: Changes = _NONE, columns: Sequence[Column[LineRow]] = ()
) -> Iterator[doc.Block]:
    shown = set(sorted(rows, key=lambda row: (row.seconds, row.allocated or 0), reverse=True)[:SHOWN_LINES])
    name = rows[0].function or "the cell"
    yield _table([row for row in rows if row in shown], f"Lines of {name}", changes, columns)
    if len(shown) < len(rows):
        yield doc.Fold(
            f"{count(len(rows) - len(shown), 'more line')} of {name}", [_table(rows, "All lines", changes, columns)]
        )


def _table(rows: Sequence[LineRow], name: str, changes: Changes, columns: Sequence[Column[LineRow]]) -> Table:
    line = Column[LineRow]("Line", lambda row: str(row.line), "right")
    code = Column[LineRow]("Code", lambda row: _code(row, changes), shrinks=True, code=True, least=24)
    return Table.of(
        rows, (line, code, *FIGURES, *columns), name, elsewhere="in a wider terminal and in .by_line.to_pandas()"
    )


def _code(row: LineRow, changes: Changes) -> doc.Cell:
    return doc.Cell(row.code, notes=changes.get(row.line, ()))


FIGURES: tuple[Column[LineRow], ...] = (
    Column("Runs", lambda row: f"{row.hits:,}", "right", 2),
    Column("Time", lambda row: duration(row.seconds), "right", bar=lambda row: row.seconds),
    Column("Allocated", lambda row: size(row.allocated) if row.allocated else "", "right", 1),
    Column("Freed", lambda row: size(row.freed) if row.freed else "", "right", 3),
    Column("Peak", lambda row: size(row.peak) if row.peak else "", "right", 1),
)
"""What is measured of a line."""


def module_blocks(report: ModuleReport | None) -> Iterator[doc.Block]:
    """Yield the modules behind a summary, if any ran."""
    if report is not None and any(row.calls for row in report if row.module != BACKWARD):
        yield doc.Fold(f"By module: {_module_headline(report)}", list(_module_blocks(report)))


@doc.document_of.register(ModuleReport)
def view_modules(report: ModuleReport) -> doc.Document:
    """Return the modules as a report of their own."""
    return doc.Document((doc.Heading(_module_headline(report)), *_module_blocks(report)))


def _module_blocks(report: ModuleReport) -> Iterator[doc.Block]:
    """Yield the modules as a tree by what they hold at the peak, and by time."""
    held = {row.module: _parts(row) for row in report.modules if row.at_peak}
    if held:
        kinds = [kind for kind in OF_MODULES if any(kind in parts for parts in held.values())]
        yield from tree_blocks(held, kinds, "What each module holds at the peak")
    ran = sorted(report.modules, key=lambda row: -row.seconds)[:SHOWN_LINES]
    yield doc.Fold("Time and allocations, each module without those in it", [Table.of(ran, MODULES, "Time")])


MODULES: tuple[Column[ModuleRow], ...] = (
    Column("Module", lambda row: row.module or OUTSIDE, shrinks=True, cut="middle"),
    Column("Calls", lambda row: f"{row.calls:,}", "right"),
    Column("Time", lambda row: duration(row.seconds), "right"),
    Column("Allocated", lambda row: size(row.allocated), "right", 1),
    Column("Freed", lambda row: size(row.freed), "right", 1),
)


def _parts(row: ModuleRow) -> dict[str, int]:
    found = {kind: getattr(row, kind.replace(" ", "_")) for kind in OF_MODULES}
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def _module_headline(report: ModuleReport) -> str:
    own = [row for row in report.modules if row.module not in ("", BACKWARD)]
    if not own:
        return "No module ran"
    most, slowest = max(own, key=lambda row: row.at_peak), max(own, key=lambda row: row.seconds)
    held = f"{most.module} holds {size(most.at_peak)} of {size(report.at_peak)} on {report.device}; "
    return f"{held if report.at_peak else ''}{slowest.module} took {duration(slowest.seconds)}"

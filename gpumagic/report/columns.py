"""Tables by declaration: what each column shows of a row stands beside its title, once.

    COLUMNS = (
        Column("Name", lambda row: row.name, shrinks=True),
        Column("Size", lambda row: units.size(row.nbytes), "right", bar=lambda row: row.nbytes),
        Column("Note", lambda row: row.note, priority=1),
    )
    Table.of(report.rows, COLUMNS, "The largest storages", limit=report.limit, rest="storage")

A column in which no row has anything is left out, so a view needs no branches for what may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from gpumagic.report import document as doc
from gpumagic.report.units import more

Row = TypeVar("Row")
Bar = float | Mapping[str, float] | None
"""An amount; or amounts by part of memory, stacked in the parts' colours; None for no bar."""


@dataclass(frozen=True)  # without slots: `Column[Row](...)` sets an attribute
class Column(Generic[Row]):
    """A column: its title, what it shows of a row, and how."""

    title: str
    value: Callable[[Row], doc.Cell | str | None]
    """The text, or a cell where that is muted or has notes; None for nothing."""
    align: Literal["left", "right"] = "left"
    priority: int = 0
    shrinks: bool = False
    cut: Literal["end", "middle"] = "end"
    least: int = 16
    code: bool = False
    bar: Callable[[Row], Bar] | None = None
    """What a bar beside the text is as long as; negative amounts are drawn in the colour of what is less."""
    when: Callable[[Row], object] | None = None
    """The column is there if this holds for any row; by default, if any row has a text."""

    @property
    def format(self) -> doc.Column:
        """The column as renderers know it."""
        return doc.Column(
            self.title, self.align, self.priority, self.shrinks, self.cut, self.least, self.code
        )  # fmt: skip

    def cells(self, rows: Sequence[Row], whole: Callable[[Row], float] | float | None) -> list[doc.Cell]:
        """Return the cell of each row; bars are shares of the whole, by default of the largest."""
        cells = [_cell(self.value(row)) for row in rows]
        if self.bar is None:
            return cells
        amounts = [self.bar(row) for row in rows]
        largest = max((_total(each) for each in amounts), default=0)
        wholes = [whole(row) if callable(whole) else largest if whole is None else whole for row in rows]
        return [
            cell if amount is None else replace(cell, bar=_segments(amount, of))
            for cell, amount, of in zip(cells, amounts, wholes, strict=True)
        ]


class Table(doc.Table):
    """A table of declared columns."""

    __slots__ = ()

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        columns: Iterable[Column[Row]],
        caption: str = "",
        *,
        limit: int | None = None,
        rest: str | Callable[[Sequence[Row]], str] = "row",
        whole: Callable[[Row], float] | float | None = None,
        elsewhere: str = "",
    ) -> Table:
        """Return the table of some rows.

        Args:
            rows: what is shown, one a line.
            columns: those without anything in any row are left out.
            caption: names the table for screen readers.
            limit: how many rows are shown.
            rest: what the others are, for "and 3 more storages" under the table; or what returns that sentence.
            whole: what a full bar stands for, or what returns that for a row; by default the largest of the column.
            elsewhere: where columns are that the width has no room for.
        """
        rows = list(rows)
        shown = rows[:limit]
        left = rows[len(shown) :]
        below = rest(left) if callable(rest) else more(len(left), rest)
        found = [
            (column.format, cells)
            for column in columns
            for cells in [column.cells(shown, whole)]
            if _is_there(column, shown, cells)
        ]
        grid = list(zip(*(cells for _, cells in found), strict=True))
        return cls([column for column, _ in found], grid, caption, elsewhere, below)


def _cell(value: doc.Cell | str | None) -> doc.Cell:
    return value if isinstance(value, doc.Cell) else doc.Cell(value or "")


def _is_there(column: Column[Any], rows: Sequence[Any], cells: Sequence[doc.Cell]) -> bool:
    return any(map(column.when, rows)) if column.when is not None else any(cell.text for cell in cells)


def _total(amount: Bar) -> float:
    return sum(amount.values()) if isinstance(amount, Mapping) else abs(amount or 0)


def _segments(amount: float | Mapping[str, float], whole: float) -> tuple[doc.Segment, ...]:
    whole = whole or 1
    if isinstance(amount, Mapping):
        return tuple(doc.Segment(each / whole, part=part) for part, each in amount.items())
    return (doc.Segment(abs(amount) / whole, "other" if amount < 0 else "main"),)

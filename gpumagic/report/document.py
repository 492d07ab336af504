"""The neutral model between a report and its two forms: a document is a list of blocks.

A view (`gpus/view.py`, `tensors/view.py`, ...) turns one kind of report into a `Document`; `report/text.py`
and `report/html.py` turn any document into text. Views decide what is said and in which order, renderers how
it looks. Text in here is plain: escaping is the renderers' work.

A table is declared: what each column shows of a row stands beside its title, once, and a column in which no row has
anything is left out, so that a view needs no branches for what may be absent.

    COLUMNS = (
        Column("Name", lambda row: row.name, shrinks=True),
        Column("Size", lambda row: size(row.nbytes), "right", bar=lambda row: row.nbytes),
    )
    Table.of(report.rows, COLUMNS, "The largest storages", limit=report.limit, rest="storage")

The colours are those of Okabe and Ito, told apart by colour-blind people too, and of middle lightness, so that they
show on white and on black.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from gpumagic.report.units import more

Row = TypeVar("Row")
Bar = float | Mapping[str, float] | None
"""An amount; or amounts by part of memory, stacked in the parts' colours; None for no bar."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar: a share of the whole from 0 to 1, and what it stands for."""

    share: float
    role: Literal["main", "second", "other"] = "main"
    part: str = ""
    """What of memory it is, such as ``"gradients"``, where it has the colour of that (`parts`)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: its text, and optionally a bar and muted style."""

    text: str
    bar: tuple[Segment, ...] = ()
    muted: bool = False
    title: str = ""
    """Said on hovering in HTML (why a figure is absent, the full name); never the only place of a fact."""
    notes: tuple[str, ...] = ()
    """What to do about it: each in a line of its own, below the text and after an arrow."""
    ground: float = 1.0
    """The share of the bar's width that has a ground: what is drawn beyond it sticks out."""


@dataclass(frozen=True)  # without slots: `Column[Row](...)` sets an attribute
class Column(Generic[Row]):
    """A column of a table: its title, what it shows of a row, and how."""

    title: str
    value: Callable[[Row], Cell | str | None] = lambda _: None
    """The text, or a cell where that is muted or has notes; None for nothing."""
    align: Literal["left", "right"] = "left"
    priority: int = 0
    """Columns of the lowest number are given room first, others as far as they fit; 0 is there always."""
    shrinks: bool = False
    """Whether its text may be cut to fit the width."""
    cut: Literal["end", "middle", "never"] = "end"
    """Where it is cut: a path tells most at its ends; code that is to be pasted has a line of its own instead."""
    least: int = 16
    """Characters that it keeps where others could have room if it was cut further."""
    code: bool = False
    """Whether it is code, whose indentation counts."""
    bar: Callable[[Row], Bar] | None = None
    """What a bar beside the text is as long as; negative amounts are drawn in the colour of what is less."""
    when: Callable[[Row], object] | None = None
    """The column is there if this holds for any row; by default, if any row has a text."""

    def cells(
        self, rows: Sequence[Row], whole: Callable[[Row], float] | float | None
    ) -> list[Cell]:
        """Return the cell of each row; bars are shares of the whole, by default of the largest."""
        cells = [_as_cell(self.value(row)) for row in rows]
        if self.bar is None:
            return cells
        amounts = [self.bar(row) for row in rows]
        largest = max(map(_length, amounts), default=0)
        with_bars = []
        for row, cell, amount in zip(rows, cells, amounts, strict=True):
            if callable(whole):
                full = whole(row)
            else:
                full = largest if whole is None else whole
            with_bars.append(_with_bar(cell, amount, full or 1))
        return with_bars

    def is_shown(self, rows: Sequence[Row], cells: Sequence[Cell]) -> bool:
        """Return whether the column has anything to show of some rows."""
        if self.when is not None:
            return any(map(self.when, rows))
        return any(cell.text for cell in cells)


def _as_cell(value: Cell | str | None) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell(value or "")


def _length(amount: Bar) -> float:
    """Return how long the bar of an amount is, all its parts together."""
    if isinstance(amount, Mapping):
        return sum(amount.values())
    return abs(amount or 0)


def _with_bar(cell: Cell, amount: Bar, full: float) -> Cell:
    """Return a cell with the bar of an amount; that of `full` is as long as a bar can be."""
    if amount is None:
        return cell
    if isinstance(amount, Mapping):
        parts = amount.items()
        return replace(
            cell, bar=tuple(Segment(nbytes / full, part=part) for part, nbytes in parts)
        )
    role: Literal["main", "other"] = "other" if amount < 0 else "main"
    return replace(cell, bar=(Segment(abs(amount) / full, role),))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under titled columns; a plain string stands for a cell without a bar."""

    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    """Names the table for screen readers; what stands above it says it to the others."""
    elsewhere: str = ""
    """Where columns are that the width has no room for, as the end of a sentence: ``"in a wider terminal"``."""
    rest: str = ""
    """What is not in it, said below it: ``"and 3 more storages"``."""

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
        columns_shown = []
        cells_by_column = []
        for column in columns:
            cells = column.cells(shown, whole)
            if column.is_shown(shown, cells):
                columns_shown.append(column)
                cells_by_column.append(cells)
        return cls(
            columns_shown,
            rows=list(zip(*cells_by_column, strict=True)),
            caption=caption,
            elsewhere=elsewhere,
            rest=rest(left) if callable(rest) else more(len(left), rest),
        )


@dataclass(frozen=True, slots=True)
class Heading:
    """The first line of a report, which is its answer, or of a part of a long one."""

    text: str
    apart: bool = False
    """Whether text leaves a line free above it, as it opens a part of a long report."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence or two, wrapped to the width; muted for legends and notes."""

    text: str
    muted: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """Numbered lines of code with a note beside those that have one."""

    lines: Sequence[tuple[int | str, str, str]]
    """``(line number or what stands for it, code, note)``."""
    whole: bool = False
    """Whether a line too long for the width goes on below, as code to be typed must, instead of being cut."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks behind a summary: `<details>` in HTML; in text only the summary is shown."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Tree:
    """Steps, each a level deeper than the one before, with a note beside each."""

    steps: Sequence[tuple[str, str]]
    """``(what is typed, note)``."""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A figure over time as a row of heights, the highest of them marked."""

    heights: Sequence[float]
    """Shares of the whole from 0 to 1, oldest first."""
    mark: int
    """Which of them is marked."""
    note: str
    """What the mark says."""
    label: str
    """What is shown, for screen readers."""
    bands: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What the heights are made of, the lowest band first: shares that add up to them."""


Block = Heading | Paragraph | Table | Listing | Fold | Tree | Sparkline


@dataclass(frozen=True, slots=True)
class Document:
    """A report ready to be rendered."""

    blocks: Sequence[Block] = field(default_factory=tuple)


def unfolded(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield the blocks with what is folded in its place, under its summary."""
    for block in blocks:
        if isinstance(block, Fold):
            yield Heading(block.summary, apart=True)
            yield from unfolded(block.blocks)
        else:
            yield block


@functools.singledispatch
def document_of(report: object) -> Document:
    """Return what a report shows; each view registers its own here, and `base.to_document` imports the views."""
    raise TypeError(f"no view is registered for {type(report).__name__}")


PART_COLOURS = {
    "earlier cells": (90, 90, 90),
    "parameters": (0, 114, 178),
    "gathered parameters": (0, 60, 110),
    "buffers": (86, 180, 233),
    "optimizer state": (0, 158, 115),
    "gradients": (230, 159, 0),
    "buckets": (150, 100, 0),
    "activations": (213, 94, 0),
    "temporaries": (204, 121, 167),
    "library workspaces": (240, 228, 66),
}
OTHER_COLOUR = (150, 150, 150)


def stacking_order(parts: Iterable[str]) -> list[str]:
    """Return the parts from the bottom of a picture to its top, each once."""
    present = dict.fromkeys(parts)
    known = [part for part in PART_COLOURS if part in present]
    others = [part for part in present if part not in PART_COLOURS]
    return [*known, *others]

"""Tables by declared columns: what no row has is left out, bars are shares, and what is not shown is counted."""

from __future__ import annotations

from typing import NamedTuple

from gpumagic.report import document as doc
from gpumagic.report import html, text
from gpumagic.report.document import Column, Table
from gpumagic.report.units import few, size


class Row(NamedTuple):
    name: str
    nbytes: int
    note: str | None = None


COLUMNS: tuple[Column[Row], ...] = (
    Column("Name", lambda row: row.name),
    Column("Size", lambda row: size(row.nbytes), "right", bar=lambda row: row.nbytes),
    Column("Note", lambda row: row.note),
    Column("Always", lambda _: "", when=lambda _: True),
)
ROWS = [Row("x", 4096), Row("y", -1024), Row("z", 512, "a view")]


def shares(table: doc.Table, column: int = 1) -> list[list[tuple[float, str, str]]]:
    return [
        [(each.share, each.role, each.part) for each in cell.bar]
        for cell in (row[column] for row in table.rows)
        if isinstance(cell, doc.Cell)
    ]


def test_a_column_that_is_empty_in_every_row_is_left_out_unless_it_says_when_it_is_there() -> None:
    assert [each.title for each in Table.of(ROWS, COLUMNS).columns] == [
        "Name",
        "Size",
        "Note",
        "Always",
    ]
    assert [each.title for each in Table.of(ROWS[:2], COLUMNS).columns] == [
        "Name",
        "Size",
        "Always",
    ]


def test_a_bar_is_a_share_of_the_largest_or_of_the_whole_that_is_given() -> None:
    assert shares(Table.of(ROWS, COLUMNS)) == [
        [(1.0, "main", "")], [(0.25, "other", "")], [(0.125, "main", "")],
    ]  # fmt: skip
    assert shares(Table.of(ROWS, COLUMNS, whole=8192))[0] == [(0.5, "main", "")]
    assert shares(Table.of(ROWS, COLUMNS, whole=lambda row: 1024))[2] == [(0.5, "main", "")]


def test_a_bar_of_several_parts_has_a_segment_for_each_and_one_of_nothing_is_none() -> None:
    parts = Column[Row](
        "Size",
        lambda row: row.name,
        bar=lambda row: {"gradients": row.nbytes} if row.note else None,
    )
    assert shares(Table.of(ROWS, [parts]), 0) == [[], [], [(1.0, "main", "gradients")]]


def test_rows_over_the_limit_are_counted_under_the_table_in_text_and_in_html() -> None:
    table = Table.of(ROWS, COLUMNS, limit=1, rest="storage")
    assert len(table.rows) == 1
    assert text.render(doc.Document([table]), 80).endswith("\nand 2 more storages")
    assert "and 2 more storages" in html.render(doc.Document([table]))
    assert Table.of(ROWS, COLUMNS, limit=3).rest == ""
    said = Table.of(
        ROWS,
        COLUMNS,
        limit=1,
        rest=lambda left: f"and {len(left)} of {sum(r.nbytes for r in left)} B",
    )
    assert said.rest == "and 2 of -512 B"


def test_the_first_few_of_many_names() -> None:
    assert few(["a", "b"], 2) == "a, b"
    assert few(list("abcdef"), 2) == "a, b and 4 more"
    assert few(list("abc"), 2, "route") == "a, b and 1 more route"

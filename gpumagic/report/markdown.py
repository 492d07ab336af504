"""Documents as Markdown, for an issue or a pull request: GitHub's tables, code blocks and `<details>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from gpumagic.report.document import Block, Cell, Column, Document, Fold, Heading, Listing, Paragraph, Sparkline, Table
from gpumagic.report.text import render as render_text
from gpumagic.report.units import printable

WIDTH = 100
"""Columns of what is shown as text."""


def render(document: Document) -> str:
    """Return the document as Markdown; text from outside is escaped."""
    return "\n\n".join(part for block in document.blocks for part in _block(block)) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"**{_escaped(block.text)}**"
    elif isinstance(block, Paragraph):
        yield _escaped(block.text)
    elif isinstance(block, Table):
        yield _table(block)
        if block.rest:
            yield _escaped(block.rest)
    elif isinstance(block, Fold):
        inner = "\n\n".join(part for each in block.blocks for part in _block(each))
        yield f"<details><summary>{_in_html(block.summary)}</summary>\n\n{inner}\n\n</details>"
    elif isinstance(block, Listing):
        yield _fenced("\n".join(f"{number:>4}  {code}{_comment(note)}" for number, code, note in block.lines))
    else:
        yield _fenced(render_text(Document((block,)), WIDTH, unicode=True))
        if isinstance(block, Sparkline):
            yield _escaped(block.note)


def _comment(note: str) -> str:
    return f"  # {printable(note)}" if note else ""


def _table(table: Table) -> str:
    rows = [[_cell(each, column) for each, column in zip(row, table.columns, strict=True)] for row in table.rows]
    titles = [_escaped(column.title) or " " for column in table.columns]
    rule = ["---:" if column.align == "right" else "---" for column in table.columns]
    return "\n".join(_row(each) for each in [titles, rule, *rows])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell | str, column: Column) -> str:
    text, notes = (cell.text, cell.notes) if isinstance(cell, Cell) else (cell, ())
    shown = _code(text) if column.code else _escaped(text)
    return "<br>".join([shown, *(f"→ {_escaped(note)}" for note in notes)])


def _code(text: str) -> str:
    """Return code for a cell of a table, whose pipes need escapes, indentation kept."""
    text = printable(text)
    indent = len(text) - len(text.lstrip())
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    space = " " if ticks != "`" else ""
    body = text.strip().replace("|", r"\|")
    return "&nbsp;" * indent + f"{ticks}{space}{body}{space}{ticks}" if body else ""


def _escaped(text: str) -> str:
    """Return text in which nothing is markup, a mention or the end of a cell."""
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", _in_html(text))


def _in_html(text: str) -> str:
    """Return text for where only HTML is markup, as in a summary."""
    return escape(printable(text), quote=False).replace("\n", " ").replace("@", "@\N{ZERO WIDTH SPACE}")


def _fenced(text: str) -> str:
    ticks = "`" * max(3, max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return f"{ticks}text\n{text}\n{ticks}"

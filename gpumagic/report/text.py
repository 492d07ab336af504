"""Documents as plain text: aligned, cut to the width, with an ASCII form for terminals without unicode."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumagic.report import document as doc
from gpumagic.report.units import (
    MAX_WORD_LENGTH,
    printable,
    sparkline,
    truncate_middle,
    truncate_words,
)

NOTEBOOK_WIDTH = 100
BAR_WIDTH = 12
GAP = "  "


def render(
    document: doc.Document, width: int | None = None, unicode: bool | None = None
) -> str:
    """Return the document as lines of at most ``width`` characters (default: the terminal's, 100 in notebooks)."""
    if width is None:
        width = terminal_width()
    if unicode is None:
        unicode = terminal_has_unicode()
    parts = [_block(block, width) for block in document.blocks]
    text = "\n".join(filter(None, parts))
    return text if unicode else to_ascii(text)


def terminal_width() -> int:
    """Return the columns of the terminal, or 100 where the output goes elsewhere.

    A kernel inherits the terminal of the server that started it; its own stdout says whether that matters.
    """
    if (
        os.environ.get("COLUMNS", "").isdigit()
        or sys.stdout is None
        or sys.stdout.isatty()
    ):
        return max(40, shutil.get_terminal_size((NOTEBOOK_WIDTH, 24)).columns)
    return NOTEBOOK_WIDTH


def terminal_has_unicode() -> bool:
    """Return whether stdout can encode the characters of bars and dashes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        "█░…×→".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_ASCII = str.maketrans(
    "█▓▒░…×→─└·↑▸▁▂▃▄▅▆▇",
    "#=-.~x>-`-^>_.-=+*%",
)


def to_ascii(text: str) -> str:
    """Return the text with its drawing characters replaced and anything else outside ASCII escaped."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode()


def _block(block: doc.Block, width: int) -> str:
    match block:
        case doc.Heading() | doc.Paragraph():
            return _line(block, width)
        case doc.Table():
            return _table(block, width)
        case doc.Listing():
            return _listing(block, width)
        case doc.Tree():
            return _tree(block, width)
        case doc.Sparkline():
            return _sparkline(block, width)
        case doc.Fold():
            return _wrap(block.summary, width)


def _line(block: doc.Heading | doc.Paragraph, width: int) -> str:
    text = _wrap(block.text, width)
    if isinstance(block, doc.Heading) and block.apart:
        return f"\n{text}"
    return text


def _wrap(text: str, width: int, indent: int = 0) -> str:
    start = " " * indent
    lines = textwrap.wrap(
        truncate_words(printable(text)),
        width,
        break_on_hyphens=False,
        initial_indent=start,
        subsequent_indent=f"{start}  ",
    )
    return "\n".join(lines)


def _listing(listing: doc.Listing, width: int) -> str:
    places = [_cut(printable(str(place)), 16) for place, _, _ in listing.lines]
    digits = max(map(_width, places), default=1)
    lines = []
    for place, (_, code, note) in zip(places, listing.lines, strict=True):
        line = f"{_pad(place, digits, 'right')} | {printable(code)}"
        if note:
            line += f"   # {printable(note)}"
        lines += _broken(line, width, digits) if listing.whole else [_cut(line, width)]
    return "\n".join(lines)


def _broken(line: str, width: int, digits: int) -> list[str]:
    """Return a line in pieces of the width, those after the first marked as going on."""
    pieces = []
    go_on = f"{'':>{digits}} :   "
    while _width(line) > width:
        piece = _cut(line, width)[:-1]
        end = len(piece)
        space = piece.rfind(" ", len(go_on) + 8)
        if (
            space > 0
        ):  # the space goes with the piece, so that the pieces join to the line
            end = space + 1
        pieces.append(line[:end].rstrip())
        line = go_on + line[end:]
    return [*pieces, line]


def _sparkline(block: doc.Sparkline, width: int) -> str:
    """Return a line of blocks, one for each band too, and under the marked one an arrow with its note beside it."""
    names = _changing_bands(block)
    indent = 0
    if names:
        indent = max(map(_width, names)) + len(GAP)
    count = len(block.heights)
    columns = min(count, max(8, width - indent))
    lines = []
    for name in names:
        label = _pad(name, indent, "left")
        lines.append(label + _band(block.bands[name], columns))
    heights = _highest_of_parts(block.heights, columns)
    lines.append(" " * indent + sparkline(heights))
    marked = math.ceil((block.mark + 1) * columns / count) - 1
    middle = indent + columns // 2
    lines.append(_under(printable(block.note), indent + marked, width, middle))
    return "\n".join(map(str.rstrip, lines))


def _band(heights: Sequence[float], columns: int) -> str:
    """Return a band of a sparkline as blocks, and blanks where it is nothing."""
    highest = _highest_of_parts(heights, columns)
    return "".join(map(_spark_or_blank, highest, sparkline(highest)))


def _changing_bands(block: doc.Sparkline) -> list[str]:
    """Return the bands that change, the highest first, where more than one does: a flat line says nothing."""
    changing = []
    for name, band in block.bands.items():
        if max(band) - min(band) > 1 / 16:
            changing.append(name)
    if len(changing) < 2:
        return []
    return changing[::-1]


def _highest_of_parts(heights: Sequence[float], parts: int) -> list[float]:
    """Return the highest of each of so many parts of some heights, one behind the other."""
    highest = []
    start = 0
    for part in range(1, parts + 1):
        end = part * len(heights) // parts
        highest.append(max(heights[start:end]))
        start = end
    return highest


def _spark_or_blank(height: float, spark: str) -> str:
    return spark if height else " "


def _under(note: str, mark: int, width: int, middle: int) -> str:
    """Return an arrow under a place, with its note to the side that has room, or below it."""
    length = _width(note)
    if length + 1 <= mark >= middle:
        return f"{_pad(note, mark - 1, 'right')} ↑"
    before = " " * mark
    if mark + 2 + length <= width:
        return f"{before}↑ {note}"
    return f"{before}↑\n{_cut(note, width)}"


def _tree(tree: doc.Tree, width: int) -> str:
    """Return a line for each step, the notes one under the other."""
    branches = []
    stem = ""
    for depth, (text, _) in enumerate(tree.steps):
        if depth:
            stem = "   " * (depth - 1) + "└─ "
        room = max(16, width - len(stem) - 24)
        branches.append(stem + _cut_middle(printable(text), room))
    column = max(map(len, branches)) + 2
    lines = []
    for branch, (_, note) in zip(branches, tree.steps, strict=True):
        line = _pad(branch, column, "left") + printable(note)
        lines.append(_cut(line.rstrip(), width))
    return "\n".join(lines)


@dataclass
class _Grid:
    """The columns of a table that are shown, with their titles as shown, and the texts of its rows."""

    columns: list[doc.Column[Any]]
    rows: list[list[str]]

    def natural_widths(self) -> list[int]:
        """Return how wide the widest text of each column is."""
        widths = []
        for place, column in enumerate(self.columns):
            texts = self.texts(place)
            widths.append(max(map(_width, [column.title, *texts])))
        return widths

    def texts(self, place: int) -> list[str]:
        return [row[place] for row in self.rows]

    def limited_to(self, places: Sequence[int]) -> _Grid:
        columns = [self.columns[place] for place in places]
        rows = [_picked(row, places) for row in self.rows]
        return _Grid(columns, rows)

    def is_cut(self, widths: Sequence[int]) -> bool:
        """Return whether code, or what is never cut, has more characters than its column is wide."""
        for place, column in enumerate(self.columns):
            if column.code or column.cut == "never":
                longest = max(map(_width, self.texts(place)), default=0)
                if longest > widths[place]:
                    return True
        return False


def _picked(row: Sequence[str], places: Sequence[int]) -> list[str]:
    return [row[place] for place in places]


def _table(table: doc.Table, width: int) -> str:
    grid = _fitted(table, width, bars=True)
    widths = _widths(grid, width)
    if _total(widths) > width or grid.is_cut(widths):
        # What bars show, the numbers beside them say.
        grid = _fitted(table, width, bars=False)
        widths = _widths(grid, width)
    if _total(widths) > width:
        lines = _stacked(table, grid, width)
    else:
        lines = _in_columns(table, grid, widths, width)
    text = "\n".join(lines)
    return f"{text}\n{_wrap(table.rest, width)}" if table.rest else text


def _in_columns(
    table: doc.Table, grid: _Grid, widths: Sequence[int], width: int
) -> list[str]:
    titles = [column.title for column in grid.columns]
    rules = ["─" * most for most in widths]
    lines = [_row(titles, grid.columns, widths), GAP.join(rules)]
    for row, cells in zip(grid.rows, table.rows, strict=True):
        lines.append(_row(row, grid.columns, widths))
        lines += _notes(cells, width)
    left_out = _left_out(table, grid)
    if left_out and table.elsewhere:
        sentence = f"{', '.join(left_out)}: {table.elsewhere}."
        lines.append(_wrap(sentence, width))
    return lines


def _left_out(table: doc.Table, grid: _Grid) -> list[str]:
    """Return the titles of the columns that the width has no room for."""
    shown = {column.title.strip() for column in grid.columns}
    return [column.title for column in table.columns if column.title not in shown]


def _stacked(table: doc.Table, grid: _Grid, width: int) -> list[str]:
    """Return a table that no width is enough for: each row as a sentence, its first cell and what the others are."""
    lines = []
    titles = [column.title.strip() for column in grid.columns]
    for row, cells in zip(grid.rows, table.rows, strict=True):
        first, *others = map(str.strip, row)
        rest = " · ".join(_named(titles[1:], others))
        sentence = f"{first}: {rest}" if first and rest else first or rest
        lines.append(_wrap(sentence, width))
        lines += _notes(cells, width)
    return lines


def _named(titles: Sequence[str], texts: Sequence[str]) -> list[str]:
    return [
        f"{title} {text}" for title, text in zip(titles, texts, strict=True) if text
    ]


def _notes(cells: Sequence[doc.Cell | str], width: int) -> list[str]:
    lines = []
    for cell in cells:
        if isinstance(cell, doc.Cell):
            lines += [_wrap(f"→ {note}", width, indent=6) for note in cell.notes]
    return lines


def _fitted(table: doc.Table, width: int, *, bars: bool) -> _Grid:
    """Return the columns of a table that fit the width."""
    columns = []
    texts_by_column = []
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        title, *texts = _column_texts(column, cells, bars=bars)
        columns.append(replace(column, title=title))
        texts_by_column.append(texts)
    grid = _Grid(columns, [list(row) for row in zip(*texts_by_column, strict=True)])
    return grid.limited_to(_columns_that_fit(grid, width))


def _column_texts(
    column: doc.Column[Any], cells: Sequence[doc.Cell | str], *, bars: bool
) -> list[str]:
    """Return a column's title and texts; where there are bars, each stands behind its number, all aligned."""
    texts = [column.title]
    drawn = [""]
    for cell in cells:
        texts.append(cell if isinstance(cell, str) else cell.text)
        drawn.append("" if isinstance(cell, str) else _bar(cell))
    texts = [truncate_middle(printable(text), MAX_WORD_LENGTH) for text in texts]
    if not bars or not any(drawn):
        return texts
    width = max(map(_width, texts))
    with_bars = []
    for text, bar in zip(texts, drawn, strict=True):
        number = _pad(text, width, column.align)
        with_bars.append(f"{number} {bar:{BAR_WIDTH}}")
    return with_bars


_GLYPHS = {"main": "█", "second": "▓", "other": "▒"}


def _bar(cell: doc.Cell) -> str:
    if not cell.bar:
        return ""
    bar = ""
    end = 0.0
    for segment in cell.bar:
        end += max(0.0, segment.share)
        filled = min(BAR_WIDTH, round(end * BAR_WIDTH))
        if segment.share > 0 and filled == 0 and not bar:
            filled = 1  # something is never drawn as nothing
        bar += _GLYPHS[segment.role] * (filled - len(bar))
    ground = round(cell.ground * BAR_WIDTH)
    return bar + "░" * (ground - len(bar))


def _columns_that_fit(grid: _Grid, width: int) -> list[int]:
    """Return which columns fit the width, by their priorities."""
    least = grid.natural_widths()
    for place, column in enumerate(grid.columns):
        if column.shrinks:
            least[place] = min(least[place], column.least)
    by_priority = sorted(
        range(len(grid.columns)), key=lambda place: grid.columns[place].priority
    )
    kept: list[int] = []
    for place in by_priority:
        wider = [*kept, place]
        needed = _total([least[shown] for shown in wider])
        if grid.columns[place].priority == 0 or not kept or needed <= width:
            kept = wider
    return sorted(kept)


def _widths(grid: _Grid, width: int) -> list[int]:
    """Return how wide each column is drawn: those that may shrink give way, the widest first."""
    widths = grid.natural_widths()
    shrinking = [place for place, column in enumerate(grid.columns) if column.shrinks]
    while _total(widths) > width:
        widest = max(shrinking, key=lambda place: widths[place], default=None)
        if widest is None or widths[widest] <= 8:
            break
        widths[widest] -= 1
    for place, column in enumerate(grid.columns):
        if column.cut == "never":  # what is wider has a line of its own
            lengths = map(_width, [column.title, *grid.texts(place)])
            widths[place] = max(length for length in lengths if length <= widths[place])
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _row(
    cells: Sequence[str], columns: Sequence[doc.Column[Any]], widths: Sequence[int]
) -> str:
    lines = []
    padded = []
    for text, column, width in zip(cells, columns, widths, strict=True):
        if column.cut == "never" and _width(text) > width:
            lines.append(text)
        padded.append(_pad(_fitting(text, column, width), width, column.align))
    lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)


def _fitting(text: str, column: doc.Column[Any], width: int) -> str:
    """Return what of a text stands in its column."""
    if column.cut == "end":
        return _cut(text, width)
    if column.cut == "middle":
        return _cut_middle(text, width)
    return text if _width(text) <= width else ""


def _pad(text: str, width: int, align: str) -> str:
    space = " " * (width - _width(text))
    return space + text if align == "right" else text + space


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while _width(text) > width - 1:
        text = text[: min(len(text) - 1, width - 1)]
    return text + "…"


def _cut_middle(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    room = width // 2
    tail = text[len(text) - room :]
    while _width(tail) > room:
        tail = tail[1:]
    return _cut(text, width - room) + tail


def _width(text: str) -> int:
    """Return how many terminal columns the text takes: East Asian wide characters take two, accents none."""
    if text.isascii():
        return len(text)
    width = len(text)
    for character in text:
        if unicodedata.east_asian_width(character) in "WF":
            width += 1
        if unicodedata.combining(character):
            width -= 1
    return width

"""Documents as plain text: aligned, cut to the width, with an ASCII form for terminals without unicode."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
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


def render(document: doc.Document, width: int | None = None, unicode: bool | None = None) -> str:
    """Return the document as lines of at most ``width`` characters (default: the terminal's, 100 in notebooks)."""
    width = terminal_width() if width is None else width
    unicode = terminal_has_unicode() if unicode is None else unicode
    parts = [_block(block, width) for block in document.blocks]
    text = "\n".join(part for part in parts if part)
    return text if unicode else to_ascii(text)


def terminal_width() -> int:
    """Return the columns of the terminal, or 100 where the output goes elsewhere.

    A kernel inherits the terminal of the server that started it; its own stdout says whether that matters.
    """
    if os.environ.get("COLUMNS", "").isdigit() or sys.stdout is None or sys.stdout.isatty():
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


def to_ascii(text: str) -> str:
    """Return the text with its drawing characters replaced and anything else outside ASCII escaped."""
    table = {
        "█": "#",
        "▓": "=",
        "▒": "-",
        "░": ".",
        "…": "~",
        "×": "x",
        "→": ">",
        "─": "-",
        "└": "`",
        "·": "-",
        "↑": "^",
        "▸": ">",
        "▁": "_",
        "▂": ".",
        "▃": "-",
        "▄": "=",
        "▅": "+",
        "▆": "*",
        "▇": "%",
    }
    plain = "".join(table.get(ch, ch) for ch in text)
    return plain.encode("ascii", "backslashreplace").decode()


def _block(block: doc.Block, width: int) -> str:
    match block:
        case doc.Heading() | doc.Paragraph():
            return ("\n" if isinstance(block, doc.Heading) and block.apart else "") + _wrap(
                block.text, width
            )
        case doc.Table():
            return _table(block, width) + (f"\n{_wrap(block.rest, width)}" if block.rest else "")
        case doc.Listing():
            return _listing(block, width)
        case doc.Tree():
            return _tree(block, width)
        case doc.Sparkline():
            return _sparkline(block, width)
        case doc.Fold():
            return _wrap(block.summary, width)


def _wrap(text: str, width: int, indent: int = 0) -> str:
    start = " " * indent
    shown = truncate_words(printable(text))
    return "\n".join(
        textwrap.wrap(
            shown,
            width,
            break_on_hyphens=False,
            initial_indent=start,
            subsequent_indent=f"{start}  ",
        )
    )


def _listing(listing: doc.Listing, width: int) -> str:
    places = [_cut(printable(str(place)), 16) for place, _, _ in listing.lines]
    digits = max(map(_width, places), default=1)
    lines = []
    for place, (_, code, note) in zip(places, listing.lines, strict=True):
        line = f"{_pad(place, digits, 'right')} | {printable(code)}"
        line = f"{line}   # {printable(note)}" if note else line
        lines += _broken(line, width, digits) if listing.whole else [_cut(line, width)]
    return "\n".join(lines)


def _broken(line: str, width: int, digits: int) -> list[str]:
    """Return a line in pieces of the width, those after the first marked as going on."""
    pieces, go_on = [], f"{'':>{digits}} :   "
    while _width(line) > width:
        piece = _cut(line, width)[:-1]
        space = piece.rfind(
            " ", len(go_on) + 8
        )  # the space goes with the piece, so that the pieces join to the line
        at = space + 1 if space > 0 else len(piece)
        pieces.append(line[:at].rstrip())
        line = go_on + line[at:]
    return [*pieces, line]


def _sparkline(block: doc.Sparkline, width: int) -> str:
    """Return a line of blocks, one for each band too, and under the marked one an arrow with its note beside it."""
    # The bands that change, the highest first, where more than one does: a flat line says nothing.
    changing = [name for name, band in block.bands.items() if max(band) - min(band) > 1 / 16][::-1]
    names = changing if len(changing) > 1 else []
    label = max((_width(name) + len(GAP) for name in names), default=0)
    columns = min(len(block.heights), max(8, width - label))
    lines = [
        _pad(name, label, "left") + _spark_characters(block.bands[name], columns, " ")
        for name in names
    ]
    lines.append(" " * label + _spark_characters(block.heights, columns))
    mark = -(-(block.mark + 1) * columns // len(block.heights)) - 1
    lines.append(_under(printable(block.note), label + mark, width, label + columns // 2))
    return "\n".join(line.rstrip() for line in lines)


def _spark_characters(heights: Sequence[float], columns: int, nothing: str = "") -> str:
    """Return the highest of each of so many parts, as blocks; what is nothing may have a sign of its own."""
    edges = [place * len(heights) // columns for place in range(columns + 1)]
    found = [max(heights[start:end]) for start, end in itertools.pairwise(edges)]
    drawn = sparkline(found)
    return "".join(
        nothing if nothing and not each else spark for each, spark in zip(found, drawn, strict=True)
    )


def _under(note: str, mark: int, width: int, middle: int) -> str:
    """Return an arrow under a place, with its note to the side that has room, or below it."""
    if _width(note) + 1 <= mark >= middle:
        return f"{_pad(note, mark - 1, 'right')} ↑"
    if mark + 2 + _width(note) <= width:
        return f"{' ' * mark}↑ {note}"
    return f"{' ' * mark}↑\n{_cut(note, width)}"


def _tree(tree: doc.Tree, width: int) -> str:
    lines = []
    for depth, (text, note) in enumerate(tree.steps):
        branch = f"{'   ' * (depth - 1)}└─ " if depth else ""
        lines.append(
            (
                branch + _cut_middle(printable(text), max(16, width - len(branch) - 24)),
                printable(note),
            )
        )
    column = max(len(text) for text, _ in lines) + 2
    return "\n".join(
        _cut(f"{_pad(text, column, 'left')}{note}".rstrip(), width) for text, note in lines
    )


def _table(table: doc.Table, width: int) -> str:
    columns, grid = _fitted(table, width, bars=True)
    widths = _widths(columns, grid, width)
    whole = [column.code or column.cut == "never" for column in columns]
    cuts = False
    for row in grid:
        for text, most, no_cut in zip(row, widths, whole, strict=False):
            cuts = cuts or (no_cut and _width(text) > most)
    if _total(widths) > width or cuts:  # what bars show, the numbers beside them say
        columns, grid = _fitted(table, width, bars=False)
    kept = {column.title.strip() for column in columns}
    left_out = [column.title for column in table.columns if column.title not in kept]
    widths = _widths(columns, grid, width)
    if _total(widths) > width:
        stacked = []  # a row that no width is enough for is a sentence: its first cell, and what the others are
        for row, cells in zip(grid, table.rows, strict=True):
            first, *others = (text.strip() for text in row)
            said = [
                f"{column.title.strip()} {text}"
                for column, text in zip(columns[1:], others, strict=True)
                if text
            ]
            text = f"{first}: {' · '.join(said)}" if first and said else first or " · ".join(said)
            stacked += [_wrap(text, width), *_notes(cells, width)]
        return "\n".join(stacked)
    lines = [_row([column.title for column in columns], columns, widths)]
    lines.append(GAP.join("─" * w for w in widths))
    for row, cells in zip(grid, table.rows, strict=True):
        lines += [_row(row, columns, widths), *_notes(cells, width)]
    if left_out and table.elsewhere:
        lines.append(_wrap(f"{', '.join(left_out)}: {table.elsewhere}.", width))
    return "\n".join(lines)


def _notes(cells: Sequence[doc.Cell | str], width: int) -> list[str]:
    notes = [note for cell in cells if isinstance(cell, doc.Cell) for note in cell.notes]
    return [_wrap(f"→ {note}", width, indent=6) for note in notes]


def _fitted(
    table: doc.Table, width: int, *, bars: bool
) -> tuple[list[doc.Column[Any]], list[list[str]]]:
    """Return the columns that fit the width, with their titles as shown, and the texts of their rows."""
    columns = list(table.columns)
    shown = [
        _column_texts(column, [row[i] for row in table.rows], bars=bars)
        for i, column in enumerate(columns)
    ]
    columns = [
        replace(column, title=texts[0]) for column, texts in zip(columns, shown, strict=True)
    ]
    grid = [list(row) for row in zip(*(texts[1:] for texts in shown), strict=True)]
    keep = _columns_that_fit(columns, grid, width)
    return [columns[i] for i in keep], [[row[i] for i in keep] for row in grid]


def _column_texts(
    column: doc.Column[Any], cells: Sequence[doc.Cell | str], *, bars: bool
) -> list[str]:
    """Return a column's title and texts; where there are bars, each stands behind its number, all aligned."""
    full = [cell if isinstance(cell, doc.Cell) else doc.Cell(cell) for cell in cells]
    texts = [
        truncate_middle(printable(text), MAX_WORD_LENGTH)
        for text in (column.title, *(cell.text for cell in full))
    ]
    if not bars or not any(cell.bar for cell in full):
        return texts
    width = max(map(_width, texts))
    drawn = ["", *(_bar(cell) if cell.bar else "" for cell in full)]
    return [
        f"{_pad(text, width, column.align)} {bar:{BAR_WIDTH}}"
        for text, bar in zip(texts, drawn, strict=True)
    ]


def _bar(cell: doc.Cell) -> str:
    glyphs = {"main": "█", "second": "▓", "other": "▒"}
    bar, end = "", 0.0
    for segment in cell.bar:
        end += max(0.0, segment.share)
        filled = min(BAR_WIDTH, round(end * BAR_WIDTH))
        if segment.share > 0 and filled == len(bar) < BAR_WIDTH and not bar:
            filled = 1  # something is never drawn as nothing
        bar += glyphs[segment.role] * (filled - len(bar))
    return bar + "░" * (round(cell.ground * BAR_WIDTH) - len(bar))


def _columns_that_fit(
    columns: Sequence[doc.Column[Any]], grid: list[list[str]], width: int
) -> list[int]:
    least = [
        max([_width(column.title), *(_width(row[i]) for row in grid)])
        for i, column in enumerate(columns)
    ]
    least = [
        min(w, column.least) if column.shrinks else w
        for w, column in zip(least, columns, strict=True)
    ]
    keep = [i for i, column in enumerate(columns) if column.priority == 0]
    by_priority = sorted(
        (i for i in range(len(columns)) if i not in keep), key=lambda i: (columns[i].priority, i)
    )
    for i in by_priority:
        wider = sorted((*keep, i))
        if not keep or _total([least[each] for each in wider]) <= width:
            keep = wider
    return keep


def _widths(columns: Sequence[doc.Column[Any]], grid: list[list[str]], width: int) -> list[int]:
    widths = [
        max([_width(c.title), *(_width(row[i]) for row in grid)]) for i, c in enumerate(columns)
    ]
    while _total(widths) > width:
        shrinkable = [i for i, c in enumerate(columns) if c.shrinks and widths[i] > 8]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    for i, column in enumerate(columns):
        if column.cut == "never":  # what is wider has a line of its own
            natural = (_width(column.title), *(_width(row[i]) for row in grid))
            widths[i] = max(each for each in natural if each <= widths[i])
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _row(cells: Sequence[str], columns: Sequence[doc.Column[Any]], widths: Sequence[int]) -> str:
    padded = [
        _pad(_CUTS[c.cut](text, w), w, c.align)
        for text, c, w in zip(cells, columns, widths, strict=True)
    ]
    own = [
        text
        for text, c, w in zip(cells, columns, widths, strict=True)
        if c.cut == "never" and _width(text) > w
    ]
    return "\n".join([*own, GAP.join(padded).rstrip()])


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
    start = _cut(text, width - width // 2)
    tail = next(
        text[at:]
        for at in range(len(text) - width // 2, len(text) + 1)
        if _width(text[at:]) <= width // 2
    )
    return start + tail


_Cut = Callable[[str, int], str]
_CUTS: dict[str, _Cut] = {
    "end": _cut,
    "middle": _cut_middle,
    "never": lambda text, most: text * (_width(text) <= most),
}


def _width(text: str) -> int:
    """Return how many terminal columns the text takes: East Asian wide characters take two, accents none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(ch) in "WF" for ch in text)
    return len(text) + wide - sum(unicodedata.combining(ch) != 0 for ch in text)

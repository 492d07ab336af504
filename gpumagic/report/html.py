"""Documents as HTML that survives every front end.

Semantic tags and inline styles with literal values only: JupyterLab drops `<style>`, scripts and `var()` from
untrusted notebooks and GitHub drops the styles too, so each bar has its number beside it and nothing is said
by colour alone. No text or background colour is set: the theme's own hold in the dark and in the light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from gpumagic.report import document as doc
from gpumagic.report.units import (
    MAX_LENGTH,
    printable,
    sparkline,
    truncate_middle,
    truncate_words,
)

COLOURS = {
    "main": "rgba(66,133,244,.85)",
    "second": "rgba(66,133,244,.40)",
    "other": "rgba(128,128,128,.75)",
}
TRACK = "rgba(128,128,128,.25)"
SPARKLINE_WIDTH = "600px"
"""How wide a sparkline is drawn at most."""
TEXT_WIDTH = "26em;max-width:min(26em,45vw)"
"""How wide a note beside code is at most."""
BAR_WIDTH = "min(9em,14vw,max(0px,99 * (100vw - 800px)))"
"""A page of less than 800 pixels has the numbers alone."""
MUTED = "opacity:.72"
"""Small text stays readable (4.5 to 1, WCAG) also where a theme's own text is a dark grey, as VS Code's is."""
CODE = "font-family:Menlo,Consolas,monospace"
"""VS Code's cells show `<code>` in the font of prose."""
APART = "margin-bottom:1em"
"""As Jupyter's theme has it; in VS Code one table would stand on the next."""


def render(document: doc.Document) -> str:
    """Return the document as one `<div>`."""
    label = _label(document)
    body = "".join(_block(block, label) for block in document.blocks)
    return f'<div style="max-width:100%;overflow-x:auto;overflow-wrap:anywhere">{body}</div>'


def page(document: doc.Document) -> str:
    """Return the document as a page of its own, light or dark as the reader's system is."""
    title = _label(document) or "gpumagic"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(printable(title))}</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark"></head>'
        f'<body style="font-family:system-ui,sans-serif;font-size:14px;margin:2em">{render(document)}</body></html>\n'
    )


def _label(document: doc.Document) -> str:
    for block in document.blocks:
        if isinstance(block, doc.Heading | doc.Paragraph):
            return block.text
    return ""


def _block(block: doc.Block, label: str) -> str:
    match block:
        case doc.Heading() | doc.Paragraph():
            return _line(block)
        case doc.Table():
            return _table(block, label)
        case doc.Listing():
            return _listing(block, label)
        case doc.Tree():
            return _tree(block.steps)
        case doc.Sparkline():
            return _sparkline(block)
        case doc.Fold():
            return _fold(block)


def _fold(fold: doc.Fold) -> str:
    """Return blocks behind a summary of one line; what the page has no room for of it shows on hovering."""
    inner = "".join(_block(block, fold.summary) for block in fold.blocks)
    one_line = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
    hover = _uncut(fold.summary)
    summary = (
        f'<summary style="{one_line}" title="{hover}">{_text(fold.summary)}</summary>'
    )
    return f"<details>{summary}{inner}</details>"


def _line(block: doc.Heading | doc.Paragraph) -> str:
    if isinstance(block, doc.Heading):
        return f'<p style="margin:.3em 0"><strong>{_text(block.text)}</strong></p>'
    style = f"margin:.3em 0;{MUTED}" if block.muted else "margin:.3em 0"
    return f'<p style="{style}">{_text(block.text)}</p>'


def _table(table: doc.Table, label: str) -> str:
    heads = []
    barred = []
    styles = []
    for place, column in enumerate(table.columns):
        cells = [_as_cell(row[place]) for row in table.rows]
        has_bars = any(cell.bar for cell in cells)
        barred.append(has_bars)
        styles.append(_column_style(column, cells, has_bars))
        heads.append(_head(column, has_bars))
    rows = []
    for row in table.rows:
        drawn = map(_cell, map(_as_cell, row), table.columns, styles, barred)
        rows.append(f"<tr>{''.join(drawn)}</tr>")
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    body = f"<tbody>{''.join(rows)}</tbody>"
    rest = _line(doc.Paragraph(table.rest, muted=True)) if table.rest else ""
    return _box(head + body, _named(table.caption or label)) + rest


def _as_cell(cell: doc.Cell | str) -> doc.Cell:
    return doc.Cell(cell) if isinstance(cell, str) else cell


def _head(column: doc.Column[Any], barred: bool) -> str:
    style = f"{_align(column, barred)};white-space:nowrap"
    track = _track() if barred else ""
    return f'<th scope="col" style="{style}">{_text(column.title)}{track}</th>'


def _column_style(
    column: doc.Column[Any], cells: Sequence[doc.Cell], barred: bool
) -> str:
    """Return how the cells of a column stand: code and names wrap on a narrow page, so that figures stay on it."""
    align = _align(column, barred)
    if not column.shrinks:
        return f"{align};white-space:nowrap"
    if column.code:
        space = "pre-wrap"
        least = 20
    else:
        space = "normal"
        least = 12
    longest = max((len(cell.text) for cell in cells), default=0)
    return f"{align};white-space:{space};overflow-wrap:anywhere;min-width:{min(longest, least)}ch"


def _box(table: str, name: str) -> str:
    """Return a table in a box of its own, which scrolls where the page is too narrow for it."""
    return f'<div style="overflow-x:auto;{APART}"><table{name} style="margin-bottom:0">{table}</table></div>'


def _align(column: doc.Column[Any], barred: bool) -> str:
    return f"text-align:{'right' if barred else column.align}"  # so that the bars of a column stand in line


def _cell(cell: doc.Cell, column: doc.Column[Any], style: str, barred: bool) -> str:
    if cell.muted:
        style += f";{MUTED}"
    hover = f' title="{_uncut(cell.title)}"' if cell.title else ""
    bar = _track(_bar(cell)) if barred else ""
    if column.code:
        text = f'<code style="white-space:inherit;{CODE}">{_uncut(cell.text)}</code>'
    else:
        text = _text(cell.text)
    notes = [
        f'<div style="white-space:normal">→ {_text(note)}</div>' for note in cell.notes
    ]
    return f'<td style="{style}"{hover}>{text}{bar}{"".join(notes)}</td>'


def _bar(cell: doc.Cell) -> str:
    """Return the segments of a cell's bar, and the ground behind what they leave free."""
    if not cell.bar:
        return ""
    spans = []
    filled = 0.0
    for segment in cell.bar:
        share = max(0.0, min(1.0, segment.share))
        filled += share
        spans.append(
            _span(
                share, _colour(segment.part) if segment.part else COLOURS[segment.role]
            )
        )
    spans.append(_span(max(0.0, cell.ground - filled), TRACK))
    return "".join(spans)


def _span(share: float, colour: str) -> str:
    style = (
        f"display:inline-block;height:.8em;width:{100 * share:.1f}%;background:{colour}"
    )
    return f'<span style="{style}"></span>'


def _track(drawn: str = "") -> str:
    """Return a bar; without anything drawn it only keeps the place, so that numbers line up."""
    style = (
        f"display:inline-block;text-align:left;width:9em;width:{BAR_WIDTH};height:.8em;line-height:.8em;"
        "font-size:1em;margin-left:.6em"
    )
    return f'<span aria-hidden="true" style="{style};white-space:nowrap;overflow:hidden">{drawn}</span>'


def _named(label: str) -> str:
    return f' aria-label="{_text(label)}"' if label else ""


def _listing(listing: doc.Listing, label: str) -> str:
    rows = []
    for place, code, note in listing.lines:
        shown = escape(printable(code)) if listing.whole else _uncut(code)
        rows.append(
            f'<tr><td style="text-align:right;white-space:nowrap;{MUTED}">{_text(str(place))}</td>'
            f'<td style="text-align:left"><code style="white-space:pre;{CODE}">{shown}</code>{_beside(note)}</td></tr>'
        )
    return _box(f"<tbody>{''.join(rows)}</tbody>", _named(label))


def _beside(note: str) -> str:
    """Return a note that stands beside its code where there is room, and below it on a narrow page."""
    if not note:
        return ""
    style = f"display:inline-block;max-width:{TEXT_WIDTH};padding-left:.8em"
    return f' <span style="{style}">{_text(note)}</span>'


def _sparkline(block: doc.Sparkline) -> str:
    """Return columns, each with the character of its height in it, which shows where styles are stripped.

    The arrow stands under the marked one, and its note to the side that has room.
    """
    count = max(1, len(block.heights))
    columns = []
    for place, spark in enumerate(sparkline(block.heights)):
        bands = [(band[place], _colour(name)) for name, band in block.bands.items()]
        columns.append(_column(100 / count, block.heights[place], spark, bands))
    height = 72 if block.bands else 48
    ground = f"display:block;height:{height}px;max-width:{SPARKLINE_WIDTH};font-size:0;line-height:0"
    stand = '<span style="display:inline-block;vertical-align:bottom;height:100%;width:0"></span>'
    note = _text(block.note)
    at = 100 * (block.mark + 0.5) / count
    if at <= 50:
        side = f"margin-left:{at:.1f}%"
        arrow = f"↑ {note}"
    else:
        side = f"text-align:right;margin-right:{100 - at:.1f}%"
        arrow = f"{note} ↑"
    return (
        f'<div role="img" aria-label="{_text(block.label)}" '
        f'style="{ground};white-space:nowrap;background:{TRACK}">{stand}{"".join(columns)}</div>'
        f'<div style="max-width:{SPARKLINE_WIDTH};margin:.1em 0 .3em 0;white-space:nowrap">'
        f'<div style="{side}">{arrow}</div></div>{_legend(block.bands)}'
    )


def _legend(names: Iterable[str]) -> str:
    """Return the names of bands, each behind its colour."""
    swatch = "display:inline-block;width:.8em;height:.8em;margin-right:.3em"
    entries = [
        f'<span style="white-space:nowrap"><span aria-hidden="true" style="{swatch};background:{_colour(name)}"></span>'
        f"{_text(name)}</span>"
        for name in names
    ]
    if not entries:
        return ""
    return f'<p style="margin:.3em 0">From the bottom: {", ".join(entries)}.</p>'


def _column(
    width: float, height: float, spark: str, bands: Sequence[tuple[float, str]]
) -> str:
    """Return one column of a sparkline, of one colour or of a band over the other."""
    percent = max(2.0, 100 * height)
    style = f"display:inline-block;vertical-align:bottom;width:{width:.4g}%;height:{percent:.4g}%"
    if not bands or not height:
        colour = COLOURS["main"]
        return f'<span style="{style};background:{colour}">{spark}</span>'
    inner = ""
    for share, colour in reversed(bands):
        if share:
            own_percent = 100 * share / height
            band = f"display:block;height:{own_percent:.4g}%;background:{colour}"
            inner += f'<span style="{band}"></span>'
    return f'<span style="{style}">{spark}{inner}</span>'


def _colour(part: str) -> str:
    red, green, blue = doc.PART_COLOURS.get(part, doc.OTHER_COLOUR)
    return f"rgba({red},{green},{blue},.85)"


def _tree(steps: Sequence[tuple[str, str]]) -> str:
    """Return lists nested in each other, which show the depth also where styles are stripped."""
    (text, note), *below = steps
    code = f'<code style="{CODE}">{_text(text)}</code>'
    beside = f'<span style="{MUTED}">{_text(note)}</span>'
    inner = _tree(below) if below else ""
    return f"<ul><li>{code} {beside}{inner}</li></ul>"


def _text(text: str) -> str:
    return escape(truncate_words(printable(text)))


def _uncut(text: str) -> str:
    """Return the text of code, or of a name on hovering, whose words are not cut."""
    return escape(truncate_middle(printable(text), MAX_LENGTH))

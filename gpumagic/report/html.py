"""Documents as HTML that survives every front end.

Semantic tags and inline styles with literal values only: JupyterLab drops `<style>`, scripts and `var()` from
untrusted notebooks and GitHub drops the styles too, so each bar has its number beside it and nothing is said
by colour alone. No text or background colour is set: the theme's own hold in the dark and in the light.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from gpumagic.report import document as doc
from gpumagic.report.units import MAX_LENGTH, printable, sparkline, truncate_middle, truncate_words

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
    return next(
        (block.text for block in document.blocks if isinstance(block, doc.Heading | doc.Paragraph)),
        "",
    )


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
        case doc.Fold():  # its summary takes one line; what the page has no room for shows on hovering
            inner = "".join(_block(each, block.summary) for each in block.blocks)
            one_line = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
            summary = f'<summary style="{one_line}" title="{_uncut(block.summary)}">{_text(block.summary)}</summary>'
            return f"<details>{summary}{inner}</details>"


def _line(block: doc.Heading | doc.Paragraph) -> str:
    if isinstance(block, doc.Heading):
        return f'<p style="margin:.3em 0"><strong>{_text(block.text)}</strong></p>'
    style = f"margin:.3em 0;{MUTED}" if block.muted else "margin:.3em 0"
    return f'<p style="{style}">{_text(block.text)}</p>'


def _table(table: doc.Table, label: str) -> str:
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    barred = [any(isinstance(cell, doc.Cell) and cell.bar for cell in cells) for cells in columns]
    styles = list(map(_column_style, table.columns, columns, barred))
    head = "".join(
        f'<th scope="col" style="{_align(column, bars)};white-space:nowrap">{_text(column.title)}{_track() * bars}</th>'
        for column, bars in zip(table.columns, barred, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(map(_cell, row, table.columns, styles, barred))}</tr>" for row in table.rows
    )
    rest = _line(doc.Paragraph(table.rest, muted=True)) if table.rest else ""
    return (
        _box(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", _named(table.caption or label))
        + rest
    )


def _column_style(column: doc.Column[Any], cells: Sequence[doc.Cell | str], barred: bool) -> str:
    """Return how the cells of a column stand: code and names wrap on a narrow page, so that figures stay on it."""
    align = _align(column, barred)
    if not column.shrinks:
        return f"{align};white-space:nowrap"
    longest = max((len(cell if isinstance(cell, str) else cell.text) for cell in cells), default=0)
    wraps = f"overflow-wrap:anywhere;min-width:{min(longest, 20 if column.code else 12)}ch"
    return f"{align};white-space:{'pre-wrap' if column.code else 'normal'};{wraps}"


def _box(table: str, name: str) -> str:
    """Return a table in a box of its own, which scrolls where the page is too narrow for it."""
    return f'<div style="overflow-x:auto;{APART}"><table{name} style="margin-bottom:0">{table}</table></div>'


def _align(column: doc.Column[Any], barred: bool) -> str:
    return f"text-align:{'right' if barred else column.align}"  # so that the bars of a column stand in line


def _cell(cell: doc.Cell | str, column: doc.Column[Any], style: str, barred: bool) -> str:
    cell = doc.Cell(cell) if isinstance(cell, str) else cell
    if cell.muted:
        style += f";{MUTED}"
    hover = f' title="{_uncut(cell.title)}"' if cell.title else ""
    spans = [
        (max(0.0, min(1.0, each.share)), _colour(each.part) if each.part else COLOURS[each.role])
        for each in cell.bar
    ]
    if cell.bar:
        spans.append((max(0.0, cell.ground - sum(share for share, _ in spans)), TRACK))
    drawn = "".join(
        f'<span style="display:inline-block;height:.8em;width:{100 * share:.1f}%;background:{colour}"></span>'
        for share, colour in spans
    )
    bar = _track(drawn) if barred else ""
    text = (
        f'<code style="white-space:inherit;{CODE}">{_uncut(cell.text)}</code>'
        if column.code
        else _text(cell.text)
    )
    notes = "".join(f'<div style="white-space:normal">→ {_text(note)}</div>' for note in cell.notes)
    return f'<td style="{style}"{hover}>{text}{bar}{notes}</td>'


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
    # A note stands beside its code where there is room, and below it on a narrow page.
    beside = f'<span style="display:inline-block;max-width:{TEXT_WIDTH};padding-left:.8em">'
    rows = "".join(
        f'<tr><td style="text-align:right;white-space:nowrap;{MUTED}">{_text(str(place))}</td>'
        f'<td style="text-align:left"><code style="white-space:pre;{CODE}">'
        f"{escape(printable(code)) if listing.whole else _uncut(code)}</code>"
        f"{f' {beside}{_text(note)}</span>' if note else ''}</td></tr>"
        for place, code, note in listing.lines
    )
    return _box(f"<tbody>{rows}</tbody>", _named(label))


def _sparkline(block: doc.Sparkline) -> str:
    """Return columns, each with the character of its height in it, which shows where styles are stripped.

    The arrow stands under the marked one, and its note to the side that has room.
    """
    count = max(1, len(block.heights))
    sparks = sparkline(block.heights)
    bands = [(block.bands[name], _colour(name)) for name in block.bands]
    columns = "".join(
        _column(
            100 / count,
            block.heights[place],
            spark,
            [(band[place], colour) for band, colour in bands],
        )
        for place, spark in enumerate(sparks)
    )
    ground = f"display:block;height:{72 if bands else 48}px;max-width:{SPARKLINE_WIDTH};font-size:0;line-height:0"
    stand = '<span style="display:inline-block;vertical-align:bottom;height:100%;width:0"></span>'
    swatch = "display:inline-block;width:.8em;height:.8em;margin-right:.3em"
    named = ", ".join(
        f'<span style="white-space:nowrap"><span aria-hidden="true" style="{swatch};background:{_colour(name)}"></span>'
        f"{_text(name)}</span>"
        for name in block.bands
    )
    note, at = _text(block.note), 100 * (block.mark + 0.5) / count
    if at <= 50:
        arrow = f"margin-left:{at:.1f}%", f"↑ {note}"
    else:
        arrow = f"text-align:right;margin-right:{100 - at:.1f}%", f"{note} ↑"
    return (
        f'<div role="img" aria-label="{_text(block.label)}" '
        f'style="{ground};white-space:nowrap;background:{TRACK}">{stand}{columns}</div>'
        f'<div style="max-width:{SPARKLINE_WIDTH};margin:.1em 0 .3em 0;white-space:nowrap">'
        f'<div style="{arrow[0]}">{arrow[1]}</div></div>'
        + (f'<p style="margin:.3em 0">From the bottom: {named}.</p>' if named else "")
    )


def _column(width: float, height: float, spark: str, bands: Sequence[tuple[float, str]]) -> str:
    """Return one column of a sparkline, of one colour or of a band over the other."""
    style = f"display:inline-block;vertical-align:bottom;width:{width:.4g}%;height:{max(2.0, 100 * height):.4g}%"
    if not bands or not height:
        return f'<span style="{style};background:{COLOURS["main"]}">{spark}</span>'
    inner = "".join(
        f'<span style="display:block;height:{100 * share / height:.4g}%;background:{colour}"></span>'
        for share, colour in reversed(bands)
        if share
    )
    return f'<span style="{style}">{spark}{inner}</span>'


def _colour(part: str) -> str:
    return "rgba({},{},{},.85)".format(*doc.PART_COLOURS.get(part, doc.OTHER_COLOUR))


def _tree(steps: Sequence[tuple[str, str]]) -> str:
    """Return lists nested in each other, which show the depth also where styles are stripped."""
    (text, note), *below = steps
    inner = _tree(below) if below else ""
    code = f'<code style="{CODE}">{_text(text)}</code>'
    return f'<ul><li>{code} <span style="{MUTED}">{_text(note)}</span>{inner}</li></ul>'


def _text(text: str) -> str:
    return escape(truncate_words(printable(text)))


def _uncut(text: str) -> str:
    """Return the text of code, or of a name on hovering, whose words are not cut."""
    return escape(truncate_middle(printable(text), MAX_LENGTH))

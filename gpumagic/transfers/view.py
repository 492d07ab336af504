"""The view of `%%ondevice`: what was copied between which devices, by which lines, why it failed, what to change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpumagic.memory.view import drawable_devices, timeline_blocks
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Paragraph,
    Segment,
    Table,
    document_of,
)
from gpumagic.report.units import NOT_AVAILABLE, count, duration, size
from gpumagic.transfers.report import TransferReport, TransferRow

SHOWN_ROUTES = 6
SHOWN_LINES = 12
SHOWN_ADVICE = 5
SHOWN_NAMES = 6


@document_of.register(TransferReport)
def view_transfers(report: TransferReport) -> Document:
    """Return the document of one run: at most a screen, and the rest folded."""
    blocks: list[Block] = [Heading(_headline(report)), *_explanation(report)]
    if report.moves:
        blocks.append(_flow(report.moves))
        blocks += _lines(report)
    blocks += [Paragraph(text) for text in _sentences(report)]
    blocks += _advice(report.advice)
    is_traced = report.timeline is not None and report.timeline.every_operator
    blocks += timeline_blocks(report.timeline, "" if is_traced else "--trace finds the line.")
    if _are_summed(report.moves):
        blocks.append(_every_move(report.moves))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _headline(report: TransferReport) -> str:
    made = sum(number for number, _ in report.created.values())
    moves = sum(row.count for row in report.moves)
    moved = size(sum(row.nbytes for row in report.moves))
    what = f"{count(moves, 'move')}, {moved}" if moves else "nothing moved between devices"
    ended = f", ended by {report.error}" if report.error else ""
    return f"on {report.device} for {duration(report.elapsed)}{ended}: {count(made, 'new tensor')}; {what}"


def _explanation(report: TransferReport) -> Iterator[Block]:
    found = report.explanation
    if found is None:
        return
    yield Paragraph(found.place.capitalize()[:1] + found.place[1:] + found.what)
    if found.fix:
        yield Paragraph(f"→ {found.fix}")
    if found.note:
        yield Paragraph(found.note)


def _flow(moves: Sequence[TransferRow]) -> Table | Fold:
    """Return the table of device pairs, with a bar for the bytes."""
    routes: dict[str, list[TransferRow]] = defaultdict(list)
    for row in moves:
        routes[f"{row.source} → {row.target}"].append(row)
    columns = (Column("From → to"), Column("Size", "right"), Column("Moves", "right"), Column("Time", "right"))
    sums = {route: sum(row.nbytes for row in rows) for route, rows in routes.items()}
    largest = max(sums.values()) or 1
    found: list[list[Cell | str]] = [
        [
            route,
            Cell(size(sums[route]), (Segment(sums[route] / largest),)),
            f"{sum(row.count for row in routes[route]):,}",
            _time(routes[route]),
        ]
        for route in sorted(routes, key=lambda route: -sums[route])
    ]
    return Table(columns, found[:SHOWN_ROUTES], "From device to device")


def _time(rows: Sequence[TransferRow]) -> str:
    known = [row.seconds for row in rows if row.seconds is not None]
    return duration(sum(known)) if known else NOT_AVAILABLE


def _lines(report: TransferReport) -> Iterator[Block]:
    """Show the code with what each line copied; of a long cell only the lines that did, and the rest folded."""
    by_line: dict[int, list[TransferRow]] = defaultdict(list)
    for row in report.moves:
        line = _asking_line(report) if row.cause == "--move" else row.line
        if line is not None:
            by_line[line].append(row)
    code = dict(report.lines)
    for line in (*by_line, *report.syncs):  # a function's line outside the cell, or code that could not be read
        code.setdefault(line, next((row.code for row in by_line[line] if row.code), ""))
    if not by_line:
        return
    shown = _worth_showing(code, by_line, report)
    yield _code_table(shown, code, by_line, report, "The lines that moved")
    if len(shown) < len(code):
        moving = len(set(by_line) - set(shown))
        more = f", {moving} of which moved something" if moving else ""
        summary = f"{count(len(code) - len(shown), 'more line')} of the code{more}"
        yield Fold(summary, [_code_table(sorted(code), code, by_line, report, "All lines")])


def _asking_line(report: TransferReport) -> int | None:
    """Return the line of the magic with `--move`; a `with` block has none in its code."""
    return next((line for line, code in report.lines if code.startswith("%") and "--move" in code), None)


def _worth_showing(code: dict[int, str], by_line: dict[int, list[TransferRow]], report: TransferReport) -> list[int]:
    """Return the lines to show: all of a short cell, else those that copied most, with the lines above them."""
    if len(code) <= SHOWN_LINES:
        return sorted(line for line in code if code[line].strip())
    weight = {line: sum(row.nbytes for row in rows) for line, rows in by_line.items()}
    busy = sorted({*weight, *report.syncs}, key=lambda line: (-weight.get(line, 0), line))[:SHOWN_LINES]
    shown = set(busy)
    for line in busy:
        above = line - 1
        if len(shown) < SHOWN_LINES and code.get(above, "").strip():
            shown.add(above)
    return sorted(shown)


def _code_table(
    shown: Sequence[int], code: dict[int, str], by_line: dict[int, list[TransferRow]], report: TransferReport, name: str
) -> Table:
    columns = [
        Column("Line", "right"), Column("Code", shrinks=True, code=True), Column("Size", "right"),
        Column("Moved", shrinks=True),
    ]  # fmt: skip
    waits = any(line in report.syncs for line in shown)
    if waits:
        columns.append(Column("Waits", "right", priority=1))
    rows = []
    for line in shown:
        moved = by_line.get(line, [])
        total = size(sum(row.nbytes for row in moved)) if moved else ""
        row: list[Cell | str] = [str(line), code[line], total, _what(moved)]
        rows.append([*row, f"{report.syncs[line]:,}" if line in report.syncs else ""] if waits else row)
    return Table(columns, rows, name)


def _what(rows: Sequence[TransferRow]) -> str:
    """Return what was copied, how often and by what, the largest first; targets are named if there are several."""
    targets = {row.target for row in rows}
    parts = []
    for row in sorted(rows, key=lambda row: -row.nbytes):
        times = f"{row.count:,}× " if row.count > 1 else ""
        what = f"{row.name} by {row.cause}" if row.name else row.cause
        parts.append(times + what + (f" to {row.target}" if len(targets) > 1 else ""))
    return "; ".join(parts)


def _are_summed(moves: Sequence[TransferRow]) -> bool:
    """Return whether the lines shown sum up more rows."""
    lines = [row.line for row in moves]
    return len(set(lines)) < len(lines) or len(lines) > SHOWN_LINES


def _every_move(moves: Sequence[TransferRow]) -> Fold:
    columns = (
        Column("Line", "right"), Column("Code", shrinks=True, code=True), Column("Variable", shrinks=True),
        Column("By"), Column("From → to"), Column("Moves", "right"), Column("Size", "right"), Column("Time", "right"),
    )  # fmt: skip
    rows: list[list[Cell | str]] = [
        [
            str(row.line) if row.line is not None else Cell(NOT_AVAILABLE, muted=True, title="not a line of the code"),
            row.code or "", row.name or "", row.cause, f"{row.source} → {row.target}", f"{row.count:,}",
            size(row.nbytes), duration(row.seconds),
        ]
        for row in moves
    ]  # fmt: skip
    return Fold(
        f"{count(len(rows), 'row')} with count, bytes and time in .to_pandas()", [Table(columns, rows, "moves")]
    )


def _sentences(report: TransferReport) -> Iterator[str]:
    first = [row for row in report.moves if row.cause == "--move"]
    if first and _asking_line(report) is None:
        names = (f"{row.name} ({size(row.nbytes)} from {row.source})" for row in first)
        yield f"Moved first, as asked: {', '.join(names)}."
    outside = [row for row in report.moves if row.line is None and row.cause != "--move"]
    if outside:
        moved = "; ".join(
            f"{row.source} → {row.target} {size(row.nbytes)} by {row.cause}" for row in outside[:SHOWN_NAMES]
        )
        yield f"Moved by code outside the cell: {moved}."
    if report.created:
        parts = [f"{device} {count(n, 'tensor')}, {size(nbytes)}" for device, (n, nbytes) in report.created.items()]
        yield "Created: " + "; ".join(parts) + "."
    if report.syncs and not any(row.line is not None for row in report.moves):
        lines = "; ".join(f"line {line}, {count(n, 'time')}" for line, n in report.syncs.items())
        yield f"The host waited for the device at {lines}."
    drawn = {each.device for each in drawable_devices(report.timeline)}
    peaks = [f"{device} {size(n)}" for device, n in report.peak.items() if device not in drawn]
    if peaks:
        yield f"Peak: {'; '.join(peaks)}."
    if report.elsewhere:
        names = (f"{each.name} ({each.device}, {size(each.nbytes)})" for each in report.elsewhere[:SHOWN_NAMES])
        rest = len(report.elsewhere) - SHOWN_NAMES
        more = f" and {count(rest, 'more name')}" if rest > 0 else ""
        yield f"Used here but living elsewhere: {', '.join(names)}{more}."


def _advice(advice: Sequence[str]) -> Iterator[Block]:
    yield from (Paragraph(f"→ {each}") for each in advice[:SHOWN_ADVICE])
    rest = advice[SHOWN_ADVICE:]
    if rest:
        yield Fold(f"and {count(len(rest), 'more suggestion')}", [Paragraph(f"→ {each}") for each in rest])

"""The view of `%%ondevice`: what to change first, then the lines that copied or waited, and the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumagic.report import document as doc
from gpumagic.report.base import grouped
from gpumagic.report.document import Column, Table
from gpumagic.report.units import NOT_AVAILABLE, count, duration, few, size
from gpumagic.transfers.report import Suggestion, TransferReport, TransferRow
from gpumagic.transfers.trace.report import LineRow
from gpumagic.transfers.trace.view import line_blocks, module_blocks

SHOWN_ROUTES = 2
SHOWN_LINES = 12
SHOWN_NAMES = 6


@doc.document_of.register(TransferReport)
def view_transfers(report: TransferReport) -> doc.Document:
    """Return the document of one run: at most a screen, and the rest folded."""
    blocks: list[doc.Block] = [doc.Heading(_headline(report))]
    if report.explanation is not None and report.explanation.note:
        blocks.append(doc.Paragraph(report.explanation.note))
    blocks.append(doc.Paragraph(_summary(report), muted=True))
    if report.by_line is not None and report.by_line.lines:
        changes = {line: _changes(report.advice, line) for line in dict(report.lines)}
        blocks += line_blocks(report.by_line, changes, _columns_of_lines(report))
    else:
        blocks += _lines(report)
    blocks += [doc.Paragraph(text, muted=True) for text in _sentences(report)]
    blocks += module_blocks(report.by_module)
    if report.moves:
        blocks.append(_every_transfer(report.moves))
    blocks += [doc.Paragraph(note, muted=True) for note in report.notes]
    return doc.Document(tuple(blocks))


def _headline(report: TransferReport) -> str:
    """Return what is wrong and what to do about it, or that nothing is."""
    if report.explanation is not None:
        found = report.explanation
        fix = f" Fix: {found.fix}" if found.fix else ""
        return f"{found.place.capitalize()[:1]}{found.place[1:]}{found.what}{fix}"
    first = str(report.advice[0]) if report.advice else _used_instead(report) or _transfers(report.moves)
    return f"{first}; ended by {report.error}" if report.error else first


def _transfers(moves: Sequence[TransferRow]) -> str:
    if not moves:
        return "No transfers between devices"
    transfers = sum(row.count for row in moves)
    told = f"{count(transfers, 'transfer')}, {size(sum(row.nbytes for row in moves))}"
    repeats = transfers == 1 or any(row.repeats for row in moves)
    return told if repeats else f"{told}: no line copied the same data twice"


def _used_instead(report: TransferReport) -> str:
    """Return what the cell used instead of its device, if it allocated nothing there; "" if it did."""
    others = [device for device, n in report.allocations.items() if n and device != report.device]
    is_used = report.allocations.get(report.device) or report.device in report.created
    if is_used or report.device in ("cpu", "meta") or not (others or report.elsewhere):
        return ""
    where = others or sorted({each.device for each in report.elsewhere})
    names = [each.name for each in report.elsewhere if each.device in where][:SHOWN_NAMES]
    named = f" ({', '.join(names)})" if names else ""
    worked = f"Nothing was allocated on {report.device}: the cell worked on {', '.join(where)}{named}"
    return f"{worked}; --move NAMES copies tensors first" if names else worked


def _summary(report: TransferReport) -> str:
    """Return the figures of the whole run in one line."""
    said = [f"{report.device}, {duration(report.elapsed)}"]
    if report.moves:
        said.append(_routes(report.moves))
    if report.syncs:
        said.append(count(sum(report.syncs.values()), "sync"))
    created = {device: count(n, "new tensor") for device, (n, _) in report.created.items()}
    said += [text if device == report.device else f"{text} on {device}" for device, text in created.items()]
    said += [f"peak {size(nbytes)} on {device}" for device, nbytes in report.peak.items()]
    return " · ".join(said)


def _routes(moves: Sequence[TransferRow]) -> str:
    routes = grouped((f"{row.source} → {row.target}", row.nbytes) for row in moves)
    largest = sorted(routes, key=lambda route: -sum(routes[route]))
    return few([f"{route} {size(sum(routes[route]))}" for route in largest], SHOWN_ROUTES, "route")


def _lines(report: TransferReport) -> Iterator[doc.Block]:
    """Yield the lines that copied or waited, each with what to change about it."""
    by_line = grouped((_line_of(row, report), row) for row in report.moves)
    code = dict(report.lines)
    busy = {line for line in (*by_line, *report.syncs) if line is not None}
    for line in busy:  # a function's line outside the cell, or code that could not be read
        code.setdefault(line, next((row.code for row in by_line.get(line, ()) if row.code), ""))
    if not busy:
        return
    weight = {line: sum(row.nbytes for row in by_line.get(line, ())) for line in busy}
    ordered = sorted(busy, key=lambda line: (-weight[line], line))
    yield _code_table(_with_context(ordered[:SHOWN_LINES], code), code, by_line, report)
    if rest := sorted(ordered[SHOWN_LINES:]):
        summary = f"{count(len(rest), 'more line')} with transfers, {size(sum(weight[line] for line in rest))}"
        yield doc.Fold(summary, [_code_table(rest, code, by_line, report)])


def _line_of(row: TransferRow, report: TransferReport) -> int | None:
    """Return the line that asked for a transfer: of `--move`, that of the magic; a `with` block has none."""
    if row.cause != "--move":
        return row.line
    return next((line for line, code in report.lines if code.startswith("%") and "--move" in code), None)


def _with_context(busy: Sequence[int], code: dict[int, str]) -> list[int]:
    """Return the lines with the one above each, as far as there is room."""
    shown = set(busy)
    for line in busy:
        above = code.get(line - 1, "").strip()
        if len(shown) < SHOWN_LINES and above and not above.startswith("%%"):
            shown.add(line - 1)
    return sorted(shown)


def _code_table(
    shown: Sequence[int], code: dict[int, str], by_line: dict[int | None, list[TransferRow]], report: TransferReport
) -> Table:
    sums = {line: sum(row.nbytes for row in by_line.get(line, ())) for line in shown}
    columns = (
        Column[int]("Line", str, "right"),
        Column[int](
            "Code", lambda line: doc.Cell(code[line], notes=_changes(report.advice, line)),
            shrinks=True, code=True, least=30,
        ),
        Column[int](
            "Size", lambda line: size(sums[line]) if line in by_line else "", "right",
            bar=lambda line: sums[line] if line in by_line else None, when=lambda _: True,
        ),
        Column[int]("Transfers", lambda line: _what(by_line.get(line, [])), shrinks=True, when=lambda _: True),
        Column[int]("Syncs", lambda line: f"{report.syncs[line]:,}" if line in report.syncs else "", "right", 1),
    )  # fmt: skip
    return Table.of(shown, columns, "Lines with transfers or syncs")


def _columns_of_lines(report: TransferReport) -> tuple[Column[LineRow], ...]:
    """Return what a traced line has besides its time and memory."""
    by_line = grouped((_line_of(row, report), row) for row in report.moves)

    def copied(row: LineRow) -> str:
        moves = by_line.get(row.line, [])
        return f"{sum(each.count for each in moves):,}× {size(sum(each.nbytes for each in moves))}" if moves else ""

    return (
        Column("Transfers", copied, "right", 1),
        Column("Syncs", lambda row: f"{report.syncs[row.line]:,}" if row.line in report.syncs else "", "right", 2),
    )


def _changes(advice: Sequence[Suggestion], line: int) -> tuple[str, ...]:
    return tuple(each.action for each in advice if each.line == line)


def _what(rows: Sequence[TransferRow]) -> str:
    """Return what was copied, how often and by what, the largest first; targets are named if there are several."""
    targets = {row.target for row in rows}
    parts = []
    for row in sorted(rows, key=lambda row: -row.nbytes):
        times = f"{row.count:,}× " if row.count > 1 else ""
        by = row.cause if row.name and row.cause.startswith(".") else f" by {row.cause}"
        what = f"{row.name}{by}" if row.name else row.cause
        parts.append(times + what + (f" → {row.target}" if len(targets) > 1 else ""))
    return "; ".join(parts)


def _every_transfer(moves: Sequence[TransferRow]) -> doc.Fold:
    known = [row.seconds for row in moves if row.seconds is not None]
    took = f", {duration(sum(known))} of host time" if known else ""
    return doc.Fold(f"Every transfer: {count(len(moves), 'row')}{took}", [Table.of(moves, TRANSFERS, "Every transfer")])


_NO_LINE = doc.Cell(NOT_AVAILABLE, muted=True, title="not a line of the code")
TRANSFERS: tuple[Column[TransferRow], ...] = (
    Column("Line", lambda row: _NO_LINE if row.line is None else str(row.line), "right"),
    Column("Code", lambda row: row.code, shrinks=True, code=True),
    Column("Variable", lambda row: row.name, shrinks=True),
    Column("Cause", lambda row: row.cause),
    Column("Direction", lambda row: f"{row.source} → {row.target}"),
    Column("Count", lambda row: f"{row.count:,}", "right"),
    Column("Size", lambda row: size(row.nbytes), "right"),
    Column("Time", lambda row: duration(row.seconds), "right"),
)


def _sentences(report: TransferReport) -> Iterator[str]:
    first = [row for row in report.moves if row.cause == "--move"]
    if first and _line_of(first[0], report) is None:
        names = (f"{row.name} ({size(row.nbytes)} from {row.source})" for row in first)
        yield f"Copied first, as asked: {', '.join(names)}."
    outside = [row for row in report.moves if row.line is None and row.cause != "--move"]
    if outside:
        copied = "; ".join(
            f"{row.source} → {row.target} {size(row.nbytes)} by {row.cause}" for row in outside[:SHOWN_NAMES]
        )
        yield f"Copied by code outside the cell: {copied}."
    told = {row.name for row in report.moves}
    elsewhere = [each for each in report.elsewhere if each.name not in told]
    if elsewhere and report.explanation is None and (report.advice or not _used_instead(report)):
        used = [f"{each.name} ({each.device}, {size(each.nbytes)})" for each in elsewhere]
        yield f"Used, but on another device: {few(used, SHOWN_NAMES, 'name')}."
    rest_of_advice = [each for each in report.advice if each.line is None or each.line not in dict(report.lines)]
    yield from (f"→ {each}" for each in rest_of_advice if each is not report.advice[0])

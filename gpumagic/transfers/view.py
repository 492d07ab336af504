"""The view of `%%ondevice`: what to change first, then the lines that copied or waited, or all that were traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumagic.report import document as doc
from gpumagic.report.base import grouped
from gpumagic.report.document import Column, Table
from gpumagic.report.units import NOT_AVAILABLE, count, duration, few, size
from gpumagic.transfers.report import LineReport, LineRow, TransferReport, TransferRow

SHOWN_ROUTES = 2
SHOWN_LINES = 12
SHOWN_NAMES = 6
TRACED_LINES = 24
"""Lines of a table of traced ones; of a longer cell or function those that took most, and the rest folded."""


@doc.document_of.register(TransferReport)
def view_transfers(report: TransferReport) -> doc.Document:
    """Return the document of one run: at most a screen, and the rest folded."""
    blocks: list[doc.Block] = [doc.Heading(_headline(report))]
    blocks.append(doc.Paragraph(_summary(report), muted=True))
    traced = report.by_line
    blocks += (
        _traced_lines(traced, report) if traced is not None and traced.lines else _lines(report)
    )
    blocks += [doc.Paragraph(text, muted=True) for text in _sentences(report)]
    if report.moves:
        known = [row.seconds for row in report.moves if row.seconds is not None]
        took = f", {duration(sum(known))} of host time" if known else ""
        table = Table.of(report.moves, TRANSFERS, "Every transfer")
        blocks.append(doc.Fold(f"Every transfer: {count(len(report.moves), 'row')}{took}", [table]))
    blocks += [doc.Paragraph(note, muted=True) for note in report.notes]
    return doc.Document(tuple(blocks))


def _headline(report: TransferReport) -> str:
    """Return what is wrong and what to do about it, or that nothing is."""
    if report.explanation is not None:
        found = report.explanation
        fix = f" Fix: {found.fix}" if found.fix else ""
        return f"{found.place.capitalize()[:1]}{found.place[1:]}{found.what}{fix}"
    if report.unrecorded:
        first = f"Ran on {report.device}; what it created and copied was not recorded: {report.unrecorded}"
        return f"{first}; ended by {report.error}" if report.error else first
    first = (
        str(report.advice[0])
        if report.advice
        else _used_instead(report) or _transfers(report.moves)
    )
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
    worked = (
        f"Nothing was allocated on {report.device}: the cell worked on {', '.join(where)}{named}"
    )
    return f"{worked}; --move NAMES copies tensors first" if names else worked


def _summary(report: TransferReport) -> str:
    """Return the figures of the whole run in one line."""
    said = [f"{report.device}, {duration(report.elapsed)}"]
    routes = grouped((f"{row.source} → {row.target}", row.nbytes) for row in report.moves)
    largest = sorted(routes, key=lambda route: -sum(routes[route]))
    said += (
        [few([f"{route} {size(sum(routes[route]))}" for route in largest], SHOWN_ROUTES, "route")]
        if routes
        else []
    )
    said += [count(sum(report.syncs.values()), "sync")] if report.syncs else []
    created = {device: count(n, "new tensor") for device, (n, _) in report.created.items()}
    said += [
        text if device == report.device else f"{text} on {device}"
        for device, text in created.items()
    ]
    said += [f"peak {size(nbytes)} on {device}" for device, nbytes in report.peak.items()]
    return " · ".join(said)


# ---- The lines that copied or waited

ByLine = Mapping[int | None, list[TransferRow]]


def _lines(report: TransferReport) -> Iterator[doc.Block]:
    """Yield the lines that copied or waited, each with the one above it, as far as there is room."""
    by_line = _by_line(report)
    code = dict(report.lines)
    busy = {line for line in (*by_line, *report.syncs) if line is not None}
    for line in busy:  # a function's line outside the cell, or code that could not be read
        code.setdefault(line, next((row.code for row in by_line.get(line, ()) if row.code), ""))
    if not busy:
        return
    weight = {line: sum(row.nbytes for row in by_line.get(line, ())) for line in busy}
    ordered = sorted(busy, key=lambda line: (-weight[line], line))
    shown = set(ordered[:SHOWN_LINES])
    for line in ordered[:SHOWN_LINES]:
        above = code.get(line - 1, "").strip()
        if len(shown) < SHOWN_LINES and above and not above.startswith("%%"):
            shown.add(line - 1)
    yield _code_table(sorted(shown), code, by_line, report)
    if rest := sorted(ordered[SHOWN_LINES:]):
        summary = f"{count(len(rest), 'more line')} with transfers, {size(sum(weight[line] for line in rest))}"
        yield doc.Fold(summary, [_code_table(rest, code, by_line, report)])


def _by_line(report: TransferReport) -> ByLine:
    """Return the transfers by line; those of `--move` are the magic's, where a cell has it."""
    magic = next(
        (line for line, code in report.lines if code.startswith("%") and "--move" in code), None
    )
    return grouped((magic if row.cause == "--move" else row.line, row) for row in report.moves)


def _code_table(
    shown: Sequence[int], code: Mapping[int, str], by_line: ByLine, report: TransferReport
) -> Table:
    sums = {line: sum(row.nbytes for row in by_line.get(line, ())) for line in shown}
    columns = (
        Column[int]("Line", str, "right"),
        Column[int](
            "Code",
            lambda line: doc.Cell(code[line], notes=_changes(report, line)),
            shrinks=True,
            code=True,
            least=30,
        ),
        Column[int](
            "Size",
            lambda line: size(sums[line]) if line in by_line else "",
            "right",
            bar=lambda line: sums[line] if line in by_line else None,
            when=lambda _: True,
        ),
        Column[int](
            "Transfers",
            lambda line: _what(by_line.get(line, [])),
            shrinks=True,
            when=lambda _: True,
        ),
        Column[int](
            "Syncs",
            lambda line: f"{report.syncs[line]:,}" if line in report.syncs else "",
            "right",
            1,
        ),
    )
    return Table.of(shown, columns, "Lines with transfers or syncs")


def _changes(report: TransferReport, line: int) -> tuple[str, ...]:
    return tuple(each.action for each in report.advice if each.line == line)


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
    outside = [row for row in _by_line(report).get(None, ()) if row.cause != "--move"]
    first = [row for row in _by_line(report).get(None, ()) if row.cause == "--move"]
    if first:
        names = (f"{row.name} ({size(row.nbytes)} from {row.source})" for row in first)
        yield f"Copied first, as asked: {', '.join(names)}."
    if outside:
        copied = "; ".join(
            f"{row.source} → {row.target} {size(row.nbytes)} by {row.cause}"
            for row in outside[:SHOWN_NAMES]
        )
        yield f"Copied by code outside the cell: {copied}."
    told = {row.name for row in report.moves}
    elsewhere = [each for each in report.elsewhere if each.name not in told]
    if elsewhere and report.explanation is None and (report.advice or not _used_instead(report)):
        used = [f"{each.name} ({each.device}, {size(each.nbytes)})" for each in elsewhere]
        yield f"Used, but on another device: {few(used, SHOWN_NAMES, 'name')}."
    rest_of_advice = [
        each for each in report.advice if each.line is None or each.line not in dict(report.lines)
    ]
    yield from (f"→ {each}" for each in rest_of_advice if each is not report.advice[0])


# ---- The lines of a trace: of the cell first, then of each function that was asked for


@doc.document_of.register(LineReport)
def view_lines(report: LineReport) -> doc.Document:
    """Return the lines as a report of their own."""
    own = [row for row in report.lines if row.function is None]
    answer = "No line was traced"
    if own:
        slowest, highest = (
            max(own, key=lambda row: row.seconds),
            max(own, key=lambda row: row.peak or 0),
        )
        memory = (
            f"; line {highest.line} has the peak, {size(highest.peak)} on {report.device}"
            if highest.peak
            else ""
        )
        answer = f"Line {slowest.line} took {duration(slowest.seconds)} of {duration(report.elapsed)}{memory}"
    return doc.Document((doc.Heading(answer), *_traced_lines(report)))


def _traced_lines(report: LineReport, run: TransferReport | None = None) -> Iterator[doc.Block]:
    """Yield a table of the cell's lines, with what the run says of each, and one of each function's."""
    if report.reason:
        yield doc.Paragraph(f"Lines were not traced: {report.reason}.", muted=True)
    elif report.missing:
        yield doc.Paragraph(report.missing, muted=True)
    for function in dict.fromkeys([None, *report.files]):
        rows = [row for row in report.lines if row.function == function]
        if function is not None:
            took = f"{duration(sum(row.seconds for row in rows))} in {count(len(rows), 'line')}"
            yield doc.Heading(
                f"{function}: {took}" if rows else f"{function} did not run in Python", apart=True
            )
        columns = _traced_columns(run if function is None else None)
        most = sorted(rows, key=lambda row: (row.seconds, row.allocated or 0), reverse=True)[
            :TRACED_LINES
        ]
        if rows:
            shown = [row for row in rows if row in most]
            yield Table.of(
                shown,
                columns,
                f"Lines of {function or 'the cell'}",
                elsewhere="in a wider terminal and in .by_line.to_pandas()",
            )
        if len(most) < len(rows):
            summary = f"{count(len(rows) - len(most), 'more line')} of {function or 'the cell'}"
            yield doc.Fold(summary, [Table.of(rows, columns, "All lines")])


def _traced_columns(run: TransferReport | None) -> tuple[Column[LineRow], ...]:
    by_line, syncs = ({}, {}) if run is None else (_by_line(run), run.syncs)

    def copied(row: LineRow) -> str:
        moves = by_line.get(row.line, [])
        return (
            f"{sum(each.count for each in moves):,}× {size(sum(each.nbytes for each in moves))}"
            if moves
            else ""
        )

    return (
        Column("Line", lambda row: str(row.line), "right"),
        Column(
            "Code",
            lambda row: doc.Cell(row.code, notes=_changes(run, row.line) if run else ()),
            shrinks=True,
            code=True,
            least=24,
        ),
        Column("Runs", lambda row: f"{row.hits:,}", "right", 2),
        Column("Time", lambda row: duration(row.seconds), "right", bar=lambda row: row.seconds),
        Column("Allocated", lambda row: size(row.allocated) if row.allocated else "", "right", 1),
        Column("Freed", lambda row: size(row.freed) if row.freed else "", "right", 3),
        Column("Peak", lambda row: size(row.peak) if row.peak else "", "right", 1),
        Column("Transfers", copied, "right", 1),
        Column(
            "Syncs", lambda row: f"{syncs[row.line]:,}" if row.line in syncs else "", "right", 2
        ),
    )

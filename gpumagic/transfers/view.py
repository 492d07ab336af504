"""The view of `%%ondevice`: what to change first, then the lines that copied or waited, or all that were traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpumagic.report import document as doc
from gpumagic.report.base import grouped
from gpumagic.report.document import Column, Table
from gpumagic.report.units import NOT_AVAILABLE, count, duration, few, size
from gpumagic.transfers.report import (
    MOVE,
    LineReport,
    LineRow,
    TransferReport,
    TransferRow,
)

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
    if traced is not None and traced.lines:
        blocks += _traced_lines(traced, report)
    else:
        blocks += _lines(report)
    blocks += [doc.Paragraph(text, muted=True) for text in _sentences(report)]
    if report.moves:
        summary = f"Every transfer: {count(len(report.moves), 'row')}"
        times = [row.seconds for row in report.moves if row.seconds is not None]
        if times:
            summary += f", {duration(sum(times))} of host time"
        table = Table.of(report.moves, TRANSFERS, "Every transfer")
        blocks.append(doc.Fold(summary, [table]))
    blocks += [doc.Paragraph(note, muted=True) for note in report.notes]
    return doc.Document(tuple(blocks))


def _headline(report: TransferReport) -> str:
    """Return what is wrong and what to do about it, or that nothing is."""
    explanation = report.explanation
    if explanation is not None:
        place = f"{explanation.place[:1].upper()}{explanation.place[1:]}"
        fix = f" Fix: {explanation.fix}" if explanation.fix else ""
        return f"{place}{explanation.what}{fix}"
    if report.unrecorded:
        answer = (
            f"Ran on {report.device}; what it created and copied was not recorded: "
            f"{report.unrecorded}"
        )
    elif report.advice:
        answer = str(report.advice[0])
    else:
        answer = _used_instead(report) or _transfers(report.moves)
    return f"{answer}; ended by {report.error}" if report.error else answer


def _transfers(moves: Sequence[TransferRow]) -> str:
    if not moves:
        return "No transfers between devices"
    transfers = sum(row.count for row in moves)
    answer = f"{count(transfers, 'transfer')}, {size(sum(row.nbytes for row in moves))}"
    if transfers == 1 or any(row.repeats for row in moves):
        return answer
    return f"{answer}: no line copied the same data twice"


def _used_instead(report: TransferReport) -> str:
    """Return what the cell used instead of its device, if it allocated nothing there; "" if it did."""
    others = [
        device
        for device, n in report.allocations.items()
        if n and device != report.device
    ]
    is_used = report.allocations.get(report.device) or report.device in report.created
    if is_used or report.device in ("cpu", "meta") or not (others or report.elsewhere):
        return ""
    where = others or sorted({used.device for used in report.elsewhere})
    names = [used.name for used in report.elsewhere if used.device in where][
        :SHOWN_NAMES
    ]
    answer = f"Nothing was allocated on {report.device}: the cell worked on {', '.join(where)}"
    if not names:
        return answer
    return f"{answer} ({', '.join(names)}); --move NAMES copies tensors first"


def _summary(report: TransferReport) -> str:
    """Return the figures of the whole run in one line."""
    figures = [f"{report.device}, {duration(report.elapsed)}"]
    routes: Counter[str] = Counter()
    for row in report.moves:
        routes[f"{row.source} → {row.target}"] += row.nbytes
    if routes:
        largest = [f"{route} {size(nbytes)}" for route, nbytes in routes.most_common()]
        figures.append(few(largest, SHOWN_ROUTES, "route"))
    if report.syncs:
        figures.append(count(sum(report.syncs.values()), "sync"))
    for device, (number, _) in report.created.items():
        created = count(number, "new tensor")
        figures.append(created if device == report.device else f"{created} on {device}")
    for device, nbytes in report.peak.items():
        figures.append(f"peak {size(nbytes)} on {device}")
    return " · ".join(figures)


# ---- The lines that copied or waited

ByLine = Mapping[int | None, list[TransferRow]]


def _lines(report: TransferReport) -> Iterator[doc.Block]:
    """Yield the lines that copied or waited, each with the one above it, as far as there is room."""
    by_line = _by_line(report)
    busy = {line for line in (*by_line, *report.syncs) if line is not None}
    if not busy:
        return
    code = dict(report.lines)
    nbytes: dict[int, int] = {}
    for line in busy:
        rows = by_line.get(line, [])
        nbytes[line] = sum(row.nbytes for row in rows)
        # A function's line outside the cell, or code that could not be read
        code.setdefault(line, next((row.code for row in rows if row.code), ""))
    ordered = sorted(busy, key=lambda line: (-nbytes[line], line))
    shown = set(ordered[:SHOWN_LINES])
    for line in ordered[:SHOWN_LINES]:
        above = code.get(line - 1, "").strip()
        if len(shown) < SHOWN_LINES and above and not above.startswith("%%"):
            shown.add(line - 1)
    yield _code_table(sorted(shown), code, by_line, report)
    rest = sorted(ordered[SHOWN_LINES:])
    if rest:
        more = count(len(rest), "more line")
        summary = f"{more} with transfers, {size(sum(nbytes[line] for line in rest))}"
        yield doc.Fold(summary, [_code_table(rest, code, by_line, report)])


def _by_line(report: TransferReport) -> ByLine:
    """Return the transfers by line; those of `--move` are the magic's, where a cell has it."""
    magic = None
    for line, code in report.lines:
        if code.startswith("%") and MOVE in code:
            magic = line
            break
    return grouped(
        (magic if row.cause == MOVE else row.line, row) for row in report.moves
    )


def _code_table(
    shown: Sequence[int],
    code: Mapping[int, str],
    by_line: ByLine,
    report: TransferReport,
) -> Table:
    sums: dict[int, int] = {}
    for line in shown:
        if line in by_line:
            sums[line] = sum(row.nbytes for row in by_line[line])
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
            lambda line: size(sums[line]) if line in sums else "",
            "right",
            bar=sums.get,
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
    return tuple(advice.action for advice in report.advice if advice.line == line)


def _what(rows: Sequence[TransferRow]) -> str:
    """Return what was copied, how often and by what, the largest first; targets are named if there are several."""
    targets = {row.target for row in rows}
    parts: list[str] = []
    for row in sorted(rows, key=lambda row: -row.nbytes):
        if not row.name:
            part = row.cause
        elif row.cause.startswith("."):
            part = f"{row.name}{row.cause}"
        else:
            part = f"{row.name} by {row.cause}"
        if row.count > 1:
            part = f"{row.count:,}× {part}"
        if len(targets) > 1:
            part = f"{part} → {row.target}"
        parts.append(part)
    return "; ".join(parts)


_NO_LINE = doc.Cell(NOT_AVAILABLE, muted=True, title="not a line of the code")
TRANSFERS: tuple[Column[TransferRow], ...] = (
    Column(
        "Line", lambda row: _NO_LINE if row.line is None else str(row.line), "right"
    ),
    Column("Code", lambda row: row.code, shrinks=True, code=True),
    Column("Variable", lambda row: row.name, shrinks=True),
    Column("Cause", lambda row: row.cause),
    Column("Direction", lambda row: f"{row.source} → {row.target}"),
    Column("Count", lambda row: f"{row.count:,}", "right"),
    Column("Size", lambda row: size(row.nbytes), "right"),
    Column("Time", lambda row: duration(row.seconds), "right"),
)


def _sentences(report: TransferReport) -> Iterator[str]:
    outside: list[str] = []
    first: list[str] = []
    for row in _by_line(report).get(None, ()):
        if row.cause == MOVE:
            first.append(f"{row.name} ({size(row.nbytes)} from {row.source})")
        else:
            outside.append(
                f"{row.source} → {row.target} {size(row.nbytes)} by {row.cause}"
            )
    if first:
        yield f"Copied first, as asked: {', '.join(first)}."
    if outside:
        yield f"Copied by code outside the cell: {'; '.join(outside[:SHOWN_NAMES])}."
    copied = {row.name for row in report.moves}
    used: list[str] = []
    for other in report.elsewhere:
        if other.name not in copied:
            used.append(f"{other.name} ({other.device}, {size(other.nbytes)})")
    if (
        used
        and report.explanation is None
        and (report.advice or not _used_instead(report))
    ):
        yield f"Used, but on another device: {few(used, SHOWN_NAMES, 'name')}."
    lines = dict(report.lines)
    for advice in report.advice[1:]:
        if advice.line is None or advice.line not in lines:
            yield f"→ {advice}"


# ---- The lines of a trace: of the cell first, then of each function that was asked for


@doc.document_of.register(LineReport)
def view_lines(report: LineReport) -> doc.Document:
    """Return the lines as a report of their own."""
    own = [row for row in report.lines if row.function is None]
    answer = "No line was traced"
    if own:
        slowest = max(own, key=lambda row: row.seconds)
        highest = max(own, key=lambda row: row.peak or 0)
        took = f"{duration(slowest.seconds)} of {duration(report.elapsed)}"
        answer = f"Line {slowest.line} took {took}"
        if highest.peak:
            peak = f"{size(highest.peak)} on {report.device}"
            answer += f"; line {highest.line} has the peak, {peak}"
    return doc.Document((doc.Heading(answer), *_traced_lines(report)))


def _traced_lines(
    report: LineReport, run: TransferReport | None = None
) -> Iterator[doc.Block]:
    """Yield a table of the cell's lines, with what the run says of each, and one of each function's."""
    if report.reason:
        yield doc.Paragraph(f"Lines were not traced: {report.reason}.", muted=True)
    elif report.missing:
        yield doc.Paragraph(report.missing, muted=True)
    for function in dict.fromkeys([None, *report.files]):
        rows = [row for row in report.lines if row.function == function]
        if function is not None:
            yield doc.Heading(_function_heading(function, rows), apart=True)
        if not rows:
            continue
        columns = _traced_columns(run if function is None else None)
        by_time = sorted(
            rows, key=lambda row: (row.seconds, row.allocated or 0), reverse=True
        )
        most = by_time[:TRACED_LINES]
        name = function or "the cell"
        yield Table.of(
            [row for row in rows if row in most],
            columns,
            f"Lines of {name}",
            elsewhere="in a wider terminal and in .by_line.to_pandas()",
        )
        if len(most) < len(rows):
            summary = f"{count(len(rows) - len(most), 'more line')} of {name}"
            yield doc.Fold(summary, [Table.of(rows, columns, "All lines")])


def _function_heading(function: str, rows: Sequence[LineRow]) -> str:
    if not rows:
        return f"{function} did not run in Python"
    took = duration(sum(row.seconds for row in rows))
    return f"{function}: {took} in {count(len(rows), 'line')}"


def _traced_columns(run: TransferReport | None) -> tuple[Column[LineRow], ...]:
    by_line: ByLine = {}
    syncs: Mapping[int, int] = {}
    if run is not None:
        by_line = _by_line(run)
        syncs = run.syncs

    def copied(row: LineRow) -> str:
        moves = by_line.get(row.line)
        if not moves:
            return ""
        transfers = sum(move.count for move in moves)
        return f"{transfers:,}× {size(sum(move.nbytes for move in moves))}"

    return (
        Column("Line", lambda row: str(row.line), "right"),
        Column(
            "Code",
            lambda row: doc.Cell(
                row.code, notes=_changes(run, row.line) if run else ()
            ),
            shrinks=True,
            code=True,
            least=24,
        ),
        Column("Runs", lambda row: f"{row.hits:,}", "right", 2),
        Column(
            "Time",
            lambda row: duration(row.seconds),
            "right",
            bar=lambda row: row.seconds,
        ),
        Column(
            "Allocated",
            lambda row: size(row.allocated) if row.allocated else "",
            "right",
            1,
        ),
        Column("Freed", lambda row: size(row.freed) if row.freed else "", "right", 3),
        Column("Peak", lambda row: size(row.peak) if row.peak else "", "right", 1),
        Column("Transfers", copied, "right", 1),
        Column(
            "Syncs",
            lambda row: f"{syncs[row.line]:,}" if row.line in syncs else "",
            "right",
            2,
        ),
    )

"""The view of a search for the largest size that fits, and the table of any cell's runs."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.oom.tries_report import FitReport, Try
from gpumagic.report.document import Block, Cell, Column, Document, Fold, Heading, Paragraph, Table, document_of
from gpumagic.report.units import count, duration, size


@document_of.register(FitReport)
def view_fit(report: FitReport) -> Document:
    """Return the answer, how to write it down, and the runs it came from."""
    blocks: list[Block] = [Heading(_headline(report))]
    if report.place:
        blocks.append(Paragraph(f"The cell has run with it; to keep it, {report.place}"))
    blocks.append(table(report.tries, report.name))
    blocks += [Paragraph(note) for note in report.notes]
    if report.failure is not None:
        blocks.append(_why(report))
    return Document(tuple(blocks))


def table(tries: Sequence[Try], name: str) -> Table:
    """Return the runs of a cell, in order.

    Args:
        tries: the runs.
        name: what the int is called that went up and down; "" where none did.
    """
    lost = any(each.lost for each in tries)
    columns = [
        Column("run", "right"), *([Column(name, "right")] if name else []), Column("ended"), Column("in use", "right"),
        Column("time", "right", priority=1), *([Column("could not be undone", shrinks=True)] if lost else []),
    ]  # fmt: skip
    rows: list[list[Cell | str]] = [
        [
            str(each.number),
            *([str(each.size)] if name else []),
            _ending(each),
            "" if each.allocated is None else size(each.allocated),
            duration(each.seconds),
            *([", ".join(each.lost)] if lost else []),
        ]
        for each in tries
    ]
    return Table(columns, rows, caption="Runs of the cell")


def _ending(each: Try) -> str:
    where = f" on {each.device}" if each.device else ""
    if each.fits:
        return f"fits{where}"
    asked = f", asked for {size(each.requested)}" if each.requested is not None else ""
    line = f" in line {each.line}" if each.line is not None else ""
    return f"out of memory{where}{line}{asked}"


def _headline(report: FitReport) -> str:
    tries = count(len(report.tries), "run")
    if report.rehearsed is not None and report.rehearsed.expected is not None:
        tries += f", {count(len(report.rehearsed.tried), 'rehearsal')}"
    if report.best is None:
        passed = next((each.device for each in report.tries if each.fits), None)
        where = f"; passed on {passed}" if passed else ""
        return f"No value of {report.name} fits{where} · {tries}"
    if report.exact:
        return f"{report.name} = {report.best} is the largest that fits · {tries}"
    limit = f"; {report.ceiling} does not" if report.ceiling is not None else ""
    return f"{report.name} = {report.best} fits{limit} · {tries}"


def _why(report: FitReport) -> Block:
    assert report.failure is not None
    from gpumagic.oom import view

    what = f"with {report.name} = {report.ceiling}" if report.best is not None else "the last run"
    return Fold(f"why not {what}: {report.failure.verdict}", view.view_failure(report.failure).blocks)

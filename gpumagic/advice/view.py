"""The view of one suggestion: its code, why it would help, and what a dry run says of it."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.records import ON_THE_CPU, Advice
from gpumagic.report.document import Block, Document, Heading, Listing, Paragraph
from gpumagic.report.units import size, size_of


def known_early(advice: Advice) -> Document:
    """Return a suggestion that fits, for the time in which others are tried."""
    return Document((Heading(f"{advice.title}{worth(advice)}"), *how(advice)))


def how(advice: Advice) -> Iterator[Block]:
    """Yield a suggestion's code, then why it would help and what it costs."""
    code = _code(advice)
    if code:
        yield Listing(code, whole=True)
    why = [
        f"Why: {advice.evidence}." if advice.evidence else "",
        f"Cost: {advice.cost}." if advice.cost else "",
    ]
    if any(why):
        yield Paragraph(" ".join(filter(None, why)), muted=True)


def _code(advice: Advice) -> list[tuple[int | str, str, str]]:
    """Return what is to be run first, then the cell's new lines by number, or where no line is known just the code."""
    before = (advice.first or "").splitlines()
    lines = (advice.edit or "").splitlines() if advice.changes or not before else []
    code: list[tuple[int | str, str, str]] = [("first", line, "") for line in before]
    start = min(advice.changes, key=lambda change: (change.line, change.column), default=None)
    if start is None:
        return [*code, *(("use", line, "") for line in lines)]
    cell, number = f"{start.cell} " if start.cell else "", start.line + start.new.startswith("\n")
    return [*code, *((f"{cell}{i}", line, "") for i, line in enumerate(lines, number))]


def worth(advice: Advice) -> str:
    """Return what a dry run says of a suggestion; of one that was not tried, what it frees."""
    trial = advice.trial
    saves = f"saves {size(advice.frees)}" if advice.frees is not None else ""
    but = f"; {trial.reason}" if trial is not None and trial.reason else ""
    if trial is None or trial.needs is None:
        frees = f": frees {size(advice.frees)}" if advice.frees is not None else ""
        return frees + (f" (not tried{but.replace(';', ':', 1)})" if but else "")
    ran = (
        size_of(trial.needs, trial.available)
        if advice.title != ON_THE_CPU
        else "in the host's memory"
    )
    if trial.fits:
        return (
            f": fits (dry run: {ran})" if trial.certain else f": should fit (dry run: {ran}{but})"
        )
    if trial.fits is False:
        return f": {saves}, does not fit alone" if saves else ": does not fit alone"
    return f": {saves or 'tried'}; whether it fits is open{but}"

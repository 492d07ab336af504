"""The view of one suggestion: its code, why it would help, and what a dry run says of it."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.records import ON_THE_CPU, Advice, EditTrial
from gpumagic.report.document import Block, Document, Heading, Listing, Paragraph
from gpumagic.report.units import size, size_of


def known_early(advice: Advice) -> Document:
    """Return a suggestion that fits, for the time in which others are tried."""
    return Document((Heading(f"{advice.title}{worth(advice)}"), *how(advice)))


def how(advice: Advice) -> Iterator[Block]:
    """Yield a suggestion's code, then why it would help and what it costs."""
    code = [*_lines_to_run_first(advice), *_lines_of_edit(advice)]
    if code:
        yield Listing(code, whole=True)
    sentences = []
    if advice.evidence:
        sentences.append(f"Why: {advice.evidence}.")
    if advice.cost:
        sentences.append(f"Cost: {advice.cost}.")
    if sentences:
        yield Paragraph(" ".join(sentences), muted=True)


Line = tuple[str, str, str]
"""As of `Listing.lines`."""


def _lines_to_run_first(advice: Advice) -> list[Line]:
    return [("first", line, "") for line in (advice.first or "").splitlines()]


def _lines_of_edit(advice: Advice) -> list[Line]:
    """Return the cell's new lines by number, or where no line is known just the code."""
    lines = (advice.edit or "").splitlines()
    if advice.changes:
        start = min(advice.changes, key=lambda change: (change.line, change.column))
        number = start.line
        if start.new.startswith("\n"):
            number += 1
        cell = f"{start.cell} " if start.cell else ""
        return [
            (f"{cell}{place}", line, "") for place, line in enumerate(lines, number)
        ]
    if advice.first:
        return []  # that is all of the edit
    return [("use", line, "") for line in lines]


def worth(advice: Advice) -> str:
    """Return what a dry run says of a suggestion; of one that was not tried, what it frees."""
    trial = advice.trial
    if trial is None or trial.needs is None:
        words = f": frees {size(advice.frees)}" if advice.frees is not None else ""
        if trial is not None and trial.reason:
            words += f" (not tried: {trial.reason})"
        return words
    if trial.fits:
        return _fit(advice, trial)
    saves = f"saves {size(advice.frees)}" if advice.frees is not None else ""
    if trial.fits is False:
        return f": {saves}, does not fit alone" if saves else ": does not fit alone"
    words = f": {saves or 'tried'}; whether it fits is open"
    return f"{words}; {trial.reason}" if trial.reason else words


def _fit(advice: Advice, trial: EditTrial) -> str:
    """Return how surely the cell fits with a suggestion, and what it needs then."""
    ran = size_of(trial.needs or 0, trial.available)
    if advice.title == ON_THE_CPU:
        ran = "in the host's memory"
    if trial.certain:
        return f": fits (dry run: {ran})"
    if trial.reason:
        ran += f"; {trial.reason}"
    return f": should fit (dry run: {ran})"

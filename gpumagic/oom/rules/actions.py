"""What can be done at once, as lines to run before the cell runs again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpumagic.oom.report import Action, OomReport
from gpumagic.report.units import size

_REBINDS = re.compile(r"\s*[\w.]+\s*=[^=]")
"""A line that gives a name another value is a change of what the user works with, not a clearing up."""

WORTH_A_LINE = 1024**2
"""Bytes below which a line is not worth typing."""


def of(report: OomReport, *, in_notebook: bool) -> tuple[Action, ...]:
    """Return lines that give memory back now, or make more of it usable, each once.

    Args:
        report: of the failure.
        in_notebook: whether magics can be typed.
    """
    return tuple(dict.fromkeys([*_from_advice(report), *_held(report, in_notebook=in_notebook)]))


def _from_advice(report: OomReport) -> Iterator[Action]:
    for advice in report.advice:
        lines = [line for line in (advice.first or "").splitlines() if not _REBINDS.match(line)]
        worth = f"frees {size(advice.frees)}" if advice.frees is not None else ""
        for line in lines:
            yield Action(line, worth if len(lines) == 1 else "")


def _held(report: OomReport, *, in_notebook: bool) -> Iterator[Action]:
    """Let the session's own places go: outputs, the last error, what nothing names."""
    outputs = sum(holder.nbytes for holder in report.holders if holder.name.startswith("Out["))
    named = sum(holder.nbytes for holder in report.holders)
    nameless = (report.allocated_after or 0) - named - _told(report) if report.holders else 0
    if outputs >= WORTH_A_LINE and in_notebook:
        yield Action("%devices --release-held", f"outputs hold {size(outputs)}")
    elif nameless >= WORTH_A_LINE:
        line = "%devices --held" if in_notebook else "gpumagic.devices().held()"
        yield Action(line, f"says what keeps the {size(nameless)} that nothing names")


def _told(report: OomReport) -> int:
    """Return the bytes that nothing names and of which the advice says already how to give them back."""
    return sum(each.frees or 0 for each in report.advice if _lets_go(each.first or ""))


def _lets_go(code: str) -> bool:
    """Return whether code does more than to delete names."""
    return any(not line.startswith("del ") for line in code.splitlines())

"""Lines to run after out-of-memory, each of which gives memory back or makes more of it usable."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.memory.workspaces import CLEAR_WORKSPACES
from gpumagic.oom.report import WORKSPACE, Action, OomReport
from gpumagic.report.units import LARGE, size


def actions_of(report: OomReport, *, in_notebook: bool) -> tuple[Action, ...]:
    """Return lines that give memory back now, or make more of it usable.

    Args:
        report: of the failure.
        in_notebook: whether magics can be typed.
    """
    found = [*_held(report, in_notebook=in_notebook), *_workspaces(report)]
    return tuple(found)


def _workspaces(report: OomReport) -> Iterator[Action]:
    """Offer the workspaces where they are as large as the request that failed; of a whole GPU they are little."""
    for holder in report.holders:
        if holder.kind == WORKSPACE and holder.nbytes >= max(LARGE, report.requested or 0):
            note = f"frees {size(holder.nbytes)} of workspaces, until the next matrix product"
            yield Action(CLEAR_WORKSPACES, note)


def _held(report: OomReport, *, in_notebook: bool) -> Iterator[Action]:
    """Have it told what holds memory that nothing names."""
    named = sum(holder.nbytes for holder in report.holders)
    nameless = (report.allocated_after or 0) - named if report.holders else 0
    if nameless >= LARGE:
        line = "%devices --leaks" if in_notebook else "gpumagic.devices().leaks()"
        yield Action(line, f"says what keeps {size(nameless)} without a name: autograd graphs, C++")

"""`%%oomguard --rehearse`: the cell is rehearsed before it runs, and runs only if it fits."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import TYPE_CHECKING

from IPython.display import display

from gpumagic import _compat
from gpumagic.errors import GpuMagicError, OptionError
from gpumagic.report import progress

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumagic.dryrun.report import RehearsalReport


def of_cell(shell: InteractiveShell, options: Namespace, body: str | None) -> RehearsalReport:
    """Return the rehearsal of a cell magic's body.

    Args:
        shell: whose names the cell sees.
        options: what the line says.
        body: the text below the line.

    Raises:
        OptionError: there is no body, or a capacity without a rehearsal.
        GpuMagicError: as `gpumagic.rehearse`.
    """
    if not (options.rehearse or options.rehearse_only):
        raise OptionError("--capacity is what a rehearsal reckons with: add --rehearse or --rehearse-only")
    if body is None:
        raise OptionError("a rehearsal needs all of the cell: write %%oomguard on its first line")
    from gpumagic.dryrun import fitting, forecast, targets

    script = forecast.script(body, _lines_above(shell, body))
    target = targets.choose(None, options.capacity)
    report = forecast.rehearse(script, shell.user_ns, target)
    if not (options.rehearse_only and options.fit):
        return report
    with progress.tally(fitting.MOST_REHEARSALS, "rehearsal") as tell:
        found = fitting.of_script(script, options.fit, shell.user_ns, target, tell)
    return dataclasses.replace(report, largest=found)


def show(report: RehearsalReport) -> None:
    """Show a rehearsal before the cell runs.

    Raises:
        GpuMagicError: the cell does not fit, or that is not known, so it must not run.
    """
    display(report)
    if not report.fits:
        why = report.verdict.rstrip(".")
        raise GpuMagicError(f"not run: {why[:1].lower()}{why[1:]}; without --rehearse it runs all the same")


def _lines_above(shell: InteractiveShell, body: str) -> int:
    """Return how many lines of the running cell stand above the body, so that the report counts as the cell does."""
    info = _compat.executing(shell)
    cell, text = ("" if info is None else info.raw_cell.rstrip()), body.rstrip()
    if not cell.endswith(text):
        return 0
    return cell[: len(cell) - len(text)].count("\n")

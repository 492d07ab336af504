"""A dry run of a cell on behalf of its magic."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import TYPE_CHECKING

from gpumagic.dryrun import fitting, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from gpumagic.errors import GpuMagicError, OptionError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def dry_run_cell(shell: InteractiveShell, options: Namespace, body: str | None) -> DryRunReport:
    """Return the dry run of a cell magic's body.

    Args:
        shell: whose names the cell sees.
        options: what the line says.
        body: the text below the line; None where IPython runs the cell, with the line magic on its first line.

    Raises:
        OptionError: there is no body, or what it needs is not there.
        GpuMagicError: as `gpumagic.dry_run`.
    """
    from gpumagic.notebook.cells import running_cell

    info = running_cell(shell)
    cell = "" if info is None else info.raw_cell
    if body is None:
        line = re.search(r"(?m)^[ \t]*%%dryrun(?!\S).*$", cell)
        if line is None or not cell[line.end() :].strip():
            raise OptionError("a dry run needs the whole cell: write %%dryrun on its first line")
        body = cell[line.end() + 1 :]
    text, whole = body.rstrip(), cell.rstrip()
    above = whole.removesuffix(text).count("\n") if whole.endswith(text) else 0
    script = script_of(body, above)  # the report counts lines as the cell does
    gpu = None if options.gpu is None else " ".join(options.gpu)
    target = targets.choose(None, options.capacity, gpu, options.ranks)
    if options.fit is not None:
        return fitting.largest(script, options.fit, shell.user_ns, target, run.TIME_LIMIT)
    return run.dry_run(script, shell.user_ns, target)


def show_and_check(report: DryRunReport) -> None:
    """Show a dry run before its cell runs.

    Raises:
        GpuMagicError: the cell does not fit, or that is not known, so it must not run.
    """
    from IPython.display import display

    display(report)
    if not report.fits:
        why = report.verdict
        raise GpuMagicError(f"not run: {why[:1].lower()}{why[1:]}")

"""A dry run on behalf of the magics: of a cell, or of one that ran out of memory with other values of its batch size.

The latter takes limited time and is never fatal: where the cell cannot be dry-run, that is an answer too.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun import fitting, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from gpumagic.errors import GpuMagicError, OptionError
from gpumagic.source.settings import Setting

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


SECONDS = 30.0
"""How long all dry runs of one question may take."""

What = str | Callable[[], object]


class OtherValues:
    """Dry-runs code with one number changed.

    Args:
        with_value: returns the code, or a callable, and the variables that a value comes with.
        namespace: the names that the code sees.
    """

    def __init__(
        self, with_value: Callable[[int], tuple[What, Mapping[str, object]]], namespace: Mapping[str, Any]
    ) -> None:
        self._with_value, self._namespace = with_value, namespace
        self._until: float | None = None

    def fits(self, value: int) -> bool | None:
        """Return whether the code fits with a value, as the devices are now; None where that cannot be told."""
        left = SECONDS if self._until is None else self._until - time.monotonic()
        if left <= 0:
            return None
        what, values = self._with_value(value)
        target = targets.choose(None, None)
        try:
            report = run.dry_run(script_of(what), self._namespace, target, values=values, time_limit=left)
        except GpuMagicError:
            return None
        if self._until is None:  # the worker's start does not count
            self._until = time.monotonic() + SECONDS
        return report.fits


def with_other_values(source: str, setting: Setting, namespace: Mapping[str, Any]) -> OtherValues:
    """Return the question for a cell's text and a number in it, or in the notebook."""

    def with_value(value: int) -> tuple[What, Mapping[str, object]]:
        text, values = setting.with_value(value)
        return source if text is None else text, values

    return OtherValues(with_value, namespace)

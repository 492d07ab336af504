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
from gpumagic.errors import DryRunUnavailable, GpuMagicError, OptionError
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
        setting: the number.
        with_value: returns the code, or a callable, and the variables that a value comes with.
        namespace: the names that the code sees.
        seconds: how long the first dry run may take, and how long all others together.
    """

    def __init__(
        self,
        setting: Setting,
        with_value: Callable[[int], tuple[What, Mapping[str, object]]],
        namespace: Mapping[str, Any],
        seconds: float = SECONDS,
    ) -> None:
        self.setting = setting
        self._with_value, self._namespace, self._seconds = with_value, namespace, seconds
        self._until: float | None = None

    def dry_run(self, value: int, only: Any = None) -> DryRunReport:
        """Return the dry run with a value, as the devices are now.

        Raises:
            GpuMagicError: it cannot be dry-run, or there is no time left.
        """
        left = self._seconds if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise DryRunUnavailable(f"the dry runs took more than {self._seconds:g} s")
        what, values = self._with_value(value)
        report = run.dry_run(
            script_of(what), self._namespace, targets.choose(None, None), values=values, time_limit=left, only=only
        )
        if self._until is None:  # the worker's start does not count
            self._until = time.monotonic() + self._seconds
        return report

    def fits(self, value: int) -> bool | None:
        """Return whether the code fits with a value; None where that cannot be told."""
        try:
            return self.dry_run(value).fits
        except GpuMagicError:
            return None

    def largest(self) -> DryRunReport:
        """Return the dry run with the largest value that fits.

        Raises:
            GpuMagicError: it cannot be dry-run, or there is no time left.
        """
        return fitting.search(self.dry_run, self.setting.name, self.setting.value, self.dry_run)


def with_other_values(source: str, setting: Setting, namespace: Mapping[str, Any]) -> OtherValues:
    """Return the question for a cell's text and a number in it, or in the notebook."""

    def with_value(value: int) -> tuple[What, Mapping[str, object]]:
        text, values = setting.with_value(value)
        return source if text is None else text, values

    return OtherValues(setting, with_value, namespace)

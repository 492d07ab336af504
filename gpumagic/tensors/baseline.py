"""The last report of a session's live tensors: what `%devices --diff` compares with.

A report is made by every `%devices` that lists tensors, and at the start of a cell whose first `%devices` has
`--diff` and comes after other code: that asks what this code did. It keeps no tensor alive.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpumagic.tensors.report import DiffReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

    from gpumagic.tensors.report import TensorReport


_LISTS = re.compile(r"\s*(?:[^%#'\"]*=\s*)?%devices(?!\S)")
_COMPARES = re.compile(r"[^#]*\s--diff(?![\w-])")


class DiffBaseline:
    """Keeps the last report of a shell's tensors."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._last: TensorReport | None = None
        self._called = ""

    def install(self) -> None:
        """Watch the shell's cells."""
        self._shell.events.register("pre_run_cell", self._cell_starts)

    def uninstall(self) -> None:
        """Undo `install`."""
        self._shell.events.unregister("pre_run_cell", self._cell_starts)
        self._last = None

    def remember(self, report: TensorReport) -> None:
        """Make the next difference one from this report; it must list everything."""
        # Since IPython 9.8 `execution_count` is the next cell's (ipython PR#15088).
        self._last, self._called = report, f"%devices in cell {self._shell.displayhook.prompt_count}"

    def difference(self, report: TensorReport) -> DiffReport:
        """Return what changed since the last report."""
        if self._last is None:
            note = "no %devices came before this one; the next --diff compares with it"
            return DiffReport((), notes=(note,))
        return report.since(self._last, self._called)

    def _cell_starts(self, info: ExecutionInfo) -> None:
        if compares_with_its_start(info.raw_cell):
            from gpumagic.tensors import scan

            self._last = scan.scan(self._shell.user_ns, shell=self._shell)
            self._called = f"the start of cell {self._shell.displayhook.prompt_count}"


def compares_with_its_start(cell: str) -> bool:
    """Tell whether the first `%devices` of a cell asks for a difference and has code before it."""
    code_before = False
    for line in cell.splitlines():
        found = _LISTS.match(line)
        if found is not None:
            return code_before and _COMPARES.match(line, found.end()) is not None
        code_before = code_before or not re.match(r"\s*(?:#|%%|$)", line)
    return False

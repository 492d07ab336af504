"""`%oomguard on` guards every cell of a shell.

It uses IPython's cell events, so the traceback shown is IPython's own and the slot for custom exception handlers, of
which there is one and Colab uses it, stays free; a `%%oomguard` in a cell replaces it there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpumagic.notebook import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

    from gpumagic.notebook.cells import CellSessions
    from gpumagic.oom.guard import OomGuard

_KEY = "gpumagic_every_cell"


class EveryCell:
    """Guards the cells of a shell that start from now on, each with a guard that `make` returns."""

    def __init__(self, shell: InteractiveShell, sessions: CellSessions, make: Callable[[], OomGuard]) -> None:
        self._shell, self._sessions, self._make = shell, sessions, make
        self._guards: weakref.WeakSet[OomGuard] = weakref.WeakSet()
        self.cells = 0
        self.failures = 0

    def install(self) -> None:
        """Follow the cells that start from now on."""
        self._shell.events.register("pre_run_cell", self._starts)
        self._shell.events.register("post_execute", self._ended)

    def uninstall(self) -> None:
        """Undo `install`; a cell that runs now ends unguarded."""
        session.unregister(self._shell, "pre_run_cell", self._starts)
        session.unregister(self._shell, "post_execute", self._ended)
        for guard in list(self._guards):
            self._sessions.drop(guard)

    def _starts(self, info: ExecutionInfo) -> None:
        self.cells += 1
        guard = self._make()
        guard.on_report = self._count
        self._guards.add(guard)
        self._sessions.start(guard, info)

    def _ended(self) -> None:
        """Release what a silent cell pins that no other cell runs: it has no start event."""
        result = self._shell.last_execution_result
        if result is None or not result.info.silent or result.error_in_exec is None or self._sessions.is_any_running():
            return
        guard = self._make()
        guard.close(result.error_in_exec)
        if guard.finish(result) is not None:
            self._count()

    def _count(self) -> None:
        self.failures += 1


def switch(shell: InteractiveShell, state: str, sessions: CellSessions, make: Callable[[], OomGuard]) -> str:
    """Turn the guard of a shell's cells ``"on"`` or ``"off"``, and return a line with the result."""
    every = shell.meta.get(_KEY)
    if state == "off":
        off(shell)
        return f"Cells are no longer guarded. {_counts(every)}" if every is not None else "Cells are not guarded."
    if every is not None:
        return f"Every cell is guarded already. {_counts(every)} %oomguard off ends it."
    every = shell.meta[_KEY] = EveryCell(shell, sessions, make)  # first: `off` undoes what an interrupt leaves of it
    every.install()
    return "From the next cell on, every cell is guarded against running out of memory. %oomguard off ends it."


def off(shell: InteractiveShell) -> None:
    """Guard no more cells."""
    if _KEY in shell.meta:
        shell.meta[_KEY].uninstall()
        del shell.meta[_KEY]


def _counts(every: EveryCell) -> str:
    return f"{every.cells} so far, of which {every.failures} ran out of memory."

"""Guards and IPython's cells: `%oomguard on` guards every cell, and a guarded cell prints text beside its report.

`EveryCell` hangs on IPython's cell events, so the traceback shown is IPython's own and the slot for custom exception
handlers, of which there is one and Colab uses it, stays free. A `%%oomguard` in a cell replaces this guard there.

What `--keep-going` continues after is printed as text: a front end that runs notebooks without a reader may take any
output of the type `error` for a failed run, whatever the kernel replies (papermill 2.7 does).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumagic.memory import host
from gpumagic.report.units import size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

    from gpumagic.notebook.cells import CellSessions
    from gpumagic.oom.guard import OomGuard


_KEY = "gpumagic_every_cell"
_WARNED = "gpumagic_host_warning"


class EveryCell:
    """Guards the cells of a shell that start from now on.

    Args:
        shell: whose cells.
        sessions: runs the guards.
        make: makes a guard for one cell.
    """

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
        self._shell.events.unregister("pre_run_cell", self._starts)
        self._shell.events.unregister("post_execute", self._ended)
        for guard in list(self._guards):
            self._sessions.drop(guard)

    def _starts(self, info: ExecutionInfo) -> None:
        self.cells += 1
        guard = self._make()
        guard.on_failure(self._count)
        self._guards.add(guard)
        self._sessions.start(guard, info)

    def _ended(self) -> None:
        """Free what a silent cell pins that no other cell runs: no event tells of its start."""
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
    """Turn the guard of a shell's cells ``"on"`` or ``"off"``, and return a line that says how it stands.

    Args:
        shell: whose cells.
        state: what is asked for; asking twice changes nothing.
        sessions: runs the guards.
        make: makes a guard for one cell.
    """
    every = shell.meta.get(_KEY)
    if state == "off":
        off(shell)
        return f"Cells are no longer guarded. {_tally(every)}" if every is not None else "Cells are not guarded."
    if every is not None:
        return f"Every cell is guarded already. {_tally(every)} %oomguard off ends it."
    every = EveryCell(shell, sessions, make)
    every.install()
    shell.meta[_KEY] = every
    return "Every cell from the next on is guarded against running out of memory. %oomguard off ends it."


def off(shell: InteractiveShell) -> None:
    """Guard no more cells."""
    shell.meta.pop(_WARNED, None)
    every = shell.meta.pop(_KEY, None)
    if every is not None:
        every.uninstall()


def _tally(every: EveryCell) -> str:
    return f"{every.cells} so far, of which {every.failures} ran out of memory."


_SHOW = "_showtraceback"


def show_as_text(shell: InteractiveShell, goes_on_after: Callable[[BaseException], bool]) -> None:
    """Have a kernel's shell print some of the tracebacks that it would send, until `stop`; a terminal's prints all.

    Args:
        shell: whose next tracebacks they are.
        goes_on_after: tells of an error whether it is to be printed.
    """
    if getattr(shell, "kernel", None) is None:
        return
    send = shell._showtraceback

    def show(kind: object, error: BaseException, lines: Any) -> None:
        if goes_on_after(error):
            sys.stderr.write(shell.InteractiveTB.stb2text(lines) + "\n")
        else:
            send(kind, error, lines)

    vars(shell)[_SHOW] = show


def stop_showing_as_text(shell: InteractiveShell) -> None:
    """Undo `start`."""
    vars(shell).pop(_SHOW, None)


def warn_of_host_memory(shell: InteractiveShell) -> None:
    """Print how little host memory is left, once until there is more again."""
    left = host.nearly_gone()
    if left is None:
        shell.meta.pop(_WARNED, None)
    elif _WARNED not in shell.meta:
        shell.meta[_WARNED] = True
        print(  # noqa: T201  # before the cell there is no report
            f"%%oomguard: only {size(left[0])} of {size(left[1])} of host memory is left; "
            "when it is gone, the kernel ends without an error."
        )

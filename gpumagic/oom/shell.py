"""What `%%oomguard` does in a shell: it shows a traceback after its report, and guards every cell.

IPython shows an error before the cell's report can be made. So the error that the guard is going to report on is held
back, as text, until the report has been shown: the user's frames only, and all of them by `%tb`.

`%oomguard on` uses IPython's cell events, so the traceback shown is IPython's own and the slot for custom exception
handlers, of which there is one and Colab uses it, stays free; a `%%oomguard` in a cell replaces it there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic import notebook
from gpumagic.oom import recognition
from gpumagic.source.frames import is_user_code, traceback_steps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

    from gpumagic.notebook.cells import CellSessions
    from gpumagic.notebook.guards import Guard

_KEY = "gpumagic_every_cell"
_SHOW = "_showtraceback"


class _HeldTraceback(NamedTuple):
    """A traceback that is to be shown later; it has no frames."""

    kind: type
    """The error's class."""
    text: str
    shown: list[str]
    """The lines to show."""
    whole: list[str]
    """All lines, those of libraries' frames included."""


class LateTraceback:
    """Holds back what a shell shows of some errors.

    Args:
        shell: the shell.
        recognises: says whether an error is to be held back.
        as_text: print it, for a run that goes on: a front end that runs notebooks without a reader may take any output
            of the type `error` for a failed run, whatever the kernel replies (papermill 2.7 does).
    """

    def __init__(
        self,
        shell: InteractiveShell,
        recognises: Callable[[BaseException], bool],
        *,
        as_text: bool = False,
    ) -> None:
        self._shell = shell
        self._recognises = recognises
        self._as_text = as_text and getattr(shell, "kernel", None) is not None
        self._send: Callable[[type, BaseException, list[str]], object] = (
            shell._showtraceback
        )
        self._before: object = None
        self._held: _HeldTraceback | None = None

    def install(self) -> None:
        """Hold back from now on."""
        own = vars(self._shell)
        self._before = own.get(_SHOW)  # ipykernel leaves one in the shell itself
        own[_SHOW] = self._hold

    def uninstall(self) -> None:
        """Hold back no more; what is held stays so until `show`."""
        own = vars(self._shell)
        if own.get(_SHOW) == self._hold:
            del own[_SHOW]
            if self._before is not None:
                own[_SHOW] = self._before

    def show(self, *, keep: bool = False) -> None:
        """Show what is held; with `keep` its frames are still there, so that `%tb` needs no text."""
        held = self._held
        self._held = None
        if held is None:
            return
        if self._as_text:
            sys.stdout.write(self._shell.InteractiveTB.stb2text(held.shown) + "\n")
        else:
            try:
                frameless: BaseException = held.kind(held.text)
            except Exception:  # not every error can be made of its text alone
                frameless = Exception(held.text)
            self._send(held.kind, frameless, held.shown)
        if not keep:
            _remember(held.kind, held.whole)

    def _hold(self, kind: type, error: BaseException, lines: list[str]) -> None:
        if not self._recognises(error):
            self._send(kind, error, lines)
            return
        shown = self._format_user_frames(kind, error) or lines
        self._held = _HeldTraceback(kind, str(error), shown, list(lines))

    def _format_user_frames(self, kind: type, error: BaseException) -> list[str]:
        """Return the lines of the traceback with the user's frames only; none where it has no such frame."""
        formatter: Any = self._shell.InteractiveTB
        last = getattr(formatter, "tb", None)
        chain = None
        for step in reversed(list(traceback_steps(error.__traceback__))):
            if is_user_code(step.tb_frame):
                chain = TracebackType(
                    chain, step.tb_frame, step.tb_lasti, step.tb_lineno
                )
        if chain is None:
            return []
        try:
            return list(formatter.structured_traceback(kind, error, chain, tb_offset=0))
        except (
            Exception
        ):  # a formatter of somebody else's may want a traceback of its own
            return []
        finally:
            formatter.tb = last


def _remember(kind: type, lines: list[str]) -> None:
    """Have `%tb` show these lines, as it shows a last error whose frames are there."""
    error = recognition.OutOfMemory(
        f"its frames are released; {kind.__name__} is shown by %tb"
    )
    vars(error)["_render_traceback_"] = lambda: lines
    try:
        raise error
    except recognition.OutOfMemory:
        sys.last_type, sys.last_value, sys.last_traceback = (
            type(error),
            error,
            error.__traceback__,
        )
    finally:
        error.__context__ = None
        del error


def switch(
    shell: InteractiveShell,
    state: str,
    sessions: CellSessions,
    make: Callable[[], Guard],
) -> str:
    """Turn the guard of a shell's cells ``"on"`` or ``"off"``, and return a line with the result.

    Args:
        shell: the shell.
        state: which of the two.
        sessions: the guards of its running cells.
        make: returns a guard for a cell that starts.
    """
    is_on = _KEY in shell.meta
    if state == "off":
        _off(shell)
        return "Cells are no longer guarded." if is_on else "Cells are not guarded."
    if is_on:
        return "Every cell is guarded already. %oomguard off ends it."
    guards = weakref.WeakSet[Any]()

    def start(info: ExecutionInfo) -> None:
        guard = make()
        guards.add(guard)
        sessions.start(guard, info)

    def stop() -> None:  # a cell that runs now ends unguarded
        notebook.unregister(shell, "pre_run_cell", start)
        for guard in list(guards):
            sessions.drop(guard)

    shell.meta[_KEY] = stop  # first: `_off` undoes what an interrupt leaves of it
    shell.events.register("pre_run_cell", start)
    return "From the next cell on, every cell is guarded against running out of memory. %oomguard off ends it."


def _off(shell: InteractiveShell) -> None:
    if _KEY in shell.meta:
        shell.meta[_KEY]()
        del shell.meta[_KEY]


def off(shell: InteractiveShell) -> None:
    """Guard no more cells, and forget what `%tb` would show."""
    _off(shell)
    if isinstance(getattr(sys, "last_value", None), recognition.OutOfMemory):
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)

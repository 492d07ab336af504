"""How a cell runs under a guard, and when the guard's report is shown.

A cell under `%%ondevice` runs as IPython's own cell. `PromoteCellMagics` makes its first line the line magic before
IPython compiles it; that magic calls `CellSessions.start`, and the session ends with the cell: `Guard.close` right
after the last statement, `Guard.finish` once IPython has shown and stored the value or the traceback. So values, `;`,
`await`, history, tracebacks and interrupts are IPython's (ipython#11314, #14157, #13797 tell of magics where they are
not).

Where a cell magic is called with its body, by an exported script or to run the body again, `ready_body` prepares it.
This module knows nothing of devices and memory: those are the guards' business.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import (
    cell_magic,
    classic_prompt,
    ipython_prompt,
    leading_indent,
)
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from gpumagic import notebook
from gpumagic.errors import GpuMagicError
from gpumagic.notebook import interrupts
from gpumagic.notebook.guards import (
    BodyOutcome,
    BodyRuns,
    CellBody,
    Guard,
    Outcome,
    in_reverse,
    run_guarded,
)

if TYPE_CHECKING:
    from types import FrameType

    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult


def running_cell(shell: InteractiveShell) -> ExecutionInfo | None:
    """Return the running cell, silent ones included, for which there is no event.

    `displayhook.exec_result` is public but undocumented, from 7.34 to 9.18. A nested `run_cell` resets it to
    None, and the threads of subshells share it.
    """
    result = shell.displayhook.exec_result
    return None if result is None else result.info


@dataclass(eq=False)
class _Session:
    guard: Guard
    info: ExecutionInfo
    depth: int
    """How many cells that show something were running in the thread, each inside the one before."""
    report: object = None
    """What waits for the end of the cell, where its guard has nothing more to do."""
    opens: bool = False
    """Whether the guard has been asked to open: an interrupt may come before."""
    closed: bool = False
    restored: bool = False

    def close(self, error: BaseException | None) -> None:
        if self.opens and not self.closed:
            self.closed = True
            self.guard.close(error)
            self.restored = True

    def repair(self) -> None:
        """Restore what an interrupt has kept `close` from restoring."""
        if self.opens and not self.restored:
            self.guard.restore()
        self.closed = self.restored = True


@dataclass
class _ThreadState:
    """The cells of one thread and their guards.

    Subshells run cells in threads at the same time. A thread changes nothing of another's state, so none needs a lock.
    """

    cells: list[ExecutionInfo] = field(default_factory=list)
    """Those that run and show something, each inside the one before."""
    sessions: list[_Session] = field(default_factory=list)
    begun: list[_Session] = field(default_factory=list)
    """All that may still have changed something."""
    ended: list[ExecutionInfo] = field(default_factory=list)

    def close(self, sessions: list[_Session], error: BaseException | None) -> None:
        in_reverse(sessions, lambda session: session.close(error))
        self.begun = [session for session in self.begun if not session.restored]

    def forget(self, sessions: list[_Session]) -> None:
        for session in sessions:
            self.sessions.remove(session)

    def repair(self) -> None:
        """Restore what interrupts have kept the guards of ended cells from restoring."""
        running = []
        for session in self.sessions:
            if not _is_among(session.info, self.ended):
                running.append(session)
        self.sessions = running
        to_repair = []
        for session in self.begun:
            if session.closed or not _is_among(session, running):
                to_repair.append(session)
        in_reverse(to_repair, _Session.repair)
        self.begun = [session for session in self.begun if not session.restored]
        self.ended.clear()


class CellSessions:
    """The guards of the cells that are running in one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._threads: dict[int, _ThreadState] = {}
        self._events: tuple[tuple[str, Callable[..., None]], ...] = (
            ("pre_run_cell", self._cell_starts),
            ("post_execute", self._cell_ends),
            ("post_run_cell", self._cell_is_shown),
        )

    def _own(self) -> _ThreadState:
        """Return this thread's state: what a guard enters belongs to its thread, as torch's modes do."""
        return self._threads.setdefault(threading.get_ident(), _ThreadState())

    def install(self) -> None:
        """Follow the shell's cells, the running one included."""
        for event, callback in self._events:
            self._shell.events.register(event, callback)
        current = running_cell(self._shell)
        if current is not None and not current.silent:
            self._cell_starts(current)

    def uninstall(self) -> None:
        """Undo `install`, as far as it went; what is open in this thread is closed, without a report."""
        for event, callback in self._events:
            notebook.unregister(self._shell, event, callback)
        own = self._own()
        open_here = list(own.sessions)
        for state in list(self._threads.values()):
            state.sessions = []
        own.close(open_here, None)
        own.repair()

    def start(self, guard: Guard, info: ExecutionInfo | None = None) -> None:
        """Put a guard around the rest of a cell; it replaces an earlier one of its name.

        Args:
            guard: what to open.
            info: a cell that is about to start; by default the running one.

        Raises:
            GpuMagicError: no cell runs in this thread; or whatever `guard.open` raises.
        """
        info = info or self._running()
        if info is None:
            raise GpuMagicError(
                f"%{guard.name} acts on the rest of a cell, and here is none; "
                f"in a script write `with gpumagic.{guard.name}(...):`"
            )
        session = self._add(guard, info)
        try:
            session.opens = True
            guard.open()
        except BaseException:
            # Ctrl-C, also right after `open`, which otherwise has restored what it had changed.
            self._own().forget([session])
            session.repair()
            raise

    def drop(self, guard: Guard) -> None:
        """Remove a guard from its cell: it is closed and shows nothing."""
        for state in list(self._threads.values()):
            sessions = [session for session in state.sessions if session.guard is guard]
            state.forget(sessions)
            state.close(sessions, None)

    def ready_body(self, runs: BodyRuns, body: str) -> Callable[[], object]:
        """Return a function that runs the body of a cell magic under a guard and returns its last expression's value.

        The function raises what the body raises, or what `runs.finish` puts in its place.

        Raises:
            GpuMagicError: the body awaits while an event loop runs, as in a notebook; or what `runs.begin` raises.
            SyntaxError: the body cannot be compiled.
        """
        info = self._running()
        cell = "" if info is None else info.raw_cell
        code = CellBody(self._shell, body, cell)
        first = runs.begin(code.source)
        return functools.partial(self._run_body, runs, code, first, info)

    def _run_body(
        self, runs: BodyRuns, code: CellBody, first: str, info: ExecutionInfo | None
    ) -> object:
        __tracebackhide__ = True
        if info is not None and code.ends_cell:
            for guard in runs.guards():
                self._replace(guard.name, info)
        outcome = run_guarded(runs, code.run, first)
        reports = runs.finish(outcome)
        if info is None or not (code.ends_cell or info.silent):
            for _, report in reports:
                display(report)
        elif not info.silent:  # at the end of the cell, of which the body is all
            for guard, report in reversed(reports):  # the last one added is shown first
                self._add(guard, info, report)
        try:
            if outcome.error_in_exec is not None:
                raise outcome.error_in_exec
            return None if code.is_silenced else outcome.result
        finally:
            del outcome  # its error's traceback holds this frame, and so itself

    def _add(
        self, guard: Guard, info: ExecutionInfo, report: object = None
    ) -> _Session:
        """Add a guard that is about to open to a cell, or one that has been closed and the report that waits."""
        self._replace(guard.name, info)
        own = self._own()
        is_over = report is not None
        session = _Session(
            guard,
            info,
            depth=len(own.cells),
            report=report,
            closed=is_over,
            restored=is_over,
        )
        own.sessions.append(session)
        own.begun.append(session)
        return session

    def _replace(self, name: str, info: ExecutionInfo) -> None:
        """Close the guards of a name that a cell has; they show nothing."""
        own = self._own()
        earlier = []
        for session in own.sessions:
            if session.info is info and session.guard.name == name:
                earlier.append(session)
        own.forget(earlier)
        own.close(earlier, None)

    def _running(self) -> ExecutionInfo | None:
        """Return the innermost cell that runs in this thread."""
        own = self._own()
        info = running_cell(self._shell)
        if info is not None and not self._is_elsewhere(info):
            return info
        return own.cells[-1] if own.cells else None

    def _is_elsewhere(self, info: ExecutionInfo) -> bool:
        """Return whether a cell runs in another thread."""
        own = self._own()
        others = [state for state in list(self._threads.values()) if state is not own]
        return any(_is_among(info, state.cells) for state in others)

    def _cell_starts(self, info: ExecutionInfo) -> None:
        own = self._own()
        if info.store_history and not self._is_inside_a_cell():
            # ipykernel was interrupted between the end of a cell and its events.
            own.ended += own.cells
        own.cells = [cell for cell in own.cells if not _is_among(cell, own.ended)]
        own.repair()
        own.cells.append(info)

    def _is_inside_a_cell(self) -> bool:
        """Return whether the cell that starts may have been run by the code of another one."""
        run_cell = InteractiveShell.run_cell_async.__code__
        running = 0
        frame: FrameType | None = sys._getframe()
        while frame is not None and running < 2:
            if frame.f_code is run_cell and frame.f_locals.get("self") is self._shell:
                running += 1
            frame = frame.f_back
        return running != 1  # none: somebody has replaced that function

    def _cell_ends(self) -> None:
        """Close the guards of the cell that ran last; by identity, since empty cells and widgets fire this too."""
        result = self._shell.last_execution_result
        if result is None:
            return
        own = self._own()
        own.ended.append(result.info)
        of_cell = [session for session in own.sessions if session.info is result.info]
        own.close(of_cell, _error(result))
        if of_cell and result.info.silent:
            # Such a cell shows nothing, so no `post_run_cell` follows.
            own.forget(of_cell)
            in_reverse(of_cell, lambda session: session.guard.finish(result))
            self._shell.last_execution_succeeded = result.success

    def _cell_is_shown(self, result: ExecutionResult | None) -> None:
        """Finish the guards of the cell that has ended, and of cells inside it whose end had no event."""
        own = self._own()
        place = _position(own.cells, result)
        if place is None:
            return
        del own.cells[place:]
        of_cell = [session for session in own.sessions if session.depth > place]
        own.forget(of_cell)
        outcome: Outcome = BodyOutcome() if result is None else result
        own.close(of_cell, _error(outcome))
        in_reverse(of_cell, lambda session: _finish(session, outcome))
        if of_cell and result is not None:
            self._shell.last_execution_succeeded = result.success


def _error(outcome: Outcome) -> BaseException | None:
    # IPython compiles each statement just before it runs it, and files what comes in between, such as Ctrl-C, apart.
    return outcome.error_in_exec or getattr(outcome, "error_before_exec", None)


@interrupts.held()
def _finish(session: _Session, outcome: Outcome) -> None:
    try:
        report = session.report
        if report is None and not session.info.silent:
            report = session.guard.finish(outcome)
        if report is not None:
            display(report)
    finally:  # what fails does not take the user's traceback along
        show_error = getattr(session.guard, "show_error", None)
        if show_error is not None:
            show_error()


def _is_among(wanted: object, members: Collection[object]) -> bool:
    return any(member is wanted for member in members)


def _position(cells: list[ExecutionInfo], result: ExecutionResult | None) -> int | None:
    """Return which of the running cells a result is of.

    When Ctrl-C breaks a terminal's event loop, IPython makes up a new result with a new info for the cell; when it
    breaks ipykernel's, there is no result.
    """
    for place in reversed(range(len(cells))):
        if result is None or cells[place] is result.info:
            return place
        if (
            result.error_in_exec is not None
            and cells[place].raw_cell == result.info.raw_cell
        ):
            return place
    return None


# These must show their help and not run the body.
_HELP = {"-h", "--help"}


class PromoteCellMagics:
    """Turn the cell form of our magics into the line form: an input transformer, as IPython's manual describes them.

    `%%ondevice` on the first line of a cell becomes `%ondevice`, so IPython runs the cell as its own; no line moves.

    Args:
        needs_body: for each magic, the options with which it runs the body itself, so that it stays a cell magic.
        lets_run: for other magics, which do not run their cell, the options with which it runs all the same.
    """

    has_side_effects = True  # else `check_complete` takes the promoted line for a whole cell (IPython 7.17 and newer)

    def __init__(
        self,
        needs_body: Mapping[str, Collection[str]],
        lets_run: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._lets_run = lets_run or {}
        self._needs_body = {
            name: {*options, *_HELP} for name, options in needs_body.items()
        }
        names = map(re.escape, [*needs_body, *self._lets_run])
        self._header = re.compile(rf"%%({'|'.join(names)})(?!\S)(.*)")

    def __call__(self, lines: list[str]) -> list[str]:
        """Return a cell's lines, the first of them promoted where it is one of ours."""
        if not lines or not lines[0].startswith("%%"):
            return lines
        if not self._is_promoted(lines):
            return lines
        return [lines[0][1:], *self._below(lines[1:])]

    def _is_promoted(self, lines: list[str]) -> bool:
        header = self._header.match(lines[0])
        if header is None:
            return False
        name, line = header.groups()
        if "?" in line or line.rstrip().endswith("\\"):
            return False  # it asks for help, or would swallow the next line as a line magic
        if not any(below.strip() for below in lines[1:]):
            return True
        before_comment = re.split(r"\s#", line, maxsplit=1)[0]
        options = {word.partition("=")[0] for word in before_comment.split()}
        if name in self._lets_run:
            return _HELP.isdisjoint(options) and not options.isdisjoint(
                self._lets_run[name]
            )
        return self._needs_body[name].isdisjoint(options)

    def _below(self, lines: list[str]) -> list[str]:
        """Do with the body what IPython does with a cell: `%%time` may stand in it, prompts, an indent."""
        blank = itertools.takewhile(lambda line: not line.strip(), lines)
        above = list(blank)
        cell = lines[len(above) :]
        for transform in (
            leading_indent,
            classic_prompt,
            ipython_prompt,
            self,
            cell_magic,
        ):
            cell = transform(cell)
        return [*above, *cell]

"""The protocol of guards, which a magic puts around a cell, and what runs the body of a cell magic under them.

A body is compiled once and run as often as asked, by IPython's own steps: its transformers, its compiler with the
session's `__future__` imports, its name space.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import methodcaller
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gpumagic import _compat
from gpumagic.errors import GpuMagicError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


Member = TypeVar("Member")


class Outcome(Protocol):
    """How a cell ended: IPython's `ExecutionResult`, or `BodyOutcome`.

    `error_in_exec` may be changed by `Guard.finish`: None lets Run All go on, another exception fails the cell instead.
    """

    error_in_exec: BaseException | None


@dataclass
class BodyOutcome:
    """How a body that `CellSessions.ready_body` ran has ended."""

    error_in_exec: BaseException | None = None
    result: object = None


class Guard(Protocol):
    """What a magic puts around one cell. One instance serves one cell; of one name the last in a cell counts."""

    name: str

    def open(self) -> None:
        """Start, before the first statement; on an error, leave nothing behind."""

    def close(self, error: BaseException | None) -> None:
        """Stop, right after the last statement, in its thread and on every way out, silent cells included.

        A guard that a later one of its name replaces is closed then; one of another name may still be open.
        """

    def restore(self) -> None:
        """Restore what the session must not keep: in `close`, and again after an interrupt of that or of `open`."""

    def finish(self, result: Outcome) -> object | None:
        """Return the report to show, or None.

        The value or the traceback is on the screen by then, except in `CellSessions.ready_body`, which asks before
        it returns or raises. Of a silent cell, such as those of `%run notebook.ipynb`, nothing is shown.

        A guard that has held back an error until its report is shown also has a `show_error`, which is called then.
        """


class BodyRuns:
    """Decides how often a body runs, and guards each run; this one runs it once.

    Args:
        guards: what goes around the run, the outermost first; only that one reports.
    """

    def __init__(self, *guards: Guard) -> None:
        self._guards = guards

    def begin(self, source: str) -> str:
        """Get ready for the first run, and return its code, as many lines long.

        Raises:
            GpuMagicError: nothing is to run.
        """
        return source

    def guards(self) -> tuple[Guard, ...]:
        """Return what goes around the coming run, the outermost first."""
        return self._guards

    def next(self, outcome: BodyOutcome) -> str | None:
        """Return the code to run next, as many lines long, or None where the outcome is to stand.

        Whoever returns code has first taken the error and the value out of the outcome: they would live on in it.
        """

    def end(self) -> None:
        """Put back what was only for the runs, on every way out."""

    def finish(self, outcome: Outcome) -> list[tuple[Guard, object]]:
        """Return the reports to show, each with its guard; like `Guard.finish` it may change the outcome."""
        if not self._guards:
            return []
        outermost = self._guards[0]
        report = outermost.finish(outcome)
        return [] if report is None else [(outermost, report)]


def run_guarded(
    runs: BodyRuns, execute: Callable[[str], object], source: str
) -> BodyOutcome:
    """Run code as often as ``runs`` decides and return how the last run ended; the caller calls `runs.finish`."""
    __tracebackhide__ = True
    try:
        outcome = _attempt(runs.guards(), execute, source)
        while (changed := runs.next(outcome)) is not None:
            del outcome  # the last attempt's frames must be gone before the next one
            outcome = _attempt(runs.guards(), execute, changed)
        return outcome
    finally:
        runs.end()
        outcome = None  # type: ignore[assignment]  # its error's traceback holds this frame, and so itself


def _attempt(
    guards: Sequence[Guard], execute: Callable[[str], object], source: str
) -> BodyOutcome:
    __tracebackhide__ = True
    outcome = BodyOutcome()
    try:
        for guard in guards:
            guard.open()
        try:
            outcome.result = execute(source)
        except BaseException as error:
            outcome.error_in_exec = error
        in_reverse(guards, methodcaller("close", outcome.error_in_exec))
    except BaseException:  # Ctrl-C, also right after one of the two
        in_reverse(guards, methodcaller("restore"))
        raise
    try:
        return outcome
    finally:
        del outcome


def in_reverse(members: Iterable[Member], act: Callable[[Member], object]) -> None:
    """Do something with each, the last one first, whatever the others raise."""
    with ExitStack() as stack:
        for member in members:
            stack.callback(act, member)


class CellBody:
    """The code under a cell magic's line.

    Args:
        shell: where it is to run.
        text: the body as the magic got it.
        cell: the text of the running cell, so that tracebacks name its lines; "" where there is none.

    Raises:
        SyntaxError: it cannot be compiled.
        GpuMagicError: it awaits, and an event loop is running already.
    """

    def __init__(self, shell: InteractiveShell, text: str, cell: str = "") -> None:
        self._shell = shell
        self._cell = cell
        head = _above(text, cell)
        self.ends_cell = head is not None
        """Whether the running cell consists of this body and the magics above it."""
        if head is None:
            # IPython drops the blank lines that the body begins with.
            blank = text[: len(text) - len(text.lstrip())]
            head = "\n" * (1 + blank.count("\n"))
        self._head = head
        self.source = "\n" * head.count("\n") + shell.transform_cell(text)
        """The body as Python, its lines numbered as the cell's."""
        self.is_silenced = _compat.ends_with_semicolon(self.source)
        """Whether a trailing `;` hides the value."""
        codes = self._compile(self.source)
        self._compiled = self.source, codes
        self._awaits = any(code.co_flags & inspect.CO_COROUTINE for code in codes)
        if self._awaits and _loop_is_running():
            raise GpuMagicError(
                "a body that the magic itself runs cannot await inside a notebook's event loop; await in another cell"
            )

    def run(self, source: str) -> object:
        """Run ``source``, the body or an edit of it, and return the value of its last expression, or None."""
        __tracebackhide__ = True
        if source != self._compiled[0]:
            self._compiled = source, self._compile(source)
        if self._awaits:
            return self._shell.loop_runner(self._run_awaiting())
        value = None
        for code in self._compiled[1]:
            value = self._evaluate(code)
        return value

    def _evaluate(self, code: CodeType) -> Any:
        __tracebackhide__ = True
        return eval(code, self._shell.user_global_ns, self._shell.user_ns)  # noqa: S307  # to run it is the task

    async def _run_awaiting(self) -> object:
        __tracebackhide__ = True
        value = None
        for code in self._compiled[1]:
            value = self._evaluate(code)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
        return value

    def _compile(self, source: str) -> list[CodeType]:
        compiler = self._shell.compile
        # Not `execution_count`: since IPython 9.8 it is the next cell's.
        number = self._shell.displayhook.prompt_count
        text = self._head + source[self._head.count("\n") :]
        name = compiler.cache(
            text, number, raw_code=self._cell if self.ends_cell else None
        )
        parsed = compiler.ast_parse(source, filename=name)
        statements = self._shell.transform_ast(parsed).body
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self._shell.autoawait else 0
        last = statements[-1] if statements else None
        with compiler.extra_flags(flags):
            if not isinstance(last, ast.Expr):
                return [compiler(ast.Module(statements, []), name, "exec")]
            return [
                compiler(ast.Module(statements[:-1], []), name, "exec"),
                compiler(ast.Expression(last.value), name, "eval"),
            ]


def _above(text: str, cell: str) -> str | None:
    """Return the lines of the cell above the body, or None where the cell is not some magics and this body."""
    body = text.strip()
    cell = cell.rstrip()
    if not body or not cell.endswith(body):
        return None
    above = cell[: len(cell) - len(body)]
    end_of_lines = above.rfind("\n") + 1
    lines = above[:end_of_lines]
    indent = above[end_of_lines:]
    if not lines or indent.strip():
        return None
    for line in lines.split("\n"):
        if line.strip() and not line.startswith("%%"):
            return None
    return lines


def _loop_is_running() -> bool:
    import asyncio  # not with %load_ext: it costs as much as all of ours

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

"""The protocol of guards, which a magic puts around a cell, and what runs a body under them once or more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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

        A guard that a later one of its name replaces is closed at that moment, so one of another name, opened
        in between, may still be open.
        """

    def restore(self) -> None:
        """Restore what the session must not keep.

        `close` does it; an interrupt of that, or of `open`, has it done again, whatever had been opened by then.
        """

    def finish(self, result: Outcome) -> object | None:
        """Return the report to show, or None.

        The value or the traceback is on the screen by then, except in `CellSessions.ready_body`, which asks before
        it returns or raises. Of a silent cell, such as those of `%run notebook.ipynb`, nothing is shown.

        A guard that has held back an error until its report is shown also has a `show_error`, which is called then.
        """


class BodyRuns:
    """Decides how often a body runs, and guards each run; this one runs it once.

    Args:
        guard: goes around the run.
    """

    def __init__(self, guard: Guard) -> None:
        self._only = guard

    def begin(self, source: str) -> str:
        """Get ready for the first run, and return its code, as many lines long.

        Raises:
            GpuMagicError: nothing is to run.
        """
        return source

    def guard(self) -> Guard:
        """Return what goes around the coming run."""
        return self._only

    def next(self, outcome: BodyOutcome) -> str | None:
        """Return the code to run next, as many lines long, or None where the outcome is to stand.

        Whoever returns code has first taken the error and the value out of the outcome: they would live on in it.
        """

    def end(self) -> None:
        """Put back what was only for the runs, on every way out."""

    def finish(self, outcome: Outcome) -> list[tuple[str, object]]:
        """Return the reports to show, each with its magic's name; like `Guard.finish` it may change the outcome."""
        report = self._only.finish(outcome)
        return [] if report is None else [(self._only.name, report)]


@dataclass
class NoGuard:
    """Stands where nothing watches a body, or no longer, with the report that waits for the end of the cell."""

    name: str
    report: object = None

    def open(self) -> None:
        """Do nothing."""

    def close(self, error: BaseException | None) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""

    def finish(self, result: Outcome) -> object | None:
        """Return what waits to be shown."""
        return self.report


class NestedGuard:
    """One guard inside another; the outer one reports."""

    def __init__(self, outer: Guard, inner: Guard) -> None:
        self.name, self._outer, self._inner = outer.name, outer, inner

    def open(self) -> None:
        """Open both, or neither."""
        self._outer.open()
        self._inner.open()

    def close(self, error: BaseException | None) -> None:
        """Close both."""
        try:
            self._inner.close(error)
        finally:
            self._outer.close(error)

    def restore(self) -> None:
        """Restore what both have changed."""
        try:
            self._inner.restore()
        finally:
            self._outer.restore()

    def finish(self, result: Outcome) -> object | None:
        """Return the outer guard's report."""
        return self._outer.finish(result)


def run_guarded(runs: BodyRuns, execute: Callable[[str], object], source: str) -> BodyOutcome:
    """Run code as often as ``runs`` decides and return how the last run ended; the caller calls `runs.finish`."""
    __tracebackhide__ = True
    try:
        outcome = _attempt(runs.guard(), execute, source)
        while (changed := runs.next(outcome)) is not None:
            del outcome  # the last attempt's frames must be gone before the next one
            outcome = _attempt(runs.guard(), execute, changed)
        return outcome
    finally:
        runs.end()
        outcome = None  # type: ignore[assignment]  # its error's traceback holds this frame, and so itself


def _attempt(guard: Guard, execute: Callable[[str], object], source: str) -> BodyOutcome:
    __tracebackhide__ = True
    outcome = BodyOutcome()
    try:
        guard.open()
        try:
            outcome.result = execute(source)
        except BaseException as error:
            outcome.error_in_exec = error
        guard.close(outcome.error_in_exec)
    except BaseException:  # Ctrl-C, also right after one of the two
        guard.restore()
        raise
    try:
        return outcome
    finally:
        del outcome

"""What a magic puts around a cell: the protocol between `cells`, which runs it, and those who watch it."""

from __future__ import annotations

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

    def finish(self, result: Outcome) -> object | None:
        """Return the report to show, or None.

        The value or the traceback is on the screen by then, except in `CellSessions.ready_body`, which asks before
        it returns or raises. Silent cells, such as those of `%run notebook.ipynb`, are not asked outside of it.
        """


class RetryingGuard(Guard, Protocol):
    """A guard that can have its body run again."""

    def retry(self, error: Exception) -> bool:
        """Tell, between `close` and the next `open`, whether to run the body again after this error."""

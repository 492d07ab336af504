"""What `%%oomguard --fit` returns, and what each run of a cell that ran more than once came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpumagic.report.base import Report

if TYPE_CHECKING:
    from gpumagic.dryrun.report import Fit
    from gpumagic.oom.report import OomReport


@dataclass(frozen=True, slots=True)
class Try:
    """One run of a cell."""

    number: int
    """From 1."""
    size: int | None
    """What the int was that goes up and down; None where none does."""
    device: str | None
    """Where it ran, if it was sent elsewhere."""
    fits: bool
    seconds: float
    allocated: int | None
    """Bytes in use on the device when it ended."""
    requested: int | None = None
    """Bytes of the request that failed."""
    line: int | None = None
    """Where it failed."""
    lost: tuple[str, ...] = ()
    """What it had changed that could not be put back before the next."""


@dataclass(frozen=True, repr=False)
class FitReport(Report[Try]):
    """The largest size with which a cell fits, and every size that was tried for it."""

    row_type: ClassVar[type[Any]] = Try

    name: str
    best: int | None
    """The largest that fits, with which the cell ran last; None if none does."""
    ceiling: int | None
    """The smallest tried or rehearsed that does not fit; None if all did."""
    tries: tuple[Try, ...]
    place: str = ""
    """Where the number stands and how to write it: ``"line 2: batch_size = 384"``."""
    failure: OomReport | None = None
    """Of the last run that did not fit."""
    notes: tuple[str, ...] = ()
    rehearsed: Fit | None = None
    """What rehearsals said before the first run; None where there were none."""

    @property
    def exact(self) -> bool:
        """Whether the next larger size was tried and does not fit."""
        return self.best is not None and self.ceiling == self.best + 1

    @property
    def rows(self) -> tuple[Try, ...]:
        return self.tries

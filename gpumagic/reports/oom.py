"""What `%%oomguard` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpumagic.reports.base import Report
from gpumagic.reports.names import Holder
from gpumagic.reports.tries import Try


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that would help, with what it is worth and why we believe it."""

    title: str
    frees: int | None
    """Bytes it would give back; None where that cannot be known beforehand."""
    covers: bool | None
    """Whether that is enough for the request that failed; None if unknown."""
    edit: str | None = None
    """The code to type."""
    evidence: str = ""


@dataclass(frozen=True, repr=False)
class OomReport(Report[Advice]):
    """Why a cell ran out of memory, what came back, who holds the rest, and what would help."""

    row_type: ClassVar[type[Any]] = Advice

    kind: str
    """``"cuda allocator"``, ``"host allocator"``, ``"cublas"``...: which allocator or library gave up."""
    certainty: str
    """``"certain"``, ``"probable"``, or ``"not-oom"`` where torch says out of memory and means a bug in a size."""
    device: str | None
    requested: int | None
    allocated_before: int | None
    allocated_at_failure: int | None
    allocated_after: int | None
    reserved_after: int | None
    line: int | None
    code: str | None
    verdict: str
    """One sentence with the numbers: a shortage, leftovers, another process..."""
    holders: tuple[Holder, ...] = ()
    advice: tuple[Advice, ...] = ()
    capacity: int | None = None
    reserved_before: int | None = None
    reserved_at_failure: int | None = None
    retries: int = 0
    recovered: bool = False
    """True if a retry passed."""
    message: str = ""
    """The first line of the original exception."""
    notes: tuple[str, ...] = ()
    tries: tuple[Try, ...] = ()
    """Every run of a cell that was run more than once."""
    shrunk: str = ""
    """The name of the int that went down from run to run."""

    @property
    def rows(self) -> tuple[Advice, ...]:
        return self.advice

"""What `%%oomguard` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpumagic.advice.records import Advice, Need
from gpumagic.report.base import Holder, Origin, Report

CUBLAS, WORKSPACE = "cuBLAS", "workspace"
"""The name and the kind of the holder of what torch keeps for matrix products."""


@dataclass(frozen=True, slots=True)
class Try:
    """One run of a cell."""

    size: int | None
    """What the int was that goes up and down; None where none does."""
    device: str | None
    """Where it ran, if it was sent elsewhere."""
    fits: bool
    line: int | None = None
    """Where it failed."""
    lost: tuple[str, ...] = ()
    """What it had changed that could not be put back before the next."""
    unseen: tuple[str, ...] = ()
    """Variables that the cell uses in which it may have changed something without being noticed."""


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
    place: str = ""
    """Where that int stands, and what it has to be for the cell to pass: ``"line 2: batch_size = 64"``."""
    need: Need | None = None
    """What the cell needs, by a dry run; None where there was none."""
    untried: str = ""
    """Why none of the advice was tried; empty where some was."""
    cause: str = "shortage"
    """The verdict in a word or two: ``"shortage"``, ``"leftovers"``, ``"earlier failure"`` (whose traceback held
    memory), ``"fragmentation"``, ``"other process"``, ``"one request"`` (larger than the device), ``"size bug"``,
    ``"host memory"``, ``"shared memory"``, ``"cap"``."""
    origin: Origin = field(default_factory=Origin)

    @property
    def rows(self) -> tuple[Advice, ...]:
        return self.advice

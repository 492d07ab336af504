"""What `%%oomguard` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpumagic.report.base import Holder, Origin, Report
from gpumagic.source.text import Change, apply_changes

ON_THE_CPU = "Run the cell on the CPU"
"""The title of what fits without the device."""
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


@dataclass(frozen=True, slots=True)
class Need:
    """What the cell needs on the device, by a dry run of it from where the release left the notebook.

    Every sentence of a report that compares what is needed with what is there is made of this.
    """

    needed: int
    """Bytes allocated at its peak, with as much memory as it wants."""
    had: int
    """Bytes that this process can have there."""
    fits: bool | None
    """Whether it ran with what is there; None where values that are not known decide."""
    certain: bool
    """As `DryRunReport.certain`."""
    alone: int | None = None
    """What it would need on an empty device: without what the notebook holds there and the cell does not use."""
    fixed: int = 0
    """Parameters, gradients and optimizer state at the peak, which no smaller batch makes smaller."""
    on: str = ""
    """The lines on whose values it depends; empty where it depends on none."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the peak by what they are for: parameters, activations..."""

    @property
    def missing(self) -> int:
        """Bytes by which the peak exceeds what is there; 0 where only the pieces are too small."""
        return max(0, self.needed - self.had)


@dataclass(frozen=True, slots=True)
class EditTrial:
    """A dry run of the cell with an edit made."""

    fits: bool | None = None
    """None where it could not be tried, or where it cannot be told."""
    certain: bool = False
    needs: int | None = None
    """Bytes allocated at the peak of the device that decides."""
    had: int | None = None
    saves: int | None = None
    """How much lower the peak of the device that failed is than without the edit."""
    reason: str = ""
    """Why it could not be tried, or what is not certain."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that would help, with what it is worth, what it costs and why we believe it."""

    title: str
    frees: int | None
    """Bytes that it saves: of the peak, by its dry run; where it was not tried, what it gives back; None if unknown."""
    covers: bool | None
    """Whether the cell fits with it, by a dry run; None where it was not tried or the dry run cannot tell."""
    edit: str | None = None
    """The code to type: the cell's new lines, or where it has none, what to run before it."""
    evidence: str = ""
    cost: str = ""
    """What is lost by it, or has to be done besides."""
    trial: EditTrial | None = None
    changes: tuple[Change, ...] = ()
    """`edit` as changes of the cell's text; empty where it is not one."""
    first: str | None = None
    """Code to run once before the cell runs again."""
    gpu: str = ""
    """The GPU by name that the dry run was of, where that is not the one that is here."""
    ranks: int | None = None
    """How many processes run the edited code, each on a GPU of its own."""

    def apply(self, source: str, cell: str = "") -> str:
        """Return a cell's text with the changes of this advice made.

        Args:
            source: the text of the cell, with the magic on its first line as it was run.
            cell: which cell that is, as in `Change.cell`.

        Raises:
            ValueError: the text is not the one that the advice was made for.
        """
        return apply_changes(self.changes, source, cell)


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

"""What `%gpuinfo --each-cell` returns: what the cells of a session did to each device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpumagic.memory.timeline import MemoryTimeline, plot
from gpumagic.report.base import Report
from gpumagic.report.rendering import to_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class CellRow:
    """What one cell did on one device, by the allocator's own counters."""

    cell: int
    """Its number: ``In [12]``."""
    code: str
    """Its first line of code."""
    seconds: float
    device: str
    allocated_before: int
    allocated_after: int
    growth: int
    """After less before; negative where it freed."""
    peak: int | None
    """Bytes allocated at most during the cell; None where the counter did not rise and so does not tell."""


@dataclass(frozen=True, repr=False)
class CellsReport(Report[CellRow]):
    """The last cells that touched a device's memory, a row a cell and device, oldest first."""

    row_type: ClassVar[type[Any]] = CellRow

    cells: tuple[CellRow, ...]
    timelines: Mapping[int, MemoryTimeline] = field(default_factory=dict)
    """By the cell's number, what was allocated in its course."""
    recorded: int = 0
    """How many cells there were, those that touched nothing included."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[CellRow, ...]:
        return self.cells

    def plot(self, cell: int | None = None) -> Figure:
        """Return a matplotlib figure of the memory after each cell, or in the course of one.

        Args:
            cell: the number of a cell.

        Raises:
            GpuMagicError: matplotlib is not installed, or there is nothing to draw.
        """
        if cell is not None:
            return plot(self.timelines.get(cell))
        return to_figure(self)

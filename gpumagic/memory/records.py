"""Allocated memory over the course of a cell, device by device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A stretch of the time of a cell; under ``--trace``, of its operators."""

    seconds: float
    """When its first look was, counted from the start of the cell."""
    low: int
    """Fewest bytes allocated at any look in it."""
    high: int
    """Most of them; where the allocator's counter tells of more between two looks, that."""
    last: int
    """Bytes at the last look in it."""
    look: int = 0
    """Which look that first one was; under ``--trace`` there is one after each operator."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Under ``--trace``, bytes that were surely there in all of it, by what they are for, as in `MemoryCourse.parts`:
    what had come by its begin and stayed to the end of the cell. Empty without."""


@dataclass(frozen=True, slots=True)
class MemoryCourse:
    """One device's allocated bytes from the start of a cell to its end."""

    device: str
    before: int
    after: int
    peak: int | None
    """The cell's own by the allocator's counter; None where the cell did not raise that, and `seen` is all we know."""
    seen: int
    """Most bytes at any look; the true peak may be higher."""
    lines: tuple[int, int] | None
    """The first and the last line between which `peak`, or without it `seen`, was reached; None if that is unknown."""
    code: str | None
    """That line, where it is one."""
    points: tuple[MemoryPoint, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were there from the start to the end, and so at the peak, by what modules and optimizers of the
    notebook have them for: ``"parameters"``, ``"gradients"``, ``"optimizer state"``, ``"buffers"``. The rest of the
    peak is activations and what else came and went. Empty where that is not known."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """The same of what came during the cell and was there at its end."""

    @property
    def line(self) -> int | None:
        """The line on which it was highest, where it is certain which one."""
        return self.lines[0] if self.lines is not None and self.lines[0] == self.lines[1] else None

    @property
    def highest(self) -> int:
        """The peak, or else the most seen."""
        return self.seen if self.peak is None else self.peak


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """What a cell had allocated while it ran, and how that was found."""

    courses: tuple[MemoryCourse, ...]
    """A device each, of those whose allocator did anything."""
    seconds: float
    looks: int
    """How often the allocators' figures were read, the start and the end included."""
    every_operator: bool = False
    """Whether they were read after each operator; else by the clock."""

    def share(self, point: MemoryPoint) -> float:
        """Return where a point is, from 0 for the start to 1 for the end: in time, or in operators."""
        at, whole = (point.look, self.looks) if self.every_operator else (point.seconds, self.seconds)
        return at / whole if whole else 0.0


def plot(timeline: MemoryTimeline | None) -> Figure:
    """Return a matplotlib figure of a timeline.

    Raises:
        GpuMagicError: matplotlib is not installed, or there is no timeline.
    """
    from gpumagic.report import plot as drawing

    return drawing.memory(timeline)

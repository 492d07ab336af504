"""What `--trace` found, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpumagic.report.base import Report


@dataclass(frozen=True, slots=True)
class LineRow:
    """One line of the cell, or of a function that `--trace` names; its figures include those of what it calls."""

    function: str | None
    """The name that was asked for; None for the cell's own lines, those of its functions included."""
    line: int
    code: str
    hits: int
    """How often it began."""
    seconds: float
    """The host's time in it; of a generator and a coroutine, without the time between two steps."""
    allocated: int | None
    """Bytes allocated on the run's device while it ran, by the allocator's history; None where only other threads ran
    it, or there is no history."""
    freed: int | None
    peak: int | None
    """The most bytes that the device had allocated at once while it ran."""


@dataclass(frozen=True, repr=False)
class LineReport(Report[LineRow]):
    """Time and memory, line by line."""

    row_type: ClassVar[type[Any]] = LineRow

    device: str
    lines: tuple[LineRow, ...]
    elapsed: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)
    """Where each function that was asked for stands."""
    reason: str = ""
    """Why there are no lines."""
    missing: str = ""
    """Why lines have no memory, or only some."""

    @property
    def rows(self) -> tuple[LineRow, ...]:
        return self.lines


BACKWARD = "backward passes"
"""Stands for them where modules have their paths."""


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, without those in it: the rows add up to what the run took, and at the peak to what was allocated."""

    module: str
    """Its path from a variable, such as ``"model.blocks.3.attn"``; `BACKWARD` for backward passes, empty for what else
    ran outside of all modules."""
    calls: int
    """How often its forward ran."""
    seconds: float
    """The host's time in it."""
    allocated: int
    """Bytes allocated on the run's device meanwhile."""
    freed: int
    parameters: int
    """Bytes at the peak, by what they are for, in this and the following fields."""
    buffers: int
    optimizer_state: int
    gradients: int
    activations: int
    """Results of operators of its forward."""
    temporaries: int
    """Results of operators in backward passes."""
    other: int
    at_peak: int
    """The sum of these."""


@dataclass(frozen=True, repr=False)
class ModuleReport(Report[ModuleRow]):
    """Time and memory by module."""

    row_type: ClassVar[type[Any]] = ModuleRow

    device: str
    modules: tuple[ModuleRow, ...]
    at_peak: int = 0
    """Bytes allocated on the device at its peak, of which the modules have their shares."""

    @property
    def rows(self) -> tuple[ModuleRow, ...]:
        return self.modules

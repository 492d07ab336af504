"""What `%devices --why` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpumagic.report.base import Report
from gpumagic.tensors.report import TensorRow


@dataclass(frozen=True, slots=True)
class WayRow:
    """The shortest way to a tensor from one of its holders."""

    root: str
    """``"model"``, ``"Out[12]"``, ``"last traceback"``..."""
    expression: str
    """The whole way, as one would type it where that is possible: ``"model.fc.weight"``."""
    steps: tuple[tuple[str, str], ...]
    """From the root to the tensor: what is typed, ``".fc"``, and the class of what it leads to, ``"Linear"``."""
    command: str | None
    """The line that makes this holder let go; None where none is known."""


@dataclass(frozen=True, repr=False)
class WhyReport(Report[WayRow]):
    """Every holder of one tensor, the nearest first: it is freed when all of them let go."""

    row_type: ClassVar[type[Any]] = WayRow

    tensor: TensorRow
    ways: tuple[WayRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[WayRow, ...]:
        return self.ways

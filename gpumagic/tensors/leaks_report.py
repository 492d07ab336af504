"""What `%devices --free` and `--why` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpumagic.report.base import Report
from gpumagic.tensors.report import COLLECT, LeakReport, TensorRow


@dataclass(frozen=True, slots=True)
class FreedRow:
    """What was freed on one device, in bytes."""

    device: str
    freed: int
    """By the allocator's own figures; by the sizes of the tensors that are gone where it keeps none (cpu)."""
    storages: int
    """How many are gone."""
    allocated_before: int | None
    allocated_after: int | None


@dataclass(frozen=True, repr=False)
class FreedReport(Report[FreedRow]):
    """What IPython and Python were made to forget, what that freed on each device, and what is still held."""

    row_type: ClassVar[type[Any]] = FreedRow
    view_module: ClassVar[str] = "leaks_view"

    freed: tuple[FreedRow, ...]
    released: tuple[str, ...] = ()
    """What was forgotten: ``"Out[12]"``, ``"last traceback"``."""
    left: LeakReport = field(default_factory=lambda: LeakReport(()))
    """What is still held, and what would free that."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[FreedRow, ...]:
        return self.freed


@dataclass(frozen=True, slots=True)
class WayRow:
    """The shortest path to a tensor from one of its holders."""

    root: str
    """``"model"``, ``"Out[12]"``, ``"last traceback"``..."""
    expression: str
    """The whole path, as code where code can reach it: ``"model.fc.weight"``."""
    steps: tuple[tuple[str, str], ...]
    """From the root to the tensor: what is typed, ``".fc"``, and the class of what it leads to, ``"Linear"``."""
    command: str | None
    """The line that makes this holder release it; None where none is known."""


@dataclass(frozen=True, repr=False)
class WhyReport(Report[WayRow]):
    """Every holder of one tensor, the nearest first: it is freed when none of them keeps it."""

    row_type: ClassVar[type[Any]] = WayRow
    view_module: ClassVar[str] = "leaks_view"

    tensor: TensorRow
    ways: tuple[WayRow, ...]
    notes: tuple[str, ...] = ()
    frees: int | None = None
    """Bytes of its device that the commands free together, with what goes with it; None where that is not known."""
    collects: bool = False
    """Whether the memory comes back when the gc runs: reference cycles keep it until then."""

    def lines(self) -> tuple[str, ...]:
        """Return what to run so that the tensor is freed: the commands that are Python's in one line, then magics."""
        commands = list(dict.fromkeys(way.command for way in self.ways if way.command is not None))
        code = [each for each in commands if not each.startswith("%")] + ([COLLECT] if self.collects else [])
        return (*(["; ".join(code)] if code else []), *(each for each in commands if each.startswith("%")))

    @property
    def rows(self) -> tuple[WayRow, ...]:
        return self.ways

"""What `%devices --held`, `--release-held` and `--why` return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpumagic.report.base import Report
from gpumagic.source.text import parse_tree
from gpumagic.tensors.records import TensorRow

if TYPE_CHECKING:
    from gpumagic.tensors.records import TensorRow


RELEASE = "%devices --release-held"
COLLECT = "import gc; gc.collect()"


@dataclass(frozen=True, slots=True)
class HeldRow:
    """One storage that lives although no variable of the notebook reaches it."""

    number: int
    """For ``%devices --why NUMBER``; the same for as long as the storage lives."""
    device: str
    nbytes: int | None
    shape: tuple[int, ...]
    dtype: str
    kind: str
    holder: str | None
    """``"Out[12]"``, ``"last traceback"``...; None where it cannot be told, as for what C++ keeps."""
    place: str | None
    """Where in its holder it is: ``"last traceback.<step()>.hidden"``."""
    command: str | None
    """The line to type that lets go of it; None where none is known."""
    views: int = 0


@dataclass(frozen=True, repr=False)
class HeldReport(Report[HeldRow]):
    """The live tensors that nothing in the notebook names, a row a storage, with what keeps and what frees each."""

    row_type: ClassVar[type[Any]] = HeldRow

    held: tuple[HeldRow, ...]
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[HeldRow, ...]:
        return self.held


@dataclass(frozen=True, slots=True)
class FreedRow:
    """What came back on one device, in bytes."""

    device: str
    freed: int
    """By the allocator's own figures; by the sizes of the tensors that are gone where it keeps none (cpu)."""
    storages: int
    """How many are gone."""
    allocated_before: int | None
    allocated_after: int | None


@dataclass(frozen=True, repr=False)
class ReleaseReport(Report[FreedRow]):
    """What IPython and Python were made to forget, what came back on each device, and what is still held."""

    row_type: ClassVar[type[Any]] = FreedRow

    freed: tuple[FreedRow, ...]
    released: tuple[str, ...] = ()
    """What was forgotten: ``"Out[12]"``, ``"last traceback"``."""
    left: HeldReport = HeldReport(())
    """What is still held, and what would free that."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[FreedRow, ...]:
        return self.freed


def held_rows(rows: Iterable[TensorRow]) -> Iterator[HeldRow]:
    """Yield those of a tensor report's rows that nothing names."""
    for row in rows:
        if row.name is None:
            yield HeldRow(
                row.numbers[0] if row.numbers else 0, row.device, row.nbytes, row.shape, row.dtype, row.kind,
                row.holder, row.place, command(row), row.views,
            )  # fmt: skip


def command(row: TensorRow) -> str | None:
    """Return the line that lets go of a storage that no variable reaches, or None where none is known."""
    if row.releasable:
        return RELEASE
    return row.frees or (COLLECT if "cycle" in (row.holder or "") else None)


def is_code(line: str) -> bool:
    """Return whether a line can be run, as one with ``step.<closure>.x`` cannot."""
    return "[...]" not in line and parse_tree(line) is not None


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

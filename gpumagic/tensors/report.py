"""What `%devices` and `%devices --diff` return: the live tensors, and the difference between two looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from gpumagic.errors import GpuMagicError
from gpumagic.report.base import Report
from gpumagic.report.origin import Origin
from gpumagic.tensors.held_report import HeldReport, held_rows
from gpumagic.tensors.records import ORDERS, DeviceMemoryRow, GraphRow, SourceRow, TensorRow, is_on


@dataclass(frozen=True, repr=False)
class TensorReport(Report[TensorRow]):
    """The live tensors of this process, a row a storage, largest first."""

    row_type: ClassVar[type[Any]] = TensorRow

    tensors: tuple[TensorRow, ...]
    by_device: tuple[DeviceMemoryRow, ...] = ()
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    group_by: str | None = None
    """Show totals by this key instead of rows: ``"device"``, ``"dtype"``, ``"kind"`` or ``"holder"``."""
    notes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """The devices it was narrowed to; all without."""
    minimum: int = 0
    """Smaller storages are left out."""
    graphs: tuple[GraphRow, ...] = ()
    """The variables whose graphs keep memory, most first."""
    sources: tuple[SourceRow, ...] = ()
    """The lines that allocated what is unexplained; only under ``torch.cuda.memory._record_memory_history()``."""
    process: str = ""
    """Stands for the process it was made in, whose storages `TensorRow.numbers` tell apart."""
    origin: Origin = field(default_factory=Origin)

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        return self.tensors

    def since(self, earlier: TensorReport, called: str = "the earlier report") -> DiffReport:
        """Return what came and what went since an earlier report of this process.

        Args:
            earlier: what to compare with; it keeps nothing alive.
            called: what the difference calls it.

        Raises:
            GpuMagicError: it is a report of another process.
        """
        return between(earlier, self, called)

    def held(self) -> HeldReport:
        """Return what no variable reaches, with what keeps each tensor and the line that frees it."""
        return HeldReport(tuple(held_rows(self.tensors)), self.limit, self.notes)

    def narrowed(self, only: Sequence[str] = (), minimum: int = 0, sort: str = "size") -> TensorReport:
        """Return the report of some devices and of storages from some size on.

        Args:
            only: devices such as ``"cuda:1"``, or ``"cuda"`` for all of a backend; all without.
            minimum: bytes.
            sort: ``"size"``, ``"name"``, ``"device"``, ``"dtype"`` or ``"kind"``.
        """
        found: Iterable[TensorRow] = self.tensors
        if only or minimum:
            found = [row for row in found if is_on(row.device, only) and (row.nbytes or 0) >= minimum]
        return replace(
            self,
            tensors=tuple(sorted(found, key=ORDERS[sort])),
            by_device=tuple(row for row in self.by_device if is_on(row.device, only)),
            only=tuple(only),
            minimum=minimum,
        )


CHANGES = ("came", "went", "resized", "lost its name")
"""What can happen to a storage; the last means that it lives on although no variable reaches it any more."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One storage that is new, gone, of another size, or without a name since."""

    change: str
    """One of `CHANGES`."""
    device: str
    nbytes: int | None
    """Bytes by which it changed what is in use: negative for what went, 0 for a lost name, None if unknown."""
    shape: tuple[int, ...]
    dtype: str
    kind: str
    name: str | None
    """Its best name now, or the last it had."""
    holder: str | None = None
    """What keeps it alive now, where no variable does."""
    size: int | None = None
    """Bytes it occupies now, or did when it was last seen."""
    views: int = 0
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """What changed on one device, in bytes."""

    device: str
    came: int
    went: int
    resized: int
    net: int
    """Came - went + resized: what Python can see."""
    allocated: int | None = None
    """Change of what the allocator has handed out; more than ``net`` where graphs or C++ keep tensors."""


@dataclass(frozen=True, repr=False)
class DiffReport(Report[DiffRow]):
    """What came and what went between two looks at the live tensors, a row a storage, largest change first."""

    row_type: ClassVar[type[Any]] = DiffRow

    changes: tuple[DiffRow, ...]
    by_device: tuple[DeviceChange, ...] = ()
    since: str = ""
    """What the earlier look was: ``"%devices in cell 3"``, ``"this cell started"``."""
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[DiffRow, ...]:
        return self.changes


def between(earlier: TensorReport, later: TensorReport, since: str) -> DiffReport:
    """Return what changed from one report to a later one of the same process.

    Where the two look at different devices or sizes, only what both would list is compared.

    Raises:
        GpuMagicError: they are reports of different processes.
    """
    if earlier.process and later.process and earlier.process != later.process:
        raise GpuMagicError("the earlier report is of another process: only reports of one kernel can be compared")
    minimum = max(earlier.minimum, later.minimum)
    found = [
        row
        for row in _changes(earlier, later)
        if is_on(row.device, earlier.only)
        and is_on(row.device, later.only)
        and max(row.size or 0, abs(row.nbytes or 0)) >= minimum
    ]
    return DiffReport(
        changes=tuple(sorted(found, key=_by_weight)),
        by_device=tuple(_sums(found, earlier, later)),
        since=since,
        limit=later.limit,
    )


def _changes(earlier: TensorReport, later: TensorReport) -> Iterator[DiffRow]:
    before = {number: row for row in earlier for number in row.numbers}
    now = {number for row in later for number in row.numbers}
    for row in later:
        old = next((before[number] for number in row.numbers if number in before), None)
        if old is None:
            yield _row("came", row, row.nbytes)
        elif old.nbytes != row.nbytes and old.nbytes is not None and row.nbytes is not None:
            yield _row("resized", row, row.nbytes - old.nbytes, old.name)
        elif old.name is not None and row.name is None:
            yield _row("lost its name", row, 0, old.name)
    for row in earlier:
        if now.isdisjoint(row.numbers):
            yield _row("went", row, None if row.nbytes is None else -row.nbytes)


def _row(change: str, row: TensorRow, nbytes: int | None, name: str | None = None) -> DiffRow:
    return DiffRow(
        change, row.device, nbytes, row.shape, row.dtype, row.kind, row.name or name, row.holder,
        row.nbytes, row.views, row.numbers,
    )  # fmt: skip


def _by_weight(row: DiffRow) -> tuple[object, ...]:
    return -abs(row.nbytes or 0), -(row.size or 0), row.name is None, row.name or "", row.device


def _sums(rows: Iterable[DiffRow], earlier: TensorReport, later: TensorReport) -> Iterator[DeviceChange]:
    totals: dict[str, dict[str, int]] = {}
    for row in rows:
        total = totals.setdefault(row.device, dict.fromkeys(CHANGES, 0))
        total[row.change] += row.nbytes or 0
    before = {row.device: row.allocated for row in earlier.by_device}
    now = {row.device: row.allocated for row in later.by_device}
    for device in [*now, *(each for each in before if each not in now)]:
        total = totals.get(device, dict.fromkeys(CHANGES, 0))
        earlier_figure, figure = before.get(device, 0), now.get(device)
        allocated = None if earlier_figure is None or figure is None else figure - earlier_figure
        if any(total.values()) or allocated:
            came, went, resized = total["came"], -total["went"], total["resized"]
            yield DeviceChange(device, came, went, resized, came - went + resized, allocated)

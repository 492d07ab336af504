"""What `%devices` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from gpumagic.report.base import Report
from gpumagic.report.origin import Origin
from gpumagic.tensors.diff import DiffReport, between
from gpumagic.tensors.held_report import HeldReport, held_rows
from gpumagic.tensors.selection import ORDERS, is_on


class TensorRow(NamedTuple):
    """One storage, with every tensor that looks into it folded under it.

    There may be a hundred thousand of them, and a named tuple is made in a sixth of a frozen dataclass's time.
    """

    device: str
    nbytes: int | None
    """Bytes the storage occupies, rounded as its allocator rounds; 0 for meta and fake tensors; None if unknown."""
    shape: tuple[int, ...]
    """Of the largest live tensor over the storage."""
    dtype: str
    kind: str
    """``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"``, ``"activation"`` or ``"plain"``."""
    name: str | None
    """The best name it has in the notebook, such as ``"model.fc.weight"``; None if nothing there names it."""
    names: tuple[str, ...] = ()
    holder: str | None = None
    """What keeps it alive, when no notebook variable does: ``"Out[12]"``, ``"last traceback"``..."""
    place: str | None = None
    """Where in its holder it is: ``"Out[12]['k'][0]"``, ``"last traceback.<step()>.hidden"``."""
    releasable: bool = False
    """Whether ``--release-held`` lets go of it: only outputs, the display hook or the last error keep it alive."""
    in_graph: bool = False
    """Whether only autograd graphs keep it; ``holder`` says whose."""
    frees: str | None = None
    """The line after which those graphs let go of it: ``"loss = loss.detach()"``; None where there is none."""
    views: int = 0
    """Further live tensors over the same storage."""
    requires_grad: bool = False
    graph_nbytes: int | None = None
    """Bytes its autograd graph keeps for backward and nothing else does; None if it has none or it is not known."""
    viewed_nbytes: int | None = None
    """Bytes the live tensors really look at; far below ``nbytes`` when a small view keeps a large storage."""
    note: str | None = None
    numbers: tuple[int, ...] = ()
    """What stands for its storages in every report of this process; never given to another storage."""


@dataclass(frozen=True, slots=True)
class DeviceMemoryRow:
    """One device's memory, from the tensors Python can see up to the whole card."""

    device: str
    tensors: int
    storages: int
    named: int
    """Bytes in storages that a notebook name reaches."""
    held: int
    """Bytes in other storages that Python can see."""
    graph: int | None = None
    """Bytes that only autograd graphs keep, as far as they can be seen."""
    unexplained: int | None = None
    """Allocated bytes that none of these account for (C++, nodes that do not show what they save)."""
    allocated: int | None = None
    """Bytes the allocator has handed out; None where there is no counting allocator (cpu, meta)."""
    cached: int | None = None
    """Bytes the allocator keeps for reuse."""
    other_processes: int | None = None

    @property
    def in_rows(self) -> int:
        """Bytes that the report's rows sum to."""
        return self.named + self.held + (self.graph or 0)


@dataclass(frozen=True, slots=True)
class GraphRow:
    """What the autograd graphs of one variable's tensors keep on a device, and nothing else does."""

    name: str
    """The variable: ``"losses"``."""
    device: str
    nbytes: int
    tensors: int
    """How many of its tensors have a graph."""
    example: str
    """The first of them: ``"losses[0]"``."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """Blocks that no tensor accounts for, by the line that allocated them, where allocations are recorded."""

    device: str
    line: str
    """``"train.py:12 in step"``."""
    nbytes: int
    blocks: int


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

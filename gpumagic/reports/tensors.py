"""What `%devices` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpumagic.reports.base import Report


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One storage, with every tensor that looks into it folded under it."""

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
    views: int = 0
    """Further live tensors over the same storage."""
    requires_grad: bool = False
    graph_nbytes: int | None = None
    """Bytes its autograd graph keeps for backward; None where it has no graph or it cannot be known."""
    viewed_nbytes: int | None = None
    """Bytes the live tensors really look at; far below ``nbytes`` when a small view keeps a large storage."""
    note: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemoryRow:
    """One device's memory, from the tensors Python can see up to the whole card."""

    device: str
    tensors: int
    storages: int
    named: int
    """Bytes in storages that a notebook name reaches."""
    held: int
    """Bytes in storages that live although nothing in the notebook names them."""
    graph: int | None = None
    """Bytes that only autograd graphs keep, as far as they can be seen."""
    unexplained: int | None = None
    """Allocated bytes that no Python-visible storage accounts for (autograd graphs, C++, other threads)."""
    allocated: int | None = None
    """Bytes the allocator has handed out; None where there is no counting allocator (cpu, meta)."""
    cached: int | None = None
    """Bytes the allocator keeps for reuse."""
    other_processes: int | None = None


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

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        return self.tensors

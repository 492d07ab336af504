"""What `%devices`, `--diff` and `--leaks` return: the live tensors, what changed, and what no variable reaches.

Reports are plain data: none keeps a tensor alive.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from gpumagic.errors import GpuMagicError
from gpumagic.heap.holders import SCRIPTS
from gpumagic.report.base import Origin, Report

KINDS = ("parameter", "buffer", "gradient", "optimizer state", "activation", "plain")
"""What a storage can be; one that is several of these is the first of them."""


class TensorRow(NamedTuple):
    """One storage, with every tensor that views it folded under it.

    There may be a hundred thousand of them, and a named tuple is made in a sixth of a frozen dataclass's time.
    """

    device: str
    nbytes: int | None
    """Bytes the storage occupies, rounded as its allocator rounds; 0 for meta and fake tensors; None if unknown."""
    shape: tuple[int, ...]
    """Of the largest live tensor over the storage."""
    dtype: str
    kind: str
    """One of `KINDS`."""
    name: str | None
    """The best name it has, such as ``"model.fc.weight"``, which evaluates to it; None if no expression reaches it."""
    names: tuple[str, ...] = ()
    holder: str | None = None
    """What keeps it alive where no variable does: ``"Out[12]"``, ``"last traceback"``..."""
    place: str | None = None
    """Where in its holder it is: ``"Out[12]['k'][0]"``, ``"last traceback.<step()>.hidden"``."""
    releasable: bool = False
    """Whether ``--free`` frees it: only outputs, the display hook, the last error or a cycle keep it alive."""
    in_graph: bool = False
    """Whether only autograd graphs keep it; ``holder`` says whose."""
    frees: str | None = None
    """The line after which those graphs release it: ``"loss = loss.detach()"``; None where there is none."""
    views: int = 0
    """Further live tensors over the same storage."""
    requires_grad: bool = False
    graph_nbytes: int | None = None
    """Bytes its autograd graph keeps for backward and nothing else does; None if it has none or it is not known."""
    viewed_nbytes: int | None = None
    """Bytes the live tensors view; far below ``nbytes`` when a small view keeps a large storage."""
    note: str | None = None
    numbers: tuple[int, ...] = ()
    """The numbers of its storages in every report of this process; never given to another storage."""
    variable: str | None = None
    """The variable that reaches it although no expression does, as what an iterator holds; ``holder`` says where."""

    def is_reached(self) -> bool:
        """Return whether a variable of the notebook reaches it."""
        return self.name is not None or self.variable is not None


@dataclass(frozen=True, slots=True)
class DeviceMemoryRow:
    """One device's memory, from the tensors Python can see up to the whole card."""

    device: str
    tensors: int
    storages: int
    named: int
    """Bytes in storages that a variable of the notebook reaches."""
    held: int
    """Bytes in other storages that Python can see."""
    graph: int | None = None
    """Bytes that only autograd graphs keep, as far as they can be seen."""
    workspaces: int | None = None
    """Bytes that torch keeps for cuBLAS; ``torch._C._cuda_clearCublasWorkspaces()`` frees them."""
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


@dataclass(frozen=True, repr=False)
class TensorReport(Report[TensorRow]):
    """The live tensors of this process, one row per storage, largest first."""

    row_type: ClassVar[type[Any]] = TensorRow

    tensors: tuple[TensorRow, ...]
    by_device: tuple[DeviceMemoryRow, ...] = ()
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    group_by: str | None = None
    """Show totals by this key instead of rows: ``"device"``, ``"dtype"``, ``"kind"`` or ``"holder"``."""
    notes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """The devices it was narrowed to; empty for all."""
    graphs: tuple[GraphRow, ...] = ()
    """The variables whose graphs keep memory, most first."""
    process: str = ""
    """Identifies the process it was made in: only there do `TensorRow.numbers` mean the same storages."""
    origin: Origin = field(default_factory=Origin)

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        return self.tensors

    def since(self, earlier: TensorReport, called: str = "the earlier report") -> DiffReport:
        """Return what was created and what was freed since an earlier report of this process.

        Where the two cover different devices, only what both would list is compared.

        Args:
            earlier: what to compare with; it keeps nothing alive.
            called: what the difference calls it.

        Raises:
            GpuMagicError: it is a report of another process.
        """
        if earlier.process and self.process and earlier.process != self.process:
            raise GpuMagicError("the earlier report is of another process: only reports of one kernel can be compared")
        found = [
            row for row in _changes(earlier, self) if is_on(row.device, earlier.only) and is_on(row.device, self.only)
        ]
        found.sort(
            key=lambda row: (-abs(row.nbytes or 0), -(row.size or 0), row.name is None, row.name or "", row.device)
        )
        return DiffReport(tuple(found), tuple(_device_changes(found, earlier, self)), called, self.limit)

    def leaks(self) -> LeakReport:
        """Return what no variable reaches, with what keeps each tensor and the line that frees it."""
        leaks = (
            LeakRow(
                row.numbers[0] if row.numbers else 0, row.device, row.nbytes, row.shape, row.dtype, row.kind,
                row.holder, row.place, release_command(row), row.views,
            )
            for row in self.tensors if not row.is_reached()
        )  # fmt: skip
        return LeakReport(tuple(leaks), self.limit, self.notes)

    def narrowed(self, only: Sequence[str]) -> TensorReport:
        """Return the report of some devices: ``"cuda:1"``, or ``"cuda"`` for all of a backend; empty for all."""
        return replace(
            self,
            tensors=tuple(
                sorted(
                    (row for row in self.tensors if is_on(row.device, only)),
                    key=lambda row: (-(row.nbytes or 0), row.name is None, row.name or "", row.device),
                )
            ),
            by_device=tuple(row for row in self.by_device if is_on(row.device, only)),
            only=tuple(only),
        )


def is_on(device: str, only: Sequence[str]) -> bool:
    """Tell whether a device is among those named, where ``"cuda"`` means all of a backend and no name means all."""
    return not only or any(device == each or device.startswith(f"{each}:") for each in only)


_ROOT = re.compile(r"(?:\[\*)*(globals\(\)\[.*?\](?=[.\[\]]|$)|[^.\[\]]*)", re.DOTALL)


def root_of(name: str) -> str:
    """Return the variable a name starts from: ``"model"`` for ``"model.fc.weight"``."""
    return _ROOT.match(name)[1]  # type: ignore[index]  # it matches everything


IN_GRAPH = "graph of "
"""How the holder of what only a graph keeps begins."""


def variable_of(row: DiffRow) -> str | None:
    """Return the variable that a storage belongs to, also where only its graph keeps it; else its holder, or None."""
    if row.name is not None:
        return root_of(row.name)
    by = row.holder or ""
    return root_of(by.removeprefix(IN_GRAPH)) if by.startswith(IN_GRAPH) else row.holder


CHANGES = ("came", "went", "resized", "lost its name")
"""What can happen to a storage; the last means that it lives on although no variable reaches it any more."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One storage that is new, gone, of another size, or without a name since the earlier report."""

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
    """What came and what went between two reports of the live tensors, one row per storage, largest change first."""

    row_type: ClassVar[type[Any]] = DiffRow
    view_module: ClassVar[str] = "leaks_view"

    changes: tuple[DiffRow, ...]
    by_device: tuple[DeviceChange, ...] = ()
    since: str = ""
    """What the earlier report was: ``"%devices in cell 3"``, ``"this cell started"``."""
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[DiffRow, ...]:
        return self.changes

    @property
    def by_variable(self) -> dict[str, int]:
        """By how many bytes each variable has grown or shrunk, what its graphs keep included; most first.

        What no variable reaches goes under its holder.
        """
        sums: Counter[str] = Counter()
        for row in self.changes:
            sums[variable_of(row) or "(no name)"] += row.nbytes or 0
        return dict(sorted(((name, nbytes) for name, nbytes in sums.items() if nbytes), key=lambda item: -abs(item[1])))


def _changes(earlier: TensorReport, later: TensorReport) -> Iterator[DiffRow]:
    before = {number: row for row in earlier for number in row.numbers}
    now = {number for row in later for number in row.numbers}
    for row in later:
        old = next((before[number] for number in row.numbers if number in before), None)
        if old is None:
            yield _diff_row("came", row, row.nbytes)
        elif old.nbytes != row.nbytes and old.nbytes is not None and row.nbytes is not None:
            yield _diff_row("resized", row, row.nbytes - old.nbytes, old.name)
        elif old.is_reached() and not row.is_reached():
            yield _diff_row("lost its name", row, 0, old.name)
    for row in earlier:
        if now.isdisjoint(row.numbers):
            yield _diff_row("went", row, None if row.nbytes is None else -row.nbytes)


def _diff_row(change: str, row: TensorRow, nbytes: int | None, name: str | None = None) -> DiffRow:
    return DiffRow(
        change, row.device, nbytes, row.shape, row.dtype, row.kind, row.name or name, row.holder,
        row.nbytes, row.views, row.numbers,
    )  # fmt: skip


def _device_changes(rows: Iterable[DiffRow], earlier: TensorReport, later: TensorReport) -> Iterator[DeviceChange]:
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


@dataclass(frozen=True, slots=True)
class LeakRow:
    """One storage that lives although no variable of the notebook reaches it."""

    number: int
    """For ``%devices --why NUMBER``; the same for as long as the storage lives."""
    device: str
    nbytes: int | None
    shape: tuple[int, ...]
    dtype: str
    kind: str
    holder: str | None
    """``"Out[12]"``, ``"last traceback"``...; None where it is unknown, as for what C++ keeps."""
    place: str | None
    """Where in its holder it is: ``"last traceback.<step()>.hidden"``."""
    command: str | None
    """The line that frees it; None where none is known."""
    views: int = 0


@dataclass(frozen=True, repr=False)
class LeakReport(Report[LeakRow]):
    """The live tensors that no variable reaches, one row per storage, with what keeps and what frees each."""

    row_type: ClassVar[type[Any]] = LeakRow
    view_module: ClassVar[str] = "leaks_view"

    leaks: tuple[LeakRow, ...]
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[LeakRow, ...]:
        return self.leaks


RELEASE = "%devices --free"
COLLECT = "import gc; gc.collect()"
_CLOSED_BY = {
    "module matplotlib._pylab_helpers": f'import matplotlib.pyplot; matplotlib.pyplot.close("all"); {COLLECT}',
    "module ipywidgets.widgets.widget": f"import ipywidgets; ipywidgets.Widget.close_all(); {COLLECT}",
}
"""What keeps pyplot's figures and widgets, also those without a name, until they are closed."""


def release_command(row: TensorRow) -> str | None:
    """Return the line that frees a storage that no variable reaches, or None where none is known."""
    if row.releasable or row.frees:
        return RELEASE if row.releasable else row.frees
    holder = row.holder or ""
    by, _, also = holder.partition(" and ")
    if not also.startswith(IN_GRAPH) and (line := script_line(by, row.place or "")):
        return f"{line}\n{RELEASE}" if also else line
    return _CLOSED_BY.get(holder)


def script_line(holder: str, place: str) -> str | None:
    """Return the line that deletes a variable of a script that `%run` ran; None where something else is the holder."""
    found = re.match(rf"{re.escape(holder)}\.\w+", place) if holder.startswith(SCRIPTS) else None
    return found and f"del {found[0]}"

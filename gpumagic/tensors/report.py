"""What `%devices`, `--diff` and `--leaks` return: the live tensors, what changed, and what no variable reaches.

Reports are plain data: none keeps a tensor alive.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from gpumagic.errors import GpuMagicError
from gpumagic.heap.held import HolderKind
from gpumagic.memory import Device
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
    """The line that frees it where no variable reaches it: ``"loss = loss.detach()"``; None where none is known."""
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
    holder_kind: HolderKind | None = None
    """What ``holder`` is; of several the first."""
    graph_of: str | None = None
    """The tensor whose autograd graph keeps it where only graphs do: ``"losses[0]"``; None where it is not known."""

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


@dataclass(frozen=True, repr=False)
class TensorReport(Report[TensorRow]):
    """The live tensors of this process, one row per storage, largest first."""

    tensors: tuple[TensorRow, ...]
    by_device: tuple[DeviceMemoryRow, ...] = ()
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    group_by: str | None = None
    """Show totals by this key instead of rows: ``"device"``, ``"dtype"``, ``"kind"`` or ``"holder"``."""
    notes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """The devices it was narrowed to; empty for all."""
    process: str = ""
    """Identifies the process it was made in: only there do `TensorRow.numbers` mean the same storages."""
    origin: Origin = field(default_factory=Origin)

    def since(
        self, earlier: TensorReport, called: str = "the earlier report"
    ) -> DiffReport:
        """Return what was created and what was freed since an earlier report of this process.

        Where the two cover different devices, only what both would list is compared.

        Args:
            earlier: what to compare with; it keeps nothing alive.
            called: what the difference calls it.

        Raises:
            GpuMagicError: it is a report of another process.
        """
        if earlier.process and self.process and earlier.process != self.process:
            raise GpuMagicError(
                "the earlier report is of another process: only reports of one kernel can be compared"
            )
        changes = [
            row for row in _changes(earlier, self) if is_on(row.device, earlier.only)
        ]
        changes = [row for row in changes if is_on(row.device, self.only)]
        changes.sort(key=_largest_change_first)
        by_device = tuple(_device_changes(changes, earlier, self))
        return DiffReport(
            tuple(changes),
            by_device,
            since=called,
            limit=self.limit,
        )

    def leaks(self) -> LeakReport:
        """Return what no variable reaches, with what keeps each tensor and the line that frees it."""
        # Nothing is lost by what occupies no bytes.
        leaks = [
            row for row in self.tensors if not row.is_reached() and row.nbytes != 0
        ]
        return LeakReport(tuple(leaks), self.limit, self.notes)

    def narrowed(self, only: Sequence[str]) -> TensorReport:
        """Return the report of some devices: ``"cuda:1"``, or ``"cuda"`` for all of a backend; empty for all."""
        tensors = [row for row in self.tensors if is_on(row.device, only)]
        tensors.sort(key=_largest_first)
        by_device = tuple(row for row in self.by_device if is_on(row.device, only))
        return replace(
            self,
            tensors=tuple(tensors),
            by_device=by_device,
            only=tuple(only),
        )


def _largest_first(row: TensorRow) -> tuple[object, ...]:
    """Return the key that sorts rows: by their bytes, then what has a name before what has none."""
    return -(row.nbytes or 0), row.name is None, row.name or "", row.device


def is_on(device: str, only: Sequence[str]) -> bool:
    """Return whether a device is among those named: ``"cuda"`` means all of a backend, and no name means all."""
    if not only or device in only:
        return True
    return Device.parse(device).backend in only


_ROOT = re.compile(r"(?:\[\*)*(globals\(\)\[.*?\](?=[.\[\]]|$)|[^.\[\]]*)", re.DOTALL)


def root_of(name: str) -> str:
    """Return the variable a name starts from: ``"model"`` for ``"model.fc.weight"``."""
    return _ROOT.match(name)[1]  # type: ignore[index]  # it matches everything


CHANGES = ("new", "freed", "resized", "unnamed")
"""What can happen to a storage; the last means that it lives on although no variable reaches it any more."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One storage that is new, gone, of another size, or without a name since the earlier report."""

    change: str
    """One of `CHANGES`."""
    device: str
    nbytes: int | None
    """Bytes by which it changed what is in use: negative for what was freed, 0 if only unnamed, None if unknown."""
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
    variable: str | None = None
    """The variable that reaches it although no expression does."""
    graph_of: str | None = None
    """The tensor whose autograd graph keeps it now, where only graphs do."""


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """What changed on one device, in bytes."""

    device: str
    new: int
    freed: int
    resized: int
    net: int
    """New - freed + resized: what Python can see."""
    allocated: int | None = None
    """Change of what the allocator has handed out; more than ``net`` where graphs or C++ keep tensors."""


@dataclass(frozen=True, repr=False)
class DiffReport(Report[DiffRow]):
    """What is new and what was freed between two reports, one row per storage, largest change first."""

    view_module: ClassVar[str] = "leaks_view"

    changes: tuple[DiffRow, ...]
    by_device: tuple[DeviceChange, ...] = ()
    since: str = ""
    """What the earlier report was: ``"%devices in cell 3"``, ``"this cell started"``."""
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    notes: tuple[str, ...] = ()

    @property
    def by_variable(self) -> dict[str, int]:
        """By how many bytes each variable has grown or shrunk, what its graphs keep included; most first.

        What no variable reaches goes under its holder.
        """
        sums: Counter[str] = Counter()
        for row in self.changes:
            name = row.name or row.variable or row.graph_of
            variable = row.holder or "(no name)"
            if name is not None:
                variable = root_of(name)
            sums[variable] += row.nbytes or 0
        changed = [variable for variable, nbytes in sums.items() if nbytes]
        changed.sort(key=lambda variable: -abs(sums[variable]))
        return {variable: sums[variable] for variable in changed}


def _largest_change_first(row: DiffRow) -> tuple[object, ...]:
    """Return the key that sorts changes: by their bytes, then what has a name before what has none."""
    change = -abs(row.nbytes or 0)
    return change, -(row.size or 0), row.name is None, row.name or "", row.device


def _changes(earlier: TensorReport, later: TensorReport) -> Iterator[DiffRow]:
    """Yield the storages that are new, of another size, without a name, or gone."""
    before: dict[int, TensorRow] = {}
    for row in earlier:
        before.update(dict.fromkeys(row.numbers, row))
    now: set[int] = set()
    for row in later:
        now.update(row.numbers)
        known = [before[number] for number in row.numbers if number in before]
        if not known:
            yield _diff_row("new", row, row.nbytes)
            continue
        old = known[0]
        grown = None
        if row.nbytes is not None and old.nbytes is not None:
            grown = row.nbytes - old.nbytes
        if grown:
            yield _diff_row("resized", row, grown, old.name)
        elif old.is_reached() and not row.is_reached():
            yield _diff_row("unnamed", row, 0, old.name)
    for row in earlier:
        if now.isdisjoint(row.numbers):
            freed = None if row.nbytes is None else -row.nbytes
            yield _diff_row("freed", row, freed)


def _diff_row(
    change: str, row: TensorRow, nbytes: int | None, name: str | None = None
) -> DiffRow:
    """Return what happened to a storage; ``name`` is the one that it had, for one that has none now."""
    return DiffRow(
        change=change,
        device=row.device,
        nbytes=nbytes,
        shape=row.shape,
        dtype=row.dtype,
        kind=row.kind,
        name=row.name or name,
        holder=row.holder,
        size=row.nbytes,
        views=row.views,
        numbers=row.numbers,
        variable=row.variable,
        graph_of=row.graph_of,
    )


def _device_changes(
    rows: Sequence[DiffRow], earlier: TensorReport, later: TensorReport
) -> Iterator[DeviceChange]:
    """Yield the sums of each device on which something changed."""
    before = {row.device: row.allocated for row in earlier.by_device}
    now = {row.device: row.allocated for row in later.by_device}
    for device in {**now, **before}:
        sums: Counter[str] = Counter()
        for row in rows:
            if row.device == device:
                sums[row.change] += row.nbytes or 0
        was = before.get(device, 0)
        figure = now.get(device)
        allocated = None
        if was is not None and figure is not None:
            allocated = figure - was
        if any(sums.values()) or allocated:
            yield DeviceChange(
                device=device,
                new=sums["new"],
                freed=-sums["freed"],
                resized=sums["resized"],
                net=sums["new"] + sums["freed"] + sums["resized"],
                allocated=allocated,
            )


@dataclass(frozen=True, repr=False)
class LeakReport(Report[TensorRow]):
    """The live tensors that no variable reaches, one row per storage, with what keeps and what frees each.

    Their first numbers are for ``%devices --why NUMBER``.
    """

    view_module: ClassVar[str] = "leaks_view"

    leaks: tuple[TensorRow, ...]
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    notes: tuple[str, ...] = ()


RELEASE = "%devices --free"
COLLECT = "import gc; gc.collect()"


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

    view_module: ClassVar[str] = "leaks_view"

    freed: tuple[FreedRow, ...]
    released: tuple[str, ...] = ()
    """What was forgotten: ``"Out[12]"``, ``"last traceback"``."""
    left: LeakReport = field(default_factory=lambda: LeakReport(()))
    """What is still held, and what would free that."""
    notes: tuple[str, ...] = ()


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
        code: dict[str, None] = {}
        magics: dict[str, None] = {}
        for way in self.ways:
            if way.command == RELEASE:
                magics[RELEASE] = None
            elif way.command is not None:
                code[way.command] = None
        if self.collects:
            code[COLLECT] = None
        python = ["; ".join(code)] if code else []
        return (*python, *magics)

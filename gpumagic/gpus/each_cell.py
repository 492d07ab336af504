"""`%gpuinfo --each-cell on`: a line after every cell, from exact counters read before and after it, and their table.

What is kept of a cell are numbers and its first line of code; of the last `KEPT` cells, until gpumagic is unloaded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumagic import _compat
from gpumagic.gpus.report import CellRow, CellsReport
from gpumagic.memory import allocator
from gpumagic.memory.sampler import CellMemory
from gpumagic.memory.timeline import MemoryTimeline

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

MAX_CELLS = 200
"""Cells that the table has at most."""
STRETCHES = 40
"""Into how many the time of each is folded."""
_KEY = "gpumagic_each_cell"


@dataclass(frozen=True)
class _RunningCell:
    """A cell that runs."""

    info: ExecutionInfo
    number: int
    started: float
    before: Mapping[str, allocator.AllocatorFigures]
    memory: CellMemory


class CellMonitor:
    """Reads the allocators around each cell of a shell; cells inside cells have their own line."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._open: list[_RunningCell] = []
        self._done: deque[tuple[tuple[CellRow, ...], MemoryTimeline | None]] = deque(maxlen=MAX_CELLS)
        self.is_on = False

    def install(self) -> None:
        """Follow the cells that start from now on."""
        self._shell.events.register("pre_run_cell", self._starts)
        self._shell.events.register("post_run_cell", self._ended)
        self.is_on = True

    def uninstall(self) -> None:
        """Undo `install`; what is recorded stays."""
        self._shell.events.unregister("pre_run_cell", self._starts)
        self._shell.events.unregister("post_run_cell", self._ended)
        self.is_on = False
        self._close(0)

    def report(self) -> CellsReport:
        """Return what the recorded cells did."""
        rows = tuple(row for rows, _ in self._done for row in rows)
        timelines = {rows[0].cell: timeline for rows, timeline in self._done if rows and timeline is not None}
        notes = () if self.is_on else ("Nothing is recorded now; %gpuinfo --each-cell on records the cells after it.",)
        return CellsReport(rows, timelines, len(self._done), notes)

    def _starts(self, info: ExecutionInfo) -> None:
        before = allocator.all_figures()
        memory = CellMemory(before, self._shell.user_ns, stretches=STRETCHES)
        number = _compat.starting_number(self._shell, info)
        self._open.append(_RunningCell(info, number, time.perf_counter(), before, memory))
        memory.start()

    def _ended(self, result: ExecutionResult | None) -> None:
        now = time.perf_counter()
        places = [place for place, each in enumerate(self._open) if result is None or each.info is result.info]
        if not places:
            return
        cell = self._open[places[-1]]
        self._close(places[-1])
        if cell.info.silent:
            return
        after = allocator.all_figures()
        rows, timeline = cell_rows(cell, now - cell.started, after), cell.memory.finished(after)
        self._done.append((rows, timeline))
        from gpumagic.gpus.history_view import cell_line

        print(cell_line(now - cell.started, rows, timeline))  # noqa: T201  # the line asked for

    def _close(self, place: int) -> None:
        """Let go of the cells from one on: it has ended, and those inside it that never said so."""
        for cell in self._open[place:]:
            cell.memory.stop()
        del self._open[place:]


def cell_rows(
    cell: _RunningCell, seconds: float, after: Mapping[str, allocator.AllocatorFigures]
) -> tuple[CellRow, ...]:
    """Return what a cell did on each device that anything was done on.

    The peak is the cell's own only where its counter rose above all there was before; nobody resets it here.
    """
    nothing = allocator.AllocatorFigures(0, 0, 0)
    code = _first_line(cell.info.raw_cell)
    pairs = {device: (cell.before.get(device, nothing), now) for device, now in after.items()}
    return tuple(
        CellRow(
            cell.number, code, seconds, device, then.allocated, now.allocated, now.allocated - then.allocated,
            now.peak if (now.peak or 0) > (then.peak or 0) else None,
        )
        for device, (then, now) in pairs.items()
        if now != then
    )  # fmt: skip


def _first_line(cell: str) -> str:
    """Return the first line that does something, rather than a comment or the name of a cell magic."""
    lines = [line.strip() for line in cell.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(("#", "%%"))), lines[0] if lines else "")


def switch(shell: InteractiveShell, state: str) -> None:
    """Turn the lines of a shell ``"on"`` or ``"off"``; doing so twice changes nothing."""
    each = shell.meta.get(_KEY)
    if state == "off":
        if each is not None and each.is_on:
            each.uninstall()
        return
    if each is None:
        each = shell.meta[_KEY] = CellMonitor(shell)
    if not each.is_on:
        each.install()


def report(shell: InteractiveShell) -> CellsReport:
    """Return what the last cells did, those recorded before ``"off"`` included."""
    return (shell.meta.get(_KEY) or CellMonitor(shell)).report()


def off(shell: InteractiveShell) -> None:
    """Print no more lines, and forget what is recorded."""
    switch(shell, "off")
    shell.meta.pop(_KEY, None)

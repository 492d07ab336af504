"""`%gpuinfo --each-cell`: a line after every cell, from the allocators' counters before and after it, and their table.

Of each of the last `MAX_CELLS` cells, numbers and its first line of code are kept until gpumagic is unloaded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumagic.gpus.history_view import CellRow, CellsReport
from gpumagic.memory import allocator
from gpumagic.memory.sampler import CellMemory
from gpumagic.memory.timeline import MemoryTimeline
from gpumagic.notebook import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

MAX_CELLS = 200
"""Cells in the table, at most."""
MAX_POINTS = 40
"""Points in the timeline of each."""
RERUNS = 3
"""Runs in a row after which a cell that left more allocated each time is reported."""
MIN_GROWTH = 1024**2
"""Growth in bytes of each run from which that is reported."""
_KEY = "gpumagic_each_cell"


@dataclass(frozen=True)
class _RunningCell:
    """A cell that is running, and the counters before it."""

    info: ExecutionInfo
    number: int
    started: float
    before: Mapping[str, allocator.AllocatorStats]
    memory: CellMemory


class CellMonitor:
    """Reads the allocators before and after each cell of a shell; nested cells have their own line."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._open: list[_RunningCell] = []
        self._done: deque[tuple[tuple[CellRow, ...], MemoryTimeline | None]] = deque(maxlen=MAX_CELLS)
        self._runs: dict[str, list[dict[str, int]]] = {}
        self._warned = False
        self.is_on = False

    def install(self) -> None:
        """Record the cells that start from now on."""
        self.is_on = True  # first, so that what an interrupt has left of it is undone
        self._shell.events.register("pre_run_cell", self._pre_run_cell)
        self._shell.events.register("post_run_cell", self._post_run_cell)

    def uninstall(self) -> None:
        """Undo `install`; recorded cells are kept."""
        session.unregister(self._shell, "pre_run_cell", self._pre_run_cell)
        session.unregister(self._shell, "post_run_cell", self._post_run_cell)
        self._close(0)
        self.is_on = False  # last, so that what an interrupt has left undone is done the next time

    def report(self) -> CellsReport:
        """Return what the recorded cells did."""
        rows = tuple(row for rows, _ in self._done for row in rows)
        timelines = {rows[0].cell: timeline for rows, timeline in self._done if rows and timeline is not None}
        notes = () if self.is_on else ("Nothing is recorded now; %gpuinfo --each-cell on records the cells after it.",)
        return CellsReport(rows, timelines, len(self._done), notes)

    def _pre_run_cell(self, info: ExecutionInfo) -> None:
        before = allocator.all_device_stats()
        memory = CellMemory(before, self._shell.user_ns, max_points=MAX_POINTS)
        number = self._shell.displayhook.prompt_count  # not `execution_count`: since IPython 9.8 it is the next's
        self._open.append(_RunningCell(info, number, time.perf_counter(), before, memory))
        memory.start()

    def _post_run_cell(self, result: ExecutionResult | None) -> None:
        now = time.perf_counter()
        places = [place for place, each in enumerate(self._open) if result is None or each.info is result.info]
        if not places:
            return
        cell = self._open[places[-1]]
        self._close(places[-1])
        if cell.info.silent:
            return
        after = allocator.all_device_stats()
        rows, timeline = cell_rows(cell, now - cell.started, after), cell.memory.finished(after)
        self._done.append((rows, timeline))
        from gpumagic.gpus.history_view import cell_line

        print(cell_line(now - cell.started, rows, timeline))  # noqa: T201  # the line asked for
        self._warn_of_growth(cell.info.raw_cell, rows)

    def _warn_of_growth(self, code: str, rows: Sequence[CellRow]) -> None:
        """Say once that a cell has left more allocated each of the last times that it ran."""
        runs = [*self._runs.pop(code, []), {row.device: row.growth for row in rows}][-RERUNS:]
        self._runs[code] = runs  # the last, so that the first is the one that has not run for longest
        if len(self._runs) > MAX_CELLS:
            self._runs.pop(next(iter(self._runs)))
        for device, change in runs[-1].items():
            if not self._warned and len(runs) == RERUNS and all(each.get(device, 0) >= MIN_GROWTH for each in runs):
                self._warned = True
                from gpumagic.gpus.history_view import growth_line

                print(growth_line(device, change, RERUNS))  # noqa: T201  # as the line above

    def _close(self, place: int) -> None:
        """Stop a cell that has ended, and any cells inside it whose end was not reported."""
        for cell in self._open[place:]:
            cell.memory.stop()
        del self._open[place:]


def cell_rows(cell: _RunningCell, seconds: float, after: Mapping[str, allocator.AllocatorStats]) -> tuple[CellRow, ...]:
    """Return a row per device whose counters changed.

    The peak is the cell's own only where the counter rose above its earlier value; the counter is never reset here.
    """
    nothing = allocator.AllocatorStats(0, 0, 0)
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
    """Return the first line that is neither a comment nor a cell magic."""
    lines = [line.strip() for line in cell.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(("#", "%%"))), lines[0] if lines else "")


def switch(shell: InteractiveShell, state: str) -> None:
    """Turn the lines of a shell ``"on"`` or ``"off"``; idempotent."""
    monitor = shell.meta.get(_KEY)
    if state == "off":
        if monitor is not None and monitor.is_on:
            monitor.uninstall()
        return
    if monitor is None:
        monitor = shell.meta[_KEY] = CellMonitor(shell)
    if not monitor.is_on:
        monitor.install()


def report(shell: InteractiveShell) -> CellsReport:
    """Return what the last cells did, including those recorded before ``"off"``."""
    return (shell.meta.get(_KEY) or CellMonitor(shell)).report()


def off(shell: InteractiveShell) -> None:
    """Stop, and drop the recorded cells."""
    switch(shell, "off")
    shell.meta.pop(_KEY, None)

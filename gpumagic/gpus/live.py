"""`%gpuinfo -w` and `--each-cell`: the GPUs every few seconds, shown in place, and a line after every cell.

`GpuRecorder` takes a snapshot every few seconds and keeps a short history. In a notebook it runs in a thread, so that
other cells can run meanwhile; in a terminal, which has one place to write to, it runs until Ctrl-C. `CellMonitor` reads
the allocators' counters before and after each cell. What a shell has of both is in its `meta`, and `off` ends it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import threading
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumagic.gpus import history_view
from gpumagic.gpus.history_view import CellRow, CellsReport, HistoryReport
from gpumagic.gpus.report import GPUReport, SampleRow
from gpumagic.memory import allocator
from gpumagic.memory.sampler import CellMemory
from gpumagic.memory.timeline import MemoryTimeline
from gpumagic.notebook import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

MAX_SNAPSHOTS = 900
"""Snapshots to keep: half an hour at two seconds."""
STOP_LIMIT = 1.0
"""Seconds to wait for a snapshot that is being taken."""
_WATCH, _CELLS = "gpumagic_recorder", "gpumagic_each_cell"


class GpuRecorder:
    """Takes a snapshot every few seconds; `report` is its history, `stop` ends it.

    Args:
        read: takes a snapshot.
        seconds: from one snapshot to the next.
        show: called with the history after each snapshot, and once more at the end.
    """

    def __init__(self, read: Callable[[], GPUReport], seconds: float, show: Callable[[HistoryReport], None]) -> None:
        self._read, self._show, self.seconds = read, show, seconds
        self._samples: deque[tuple[SampleRow, ...]] = deque(maxlen=MAX_SNAPSHOTS)
        self._latest: GPUReport | None = None
        self._started = time.monotonic()
        self._stopping = threading.Event()
        self._reason, self._until = "stopped", "interrupted or %gpuinfo -w off"
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Why it has stopped; None while it runs."""

    @property
    def report(self) -> HistoryReport:
        """Return the history so far."""
        samples = tuple(row for rows in self._samples for row in rows)
        return HistoryReport(samples, self._latest, self.seconds, self.ended, self._until)

    def start(self) -> None:
        """Record in a thread. The first snapshot is taken in this one, so that its errors are raised here."""
        self._take()
        self._thread = threading.Thread(target=self._record, name="gpumagic recorder", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def run(self) -> None:
        """Record in this thread until Ctrl-C."""
        self._until = "Ctrl-C"
        try:
            self._take()
            self._record()
        except KeyboardInterrupt:
            self._end("interrupted")

    def stop(self, reason: str = "stopped") -> None:
        """Stop and wait for the thread: NVML must not be queried while the process exits (nvitop#222).

        A driver that hangs is not waited for.
        """
        self.stop_soon(reason)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(STOP_LIMIT)
        atexit.unregister(self.stop)

    def stop_soon(self, reason: str = "stopped") -> None:
        """Stop without waiting for the thread, which shows the end itself."""
        if not self._stopping.is_set():
            self._reason = reason
            self._stopping.set()

    def _record(self) -> None:
        try:
            while not self._stopping.wait(self.seconds):
                self._take()
            self._end(self._reason)
        except Exception as error:  # nobody would see what a thread raises
            self._end(f"stopped by {type(error).__name__}: {error}")

    def _take(self) -> None:
        self._latest = report = self._read()
        seconds = time.monotonic() - self._started
        self._samples.append(tuple(SampleRow.of(seconds, row) for row in report.devices))
        self._show(self.report)

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            self._show(self.report)

    def __repr__(self) -> str:
        return f"<recorder of the GPUs every {self.seconds:g} s; {self.ended or 'stop it with %gpuinfo -w off'}>"


def watch(shell: InteractiveShell, read: Callable[[], GPUReport], seconds: float) -> GpuRecorder:
    """Show the GPUs in place until `%gpuinfo -w off`, an interrupt, or the extension's unloading.

    Args:
        shell: in a kernel's, other cells can run meanwhile; another waits for Ctrl-C.
        read: as for `GpuRecorder`.
        seconds: from one snapshot to the next.
    """
    stop_watching(shell)
    if getattr(shell, "kernel", None) is None:
        recorder = GpuRecorder(read, seconds, terminal_display())
        recorder.run()
        return recorder
    recorder = GpuRecorder(read, seconds, _notebook_display())
    shell.meta[_WATCH] = (recorder, _stop_on_interrupt(shell))  # first: an interrupt may come while it starts
    try:
        recorder.start()
    except BaseException:
        stop_watching(shell)
        raise
    return recorder


def stop_watching(shell: InteractiveShell, reason: str = "stopped") -> None:
    """Stop the shell's recorder, if there is one, and wait until it has stopped.

    Nothing here minds being done twice: an interrupt between cells does it in a thread, and one in the midst of it has
    the end of its cell do it again. So there is no lock, which an interrupt could leave locked.
    """
    recorder, undo = shell.meta.get(_WATCH, (None, None))
    if recorder is not None:
        recorder.stop_soon(reason)  # first, so that it stops even if the rest is interrupted
        recorder.stop()
        undo()


def _notebook_display() -> Callable[[HistoryReport], None]:
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    shown: list[bool] = []

    def show(report: HistoryReport) -> None:
        (handle.update if shown else handle.display)(report)
        shown.append(True)

    return show


def terminal_display() -> Callable[[HistoryReport], None]:
    """Return a function that writes each report over the last one, or below it where stdout is no capable terminal.

    Terminals that call themselves `dumb`, as Emacs' shell does, show escape sequences as letters.
    """
    in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    written = 0

    def show(report: HistoryReport) -> None:
        nonlocal written
        if not in_place:
            print(report, flush=True)  # noqa: T201  # the terminal's display is its stdout
            return
        lines = str(report).splitlines()
        height = shutil.get_terminal_size().lines - 1
        if report.ended is None and len(lines) > height:  # what has scrolled off the top cannot be written over
            more = f"... {len(lines) - height + 1} more lines in a taller terminal; Ctrl-C ends it"
            lines = [*lines[: height - 1], more]
        up = f"\x1b[{written}F" if written else ""
        written = len(lines)
        text = "".join(f"{line}\x1b[K\n" for line in lines)  # erasing line by line does not flicker
        print(f"{up}{text}\x1b[J", end="", flush=True)  # noqa: T201

    return show


_INTERRUPTS = (KeyboardInterrupt, CancelledError)
"""What an interrupt raises in a cell, and in one that awaits. Between two statements, while the next is compiled,
IPython (7.34 to 9) reports it as an error "before execution"."""


def _stop_on_interrupt(shell: Any) -> Callable[[], None]:
    """Stop the recorder at Ctrl-C, in a cell or between cells; return what undoes this.

    Between cells ipykernel (6.17 to 7.4) ignores an interrupt, by a handler that it keeps in `saved_sigint_handler`
    while no cell runs, and has no hook for it: the stop button would do nothing where users press it. So the handler
    that it keeps is replaced, and sets the old one before anything else. A kernel without that attribute still stops
    at an interrupt of a cell, and at ``%gpuinfo -w off``.
    """
    kernel = shell.kernel
    ignoring = getattr(kernel, "saved_sigint_handler", None)

    def cell_has_run(result: ExecutionResult | None) -> None:
        if result is None or isinstance(result.error_in_exec or result.error_before_exec, _INTERRUPTS):
            stop_watching(shell, "interrupted")
            undo()  # where the interrupt came before `stop_watching` could find it

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, ignoring)
        # In a thread: this runs between two instructions of the main thread, which may hold any lock.
        threading.Thread(target=stop_watching, args=(shell, "interrupted"), name="gpumagic stop", daemon=True).start()

    def undo() -> None:
        if getattr(kernel, "saved_sigint_handler", None) is interrupted:
            kernel.saved_sigint_handler = ignoring
        session.unregister(shell, "post_run_cell", cell_has_run)

    shell.events.register("post_run_cell", cell_has_run)
    if ignoring is not None:
        kernel.saved_sigint_handler = interrupted
    return undo


MAX_CELLS = 200
"""Cells in the table, at most."""
MAX_POINTS = 40
"""Points in the timeline of each."""
RERUNS = 3
"""Runs in a row after which a cell that left more allocated each time is reported."""
MIN_GROWTH = 1024**2
"""Growth in bytes of each run from which that is reported."""


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

    def switch(self, on: bool) -> None:
        """Record the cells that start from now on, or no more of them; recorded ones are kept."""
        if on == self.is_on:
            return
        self.is_on = True  # first and, where it goes off, last: what an interrupt leaves half done can be undone
        for event, hook in (("pre_run_cell", self._pre_run_cell), ("post_run_cell", self._post_run_cell)):
            if on:
                self._shell.events.register(event, hook)
            else:
                session.unregister(self._shell, event, hook)
        if not on:
            self._close(0)
            self.is_on = False

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
        print(history_view.cell_line(now - cell.started, rows, timeline))  # noqa: T201  # the line asked for
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
                print(history_view.growth_line(device, change, RERUNS))  # noqa: T201  # as the line above

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


def cell_monitor(shell: InteractiveShell) -> CellMonitor:
    """Return the monitor of a shell, with what it has recorded; at first it is off."""
    monitor: CellMonitor = shell.meta.setdefault(_CELLS, CellMonitor(shell))
    return monitor


def off(shell: InteractiveShell) -> None:
    """Stop both, and drop the recorded cells."""
    stop_watching(shell)
    if _CELLS in shell.meta:
        shell.meta[_CELLS].switch(False)
        shell.meta.pop(_CELLS)

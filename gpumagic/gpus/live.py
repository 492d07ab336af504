"""`%gpuinfo -w` and `--each-cell`: the GPUs every few seconds, shown in place, and a line after every cell.

In a notebook `GpuWatch` takes its snapshots in a thread, so that other cells can run meanwhile; in a terminal, which
has one place to write to, it runs until Ctrl-C. `CellMonitor` reads the allocators' counters before and after each
cell. What a shell has of both is in its `meta`, and `off` ends it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gpumagic import notebook
from gpumagic.gpus.report import CellChange, GPUReport
from gpumagic.gpus.view import cell_line
from gpumagic.memory import allocator

if TYPE_CHECKING:
    from IPython.core.interactiveshell import (
        ExecutionInfo,
        ExecutionResult,
        InteractiveShell,
    )

_WATCH = "gpumagic_watch"
_CELLS = "gpumagic_each_cell"


class GpuWatch:
    """Shows the GPUs every few seconds; `report` is the last snapshot, `stop` ends it.

    Args:
        read: takes a snapshot.
        seconds: from one snapshot to the next.
        show: called with each snapshot, and once more with the last one at the end; the second argument says which.
    """

    def __init__(
        self,
        read: Callable[[], GPUReport],
        seconds: float,
        show: Callable[[GPUReport, bool], None],
    ) -> None:
        self._read = read
        self._show = show
        self.seconds = seconds
        self._latest = GPUReport(())
        self._stopping = threading.Event()
        self._until = "%gpuinfo -w off"
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Why it has stopped; None while it runs."""

    @property
    def report(self) -> GPUReport:
        """The last snapshot, with a note that says what ends the refreshing, or has ended it."""
        end = f", until {self._until}" if self.ended is None else f"; {self.ended}"
        note = f"A snapshot every {self.seconds:g} s{end}."
        return replace(self._latest, notes=(*self._latest.notes, note))

    def start(self) -> None:
        """Refresh in a thread. The first snapshot is taken in this one, so that its errors are raised here."""
        self._take()
        self._thread = threading.Thread(
            target=self._refresh, name="gpumagic watch", daemon=True
        )
        atexit.register(self.stop)
        self._thread.start()

    def run(self) -> None:
        """Refresh in this thread until Ctrl-C."""
        self._until = "Ctrl-C"
        try:
            self._take()
            self._refresh()
        except KeyboardInterrupt:
            self._end("interrupted")

    def stop(self) -> None:
        """Stop and wait for the thread: NVML must not be queried while the process exits (nvitop#222)."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)  # seconds: a driver that hangs is not waited for
        atexit.unregister(self.stop)

    def _refresh(self) -> None:
        try:
            while not self._stopping.wait(self.seconds):
                self._take()
            self._end("stopped")
        except Exception as error:  # nobody would see what a thread raises
            self._end(f"stopped by {type(error).__name__}: {error}")

    def _take(self) -> None:
        self._latest = self._read()
        self._show(self.report, False)

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            self._show(self.report, True)

    def __repr__(self) -> str:
        state = self.ended or "stop it with %gpuinfo -w off"
        return f"<watch of the GPUs every {self.seconds:g} s; {state}>"


def watch(
    shell: InteractiveShell, read: Callable[[], GPUReport], seconds: float
) -> GpuWatch:
    """Show the GPUs in place until `%gpuinfo -w off` or the extension's unloading; in a terminal until Ctrl-C."""
    stop_watching(shell)
    if getattr(shell, "kernel", None) is None:
        watching = GpuWatch(read, seconds, terminal_display())
        watching.run()
        return watching
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    is_displayed = False

    def show(report: GPUReport, _is_last: bool) -> None:
        nonlocal is_displayed
        if is_displayed:
            handle.update(report)
        else:
            is_displayed = True
            handle.display(report)

    watching = GpuWatch(read, seconds, show)
    shell.meta[_WATCH] = watching
    try:
        watching.start()
    except BaseException:
        stop_watching(shell)
        raise
    return watching


def stop_watching(shell: InteractiveShell) -> None:
    """Stop what refreshes in the shell, if anything does, and wait until it has stopped."""
    if _WATCH in shell.meta:
        shell.meta[_WATCH].stop()


def terminal_display() -> Callable[[GPUReport, bool], None]:
    """Return a function that writes each report over the last one, or below it where stdout is no capable terminal.

    Terminals that call themselves `dumb`, as Emacs' shell does, show escape sequences as letters.
    """
    in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    written = 0

    def show(report: GPUReport, is_last: bool) -> None:
        nonlocal written
        if not in_place:
            print(report, flush=True)  # noqa: T201  # the terminal's display is its stdout
            return
        lines = str(report).splitlines()
        height = shutil.get_terminal_size().lines - 1
        if len(lines) > height and not is_last:
            # What has scrolled off the top cannot be written over.
            more = f"... {len(lines) - height + 1} more lines in a taller terminal; Ctrl-C ends it"
            lines = [*lines[: height - 1], more]
        up = f"\x1b[{written}F" if written else ""
        written = len(lines)
        text = "".join(
            f"{line}\x1b[K\n" for line in lines
        )  # erasing line by line does not flicker
        print(f"{up}{text}\x1b[J", end="", flush=True)  # noqa: T201

    return show


class _OpenCell(NamedTuple):
    """A cell that runs: since when, and the allocators' counters before it."""

    info: ExecutionInfo
    started: float
    before: Mapping[str, allocator.AllocatorStats]


class CellMonitor:
    """Reads the allocators before and after each cell of a shell; nested cells have their own line."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._open: dict[int, list[_OpenCell]] = {}
        """By thread, since subshells run cells in threads: the cells that run, each inside the one before."""
        self.is_on = False

    def switch(self, on: bool) -> None:
        """Print a line after the cells that start from now on, or no more."""
        if on == self.is_on:
            return
        self.is_on = True  # first and, where it goes off, last: what an interrupt leaves half done can be undone
        for event, hook in (
            ("pre_run_cell", self._pre_run_cell),
            ("post_run_cell", self._post_run_cell),
        ):
            if on:
                self._shell.events.register(event, hook)
            else:
                notebook.unregister(self._shell, event, hook)
        if not on:
            self._open.clear()
            self.is_on = False

    def _pre_run_cell(self, info: ExecutionInfo) -> None:
        cell = _OpenCell(info, time.perf_counter(), allocator.all_device_stats())
        self._open.setdefault(threading.get_ident(), []).append(cell)

    def _post_run_cell(self, result: ExecutionResult | None) -> None:
        now = time.perf_counter()
        cells = self._open.get(threading.get_ident(), [])
        for place in reversed(range(len(cells))):
            cell = cells[place]
            if result is None or cell.info is result.info:
                del cells[place:]  # with any cells inside it whose end was not reported
                if not cell.info.silent:
                    changes = _changes(cell.before, allocator.all_device_stats())
                    print(cell_line(now - cell.started, changes))  # noqa: T201  # what is asked for
                return


def _changes(
    before: Mapping[str, allocator.AllocatorStats],
    after: Mapping[str, allocator.AllocatorStats],
) -> list[CellChange]:
    """Return what changed on each device.

    The peak is the cell's own only where the counter rose above its earlier value; the counter is never reset here.
    """
    changes = []
    for device, now in after.items():
        then = before.get(device, allocator.AllocatorStats(0, 0, 0))
        if now == then:
            continue
        has_risen = (now.peak or 0) > (then.peak or 0)
        change = CellChange(
            device,
            growth=now.allocated - then.allocated,
            allocated=now.allocated,
            peak=now.peak if has_risen else None,
        )
        changes.append(change)
    return changes


def cell_monitor(shell: InteractiveShell) -> CellMonitor:
    """Return the monitor of a shell; at first it is off."""
    monitor: CellMonitor = shell.meta.setdefault(_CELLS, CellMonitor(shell))
    return monitor


def off(shell: InteractiveShell) -> None:
    """Stop both."""
    stop_watching(shell)
    if _CELLS in shell.meta:
        shell.meta[_CELLS].switch(False)
        shell.meta.pop(_CELLS)

"""`%gpuinfo -w`: the GPUs over time, shown in place.

A recorder takes a snapshot every few seconds and keeps a short history. In a notebook it does so in a thread, so
that other cells run meanwhile; a terminal has one place to write to, so there it runs until Ctrl-C.
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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumagic.gpus.report import HistoryReport, SampleRow, sample_rows
from gpumagic.report.base import Report

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

Snapshot = Report[Any]
"""A `GPUReport`, or of many engines a `ClusterReport`."""
MAX_SNAPSHOTS = 900
"""Snapshots a recorder keeps: half an hour at two seconds."""
_KEY = "gpumagic_recorder"
_STOP_LOCK = threading.Lock()
"""Held while one ends: the next starts after that, although an interrupt between cells ends it in a thread."""


class GpuRecorder:
    """Takes a snapshot every few seconds; `report` is its history, `stop` ends it.

    Args:
        ask: takes one snapshot.
        seconds: from one to the next.
        show: called with the history after each, and once more at the end.
    """

    def __init__(self, ask: Callable[[], Snapshot], seconds: float, show: Callable[[HistoryReport], None]) -> None:
        self._ask, self._show, self.seconds = ask, show, seconds
        self._samples: deque[tuple[SampleRow, ...]] = deque(maxlen=MAX_SNAPSHOTS)
        self._latest: Snapshot | None = None
        self._started = time.monotonic()
        self._enough = threading.Event()
        self._why, self._until = "stopped", "interrupted or %gpuinfo -w off"
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Why it has stopped; None while it runs."""

    @property
    def report(self) -> HistoryReport:
        """Return the history so far."""
        samples = tuple(row for rows in self._samples for row in rows)
        return HistoryReport(
            samples, latest=self._latest, interval=self.seconds, ended=self.ended, until=self._until
        )  # fmt: skip

    def plot(self) -> Any:
        """Return a matplotlib figure of the history."""
        return self.report.plot()

    def start(self) -> None:
        """Record in a thread. The first snapshot is taken here, so that what is wrong with it is raised here."""
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

    def stop(self, why: str = "stopped") -> None:
        """End the recording and wait for its thread: NVML must not be asked while the process ends (nvitop#222)."""
        self.stop_soon(why)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self.stop)

    def stop_soon(self, why: str = "stopped") -> None:
        """Take no further snapshot, without waiting for the thread, which shows the end by itself."""
        if not self._enough.is_set():
            self._why = why
            self._enough.set()

    def _record(self) -> None:
        try:
            while not self._enough.wait(self.seconds):
                self._take()
            self._end(self._why)
        except Exception as error:  # a thread has nobody to raise to
            self._end(f"stopped by {type(error).__name__}: {error}")

    def _take(self) -> None:
        report = self._ask()
        moment = time.monotonic() - self._started
        self._latest = report
        self._samples.append(sample_rows(report, moment))
        self._show(self.report)

    def _end(self, why: str) -> None:
        if self.ended is None:
            self.ended = why
            self._show(self.report)

    def __repr__(self) -> str:
        how = "stop it with %gpuinfo -w off" if self.ended is None else self.ended
        return f"<recorder of the GPUs every {self.seconds:g} s; {how}>"


# -- in a shell -------------------------------------------------------------------------------------------


def watch(shell: InteractiveShell, ask: Callable[[], Snapshot], seconds: float) -> GpuRecorder:
    """Show the GPUs in place until `%gpuinfo -w off`, an interrupt, or the extension's unloading.

    Args:
        shell: one that belongs to a kernel goes on with other cells meanwhile; another waits for Ctrl-C.
        ask: takes one snapshot.
        seconds: from one to the next.
    """
    off(shell)
    if getattr(shell, "kernel", None) is None:
        recorder = GpuRecorder(ask, seconds, terminal_display())
        recorder.run()
        return recorder
    recorder = GpuRecorder(ask, seconds, _notebook_display())
    shell.meta[_KEY] = (recorder, _stop_on_interrupt(shell))  # first: an interrupt may come while it starts
    try:
        recorder.start()
    except BaseException:
        off(shell)
        raise
    return recorder


def off(shell: InteractiveShell, why: str = "stopped") -> None:
    """Stop the shell's recorder, if there is one."""
    with _STOP_LOCK:
        recorder, undo = shell.meta.pop(_KEY, (None, None))
        if recorder is not None:
            recorder.stop_soon(why)  # first, so that it ends whatever interrupts the rest
            undo()
            recorder.stop()


def _notebook_display() -> Callable[[HistoryReport], None]:
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    shown: list[bool] = []

    def show(report: HistoryReport) -> None:
        (handle.update if shown else handle.display)(report)
        shown.append(True)

    return show


def terminal_display() -> Callable[[HistoryReport], None]:
    """Return what writes each report over the one before where stdout is a terminal that can, and below it elsewhere.

    Emacs' shell, and whatever else says that it is `dumb`, shows escape sequences as letters.
    """
    in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    written = 0

    def show(report: HistoryReport) -> None:
        nonlocal written
        if not in_place:
            print(report, flush=True)  # noqa: T201  # the terminal's display is its stdout
            return
        lines = str(report).splitlines()
        if report.ended is None:
            lines = _truncated(lines, shutil.get_terminal_size().lines - 1)
        up = f"\x1b[{written}F" if written else ""
        written = len(lines)
        text = "".join(f"{line}\x1b[K\n" for line in lines)  # each line erases its own rest: nothing flickers
        print(f"{up}{text}\x1b[J", end="", flush=True)  # noqa: T201

    return show


def _truncated(lines: list[str], height: int) -> list[str]:
    """Return as many as the terminal has room for: what has scrolled off its top cannot be written over."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"... {len(lines) - height + 1} more lines in a higher terminal; Ctrl-C ends it"]


_INTERRUPTS = (KeyboardInterrupt, CancelledError)
"""What an interrupt raises in a cell, and in one that awaits. IPython (7.34 to 9) takes it for an error "before
execution" where it comes between two statements, while the next is compiled."""


def _stop_on_interrupt(shell: Any) -> Callable[[], None]:
    """Stop the recorder at Ctrl-C, in a cell or between cells, and return what takes that back."""

    def cell_has_run(result: ExecutionResult | None) -> None:
        if result is None or isinstance(result.error_in_exec or result.error_before_exec, _INTERRUPTS):
            off(shell, "interrupted")

    shell.events.register("post_run_cell", cell_has_run)
    put_back = _on_interrupt_between_cells(shell)

    def undo() -> None:
        shell.events.unregister("post_run_cell", cell_has_run)
        put_back()

    return undo


def _on_interrupt_between_cells(shell: Any) -> Callable[[], None]:
    """Hear an interrupt between cells, which ipykernel ignores by a handler that it keeps here (6.17 to 7.4)."""
    kernel = shell.kernel
    ignoring = getattr(kernel, "saved_sigint_handler", None)
    if ignoring is None:
        return lambda: None

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, ignoring)
        # In a thread: this stands between two instructions of the main thread, which may hold any lock.
        threading.Thread(target=off, args=(shell, "interrupted"), name="gpumagic stop", daemon=True).start()

    kernel.saved_sigint_handler = interrupted

    def put_back() -> None:
        if kernel.saved_sigint_handler is interrupted:
            kernel.saved_sigint_handler = ignoring

    return put_back

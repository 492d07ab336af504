"""`%gpuinfo -w`: the GPUs over time, shown in place.

`GpuRecorder` takes a snapshot every few seconds and keeps a short history. In a notebook it runs in a thread, so that
other cells can run meanwhile; in a terminal, which has one place to write to, it runs until Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
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

from gpumagic.gpus.history_view import HistoryReport, SampleRow, sample_rows
from gpumagic.report.base import Report

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

MAX_SNAPSHOTS = 900
"""Snapshots to keep: half an hour at two seconds."""
STOP_LIMIT = 1.0
"""Seconds to wait for a snapshot that is being taken."""
_KEY = "gpumagic_recorder"


class GpuRecorder:
    """Takes a snapshot every few seconds; `report` is its history, `stop` ends it.

    Args:
        read: returns a `GPUReport`, or the `ClusterReport` of many engines.
        seconds: from one snapshot to the next.
        show: called with the history after each snapshot, and once more at the end.
    """

    def __init__(self, read: Callable[[], Report[Any]], seconds: float, show: Callable[[HistoryReport], None]) -> None:
        self._read, self._show, self.seconds = read, show, seconds
        self._samples: deque[tuple[SampleRow, ...]] = deque(maxlen=MAX_SNAPSHOTS)
        self._latest: Report[Any] | None = None
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

    def plot(self) -> Any:
        """Return a matplotlib figure of the history."""
        return self.report.plot()

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
        self._latest = self._read()
        self._samples.append(sample_rows(self._latest, time.monotonic() - self._started))
        self._show(self.report)

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            self._show(self.report)

    def __repr__(self) -> str:
        return f"<recorder of the GPUs every {self.seconds:g} s; {self.ended or 'stop it with %gpuinfo -w off'}>"


def watch(shell: InteractiveShell, read: Callable[[], Report[Any]], seconds: float) -> GpuRecorder:
    """Show the GPUs in place until `%gpuinfo -w off`, an interrupt, or the extension's unloading.

    Args:
        shell: in a kernel's, other cells can run meanwhile; another waits for Ctrl-C.
        read: as for `GpuRecorder`.
        seconds: from one snapshot to the next.
    """
    off(shell)
    if getattr(shell, "kernel", None) is None:
        recorder = GpuRecorder(read, seconds, terminal_display())
        recorder.run()
        return recorder
    recorder = GpuRecorder(read, seconds, _notebook_display())
    shell.meta[_KEY] = (recorder, _stop_on_interrupt(shell))  # first: an interrupt may come while it starts
    try:
        recorder.start()
    except BaseException:
        off(shell)
        raise
    return recorder


def off(shell: InteractiveShell, reason: str = "stopped") -> None:
    """Stop the shell's recorder, if there is one, and wait until it has stopped.

    Nothing here minds being done twice: an interrupt between cells does it in a thread, and one in the midst of it has
    the end of its cell do it again. So there is no lock, which an interrupt could leave locked.
    """
    recorder, undo = shell.meta.get(_KEY, (None, None))
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
        if report.ended is None:
            lines = _truncated(lines, shutil.get_terminal_size().lines - 1)
        up = f"\x1b[{written}F" if written else ""
        written = len(lines)
        text = "".join(f"{line}\x1b[K\n" for line in lines)  # erasing line by line does not flicker
        print(f"{up}{text}\x1b[J", end="", flush=True)  # noqa: T201

    return show


def _truncated(lines: list[str], height: int) -> list[str]:
    """Return as many lines as fit: those that have scrolled off the top cannot be written over."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"... {len(lines) - height + 1} more lines in a taller terminal; Ctrl-C ends it"]


_INTERRUPTS = (KeyboardInterrupt, CancelledError)
"""What an interrupt raises in a cell, and in one that awaits. Between two statements, while the next is compiled,
IPython (7.34 to 9) reports it as an error "before execution"."""


def _stop_on_interrupt(shell: Any) -> Callable[[], None]:
    """Stop the recorder at Ctrl-C, in a cell or between cells; return what undoes this.

    Between cells ipykernel ignores an interrupt, by a handler that it stores (6.17 to 7.4).
    """
    kernel = shell.kernel
    ignoring = getattr(kernel, "saved_sigint_handler", None)

    def cell_has_run(result: ExecutionResult | None) -> None:
        if result is None or isinstance(result.error_in_exec or result.error_before_exec, _INTERRUPTS):
            off(shell, "interrupted")
            undo()  # where the interrupt came before `off` could find it

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, ignoring)
        # In a thread: this runs between two instructions of the main thread, which may hold any lock.
        threading.Thread(target=off, args=(shell, "interrupted"), name="gpumagic stop", daemon=True).start()

    def undo() -> None:
        if getattr(kernel, "saved_sigint_handler", None) is interrupted:
            kernel.saved_sigint_handler = ignoring
        with contextlib.suppress(ValueError):  # done before
            shell.events.unregister("post_run_cell", cell_has_run)

    shell.events.register("post_run_cell", cell_has_run)
    if ignoring is not None:
        kernel.saved_sigint_handler = interrupted
    return undo

"""Sample the allocators while a cell runs, from one thread that serves all timelines.

The thread starts with the first timeline and ends with the last. It only reads: counters that torch keeps anyway, and
the stack of the thread that runs the cell. The first sample is taken after `FIRST_DELAY`; the interval then grows with
the age of the cell up to `MIN_INTERVAL`, so that a short cell has some samples and none has many. In long cells it
grows further, and it is at least `INTERVAL_PER_COST` times the cost of a sample. A sample of two simulated devices
costs a busy cell 0.2 to 0.4 ms of processor time, the switch of threads included, and so about one percent;
`tests/benchmarks/test_timeline.py` measures it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import CodeType

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.timeline import MAX_POINTS, MemoryTimeline, TimelineLog
from gpumagic.source.lines import CellLineFinder, CodeLineFinder, LineFinder, WatchedCode

FIRST_DELAY = 0.064
"""Seconds from the start of a cell to the first sample; with 8 ms, a step of 45 ms took 4 % longer."""
MIN_INTERVAL = 0.1
"""Seconds between two samples, once the cell has run as long."""
MAX_INTERVAL = 0.5
INTERVAL_PER_COST = 400
"""The interval is at least so many times the cost of a sample."""


class _Sampler(threading.Thread):
    """Samples until no timeline is left."""

    def __init__(self) -> None:
        super().__init__(name="gpumagic memory", daemon=True)
        self._enough = threading.Event()
        self._cost = 0.0

    def run(self) -> None:
        """Sample and sleep."""
        while _sampled and not self._enough.wait(self._pause()):
            start = time.thread_time()
            try:
                sample_all()
            except Exception:  # errors of a backend's counters do not belong on the user's stderr
                return
            self._cost = time.thread_time() - start

    def end(self) -> None:
        """Stop and join; a Ctrl-C meanwhile only ends the wait."""
        self._enough.set()  # also where Ctrl-C came while it was starting
        if self.is_alive():
            self.join()

    def is_running(self) -> bool:
        """Return whether it samples, and will."""
        return self.is_alive() and not self._enough.is_set()

    def _pause(self) -> float:
        now = time.perf_counter()
        youngest = min((now - each.log.started for each in _sampled), default=0.0)
        if youngest < MIN_INTERVAL:
            return max(FIRST_DELAY, youngest)
        return min(max(MIN_INTERVAL, youngest / MAX_POINTS, INTERVAL_PER_COST * self._cost), MAX_INTERVAL)


_sampled: list[CellMemory] = []
_sampler: _Sampler | None = None
_lock = threading.RLock()


@contextlib.contextmanager
def exclusive(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock, or go on without it after a second: Ctrl-C where a `with` ends may keep it from its release."""
    is_held = lock.acquire(timeout=1)
    try:
        yield
    finally:
        if is_held:
            lock.release()


def is_idle() -> bool:
    """Return whether no timeline is being sampled."""
    return not _sampled and _sampler is None


def sample_all() -> None:
    """Read the allocators now, for every timeline that is being sampled."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return  # the cell may be importing it now
    figures = allocator.all_device_stats()
    if not figures:
        return
    for each in tuple(_sampled):
        each.look(figures)


class CellMemory:
    """Records what is allocated from `start` to `stop`.

    Args:
        before: the allocators' statistics as the code begins.
        namespace: the globals of the code.
        block: the code of the `with` block or function; None for a cell.
        line: the line of the `with` statement or function; None for a cell.
        is_running: whether the cell runs already; else it is about to.
    """

    def __init__(
        self,
        before: Mapping[str, AllocatorStats],
        namespace: Mapping[str, object],
        block: CodeType | None = None,
        line: int | None = None,
        *,
        is_running: bool = False,
    ) -> None:
        self._finder: LineFinder = (
            CodeLineFinder(block) if block is not None else CellLineFinder(namespace, is_running=is_running)
        )
        self._first_line = (self._finder.line(sys._getframe(1)) if is_running else None) or line or 1
        self._code = WatchedCode(namespace, self._finder.filename, line)
        self.log = TimelineLog(before, self._first_line)
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Start to sample."""
        global _sampler  # noqa: PLW0603  one serves all
        try:
            with exclusive(_lock):
                _sampled.append(self)
                if _sampler is None or not _sampler.is_running():  # in a process that was forked it is not
                    _sampler = _Sampler()
                    _sampler.start()
        except BaseException:  # Ctrl-C: no thread is left behind
            self.stop()
            raise

    def sample(self) -> None:
        """Sample once, before the first line runs."""
        self.log.add(allocator.all_device_stats(), self._first_line)

    def look(self, figures: Mapping[str, AllocatorStats]) -> None:
        """Add a sample, taken in another thread."""
        # Not kept in a variable: this frame is among them, and the cycle would keep every frame and its tensors alive.
        self.log.add(figures, self._finder.line(sys._current_frames().get(self._thread)))

    def stop(self) -> None:
        """Stop sampling; idempotent, so that it can be called after an interrupt anywhere."""
        global _sampler  # noqa: PLW0603  as above
        self.log.end()
        with exclusive(_lock):
            if self in _sampled:
                _sampled.remove(self)
            last = None if _sampled else _sampler
        if last is not None:
            last.end()
            _sampler = None if _sampler is last else _sampler

    def finished(self, after: Mapping[str, AllocatorStats]) -> MemoryTimeline | None:
        """Return the timeline with the final statistics, or None where no device's memory changed."""
        self._code.filename = self._code.filename or self._finder.filename
        return self.log.finished(after, lambda: dict(self._code.lines()))

"""A look at the allocators every now and then while a cell runs, by one thread for all that ask.

The thread starts with the first timeline and has ended when the last one has. It only reads: counters that torch keeps
anyway, and the stack of the thread that runs the cell. It looks for the first time after `FIRST`, and then each time as
long after as the cell has run: a short cell has some looks, and none has many. From `PAUSE` on it sleeps that long,
longer in long cells, and at least `SHARE` times what a look takes. A look at two simulated devices costs a busy cell
0.2 to 0.4 ms of processor time, the change of threads included, and so about one percent;
`tests/benchmarks/test_timeline.py` measures it.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field

from gpumagic.memory import allocator
from gpumagic.memory.timeline import STRETCHES, TimelineLog
from gpumagic.source.lines import Place

FIRST = 0.064
"""Seconds from the start of a cell to the first look; with 8 ms, a step of 45 ms took 4 % longer."""
PAUSE = 0.1
"""Seconds between two looks, once as many have passed."""
LONGEST_PAUSE = 0.5
SHARE = 400
"""A pause takes at least so many times as long as a look."""


@dataclass(eq=False)
class Sampled:
    """A timeline to be looked at, and the code whose lines are told with it, in the thread that makes this."""

    log: TimelineLog
    place: Place
    thread: int = field(default_factory=threading.get_ident)


class _Sampler(threading.Thread):
    """Looks until nobody asks any more."""

    def __init__(self) -> None:
        super().__init__(name="gpumagic memory", daemon=True)
        self._enough = threading.Event()
        self._cost = 0.0

    def run(self) -> None:
        """Look, and sleep."""
        while not self._enough.wait(self._pause()):
            start = time.thread_time()
            try:
                _look()
            except Exception:  # what a backend's counters raise is not for the user's stderr
                return
            self._cost = time.thread_time() - start

    def end(self) -> None:
        """Stop, and wait for it; a Ctrl-C that comes meanwhile only means not to wait."""
        self._enough.set()  # also where Ctrl-C came while it was starting
        if self.is_alive():
            self.join()

    def _pause(self) -> float:
        now = time.perf_counter()
        youngest = min((now - each.log.started for each in _sampled), default=0.0)
        if youngest < PAUSE:
            return max(FIRST, youngest)
        return min(max(PAUSE, youngest / STRETCHES, SHARE * self._cost), LONGEST_PAUSE)


_sampled: list[Sampled] = []
_thread: _Sampler | None = None
_lock = threading.Lock()


def begin(asked: Sampled) -> None:
    """Have the allocators looked at for a timeline until `end`."""
    global _thread  # noqa: PLW0603  one serves all
    with _lock:
        _sampled.append(asked)
        if _thread is None or not _thread.is_alive():  # in a process that was forked it is not
            _thread = _Sampler()
            _thread.start()


def end(asked: Sampled) -> None:
    """Undo `begin`; again does nothing."""
    global _thread
    with _lock:
        if asked in _sampled:
            _sampled.remove(asked)
        last, _thread = (_thread, None) if not _sampled else (None, _thread)
    if last is not None:
        last.end()


def _look() -> None:
    if not _is_torch_there():
        return
    figures = allocator.all_figures()
    if not figures:
        return
    for each in tuple(_sampled):
        # No name for these: this frame is among them, and the cycle would keep every frame with its tensors alive.
        each.log.add(figures, each.place.line(sys._current_frames().get(each.thread)))


def _is_torch_there() -> bool:
    """Return whether torch has been imported, to its end: the cell may be importing it now."""
    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    return torch is not None and not getattr(spec, "_initializing", False)

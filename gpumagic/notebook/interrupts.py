"""Ctrl-C while a report is made and shown: it ends what may be ended, and never the report.

The cell is over by then. An interrupt that tore open the reading of the notebook or the rendering would cost the report
and mend nothing, so it is noted; only what says so (`ending`), such as a dry run, is ended by it. Nor may it cost the
threads that wait for a lock: `locked`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_notes: list[bool] = []
"""Whether Ctrl-C was pressed; one while interrupts are held, none otherwise."""
_may_end = False
"""Whether what runs now may be ended."""


def _note(_number: int, _frame: FrameType | None) -> None:
    _notes[:] = [True]
    if _may_end:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C back in the main thread; one that comes meanwhile has done its work and is not raised later."""
    before = signal.getsignal(signal.SIGINT)
    if (
        _notes
        or threading.current_thread() is not threading.main_thread()
        or not callable(before)
    ):
        yield
        return
    _notes.append(False)
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _notes.clear()


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Let Ctrl-C end what runs, also one that was held back before; in other threads than the main one nothing does."""
    global _may_end  # noqa: PLW0603  # a process has one main thread
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _may_end = bool(_notes)
    try:
        if any(_notes):
            raise KeyboardInterrupt
        yield
    finally:
        _may_end = False


@contextlib.contextmanager
def locked(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock, or go on without it after a second: Ctrl-C where a `with` ends may have kept it from its release."""
    is_held = lock.acquire(timeout=1)
    try:
        yield
    finally:
        if is_held:
            lock.release()

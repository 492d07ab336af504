"""Progress of whatever takes more than a second: tqdm's bar where it is installed, else one plain line.

All of it goes to stderr and is removed at the end.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from typing import Any, Protocol, TypeVar

DELAY = 1.0
"""Seconds that need no word."""

Step = TypeVar("Step")


def bar(steps: Sequence[Step], unit: str) -> Iterator[Step]:
    """Yield the steps, showing how many are done and the name of the next one."""
    with counted(len(steps), unit) as advance:
        for step in steps:
            advance(str(step))
            yield step


@contextmanager
def counted(most: int, unit: str) -> Iterator[Callable[[str], None]]:
    """Show steps whose number is not known before: call the result with the name of each as it begins."""
    shown = _new_bar(total=most, unit=unit, delay=DELAY)
    begun = 0

    def advance(step: str) -> None:
        nonlocal begun
        shown.set_description(step, refresh=False)
        shown.update(min(begun, 1))
        begun += 1

    _open_bars.append(shown)
    try:
        yield advance
    finally:
        _open_bars.remove(shown)
        shown.close()


def elapsed_seconds(what: str) -> Iterator[int]:
    """Yield 0, 1, 2 and so on, showing for how many seconds something has been running.

    Inside `counted` that bar shows it: a notebook cannot rewrite two lines.
    """
    if _open_bars:
        for second in count():
            _open_bars[-1].refresh()
            yield second
    shown = _new_bar(total=None, bar_format="{desc}")
    try:
        for second in count():
            shown.set_description_str(f"{what}, {second} s")  # the other one adds a colon
            yield second
    finally:
        shown.close()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show `elapsed_seconds` during a call that reports no progress of its own."""
    done = threading.Event()

    def show() -> None:
        if not done.wait(DELAY):
            any(done.wait(1.0) for _ in elapsed_seconds(what))

    thread = threading.Thread(target=show, name="gpumagic progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Bar(Protocol):
    """What is used of a tqdm bar."""

    def set_description(self, text: str, refresh: bool = True) -> None: ...
    def set_description_str(self, text: str) -> None: ...
    def update(self, n: int) -> object: ...
    def refresh(self) -> object: ...
    def close(self) -> None: ...


_open_bars: list[_Bar] = []


def _new_bar(**options: Any) -> _Bar:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in a notebook without ipywidgets it says so, and then works as text
            found: _Bar = import_module("tqdm.auto").tqdm(leave=False, **options)
    except ImportError:
        return _TextBar(options["total"], options.get("delay", 0.0))
    return found


class _TextBar:
    """One line of text that is rewritten."""

    def __init__(self, total: int | None, delay: float) -> None:
        self._total = total
        self._from = time.monotonic() + delay
        self._done = self._longest = 0
        self._text = ""

    def set_description(self, text: str, refresh: bool = True) -> None:
        self._text = text
        if refresh:
            self.refresh()

    set_description_str = set_description

    def update(self, n: int) -> None:
        self._done += n
        if time.monotonic() >= self._from:
            self.refresh()

    def refresh(self) -> None:
        text = self._text if self._total is None else f"{self._done}/{self._total} {self._text}"
        self._longest = max(self._longest, len(text))
        print(f"\r{text:{self._longest}}", end="", file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        if self._longest:
            print(f"\r{'':{self._longest}}\r", end="", file=sys.stderr, flush=True)  # noqa: T201

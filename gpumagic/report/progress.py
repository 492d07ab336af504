"""Progress of what takes more than a second: one line that is rewritten in place and is gone at the end.

In a notebook it is a display, so that no box for stderr is left behind; in a terminal it is the last line. Where
nothing can be rewritten, as in a file, only what one waits for without a count is written, once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 1.0
"""Seconds that need no word."""


@contextmanager
def counted(most: int, unit: str) -> Iterator[Callable[[str], None]]:
    """Show how many of at most ``most`` steps are done: call the result with the name of each as it begins."""
    begun = 0

    def advance(step: str) -> None:
        nonlocal begun
        begun += 1
        line.write(f"{unit} {begun} of {most}: {step}")

    with _shown() as line:
        yield advance


@contextmanager
def elapsed(what: str) -> Iterator[Callable[[], None]]:
    """Show for how long something has been running: call the result once a second or so.

    Inside `counted` its line shows it.
    """
    began = time.monotonic()

    def tick() -> None:
        line.write(f"{text}, {time.monotonic() - began:.0f} s")

    with _shown() as line:
        text = line.text or what
        yield tick


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a line during a call that reports no progress of its own."""
    with _shown() as line:
        line.announce(what)
        yield


class _Line:
    """The one line; it appears `DELAY` seconds after its making."""

    def __init__(self) -> None:
        self._show = _surface()
        self._from = time.monotonic() + DELAY
        self._is_shown = False
        self.text = ""

    def announce(self, text: str) -> None:
        """Show a text at once, also where nothing can be rewritten."""
        if self._show is None:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
        self._from = 0.0
        self.write(text)

    def write(self, text: str) -> None:
        self.text = text
        if self._show is not None and time.monotonic() >= self._from:
            self._is_shown = True
            self._show(text)

    def clear(self) -> None:
        if self._show is not None and self._is_shown:
            self._show("")


_line: _Line | None = None


@contextmanager
def _shown() -> Iterator[_Line]:
    """Yield the line that is shown already, or a new one, which is cleared at the end."""
    global _line  # noqa: PLW0603  there is one, as a screen has one last line
    if _line is not None:
        yield _line
        return
    _line = line = _Line()
    try:
        yield line
    finally:
        _line = None
        line.clear()


def _surface() -> Callable[[str], None] | None:
    """Return what shows a text in the place of the last one, "" for none; None where nothing can be rewritten."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    if type(kernel).__module__.startswith("ipyparallel."):
        return None  # an engine's client draws each update as one more output, and none of them goes
    if kernel is not None:
        return _in_notebook()
    return _in_terminal() if sys.stderr.isatty() else None


def _in_notebook() -> Callable[[str], None]:
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    begin = [handle.display]

    def show(text: str) -> None:
        data = {"text/plain": text} if text else {}  # without any JupyterLab draws no output, not even an empty one
        (begin.pop() if begin else handle.update)(data, raw=True)

    return show


def _in_terminal() -> Callable[[str], None]:
    longest = 0

    def show(text: str) -> None:
        nonlocal longest
        longest = max(longest, len(text))
        print(f"\r{text:{longest}}", end="" if text else "\r", file=sys.stderr, flush=True)  # noqa: T201

    return show

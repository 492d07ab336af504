"""Progress of what takes more than a second: one line that is rewritten in place and is gone at the end.

In a notebook it is a display, so that no box for stderr is left behind; in a terminal it is the last line. Where
nothing can be rewritten, as in a file, only what one waits for without a count is written, once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

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


class _Surface(Protocol):
    """Where a line can be rewritten."""

    def announce(self, text: str) -> None: ...
    def write(self, text: str) -> None: ...
    def clear(self) -> None: ...


class _Line:
    """The one line; it appears `DELAY` seconds after its making."""

    def __init__(self) -> None:
        self._surface = _surface()
        self._from = time.monotonic() + DELAY
        self.text = ""

    def announce(self, text: str) -> None:
        self.text = text
        self._surface.announce(text)

    def write(self, text: str) -> None:
        self.text = text
        if time.monotonic() >= self._from:
            self._surface.write(text)

    def clear(self) -> None:
        self._surface.clear()


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


def _surface() -> _Surface:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    if type(kernel).__module__.startswith("ipyparallel."):
        return _File()  # an engine's client draws each update as one more output, and none of them goes
    if kernel is not None:
        return _Display()
    return _Terminal() if sys.stderr.isatty() else _File()


class _Display:
    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def write(self, text: str) -> None:
        self._send({"text/plain": text})

    announce = write

    def clear(self) -> None:
        if self._handle is not None:
            self._send({})  # JupyterLab then draws no output, not even an empty one

    def _send(self, data: dict[str, str]) -> None:
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


class _Terminal:
    def __init__(self) -> None:
        self._longest = 0

    def write(self, text: str) -> None:
        self._longest = max(self._longest, len(text))
        print(f"\r{text:{self._longest}}", end="", file=sys.stderr, flush=True)  # noqa: T201

    announce = write

    def clear(self) -> None:
        if self._longest:
            print(f"\r{'':{self._longest}}\r", end="", file=sys.stderr, flush=True)  # noqa: T201


class _File:
    def announce(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def write(self, text: str) -> None:
        pass

    def clear(self) -> None:
        pass

"""Progress of what takes more than a second: one line that is rewritten in place and is gone at the end.

In a notebook it is a display, so that no box for stderr is left behind; the next report of the cell takes its place,
and no empty output stays. In a terminal it is the last line. Where nothing can be rewritten, as in a file, only what
one waits for without a count is written, once.

Each thread has a line of its own: cells in subshells and calls in a pool show theirs at the same time.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpumagic.report.document import Document
from gpumagic.report.text import render

DELAY = 1.0
"""Seconds that need no word."""


@contextmanager
def counted(most: int, unit: str) -> Iterator[Callable[[str], None]]:
    """Show how many of at most ``most`` steps are done: call the result with the name of each as it begins."""
    numbers = itertools.count(1)
    with _shown() as line:
        yield lambda step: line.write(f"{unit} {next(numbers)} of {most}: {step}")


@contextmanager
def elapsed(what: str) -> Iterator[Callable[[], None]]:
    """Show for how long something has been running: call the result once a second or so.

    Inside `counted` its line shows it.
    """
    began = time.monotonic()
    with _shown() as line:
        text = line.text or what
        yield lambda: line.write(f"{text}, {time.monotonic() - began:.0f} s")


def known(document: Document) -> None:
    """Show what is known before the end of what is being counted: above its line, and gone with it.

    The report has it again. A terminal that cannot go up keeps it.
    """
    line = _own.line
    if line is not None:
        line.known = render(document)
        line.write(line.text)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a line at once, during a call that reports no progress of its own."""
    with _shown() as line:
        if line.show is None:
            print(what, file=sys.stderr, flush=True)  # noqa: T201
        line.start = 0.0
        line.write(what)
        yield


class _Line:
    """The one line; it appears `DELAY` seconds after its making."""

    def __init__(self) -> None:
        self.show = _surface()
        self.start = time.monotonic() + DELAY
        self.text = ""
        self.known = ""
        self.is_shown = False

    def write(self, text: str) -> None:
        self.text = text
        if self.show is not None and time.monotonic() >= self.start:
            self.is_shown = True
            self.show(text, self.known)


class _Own(threading.local):
    """What a thread shows.

    Attributes:
        line: the line that it shows now.
        emptied: the display of its latest line in a notebook, once the line is gone, and the request that ran the cell.
    """

    line: _Line | None = None
    emptied: tuple[Any, object] | None = None


_own = _Own()


@contextmanager
def _shown() -> Iterator[_Line]:
    """Yield the line that this thread shows already, or a new one, which is cleared at the end."""
    if _own.line is not None:
        yield _own.line
        return
    line = _Line()
    _own.line = line
    try:
        yield line
    finally:
        _own.line = None
        if line.is_shown:
            line.write("")


def _surface() -> Callable[[str, str], None] | None:
    """Return what shows a line in the place of the last one, "" for none, and what is known by then above it.

    It is None where nothing can be rewritten.
    """
    shell = _shell()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return _in_terminal() if sys.stderr.isatty() else None
    if type(kernel).__module__.startswith("ipyparallel."):
        # An engine's client draws each update as one more output, and none of them goes.
        return None
    request = _request(shell)
    return None if request is None else _in_notebook(request)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _request(shell: Any) -> object:
    """Return the request that runs the cell of a kernel.

    None under `%%capture`: what it puts in the publisher's place has no request, and keeps each update.
    """
    return getattr(shell.display_pub, "parent_header", None)


def _in_notebook(request: object) -> Callable[[str, str], None]:
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    is_displayed = False

    def show(text: str, known: str) -> None:
        nonlocal is_displayed
        # Without data JupyterLab draws no output, not even an empty one.
        data = {"text/plain": f"{known}\n\n{text}".lstrip()} if text else {}
        if is_displayed:
            handle.update(data, raw=True)
        else:
            is_displayed = True
            handle.display(data, raw=True)
        _own.emptied = None if text else (handle, request)

    return show


def replaced_by(data: Mapping[str, str]) -> bool:
    """Show data where the running cell has an empty display left of a line; return whether it has one."""
    if _own.emptied is None:
        return False
    handle, request = _own.emptied
    _own.emptied = None
    if _request(_shell()) is not request:
        return False
    handle.update(data, raw=True)
    return True


def _in_terminal() -> Callable[[str, str], None]:
    longest = 0
    printed = ""

    def show(text: str, known: str) -> None:
        nonlocal longest, printed
        if known != printed:
            print(f"\r{'':{longest}}\r{known}\n", file=sys.stderr)  # noqa: T201
            printed = known
        longest = max(longest, len(text))
        rows = known.count("\n") + 2
        if text:
            end = ""
        elif known and _can_go_up(rows):
            end = f"\r\x1b[{rows}A\x1b[J"
        else:
            end = "\r"
        print(f"\r{text:{longest}}", end=end, file=sys.stderr, flush=True)  # noqa: T201

    return show


def _can_go_up(rows: int) -> bool:
    """Return whether a terminal's cursor can go up so many rows."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    return rows < shutil.get_terminal_size().lines

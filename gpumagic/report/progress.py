"""Progress of what takes more than a second: one line that is rewritten in place and is gone at the end.

In a notebook it is a display, so that no box for stderr is left behind; the next report of the cell takes its place,
and no empty output stays. In a terminal it is the last line. Where nothing can be rewritten, as in a file, only what
one waits for without a count is written, once.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
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
    if _line is not None:
        _line.known = render(document)
        _line.write(_line.text)


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
        self.text = self.known = ""
        self.is_shown = False

    def write(self, text: str) -> None:
        self.text = text
        if self.show is not None and time.monotonic() >= self.start:
            self.is_shown = True
            self.show(text, self.known)


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
        if line.is_shown:
            line.write("")


def _surface() -> Callable[[str, str], None] | None:
    """Return what shows a line in the place of the last one, "" for none, and what is known by then above it.

    It is None where nothing can be rewritten.
    """
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    if type(kernel).__module__.startswith("ipyparallel."):
        return (
            None  # an engine's client draws each update as one more output, and none of them goes
        )
    if (
        kernel is not None
    ):  # what `%%capture` puts in the publisher's place has no such request, and keeps each update
        request = getattr(shell.display_pub, "parent_header", None)
        return None if request is None else _in_notebook(request)
    return _in_terminal() if sys.stderr.isatty() else None


_emptied: tuple[Any, object] | None = None
"""The display of the latest line in a notebook, once the line is gone, and the request that ran its cell."""


def _in_notebook(request: object) -> Callable[[str, str], None]:
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    begin = [handle.display]

    def show(text: str, known: str) -> None:
        global _emptied  # noqa: PLW0603
        # Without data JupyterLab draws no output, not even an empty one.
        data = {"text/plain": f"{known}\n\n{text}".lstrip()} if text else {}
        (begin.pop() if begin else handle.update)(data, raw=True)
        _emptied = None if text else (handle, request)

    return show


def replaced_by(data: Mapping[str, str]) -> bool:
    """Show data where the running cell has an empty display left of a line; return whether it has one."""
    global _emptied
    if _emptied is None:
        return False
    (handle, request), _emptied = _emptied, None
    if (
        getattr(sys.modules["IPython"].get_ipython().display_pub, "parent_header", None)
        is not request
    ):
        return False
    handle.update(data, raw=True)
    return True


def _in_terminal() -> Callable[[str, str], None]:
    longest, printed = 0, ""

    def show(text: str, known: str) -> None:
        nonlocal longest, printed
        if known != printed:
            print(f"\r{'':{longest}}\r{known}\n", file=sys.stderr)  # noqa: T201
        longest, printed = max(longest, len(text)), known
        rows = known.count("\n") + 2 if known else 0
        goes_up = (
            not text
            and 0 < rows < shutil.get_terminal_size().lines
            and os.environ.get("TERM", "dumb") != "dumb"
        )
        end = f"\r\x1b[{rows}A\x1b[J" if goes_up else "" if text else "\r"
        print(f"\r{text:{longest}}", end=end, file=sys.stderr, flush=True)  # noqa: T201

    return show

"""Which line of a cell or a block runs in a thread, told from the thread's stack at any moment.

Lines are those of the cell's own frame, or of the block's: while a function that it calls runs, the line of the call.
IPython runs each statement of a cell in a frame of its own, so a frame is known by where it stands, not by itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Protocol


class Place(Protocol):
    """Tells the line of some code that a stack is in."""

    filename: str | None
    """The file of the code, once it has been seen to run."""

    def line(self, innermost: FrameType | None) -> int | None:
        """Return the line that a stack is in, or None where the code is not on it, or more than once."""


class OfCell:
    """A cell: the outermost frame of a module's kind over its name space that was not there before the cell.

    Args:
        namespace: the globals in which the cell runs.
        is_running: whether the cell itself makes this, and is not only about to start.
    """

    def __init__(self, namespace: Mapping[str, object], *, is_running: bool) -> None:
        self._namespace = namespace
        self._below = max(0, len(self._found(sys._getframe(1))) - is_running)
        self.filename: str | None = None

    def line(self, innermost: FrameType | None) -> int | None:
        """Return the line of the cell."""
        found = self._found(innermost)
        if len(found) <= self._below:
            return None
        frame = found[-1 - self._below]
        self.filename = frame.f_code.co_filename
        return frame.f_lineno

    def _found(self, frame: FrameType | None) -> list[FrameType]:
        """Return the frames, innermost first; not by name, as IPython 7.34 calls a cell's "<cell line: 1>"."""
        found = []
        while frame is not None:
            if frame.f_globals is self._namespace and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                found.append(frame)
            frame = frame.f_back
        return found


class OfCode:
    """A `with` block in some code, or a function's body."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self.filename: str | None = code.co_filename

    def line(self, innermost: FrameType | None) -> int | None:
        """Return the line of the code."""
        found, frame = [], innermost
        while frame is not None:
            if frame.f_code is self._code:
                found.append(frame.f_lineno)
            frame = frame.f_back
        return found[0] if len(found) == 1 else None

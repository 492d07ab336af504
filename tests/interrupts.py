"""Ctrl-C at a chosen line of some files, for tests that try every one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt at one line that runs in some files.

    Args:
        files: their paths.
        line: how many lines run there before.
    """

    def __init__(self, files: Collection[str], line: int) -> None:
        self._files = files
        self._left = line
        self.where = ""
        """The line; empty while it was not reached."""

    def run(self, shell: Any, cell: str) -> None:
        """Run a cell, in which `arm()` begins the count."""
        shell.user_ns["arm"] = lambda: sys.settrace(self._trace)
        before = sys.gettrace()
        try:
            shell.run_cell(cell, store_history=True)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if self.where or frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

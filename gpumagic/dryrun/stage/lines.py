"""Tells which line of the cell an operator belongs to."""

from __future__ import annotations

import sys
from types import FrameType

from gpumagic.dryrun.stage.ledger import Place


class Lines:
    """Finds the cell's running line from anywhere below it.

    Args:
        cell: the file name of the cell's code.
        sources: the text of the cell and of the notebook's other files, by file name.
    """

    def __init__(self, cell: str, sources: dict[str, str]) -> None:
        self._cell = cell
        self._lines = {name: text.splitlines() for name, text in sources.items()}

    def where(self) -> Place:
        """Return the cell's innermost running line, and the notebook's function it is in where that is another's."""
        frame: FrameType | None = sys._getframe(1)
        innermost: FrameType | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._cell:
                return self._place(frame, innermost)
            if innermost is None and name in self._lines:
                innermost = frame
            frame = frame.f_back
        return Place() if innermost is None else self._place(innermost, None)

    def _place(self, frame: FrameType, inner: FrameType | None) -> Place:
        lines = self._lines.get(frame.f_code.co_filename, [])
        code = lines[frame.f_lineno - 1].strip() if 0 < frame.f_lineno <= len(lines) else ""
        function = "" if inner is None else f"{inner.f_code.co_name}, line {inner.f_lineno}"
        return Place(frame.f_lineno, code, function)

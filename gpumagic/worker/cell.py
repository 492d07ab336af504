"""Where a cell stands while it is dry-run, and what is to be said of it."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Iterable
from types import CodeType, FrameType

from gpumagic.dryrun.wire import Key
from gpumagic.memory.ledger import Place
from gpumagic.source.frames import module_of, stack
from gpumagic.source.text import span_at
from gpumagic.worker.guesses import THREAD

Location = tuple[str, str, int]
"""A file, a function in it, and a line."""
_BETWEEN = ("gpumagic.", "torch._ops", "torch._compile", "torch._dynamo.eval_frame")
"""Modules that stand between the code that calls an operator and what answers for it."""


class Lines:
    """Finds the cell's running line from anywhere below it.

    Args:
        filename: that of the cell's code.
        sources: the text of the cell and of the notebook's other files, by file name.
    """

    def __init__(self, filename: str, sources: dict[str, str]) -> None:
        self._cell = filename
        self._files = frozenset(sources)
        # Where IPython has it too: inspect and TorchScript read functions of the cell there.
        linecache.cache.update(
            {
                name: (len(text), None, text.splitlines(keepends=True), name)
                for name, text in sources.items()
            }
        )
        self._place = functools.cache(self._place_of)
        self._text = functools.cache(self._text_at)

    def where(self) -> Place:
        """Return the cell's innermost running line, and the notebook's function it is in where that is another's."""
        running = (each for each in self._running() if each is not None)
        return self._place(
            *((each.f_code.co_filename, each.f_code.co_name, each.f_lineno) for each in running)
        )

    def reading(self) -> Key | None:
        """Return the cell's running line, the notebook's innermost expression, and below it the library's line.

        None where what is read is the cell's only to show.
        """
        if runs_in(*UNHEARD):
            return None
        frame, inner = self._running()
        inner = inner or frame
        below = next(
            (each for each in stack(sys._getframe()) if not module_of(each).startswith(_BETWEEN)),
            None,
        )
        library = (
            ""
            if below is None or below is inner
            else f"{below.f_code.co_filename}:{below.f_lineno}"
        )
        if inner is None:
            return None, THREAD, library
        return (
            (frame or inner).f_lineno,
            self._text(inner.f_code, inner.f_lasti, inner.f_lineno),
            library,
        )

    def _running(self) -> tuple[FrameType | None, FrameType | None]:
        """Return the cell's innermost frame, and the innermost one of the notebook's other code that it has called."""
        inner: FrameType | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._cell:
                break
            if inner is None and name in self._files:
                inner = frame
            frame = frame.f_back
        return frame, inner

    def _text_at(self, code: CodeType, instruction: int, number: int) -> str:
        """Return what an instruction was compiled from; all of its line where Python does not say (3.10)."""
        line = linecache.getline(code.co_filename, number)
        span = span_at(code, instruction)
        if span is not None and span[0] == span[1] == number:
            line = line.encode()[span[2] : span[3]].decode()
        return line.strip()

    def of(self, frames: Iterable[Location]) -> Place:
        """Return the same from the location of each frame, the innermost first."""
        innermost: Location | None = None
        for frame in frames:
            if frame[0] == self._cell:
                return self._place(frame, innermost)
            if innermost is None and frame[0] in self._files:
                innermost = frame
        return self._place(innermost)

    def _place_of(self, frame: Location | None = None, inner: Location | None = None) -> Place:
        if frame is None:
            return Place()
        filename, _, line = frame
        code = linecache.getline(filename, line).strip()
        return Place(line, code, "" if inner is None else f"{inner[1]}, line {inner[2]}")


def runs_in(*prefixes: str) -> bool:
    """Return whether a module whose name begins like this is running, in this thread."""
    return any(module_of(each).startswith(prefixes) for each in stack(sys._getframe(1)))


COMPILERS = ("torch._inductor.runtime.", "torch._inductor.select_algorithm", "triton.")
"""What measures kernels while torch.compile chooses among them, and copies what they would overwrite."""
UNHEARD = (*COMPILERS, "torch._tensor_str")
"""What reads values by which the cell decides nothing."""

"""Where a cell stands while it is dry-run: its running line, and the expression that reads a value."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType

from gpumagic.dryrun.wire import Key
from gpumagic.memory.ledger import NOWHERE, Place
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

    def __init__(self, filename: str, sources: Mapping[str, str]) -> None:
        self._cell = filename
        self._files = frozenset(sources)
        for name, text in sources.items():
            # Where IPython has it too: inspect and TorchScript read functions of the cell there.
            lines = text.splitlines(keepends=True)
            linecache.cache[name] = len(text), None, lines, name
        self._place = functools.cache(self._place_of)
        self._text = functools.cache(self._text_at)

    def where(self) -> Place:
        """Return the cell's innermost running line, with the notebook's function below it that runs, if one does."""
        frame, inner = self._running()
        if frame is None:
            frame, inner = inner, None
        if frame is None:
            return NOWHERE
        if inner is None:
            return self._place(_location(frame))
        return self._place(_location(frame), _location(inner))

    def reading(self) -> Key | None:
        """Return the cell's running line, the notebook's innermost expression, and below it the library's line.

        None where what is read is the cell's only to show.
        """
        if runs_in(*UNHEARD):
            return None
        frame, inner = self._running()
        innermost = inner or frame
        caller = _first_outside(sys._getframe())
        library = ""
        if caller is not None and caller is not innermost:
            library = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if innermost is None:
            return Key(None, THREAD, library)
        line = (frame or innermost).f_lineno
        code = self._text(innermost.f_code, innermost.f_lasti, innermost.f_lineno)
        return Key(line, code, library)

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
        if span is not None:
            first, last, begin, end = span
            if first == last == number:
                line = line.encode()[begin:end].decode()
        return line.strip()

    def of(self, frames: Iterable[Location]) -> Place:
        """Return what `where` does from the location of each frame, the innermost first."""
        innermost: Location | None = None
        for frame in frames:
            filename = frame[0]
            if filename == self._cell:
                return self._place(frame, innermost)
            if innermost is None and filename in self._files:
                innermost = frame
        return NOWHERE if innermost is None else self._place(innermost)

    def _place_of(self, location: Location, inner: Location | None = None) -> Place:
        filename, _, line = location
        function = ""
        if inner is not None:
            _, name, line_in_function = inner
            function = f"{name}, line {line_in_function}"
        return Place(line, linecache.getline(filename, line).strip(), function)


def _location(frame: FrameType) -> Location:
    return frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno


def _first_outside(frame: FrameType) -> FrameType | None:
    """Return the innermost frame, from a given one on, that does not stand between an operator and its answer."""
    for outer in stack(frame):
        if not module_of(outer).startswith(_BETWEEN):
            return outer
    return None


def runs_in(*prefixes: str) -> bool:
    """Return whether a module whose name begins like this is running, in this thread."""
    return any(
        module_of(frame).startswith(prefixes) for frame in stack(sys._getframe(1))
    )


COMPILERS = ("torch._inductor.runtime.", "torch._inductor.select_algorithm", "triton.")
"""What measures kernels while torch.compile chooses among them, and copies what they would overwrite."""
UNHEARD = (*COMPILERS, "torch._tensor_str")
"""What reads values by which the cell decides nothing."""

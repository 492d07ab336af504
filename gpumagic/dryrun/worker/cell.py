"""Where a cell stands while it is dry-run, and what is to be said of it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from gpumagic.dryrun.effects import CACHES
from gpumagic.dryrun.worker.guesses import THREAD, Key
from gpumagic.memory.ledger import Place
from gpumagic.source.text import span_at


@dataclass
class Notes:
    """Sentences for the report, each once."""

    assumed: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    effects: dict[str, None] = field(default_factory=dict)
    written: Callable[[], Iterable[str]] = tuple
    """Tells what was done to files, also by code that no hook sees."""

    def assume(self, text: str) -> None:
        """Note what is assumed."""
        self.assumed.setdefault(text)

    def effect(self, text: str) -> None:
        """Note what the cell would do to the world."""
        self.effects.setdefault(text)

    def all_effects(self) -> list[str]:
        """Return what the cell would do to the world, with what only the files themselves tell."""
        told = " ".join(self.effects)
        files = [each for each in self.written() if not any(part in each for part in CACHES)]
        return [*self.effects, *(each for each in files if each.rpartition("/")[2] not in told)]

    def not_known(self, text: str) -> None:
        """Note what is not known."""
        self.unknown.setdefault(text)


_NOWHERE = Place()
_BETWEEN = ("gpumagic.", "torch._ops")
"""Modules that stand between the code that calls an operator and what answers for it."""
_COPIES = {"cpu", "to", "copy_"}


class Lines:
    """Finds the cell's running line from anywhere below it.

    Args:
        filename: that of the cell's code.
        sources: the text of the cell and of the notebook's other files, by file name.
    """

    def __init__(self, filename: str, sources: dict[str, str]) -> None:
        self._cell = filename
        self._lines = {name: text.splitlines() for name, text in sources.items()}
        self._places: dict[tuple[Any, ...], Place] = {}
        self._expressions: dict[tuple[CodeType, int], str] = {}
        self._keeping: dict[tuple[CodeType, int], bool] = {}

    def where(self) -> Place:
        """Return the cell's innermost running line, and the notebook's function it is in where that is another's."""
        frame, inner = self._running()
        if frame is None:
            frame, inner = inner, None
        if frame is None:
            return _NOWHERE
        key = frame.f_code, frame.f_lineno, inner and inner.f_code, inner and inner.f_lineno
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._place(_location(frame), _location(inner) if inner else None)
        return place

    def reading(self) -> Key | None:
        """Return the cell's running line, the notebook's innermost expression, and below it the library's line.

        None while kernels are measured.
        """
        if runs_in(*COMPILERS):
            return None
        frame, inner = self._running()
        inner, below = inner or frame, _calling()
        library = "" if below is None or below is inner else f"{below.f_code.co_filename}:{below.f_lineno}"
        if inner is None:
            return None, THREAD, library
        at = (inner.f_code, inner.f_lasti)
        if at not in self._expressions:
            self._expressions[at] = self._text(inner)
        return (frame or inner).f_lineno, self._expressions[at], library

    def keeps(self) -> bool:
        """Return whether a method is called that copies a tensor and looks at none of its numbers."""
        frame = _calling()
        if frame is None:
            return False
        at = (frame.f_code, frame.f_lasti)
        if at not in self._keeping:
            self._keeping[at] = _method(self._text(frame)) in _COPIES
        return self._keeping[at]

    def _running(self) -> tuple[FrameType | None, FrameType | None]:
        """Return the cell's innermost frame, and the innermost one of the notebook's other code that it has called."""
        inner: FrameType | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._cell:
                break
            if inner is None and name in self._lines:
                inner = frame
            frame = frame.f_back
        return frame, inner

    def _text(self, frame: FrameType) -> str:
        """Return what a frame's instruction was compiled from; all of its line where Python does not say (3.10)."""
        name = frame.f_code.co_filename
        lines = self._lines[name] if name in self._lines else linecache.getlines(name)
        line = lines[frame.f_lineno - 1] if 0 < frame.f_lineno <= len(lines) else ""
        span = span_at(frame.f_code, frame.f_lasti)
        if span is not None and span[0] == span[1] == frame.f_lineno:
            line = line.encode()[span[2] : span[3]].decode()
        return line.strip()

    def of(self, frames: Iterable[tuple[str, str, int]]) -> Place:
        """Return the same from the file, function and line of each frame, the innermost first."""
        innermost: tuple[str, str, int] | None = None
        for frame in frames:
            if frame[0] == self._cell:
                return self._place(frame, innermost)
            if innermost is None and frame[0] in self._lines:
                innermost = frame
        return Place() if innermost is None else self._place(innermost, None)

    def _place(self, frame: tuple[str, str, int], inner: tuple[str, str, int] | None) -> Place:
        filename, _, line = frame
        lines = self._lines.get(filename, [])
        code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return Place(line, code, "" if inner is None else f"{inner[1]}, line {inner[2]}")


def _calling() -> FrameType | None:
    """Return the innermost frame of what is neither this package nor torch's way to an operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _method(text: str) -> str:
    """Return the name of what an expression calls last; nothing where it is no call."""
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[place], 0)
        if depth == 0:
            return text[:place].rpartition(".")[2]
    return ""


def _location(frame: FrameType) -> tuple[str, str, int]:
    return frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno


def runs_in(*prefixes: str) -> bool:
    """Return whether a module whose name begins like this is running, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(prefixes):
            return True
        frame = frame.f_back
    return False


COMPILERS = ("torch._inductor.runtime.", "torch._inductor.select_algorithm", "triton.")
"""What measures kernels while torch.compile chooses among them, and copies what they would overwrite."""

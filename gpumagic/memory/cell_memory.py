"""The memory timeline of one cell or block, from its start to its end: who looks, and whose lines are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import CodeType

from gpumagic.heap import lasting
from gpumagic.heap.lasting import Found
from gpumagic.memory import allocator, sampler
from gpumagic.memory.allocator import AllocatorFigures
from gpumagic.memory.records import MemoryTimeline
from gpumagic.memory.timeline import STRETCHES, TimelineLog
from gpumagic.source.lines import OfCell, OfCode, Place, WatchedCode


class CellMemory:
    """Follows what is allocated from `start` to `stop`.

    Args:
        before: the allocators' figures as it begins.
        namespace: the globals of the code.
        block: the code with the `with` block, or of the function; None for a cell.
        line: of the `with` statement or the function; None for a cell.
        is_running: of a cell, whether it runs already and is not only about to.
        by_clock: whether to look every now and then; without, `log` is for others to fill.
        stretches: into how many it is folded at most.
    """

    def __init__(
        self,
        before: Mapping[str, AllocatorFigures],
        namespace: Mapping[str, object],
        block: CodeType | None = None,
        line: int | None = None,
        *,
        is_running: bool = False,
        by_clock: bool = True,
        stretches: int = STRETCHES,
    ) -> None:
        self._place: Place = OfCode(block) if block is not None else OfCell(namespace, is_running=is_running)
        self._begins = (self._place.line(sys._getframe(1)) if is_running else None) or line or 1
        self._code = WatchedCode(namespace, self._place.filename, line)
        self.log = TimelineLog(before, self._begins, stretches, by_look=not by_clock)
        self._thread = get_ident()
        self._sampled = sampler.Sampled(self.log, self._place) if by_clock else None

    def start(self) -> None:
        """Begin to look, where that goes by the clock."""
        if self._sampled is None:
            return
        try:
            sampler.begin(self._sampled)
        except BaseException:  # Ctrl-C: no thread is left behind
            self.stop()
            raise

    def look(self) -> None:
        """Note what was allocated before the first line has run."""
        self.log.add(allocator.all_figures(), self._begins)

    def note_operator(self, device: str, addresses: Iterable[int], innermost: Callable[[], int | None]) -> None:
        """Look at a device after an operator that allocates its results there.

        Args:
            device: which one.
            addresses: of the results.
            innermost: returns the line of a function of the cell, if one runs.
        """
        now = allocator.figures(device)
        if now is not None:
            # Autograd works for the cell in threads of its own.
            stack = sys._getframe(1) if get_ident() == self._thread else sys._current_frames().get(self._thread)
            self.log.add_operator(device, now, self._place.line(stack), addresses, innermost)

    def stop(self) -> None:
        """Look no more; again does nothing."""
        self.log.end()
        if self._sampled is not None:
            sampler.end(self._sampled)

    def finished(
        self, after: Mapping[str, AllocatorFigures], kept: tuple[Found, Found] = ({}, {})
    ) -> MemoryTimeline | None:
        """Return the timeline of what has stopped, or None where no device's memory was touched.

        Args:
            after: the allocators' figures at its end.
            kept: what modules and optimizers had at the start and at the end.
        """
        self._code.filename = self._code.filename or self._place.filename
        return self.log.finished(after, lambda: dict(self._code.lines()), lasting.parts(*kept), lasting.grown(*kept))

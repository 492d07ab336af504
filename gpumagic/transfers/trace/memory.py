"""What a traced cell's memory was at each moment: the allocator's history, with the line and module of each block.

While the cell runs only turns are noted: which line and which module is the innermost from when on. CUDA's history
says of each entry when the turn of its thread began (torch has it as metadata), so entries of the run's thread find
their turn exactly; those of autograd's threads, and of other allocators, find it by the clock. At the end the history
is gone through once, into a `Ledger` like that of a dry run.

No dispatch mode is needed for that, and none may be on: under one autograd adds no gradients in place, so that a
traced cell would have a higher peak than the same cell alone. No counter is read at a line: that takes 12 to 30 us.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from threading import get_ident
from typing import Any, NamedTuple

from gpumagic.memory import allocator, segments
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.memory.history import AllocatorHistory, BlockEvent
from gpumagic.memory.ledger import Account, Ledger, Place
from gpumagic.transfers.trace.lines import LineSum

Owner = tuple[int | None, str]
"""The module, and what the memory is for."""


class ModuleTurn(NamedTuple):
    """The module that runs from a time on."""

    at: float
    module: int | None
    in_backward: bool

    def apply(self, book: Ledger) -> None:
        """Let the blocks that come have this module."""
        book.module, book.in_backward = self.module, int(self.in_backward)


class Mark(NamedTuple):
    """What the block at an address is at a time."""

    at: float
    address: int
    owner: Owner

    def apply(self, book: Ledger) -> None:
        """Say so."""
        module, kind = self.owner
        book.mark(self.address, kind)
        if module is not None:
            book.own(self.address, module)


class TracedMemory:
    """The memory of a run's device, and of the others of its backend.

    Args:
        device: the run's.
        owners: returns by address whose the parameters, gradients, buffers and optimizers' states are now.
    """

    GROWTH, INTERVAL = 1.02, 0.005
    """The owners are asked for between modules if the memory has grown by this; it is read once in so many seconds."""

    def __init__(self, device: str, owners: Callable[[], Iterable[tuple[int, Owner]]]) -> None:
        self.device = device
        self.history = AllocatorHistory(device)
        self._read = allocator.reader(device)
        self._thread = get_ident()
        self._owners = owners
        self._asked_at, self._read_at = -1, 0.0
        self._lines, self._line_times = list[int | None](), array("d")
        self._modules: list[ModuleTurn] = []
        self._marks: list[Mark] = []
        self._in_use: list[tuple[int, int]] = []

    def start(self) -> None:
        """Begin to record."""
        self.history.start()
        self._ask(self.history.started)

    def stop(self, at: float) -> None:
        """End it; idempotent."""
        self.history.stop()
        if self.history.events() and not self._in_use:
            self._asked_at = -1
            self._ask(at)
            blocks = segments.allocated_blocks(Device.parse(self.device).backend)
            self._in_use = [(each.address, each.size) for each in blocks if each.device == self.device]

    # ---- While the cell runs

    def line_runs(self, line: int | None, at: float) -> None:
        """Note which line of the cell is the innermost from now on, in the run's thread."""
        self.history.begin_turn(at)
        if not self._lines or line != self._lines[-1]:
            self._lines.append(line)
            self._line_times.append(at)

    def module_runs(self, module: int | None, in_backward: bool, at: float) -> None:
        """Note which module runs from now on."""
        if get_ident() == self._thread:
            self.history.begin_turn(at)
        self._modules.append(ModuleTurn(at, module, in_backward))
        if module is None and at > self._read_at + self.INTERVAL:
            self._ask(at)

    def _ask(self, at: float) -> None:
        self._read_at, now = at, self._read()
        if now is not None and now.allocated > self.GROWTH * self._asked_at:
            self._asked_at = now.allocated
            self._marks += [Mark(at, address, owner) for address, owner in self._owners()]

    # ---- Afterwards

    def missing(self) -> str:
        """Return why lines have no memory, or those before what the history has kept; empty where all have."""
        before, after = self.history.before.get(self.device), self.history.after.get(self.device)
        if not self.history.is_kept:
            backend = Device.parse(self.device).backend
            counts = backend not in ("cpu", "meta")
            return f"Lines have no memory: the allocator of {backend} keeps no history." if counts else ""
        count = (after.events if after else 0) - (before.events if before else 0)
        kept = len(self._events())
        return "" if count <= kept else f"The allocator's history has the last {kept:,} of {count:,} events."

    def add_to_lines(self, runs: Iterable[tuple[LineSum, float, float]]) -> None:
        """Add to each line what was allocated and freed while it ran, and the highest."""
        if not self.history.is_kept:
            return
        levels = Levels(self._events(), self.history.after.get(self.device, AllocatorStats(0, 0, 0)))
        first = levels.times[0] if self.missing() else 0.0
        for found, start, end in runs:
            if start >= first:
                levels.add_to(found, start, end)

    def line_at(self, time: float) -> int | None:
        """Return the innermost line of the cell that ran."""
        at = bisect_right(self._line_times, time)
        return self._lines[at - 1] if at else None

    def ledger(self) -> tuple[Ledger, Counter[int | None], Counter[int | None]]:
        """Return the life of every block of the run's device, and what each module allocated and freed."""
        book, taken, freed = Ledger([Account()]), Counter[int | None](), Counter[int | None]()
        events = self._events()
        for address, nbytes in _in_use_before(events, self._in_use):
            book.begin(address, 0, nbytes)
        book.start()
        notes: list[ModuleTurn | Mark] = sorted([*self._marks, *self._modules], key=lambda each: -each.at)
        for event in events:
            while notes and notes[-1].at <= event.turn:
                notes.pop().apply(book)
            (taken if event.nbytes > 0 else freed)[book.module] += abs(event.nbytes)
            if event.nbytes > 0:
                book.operator, book.place = "", Place(self.line_at(event.turn))
                book.begin(event.address, 0, event.nbytes)
            elif event.address in book.blocks:
                book.end(event.address)
        while notes:
            notes.pop().apply(book)
        for life in book.lives:
            if not life.backward:
                life.mark("activations")  # results of the forward that have no other name
        return book, taken, freed

    def snapshot(self, filename: str, code: Mapping[int | None, str]) -> Mapping[str, Any] | str:
        """Return torch's snapshot of the cell, in which each entry without a stack has the line of the cell for one."""
        found = self.history.snapshot
        if isinstance(found, str):
            return found
        frames: dict[int | None, list[dict[str, Any]]] = {None: []}
        for trace in found["device_traces"]:
            for entry, turn in self.history.turns(trace):
                line = self.line_at(turn)
                if line not in frames:
                    frames[line] = [{"filename": filename, "line": line, "name": code.get(line, "").strip()}]
                entry.setdefault("frames", frames[line])
        for segment in found["segments"]:
            for block in segment["blocks"]:
                block.setdefault("frames", [])
        return found

    def _events(self) -> list[BlockEvent]:
        return self.history.events().get(self.device, [])


class Levels:
    """A device's allocated bytes before its history and after each event of it."""

    def __init__(self, events: list[BlockEvent], after: AllocatorStats) -> None:
        self.times = [each.turn for each in events]
        before = after.allocated - sum(each.nbytes for each in events)
        self.levels = list(accumulate((each.nbytes for each in events), initial=before))
        self._taken = list(accumulate((max(0, each.nbytes) for each in events), initial=0))

    def add_to(self, found: LineSum, start: float, end: float) -> None:
        """Add to a line what was done from its start to its end."""
        first, last = bisect_left(self.times, start), bisect_left(self.times, end)
        taken = self._taken[last] - self._taken[first]
        found.allocated = (found.allocated or 0) + taken
        found.freed = (found.freed or 0) + taken - (self.levels[last] - self.levels[first])
        found.peak = max(found.peak or 0, *self.levels[first : last + 1])


def _in_use_before(events: Iterable[BlockEvent], at_end: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the blocks that were in use when a history begins: what it gives back or keeps without having taken it."""
    taken: Counter[int] = Counter()
    for event in events:
        if event.nbytes > 0:
            taken[event.address] += 1
        elif taken[event.address]:
            taken[event.address] -= 1
        else:
            yield event.address, -event.nbytes
    yield from ((address, nbytes) for address, nbytes in at_end if not taken[address])

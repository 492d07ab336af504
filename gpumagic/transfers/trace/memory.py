"""What a traced cell's memory was at each moment: the allocator's history, with the line and module of each block.

While the cell runs only turns are noted: which line and module is the innermost from when on. "When" is the number of
blocks that the allocator has handed out and taken back until then, which is its history's own order, so that a turn
finds its place between the entries exactly, whatever clocks say and whichever thread asks for memory. At the end the
history is gone through once, into a `Ledger` like that of a dry run.

No dispatch mode is needed for that, and none may be on: under one autograd adds no gradients in place, so that a
traced cell would have a higher peak than the same cell alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from gpumagic.memory import segments
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.memory.history import AllocatorHistory, BlockEvent
from gpumagic.memory.ledger import Account, Ledger, Place
from gpumagic.memory.timeline import DeviceEvent

Owner = tuple[int | None, str]
"""The module, and what the memory is for."""


class Turn(NamedTuple):
    """What runs from a number of events on."""

    events: int
    at: float
    line: int | None
    module: int | None
    in_backward: bool

    def apply(self, book: Ledger) -> None:
        """Let the blocks that come have this line and module."""
        book.place, book.module, book.in_backward = Place(self.line), self.module, int(self.in_backward)


class Mark(NamedTuple):
    """What the block at an address is, after a number of events."""

    events: int
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

    GROWTH = 1.02
    """The owners are asked for whenever the memory has grown by this since they were last."""

    def __init__(self, device: str, owners: Callable[[], Iterable[tuple[int, Owner]]]) -> None:
        self.device = device
        self.history = AllocatorHistory(device)
        self._owners = owners
        self._asked_at = 0
        self._turns: list[Turn] = []
        self._marks: list[Mark] = []
        self._line: int | None = None
        self._module: int | None = None
        self._in_backward = False
        self._in_use: list[tuple[int, int]] = []

    def start(self) -> None:
        """Begin to record."""
        self.history.start()
        now = self.history.before.get(self.device)
        self._ask(now or AllocatorStats(0, 0, 0))

    def stop(self) -> None:
        """End it; idempotent."""
        self.history.stop()
        if self.history.events() and not self._in_use:
            self._ask(self.history.after[self.device])
            blocks = segments.allocated_blocks(Device.parse(self.device).backend)
            self._in_use = [(each.address, each.size) for each in blocks if each.device == self.device]

    # ---- While the cell runs

    def line_runs(self, line: int | None, at: float, now: AllocatorStats | None) -> None:
        """Note which line of the cell is the innermost from now on."""
        if line != self._line:
            self._line = line
            self._turn(at, now)

    def module_runs(self, module: int | None, in_backward: bool, at: float, now: AllocatorStats | None) -> None:
        """Note which module runs from now on."""
        self._module, self._in_backward = module, in_backward
        self._turn(at, now)

    def _turn(self, at: float, now: AllocatorStats | None) -> None:
        if now is None:
            return
        turn = Turn(now.events, at, self._line, self._module, self._in_backward)
        if self._turns and self._turns[-1].events == turn.events:  # nothing was allocated in between
            self._turns[-1] = turn
        else:
            self._turns.append(turn)
        if now.allocated > self.GROWTH * self._asked_at:
            self._ask(now)

    def _ask(self, now: AllocatorStats) -> None:
        self._asked_at = now.allocated
        self._marks += [Mark(now.events, address, owner) for address, owner in self._owners()]

    # ---- Afterwards

    def levels(self) -> Levels | None:
        """Return the device's memory after each event; None where there is no history."""
        found = self.history.events().get(self.device)
        if found is None or self.device not in self.history.after:
            return None
        return Levels(found, self.history.after[self.device])

    def ledger(self) -> Ledger:
        """Return the life of every block of the run's device."""
        book = Ledger([Account()])
        events = self.history.events().get(self.device, [])
        for address, nbytes in _in_use_before(events, self._in_use):
            book.begin(address, 0, nbytes)
        book.start()
        notes: list[Turn | Mark] = [*self._marks, *self._turns]
        notes.sort(key=lambda each: each.events, reverse=True)
        for number, event in enumerate(events, self.history.after[self.device].events - len(events) if events else 0):
            while notes and notes[-1].events <= number:
                notes.pop().apply(book)
            if event.nbytes > 0:
                book.operator = ""
                book.begin(event.address, 0, event.nbytes)
            elif event.address in book.blocks:
                book.end(event.address)
        while notes:
            notes.pop().apply(book)
        for life in book.lives:
            if not life.backward:
                life.mark("activations")  # results of the forward that have no other name
        return book

    def timeline(self) -> list[DeviceEvent]:
        """Return every event of every device of the backend, in order, with the line that ran."""
        found: list[DeviceEvent] = []
        for device, events in self.history.events().items():
            after = self.history.after[device]
            levels = Levels(events, after)
            numbers, times = [each.events for each in self._turns], [each.at for each in self._turns]
            for place, event in enumerate(events):
                number = levels.first + place
                at = bisect_right(numbers, number) if device == self.device else bisect_right(times, event.at)
                line = self._turns[at - 1].line if at else None
                is_new = event.nbytes > 0
                found.append(
                    DeviceEvent(device, event.at, levels.after(number + 1), line, event.address if is_new else 0)
                )
        return sorted(found, key=lambda each: each.at)


class Levels:
    """A device's allocated bytes after each event of its history."""

    def __init__(self, events: list[BlockEvent], after: AllocatorStats) -> None:
        self.first = after.events - len(events)
        """How many events came before."""
        before = after.allocated - sum(each.nbytes for each in events)
        self._levels = list(accumulate((each.nbytes for each in events), initial=before))
        self._taken = list(accumulate((max(0, each.nbytes) for each in events), initial=0))

    def after(self, number: int) -> int:
        """Return what was allocated after so many events."""
        return self._levels[number - self.first]

    def highest(self, start: AllocatorStats, end: AllocatorStats) -> int | None:
        """Return the most that was allocated between two readings.

        None where that cannot be told: the history has lost its beginning, or the bytes that it has are not those that
        the allocator counted, which leaves up to 1 MiB that would be too small to be split off with a large block.
        """
        first, last = start.events - self.first, end.events - self.first
        if first < 0 or last >= len(self._levels) or self._taken[last] - self._taken[first] != end.total - start.total:
            return None
        return start.allocated + max(self._levels[first : last + 1]) - self._levels[first]


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

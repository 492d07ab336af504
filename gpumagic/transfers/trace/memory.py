"""What a traced cell's memory was at each moment: the allocator's history, with the line and module of each block.

While the cell runs only turns are noted: which line and which module runs from when on. CUDA's history says of each
entry when the turn of its thread began (torch has it as metadata), so entries of the run's thread find their turn
exactly; those of autograd's threads, and of other allocators, find it by the clock. At the end the history is gone
through once, by columns: a step of small operators has some ninety entries, and an object of Python's for each would
take as long as the step.

No dispatch mode is needed for that, and none may be on: under one autograd adds no gradients in place, so that a
traced cell would have a higher peak than the same cell alone. No counter is read at a line: that takes 12 to 30 us.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from linecache import getline
from math import inf
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from gpumagic.memory import allocator, segments
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.memory.history import AllocatorHistory, BlockEvents, turns
from gpumagic.transfers.trace.lines import Place

_NEVER = AllocatorStats(-1, 0, 0)


class Owner(NamedTuple):
    """Whose memory is at an address, and what it is for."""

    address: int
    module: int
    kind: str


class TracedMemory:
    """The memory of a run's device.

    Args:
        device: the run's.
        owners: returns whose the parameters, gradients, buffers and optimizers' states are now.
    """

    GROWTH, INTERVAL = 1.02, 100
    """The owners are asked for where memory has come to a new peak, or has grown by this; next after so many times what
    it took to find out."""

    def __init__(self, device: str, owners: Callable[[], Iterable[Owner]]) -> None:
        self.device = device
        self.history = AllocatorHistory(device)
        self._read = allocator.reader(device)
        self._owners = owners
        self._asked = _NEVER
        self._next_read = 0
        self._marks: list[tuple[int, Owner]] = []
        self._in_use: list[tuple[int, int]] = []

    def start(self) -> None:
        """Begin to record."""
        self.history.start()
        self._ask(self.history.started)

    def stop(self, at: int) -> None:
        """End it; idempotent."""
        self.history.stop()
        if self.history.events is not None and not self._in_use:
            self._asked = _NEVER
            self._ask(at)
            told = self.history.snapshot
            known = None if isinstance(told, str) else told["segments"]
            blocks = segments.allocated_blocks(Device.parse(self.device).backend, known)
            self._in_use = [(each.address, each.size) for each in blocks if each.device == self.device]

    def begin_turn(self, at: int) -> None:
        """Note that a line or module begins in the run's thread."""
        self.history.begin_turn(str(at))
        if at > self._next_read:
            self._ask(at)
            self._next_read = at + self.INTERVAL * (perf_counter_ns() - at)

    def _ask(self, at: int) -> None:
        now, last = self._read(), self._asked
        if now is not None and (now.allocated > self.GROWTH * last.allocated or (now.peak or 0) > (last.peak or 0)):
            self._asked = now
            self._marks += [(at, each) for each in self._owners()]

    # ---- Afterwards

    @property
    def events(self) -> BlockEvents:
        """What the device did."""
        return self.history.events or BlockEvents(*np.zeros((3, 0), np.int64))

    def missing(self) -> str:
        """Return why lines have no memory, or those before what the history has kept; empty where all have."""
        if self.history.events is None:
            backend = Device.parse(self.device).backend
            counts = backend not in ("cpu", "meta")
            return f"Lines have no memory: the allocator of {backend} keeps no history." if counts else ""
        count, kept = self.history.after.events - self.history.before.events, len(self.events.turn)
        return "" if count <= kept else f"The allocator's history has the last {kept:,} of {count:,} events."

    def by_line(self, runs: Any) -> dict[int, list[int]]:
        """Return for each line the bytes allocated and freed while it ran, and the most that were allocated at once.

        Args:
            runs: the number of the line, start and end of each time that one ran in the run's thread, a row each.
        """
        if self.history.events is None:
            return {}
        _, nbytes, turn = self.events
        if self.missing():
            runs = runs[runs[:, 1] >= turn[0]]
        lines, starts, ends = runs.T
        first, last = np.searchsorted(turn, starts), np.searchsorted(turn, ends)
        levels, allocated = _sums(nbytes), _sums(np.maximum(nbytes, 0))
        levels += self.history.after.allocated - levels[-1]
        taken = allocated[last] - allocated[first]
        grown = levels[last] - levels[first]
        # The highest from the event before each run's first to its last; what it finds for the gaps is left out.
        spans = np.stack([first, last + 1], axis=1).ravel()
        peaks = np.maximum.reduceat(np.append(levels, 0), spans)[::2] if len(spans) else first
        found = np.zeros((3, lines.max(initial=-1) + 1), np.int64)
        np.add.at(found[0], lines, taken)
        np.add.at(found[1], lines, taken - grown)
        np.maximum.at(found[2], lines, peaks)
        return {line: found[:, line].tolist() for line in np.unique(lines).tolist()}

    def by_module(
        self, modules: Any, backward: int
    ) -> tuple[Counter[int], Counter[int], defaultdict[int, Counter[str]]]:
        """Return the bytes that each module allocated, those that it freed, and what it had at the peak, by kind.

        Args:
            modules: times, each with the number of the module that runs from then on; a row each.
            backward: the number that stands for backward passes.
        """
        module = _at(modules, self.events.turn)
        at_peak = defaultdict[int, Counter[str]](Counter)
        for event, size, owner in self._held_at_peak():
            number = -1 if event is None else int(module[event])
            kind = "other" if event is None else "temporaries" if number == backward else "activations"
            if owner is not None:
                number, kind = owner.module, owner.kind
            at_peak[number][kind] += size
        sums = [np.bincount(module + 1, np.maximum(0, each)) for each in (self.events.nbytes, -self.events.nbytes)]
        taken, freed = (Counter(dict(enumerate(each.astype(np.int64).tolist(), start=-1))) for each in sums)
        return taken, freed, at_peak

    def snapshot(self, lines: Any, places: Iterable[Place]) -> Any:
        """Return torch's snapshot of the cell, in which each entry without a stack has its line for one; or why not.

        Args:
            lines: times, each with the number of the line that is the innermost from then on; a row each.
            places: the file and line of each.
        """
        found = self.history.snapshot
        if isinstance(found, str):
            return found
        frames = [[{"filename": file, "line": line, "name": getline(file, line).strip()}] for file, line in places]
        frames.append([])  # that of -1
        for trace in found["device_traces"]:
            numbers = _at(lines, turns(trace, self.history.ahead)).tolist()
            for entry, number in zip(trace, numbers, strict=True):
                entry.setdefault("frames", frames[number])
        for segment in found["segments"]:
            for block in segment["blocks"]:
                block.setdefault("frames", [])
        return found

    def _held_at_peak(self) -> Iterator[tuple[int | None, int, Owner | None]]:
        """Yield each block in use at the peak: the event that began it, if one did, its bytes, and whose it is."""
        peak = int(np.argmax(_sums(self.events.nbytes)))
        address, nbytes, turn = (each.tolist() for each in self.events)
        last = dict(zip(address[:peak], range(peak), strict=True))
        following = dict(zip(reversed(address[peak:]), reversed(range(peak, len(address))), strict=True))
        # What is kept to the end, what is given back next, and what was handed out last; negative what was not in use.
        sizes = {**dict(self._in_use), **{each: -nbytes[event] for each, event in following.items()}}
        sizes.update((each, nbytes[event]) for each, event in last.items())
        owners: dict[int, Owner] = {}
        for at, owner in self._marks:
            where = owner.address
            born = turn[last[where]] if where in last else -inf
            is_this = born < at <= (turn[following[where]] if where in following else inf)
            # A parameter is what it is; of other words the first holds.
            if is_this and (where not in owners or owner.kind in ("parameters", "buffers")):
                owners[where] = owner
        for where, size in sizes.items():
            if size > 0:
                yield last.get(where), size, owners.get(where)


def _at(what: Any, times: Any) -> Any:
    """Return what runs at some times by what runs from a time on; -1 before the first."""
    return np.append(-1, what[:, 1])[np.searchsorted(what[:, 0], times, side="right")]


def _sums(values: Any) -> Any:
    """Return the sums of the first none, one, two and so on."""
    return np.concatenate([[0], np.cumsum(values)])

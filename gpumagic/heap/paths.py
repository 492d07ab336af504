"""Every way from some names to the tensors they reach, in one pass over what the names hold.

Small containers come first, so that a list of a million records cannot hide the model beside it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count, islice
from typing import Any

from gpumagic.heap.anatomy import VARIABLE, Branch, Opener, module, optimizer
from gpumagic.heap.openers import opener_of
from gpumagic.heap.spelling import Path, spell

MAX_DEPTH = 32
MAX_STEPS = 250_000
"""Children looked at before a search gives up: about 50 ms."""
LARGE = 1_000
"""Children that make a container wait until the smaller ones have been opened."""
_HUGE = 50_000
"""Children that are only looked at if some tensor has no name yet."""
_MAX_PATHS = 16


class Search:
    """Finds tensors from named roots; what one run has opened, a later one does not open again.

    Args:
        closed: objects that are never opened, such as the shell.
        steps: how many children one run looks at before it gives up.
    """

    def __init__(self, closed: Iterable[object] = (), steps: int = MAX_STEPS) -> None:
        self._closed = list(closed)  # kept, or another object could come by one's `id`
        self._seen = set(map(id, self._closed))
        self._openers: dict[type, Opener | None] = {}
        self._limit = self._steps = steps
        self._queue: deque[tuple[object, Path]] = deque()
        self._large: list[tuple[int, int, object, Path]] = []
        self._order = count()
        self.gave_up = False
        self._paths: dict[int, list[Path]] = {}
        self.tensors: dict[int, Any] = {}
        """The tensors met, so that an `id` stays theirs."""
        self.owners: list[object] = []
        """The modules and optimizers met."""

    def release(self) -> None:
        """Let go of every object, however the search ended."""
        self.tensors.clear()
        self.owners.clear()
        self._closed.clear()
        self._queue.clear()
        self._large.clear()

    def run(self, roots: Iterable[tuple[str, object]], wanted: Iterable[int] | None = None) -> dict[int, list[Path]]:
        """Follow each root to every tensor below it; return the ways to each, by the tensor's `id`.

        Args:
            roots: names, or labels, with what they stand for.
            wanted: the tensors to find; huge containers stay closed once none of them is without a way.
        """
        self._steps, self._paths = self._limit, {}
        missing = None if wanted is None else set(wanted)
        self._meet(Branch("name", VARIABLE, list(roots)), None)
        while self._steps > 0 and (self._queue or self._large):
            if self._queue:
                value, path = self._queue.popleft()
            else:
                length, _, value, path = heapq.heappop(self._large)
                if length >= _HUGE and missing is not None and missing <= self._paths.keys():
                    break
                self._steps -= length // 4  # even what holds nothing is glanced at
            if path.depth < MAX_DEPTH:
                self._open(value, path)
        self.gave_up |= self._steps <= 0
        self._queue.clear()
        self._large.clear()
        return self._paths

    def _open(self, value: object, path: Path) -> None:
        opener = self._openers[type(value)]
        assert opener is not None
        if opener.branches in (module, optimizer):
            self.owners.append(value)
        for branch in opener.branches(value, opener):
            if self._steps <= 0:
                return
            self._meet(branch, path)

    def _meet(self, branch: Branch, parent: Path | None) -> None:
        style, rank, children, below = branch
        if below is not None:
            assert parent is not None
            parent = Path(parent, "state", id(below), rank, parent.depth + 1)
        rank, depth = (rank, 0) if parent is None else (max(rank, parent.rank), parent.depth + 1)
        openers, seen = self._openers, self._seen
        children = list(islice(children, self._steps))
        self._steps -= len(children)
        for key, child in children:
            kind = type(child)
            opener = openers[kind] if kind in openers else openers.setdefault(kind, opener_of(kind))
            if opener is None:
                continue
            if opener.is_tensor:
                self._note(child, Path(parent, style, key, rank, depth, kind))
                if opener.fields is None:
                    continue
            if id(child) in seen:
                continue
            seen.add(id(child))
            length = opener.length(child)
            if length >= LARGE:
                entry = (length, next(self._order), child, Path(parent, style, key, rank, depth, kind))
                heapq.heappush(self._large, entry)
            elif length or opener.container is None or opener.fields is not None:
                self._queue.append((child, Path(parent, style, key, rank, depth, kind)))

    def _note(self, tensor: object, path: Path) -> None:
        self.tensors[id(tensor)] = tensor
        ways = self._paths.setdefault(id(tensor), [])
        if len(ways) < _MAX_PATHS or path.root() not in {way.root() for way in ways}:
            ways.append(path)  # each variable that reaches it counts, further ways of the same do not


class Names:
    """The names of tensors by their `id`, best first; spelled only when asked for."""

    def __init__(self, paths: Mapping[int, list[Path]]) -> None:
        self._paths = paths

    def of(self, tensor_id: int) -> list[str]:
        """Return the ways to write a tensor, a plain variable before a module's path before other containers."""
        ways = self._paths.get(tensor_id)
        if ways is None:
            return []
        if len(ways) == 1:
            return [spell(way, self.best) for way in ways]
        ranked = sorted((way.rank, way.depth, spell(way, self.best)) for way in ways)
        return [name for _, _, name in ranked]

    def ways(self, tensor_id: int) -> list[Path]:
        """Return the ways to a tensor, in no order."""
        return list(self._paths.get(tensor_id, ()))

    def are_none(self) -> bool:
        """Return whether no tensor has a name."""
        return not self._paths

    def best(self, tensor_id: int) -> str | None:
        """Return the best way to write a tensor that is not itself an optimizer's state of another."""
        ways = [way for way in self._paths.get(tensor_id, ()) if not _through_state(way)]
        if not ways:
            return None
        first = min(ways, key=lambda way: (way.rank, way.depth))
        return spell(first, self.best)


def _through_state(path: Path | None) -> bool:
    while path is not None:
        if path.style == "state":
            return True
        path = path.parent
    return False

"""Every reference below some roots, so that all paths to one tensor can be followed back up.

`holders.Search` finds a name for every tensor and reads each object once; here every reference is recorded, so that a
list under two variables is on a path from both. It serves `%devices --why`, not each `%devices`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

from gpumagic.heap.holders import LARGE, Path, spell
from gpumagic.heap.readers import VARIABLE, Branch, Reader, Style, reader_of

MAX_STEPS = 500_000
"""References followed before it gives up: about half a second."""


class _Reference(NamedTuple):
    """That one object is referred to, by a root's label if there is no parent."""

    parent: int | None
    style: Style
    rank: int
    parameter: int | None
    key: Any


class Step(NamedTuple):
    """One object on the path from a root to a tensor."""

    path: Path
    value: object


class References:
    """The references below some roots; `release` releases every object.

    Args:
        excluded: objects that are never read, such as the shell.
        steps: how many references are followed.
    """

    def __init__(self, excluded: Iterable[object], steps: int) -> None:
        self._excluded = list(excluded)
        self._objects: dict[int, object] = {}
        self._references: dict[int, list[_Reference]] = {}
        self._readers: dict[type, Reader | None] = {}
        self._limit = self._steps = steps
        self._wanted: Collection[int] = ()
        self.gave_up = False
        """Whether it stopped at its limit."""
        self.tensors: list[Any] = []

    def explore(self, roots: Iterable[tuple[str, object]], wanted: Collection[int] = ()) -> None:
        """Follow every reference from the roots down, nearest first and large containers last.

        What has been met already is not followed again: what is explored first has the steps to itself.

        Args:
            roots: names, or labels, with what they stand for.
            wanted: the `id`s of objects to record although no tensor can be below them.
        """
        self._wanted, self._steps = wanted, self._limit
        waiting: deque[object] = deque()
        large: list[tuple[int, int, object]] = []
        self._wait(self._met(Branch("name", VARIABLE, list(roots)), None), waiting, large)
        excluded = set(map(id, self._excluded))
        while (waiting or large) and self._steps > 0:
            value = waiting.popleft() if waiting else heappop(large)[2]
            reader = self._reader(type(value))
            if reader is not None and id(value) not in excluded:
                for branch in reader.read(value, reader):
                    self._wait(self._met(branch, id(value)), waiting, large)
        self.gave_up |= self._steps <= 0

    def _wait(self, met: Iterable[object], waiting: deque[object], large: list[tuple[int, int, object]]) -> None:
        for value in met:
            reader = self._reader(type(value))
            length = 0 if reader is None else reader.length(value)
            if length < LARGE:
                waiting.append(value)
            else:
                heappush(large, (length, len(self._objects), value))

    def name_of(self, target: int) -> str | None:
        """Return the best name of the object with an `id`."""
        paths = [steps[-1].path for steps in self.paths([target])]
        best = min(paths, key=lambda path: (path.rank, path.depth), default=None)
        return None if best is None else spell(best, lambda _: None)

    def paths(self, targets: Iterable[int]) -> Iterator[list[Step]]:
        """Yield the shortest path to any object with these `id`s from each root that leads there, shortest first."""
        after: dict[int, tuple[int, _Reference] | None] = dict.fromkeys(targets)
        waiting, roots = deque(after), set()
        while waiting:
            child = waiting.popleft()
            for reference in self._references.get(child, ()):
                if reference.parent is None:
                    if reference.key not in roots:
                        roots.add(reference.key)
                        yield self._path(child, reference, after)
                elif reference.parent not in after:
                    after[reference.parent] = (child, reference)
                    waiting.append(reference.parent)

    def release(self) -> None:
        """Release every object."""
        self._excluded.clear()
        self._objects.clear()
        self._references.clear()
        self.tensors.clear()

    def _met(self, branch: Branch, parent: int | None) -> Iterator[object]:
        """Record what one object refers to, and yield what is met for the first time."""
        parameter = None if branch.parameter is None else id(branch.parameter)
        for key, child in branch.children:
            reader = self._reader(type(child))
            self._steps -= 1
            if self._steps <= 0:
                return
            if reader is None and id(child) not in self._wanted:
                continue
            reference = _Reference(parent, branch.style, branch.rank, parameter, key)
            self._references.setdefault(id(child), []).append(reference)
            if id(child) not in self._objects:
                self._objects[id(child)] = child
                if reader is not None and reader.is_tensor:
                    self.tensors.append(child)
                yield child

    def _reader(self, kind: type) -> Reader | None:
        if kind not in self._readers:
            self._readers[kind] = reader_of(kind)
        return self._readers[kind]

    def _path(
        self, child: int | None, reference: _Reference, after: dict[int, tuple[int, _Reference] | None]
    ) -> list[Step]:
        steps: list[Step] = []
        path: Path | None = None
        while child is not None:
            if reference.parameter is not None:
                path = Path(path, "state", reference.parameter, reference.rank, len(steps))
                steps.append(Step(path, {}))  # the optimizer's state of one parameter is a dict
            rank = reference.rank if path is None else max(reference.rank, path.rank)
            path = Path(path, reference.style, reference.key, rank, len(steps), type(self._objects[child]))
            steps.append(Step(path, self._objects[child]))
            following = after[child]
            child, reference = (None, reference) if following is None else following
        return steps

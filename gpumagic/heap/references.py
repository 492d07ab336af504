"""Who refers to whom, from some roots down, so that the ways to one tensor can be followed back up.

`paths` finds a name for every tensor and opens each object once; here every reference is noted, so that a list
under two variables is a way from both. It is for one question at a time, not for each `%devices`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

from gpumagic.heap.object_fields import VARIABLE, Branch, Opener, Style
from gpumagic.heap.paths import LARGE, Path, spell
from gpumagic.heap.readers import opener_of

MAX_STEPS = 500_000
"""References looked at before it gives up: about half a second."""


class _Reference(NamedTuple):
    """That one object is referred to, by a root's label if there is no parent."""

    parent: int | None
    style: Style
    rank: int
    below: int | None
    key: Any


class Step(NamedTuple):
    """One object on the way from a root to a tensor."""

    path: Path
    value: object


class References:
    """The references below some roots; `release` lets go of every object.

    Args:
        closed: objects that are never opened, such as the shell.
        steps: how many references are looked at.
    """

    def __init__(self, closed: Iterable[object], steps: int) -> None:
        self._closed = list(closed)
        self._objects: dict[int, object] = {}
        self._references: dict[int, list[_Reference]] = {}
        self._openers: dict[type, Opener | None] = {}
        self._limit = self._steps = steps
        self._wanted: Collection[int] = ()
        self.gave_up = False
        """Whether there was more to look at than it may."""
        self.tensors: list[Any] = []

    def explore(self, roots: Iterable[tuple[str, object]], wanted: Collection[int] = ()) -> None:
        """Follow every reference from the roots down, nearest first and large containers last.

        What has been met already is not looked at again, so that what is explored first has the steps to itself.

        Args:
            roots: names, or labels, with what they stand for.
            wanted: the `id`s of objects to note although nothing can be below them.
        """
        self._wanted, self._steps = wanted, self._limit
        waiting: deque[object] = deque()
        large: list[tuple[int, int, object]] = []
        self._wait(self._met(Branch("name", VARIABLE, list(roots)), None), waiting, large)
        closed = set(map(id, self._closed))
        while (waiting or large) and self._steps > 0:
            value = waiting.popleft() if waiting else heappop(large)[2]
            opener = self._opener(type(value))
            if opener is not None and id(value) not in closed:
                for branch in opener.branches(value, opener):
                    self._wait(self._met(branch, id(value)), waiting, large)
        self.gave_up |= self._steps <= 0

    def _wait(self, met: Iterable[object], waiting: deque[object], large: list[tuple[int, int, object]]) -> None:
        for value in met:
            opener = self._opener(type(value))
            length = 0 if opener is None else opener.length(value)
            if length < LARGE:
                waiting.append(value)
            else:
                heappush(large, (length, len(self._objects), value))

    def name_of(self, target: int) -> str | None:
        """Return the best way to write the object with an `id`."""
        paths = [steps[-1].path for steps in self.ways([target])]
        best = min(paths, key=lambda path: (path.rank, path.depth), default=None)
        return None if best is None else spell(best, lambda _: None)

    def ways(self, targets: Iterable[int]) -> Iterator[list[Step]]:
        """Yield the shortest way to any object with these `id`s from each root that leads there, shortest first."""
        after: dict[int, tuple[int, _Reference] | None] = dict.fromkeys(targets)
        waiting, roots = deque(after), set()
        while waiting:
            child = waiting.popleft()
            for reference in self._references.get(child, ()):
                if reference.parent is None:
                    if reference.key not in roots:
                        roots.add(reference.key)
                        yield self._way(child, reference, after)
                elif reference.parent not in after:
                    after[reference.parent] = (child, reference)
                    waiting.append(reference.parent)

    def release(self) -> None:
        """Let go of every object."""
        self._closed.clear()
        self._objects.clear()
        self._references.clear()
        self.tensors.clear()

    def _met(self, branch: Branch, parent: int | None) -> Iterator[object]:
        """Note what one object refers to, and yield what is met for the first time."""
        below = None if branch.below is None else id(branch.below)
        for key, child in branch.children:
            opener = self._opener(type(child))
            self._steps -= 1
            if self._steps <= 0:
                return
            if opener is None and id(child) not in self._wanted:
                continue
            reference = _Reference(parent, branch.style, branch.rank, below, key)
            self._references.setdefault(id(child), []).append(reference)
            if id(child) not in self._objects:
                self._objects[id(child)] = child
                if opener is not None and opener.is_tensor:
                    self.tensors.append(child)
                yield child

    def _opener(self, kind: type) -> Opener | None:
        if kind not in self._openers:
            self._openers[kind] = opener_of(kind)
        return self._openers[kind]

    def _way(
        self, child: int | None, reference: _Reference, after: dict[int, tuple[int, _Reference] | None]
    ) -> list[Step]:
        steps: list[Step] = []
        path: Path | None = None
        while child is not None:
            if reference.below is not None:
                path = Path(path, "state", reference.below, reference.rank, len(steps))
                steps.append(Step(path, {}))  # the optimizer's state of one parameter is a dict
            rank = reference.rank if path is None else max(reference.rank, path.rank)
            path = Path(path, reference.style, reference.key, rank, len(steps), type(self._objects[child]))
            steps.append(Step(path, self._objects[child]))
            following = after[child]
            child, reference = (None, reference) if following is None else following
        return steps

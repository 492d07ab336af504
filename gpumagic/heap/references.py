"""Every reference below some roots, so that all paths to one tensor can be followed back up.

`holders.Search` finds a name for every tensor and reads each object once; here every reference is recorded, so that a
list under two variables is on a path from both. It serves `%devices --why`, not each `%devices`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

from gpumagic.heap.branches import VARIABLE, Branch, Reader, Style
from gpumagic.heap.holders import LARGE
from gpumagic.heap.paths import Path, Spelling
from gpumagic.heap.readers import own_class, reader_of, tensor_attributes

MAX_STEPS = 500_000
"""References followed before it gives up: about half a second."""


class Reference(NamedTuple):
    """That one object is referred to, by a root's label if there is no parent."""

    parent: int | None
    style: Style
    rank: int
    parameter: tuple[int, int] | None
    key: Any


class Step(NamedTuple):
    """One object on the path from a root to a tensor."""

    path: Path
    value: object
    reference: Reference


class References:
    """The references below some roots; `release` releases every object.

    Args:
        excluded: objects that are never read, such as the shell.
        steps: how many references are followed.
    """

    def __init__(self, excluded: Iterable[object], steps: int) -> None:
        self._excluded = list(excluded)
        self._objects: dict[int, object] = {}
        self._references: dict[int, list[Reference]] = {}
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
                for branch in self._branches(value, reader):
                    self._wait(self._met(branch, id(value)), waiting, large)
        self.gave_up |= self._steps <= 0

    def _branches(self, value: object, reader: Reader) -> Iterator[Branch]:
        yield from reader.read(value, reader)
        yield from own_class(value, reader)
        if reader.is_tensor and reader.fields is None:
            yield from tensor_attributes(value)

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
        spelling = Spelling(lambda _: None)
        found = (spelling.code(path) for path in sorted(paths, key=lambda path: (path.rank, path.depth)))
        return next((name for name in found if name is not None), None)

    def paths(self, targets: Iterable[int]) -> Iterator[list[Step]]:
        """Yield the shortest path to any object with these `id`s from each root that leads there, shortest first."""
        after: dict[int, tuple[int, Reference] | None] = dict.fromkeys(targets)
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

    def left_by(self, is_cut: Callable[[Reference], bool]) -> tuple[set[int], bool]:
        """Return the `id`s of what the roots do not reach once some references are gone, and whether a cycle keeps it.

        Without a cycle it is freed at once, else by the next collection.
        """
        children: dict[int | None, list[int]] = {}
        for child, references in self._references.items():
            for parent in {each.parent for each in references if not is_cut(each)}:
                children.setdefault(parent, []).append(child)
        reached, waiting = set(children.get(None, ())), list(children.get(None, ()))
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in reached:
                    reached.add(child)
                    waiting.append(child)
        left = self._objects.keys() - reached
        parents = Counter(child for parent in left for child in children.get(parent, ()))
        free = [each for each in left if not parents[each] and not issubclass(type(self._objects[each]), type)]
        freed = 0  # a class refers to itself, and is freed by a collection
        while free:
            freed += 1
            for child in children.get(free.pop(), ()):
                parents[child] -= 1
                if not parents[child] and not issubclass(type(self._objects[child]), type):
                    free.append(child)
        return left, freed < len(left)

    def release(self) -> None:
        """Release every object."""
        self._excluded.clear()
        self._objects.clear()
        self._references.clear()
        self.tensors.clear()

    def _met(self, branch: Branch, parent: int | None) -> Iterator[object]:
        """Record what one object refers to, and yield what is met for the first time."""
        parameter = branch.parameter
        for key, child in branch.children:
            reader = self._reader(type(child))
            self._steps -= 1
            if self._steps <= 0:
                return
            if reader is None and id(child) not in self._wanted:
                continue
            reference = Reference(parent, branch.style, branch.rank, parameter, key)
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
        self, child: int | None, reference: Reference, after: dict[int, tuple[int, Reference] | None]
    ) -> list[Step]:
        steps: list[Step] = []
        path: Path | None = None
        while child is not None:
            if reference.parameter is not None:
                path = Path(path, "state", reference.parameter, reference.rank, len(steps))
                steps.append(Step(path, {}, reference))  # the optimizer's state of one parameter is a dict
            rank = reference.rank if path is None else max(reference.rank, path.rank)
            path = Path(path, reference.style, reference.key, rank, len(steps), type(self._objects[child]))
            steps.append(Step(path, self._objects[child], reference))
            following = after[child]
            child, reference = (None, reference) if following is None else following
        return steps

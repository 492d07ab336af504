"""The heap below some roots as a graph: each object is read once, and every reference to it is recorded.

One exploration answers all that is asked of the heap:

- **names** of tensors: `explore` returns the paths to each, which `branches.Names` writes as code;
- **holders** of one tensor, for `%devices --why`: `paths_to` yields the shortest path from each root;
- **ownership**, for `oom` and rollback: `roots_of` gives the roots that reach each tensor, so that a storage which two
  variables share is known to be freed only with both. One graph of all variables answers it; no
  search for each variable is needed;
- **what goes** once some references are cut, for what a `del` frees: `freed_without`.

Small containers are read first, so that a list of a million records cannot hide the model beside it, and what no
expression reaches last. No code of the user's runs, and nothing is kept after `release`.
"""

from __future__ import annotations

import gc
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, TypeAlias

from gpumagic.heap import readers
from gpumagic.heap.branches import VARIABLE, Branch, Path, Reader
from gpumagic.heap.held import RootKey
from gpumagic.heap.readers import reader_of

MAX_DEPTH = 32
"""References that a path has at most."""
MAX_STEPS = 250_000
"""References followed before an exploration gives up: about 50 ms."""
MAX_STEPS_OF_ALL = 500_000
"""The same where every holder is asked for, as `--why` does."""
LARGE = 1_000
"""Containers of at least this many children wait until the smaller ones have been read."""
_HUGE = 50_000
"""Containers of at least this many are only read if some tensor has no name yet."""


References: TypeAlias = dict[int, list[Path]]
"""The references to objects, each as the path that leads through it, by the object's `id`."""
Children: TypeAlias = "dict[int | None, list[int]]"
"""The `id`s of what each object refers to, by its `id`; those of the roots under None."""
Waiting: TypeAlias = tuple[Any, Path]
"""An object that was met and is to be read."""


class Step(NamedTuple):
    """One object on the way from a root to a tensor."""

    path: Path
    value: object
    reference: Path
    """The reference that is followed: `path` may lead to its beginning by another way."""


class _Readers(dict[type, "Reader | None"]):
    """How the instances of each type are read; each type is looked at once."""

    def __missing__(self, kind: type) -> Reader | None:
        self[kind] = reader_of(kind)
        return self[kind]


class HeapGraph:
    """What some roots reach; what one exploration has read, a later one does not read again.

    Args:
        excluded: objects that are never read, such as the shell.
        steps: how many references one exploration follows before it gives up.
    """

    def __init__(self, excluded: Iterable[object] = (), steps: int = MAX_STEPS) -> None:
        self.objects: dict[int, Any] = {id(value): value for value in excluded}
        """All but tensors that was met or is excluded, by `id`; kept, or another object could get one's `id`."""
        self.tensors: dict[int, Any] = {}
        """The tensors met."""
        self.owners: list[object] = []
        """The modules and optimizers met."""
        self.nodes: dict[int, Any] = {}
        """The nodes of autograd graphs met, which have paths too."""
        self.gave_up = False
        """Whether an exploration stopped at its limit."""
        self._references: References = {}
        """Each reference to an object, but for tensors and nodes: those are in `_found`."""
        self._found: list[References] = []
        """By exploration, the references to each tensor and node."""
        self._roots: dict[RootKey, None] = {}
        """The names and holders of the roots, in their order."""
        self._readers = _Readers()
        self.limit = steps
        """How many references one exploration follows before it gives up."""
        self._steps = steps
        """How many more references this exploration follows."""
        self._order = count()
        """Tells containers of one length apart."""
        self._queue: deque[Waiting] = deque()
        self._large: list[tuple[int, int, object, Path]] = []
        """A heap of long containers, the shortest first."""
        self._unreached: deque[Waiting] = deque()
        """What no expression reaches, in case that one does."""
        self._plain: list[Waiting] = []
        """Plain tensors, of which hardly any has attributes."""

    def release(self) -> None:
        """Release every object, however an exploration ended."""
        self.objects.clear()
        self.tensors.clear()
        self.owners.clear()
        self.nodes.clear()
        self._references.clear()
        self._found.clear()
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._queue.clear()
        self._large.clear()
        self._unreached.clear()
        self._plain.clear()

    def explore(
        self,
        roots: Iterable[tuple[RootKey, object]],
        wanted: Iterable[int] | None = None,
    ) -> References:
        """Follow every reference from the roots down; return the paths to each tensor and node, by its `id`.

        Of an object that is reached twice, what is below has the path of the first time: the shortest, as a rule.

        Args:
            roots: where it begins: variables under their names, anything else under its holder.
            wanted: the tensors to find; huge containers are not read once each of them has a path.
        """
        self._steps = self.limit
        found: References = {}
        self._found.append(found)
        roots = list(roots)
        self._roots.update(dict.fromkeys(root for root, _ in roots))
        self._meet(Branch("name", VARIABLE, roots), None)
        missing = None if wanted is None else set(wanted)
        while self._steps > 0:
            if self._queue:
                self._read(*self._queue.popleft())
            elif self._plain:
                self._read_tensors()
            elif self._large:
                length, _, value, path = heapq.heappop(self._large)
                all_have_paths = missing is not None and missing <= found.keys()
                if length >= _HUGE and all_have_paths:
                    break
                self._steps -= length // 4  # even what holds nothing is glanced at
                self._read(value, path)
            elif self._unreached:
                value, path = self._unreached.popleft()
                if id(value) not in self.objects:
                    self.objects[id(value)] = value
                    self._queue.append((value, path))
            else:
                break
        self.gave_up |= self._steps <= 0
        self._forget_waiting()
        return found

    def _read(self, value: object, path: Path) -> None:
        reader = self._readers[type(value)]
        assert reader is not None
        if path.depth >= MAX_DEPTH:
            return
        if reader.read in (readers.read_module, readers.read_optimizer):
            self.owners.append(value)
        elif reader.read is readers.read_node:
            self.nodes[id(value)] = value
        for branch in reader.read(value, reader):
            if self._steps <= 0:
                return
            self._meet(branch, path)
        if reader.has_own_class:
            for branch in readers.own_class(value, reader):
                self._meet(branch, path)

    def _read_tensors(self) -> None:
        """Read what was set on plain tensors: one question to the gc tells whether there is anything."""
        waiting = self._plain
        self._plain = []
        tensors = [tensor for tensor, _ in waiting]
        kinds = set(map(type, gc.get_referents(*tensors)))
        if not any(issubclass(kind, dict) for kind in kinds):
            return
        for tensor, path in waiting:
            for branch in readers.tensor_attributes(tensor):
                self._meet(branch, path)

    def _meet(self, branch: Branch, parent: Path | None) -> None:
        """Record the references of one branch; put what is met for the first time in line."""
        style, rank, children, parameter = branch
        if parameter is not None:
            assert parent is not None
            parent = Path(parent, "state", parameter, rank, parent.depth + 1)
        depth = 0 if parent is None else parent.depth + 1
        # Local names, as this loop is most of what an exploration costs.
        reader_for = self._readers
        objects = self.objects
        tensors = self.tensors
        references = self._references
        found = self._found[-1]
        read_node = readers.read_node
        children = list(islice(children, self._steps))
        self._steps -= len(children)
        for key, child in children:
            kind = type(child)
            reader = reader_for[kind]
            if reader is None:
                continue
            address = id(child)
            path = Path(parent, style, key, rank, depth, kind, address)
            has_names = reader.is_tensor or reader.read is read_node
            paths = found if has_names else references
            paths.setdefault(address, []).append(path)
            if reader.is_tensor and address not in tensors:
                tensors[address] = child
                if reader.fields is None:
                    self._plain.append((child, path))
            if address in objects or (reader.is_tensor and reader.fields is None):
                continue
            if style == "in" and key.code is None:
                self._unreached.append((child, path))
                continue
            objects[address] = child
            length = reader.length(child)
            if length >= LARGE:
                entry = (length, next(self._order), child, path)
                heapq.heappush(self._large, entry)
            elif length or reader.container is None or reader.fields is not None:
                self._queue.append((child, path))

    # ---- What the references tell

    def references_to(self, target: int) -> list[Path]:
        """Return every reference to an object, each as the path that leads through it."""
        found: list[Path] = []
        for exploration in self._found:
            found += exploration.get(target, ())
        return found or self._references.get(target, [])

    def paths_to(self, targets: Iterable[int]) -> Iterator[list[Step]]:
        """Yield the shortest path to any object with these `id`s from each root that leads there, shortest first."""
        following: dict[int, Path | None] = dict.fromkeys(targets)
        waiting = deque(following)
        roots: set[RootKey] = set()
        while waiting:
            child = waiting.popleft()
            for reference in self.references_to(child):
                owner = reference.owner()
                if owner is None:
                    if reference.key not in roots:
                        roots.add(reference.key)
                        yield self._steps_along(reference, following)
                elif owner not in following:
                    following[owner] = reference
                    waiting.append(owner)

    def _steps_along(
        self, reference: Path | None, following: dict[int, Path | None]
    ) -> list[Step]:
        """Return the objects that references lead through, one reference after the other."""
        steps: list[Step] = []
        path: Path | None = None
        while reference is not None:
            state = reference.parent
            if state is not None and state.style == "state":
                # The optimizer's state of one parameter is a dict of its own.
                path = state._replace(parent=path, depth=len(steps))
                steps.append(Step(path, {}, reference))
            path = reference._replace(parent=path, depth=len(steps))
            target = reference.target
            known = self.tensors if target in self.tensors else self.objects
            steps.append(Step(path, known[target], reference))
            reference = following[target]
        return steps

    def roots_of(self) -> dict[int, tuple[Any, ...]]:
        """Return the roots that lead to each tensor, by its `id`: their names or holders, in their order."""
        children = self._children()
        order = {root: position for position, root in enumerate(self._roots)}
        # The roots that reach an object, as bits: a set for each would be large.
        reached: dict[int, int] = {}
        for child in children.get(None, ()):
            for reference in self.references_to(child):
                if reference.parent is None:
                    bit = 1 << order[reference.key]
                    reached[child] = reached.get(child, 0) | bit
        waiting = deque(reached)
        while waiting:
            parent = waiting.popleft()
            bits = reached[parent]
            for child in children.get(parent, ()):
                known = reached.get(child, 0)
                if bits | known != known:
                    reached[child] = bits | known
                    waiting.append(child)
        roots_of_bits: dict[int, tuple[Any, ...]] = {}
        found: dict[int, tuple[Any, ...]] = {}
        for key in self.tensors:
            bits = reached.get(key, 0)
            if bits not in roots_of_bits:
                roots = [
                    root for root, position in order.items() if bits >> position & 1
                ]
                roots_of_bits[bits] = tuple(roots)
            found[key] = roots_of_bits[bits]
        return found

    def freed_without(self, is_cut: Callable[[Path], bool]) -> tuple[set[int], bool]:
        """Return the `id`s of what the roots do not reach once some references are gone, and whether a cycle keeps it.

        Without a cycle it is freed at once, else by the next collection.
        """
        children = self._children(is_cut)
        left = self._met() - _reached(children)
        parents: Counter[int] = Counter()
        for parent in left:
            parents.update(children.get(parent, ()))
        # A class refers to itself, and is freed by a collection.
        waiting = {target for target in left if not self._is_class(target)}
        free = [target for target in waiting if not parents[target]]
        freed = 0
        while free:
            freed += 1
            for child in children.get(free.pop(), ()):
                parents[child] -= 1
                if not parents[child] and child in waiting:
                    free.append(child)
        return left, freed < len(left)

    def _met(self) -> set[int]:
        """Return the `id`s of all that a reference leads to."""
        return set(self._references).union(*self._found)

    def _children(self, is_cut: Callable[[Path], bool] | None = None) -> Children:
        """Return what each object refers to, by its `id`, and the roots under None; without the references cut."""
        children: Children = {}
        for references in (self._references, *self._found):
            for child, paths in references.items():
                for path in paths:
                    if is_cut is None or not is_cut(path):
                        children.setdefault(path.owner(), []).append(child)
        return children

    def _is_class(self, target: int) -> bool:
        value = self.objects.get(target)
        return issubclass(type(value), type)


def _reached(children: Children) -> set[int]:
    """Return the `id`s of what the roots reach, by what each object refers to."""
    reached = set(children.get(None, ()))
    waiting = list(reached)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in reached:
                reached.add(child)
                waiting.append(child)
    return reached

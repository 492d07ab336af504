"""What keeps a tensor, found from below: a reference cycle, until the garbage collector runs, or an installed module.

Running a collection would change what is observed; asking who refers to whom does not. Starting from a tensor, all
that refers to it is gathered; it is a cycle if every reference to what was gathered comes from there, which is how
the collector itself decides. To look down from all modules instead would take seconds: they hold a million objects.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from gpumagic import _compat
from gpumagic.heap.branches import dict_of, name_of_type
from gpumagic.heap.held import Holder
from gpumagic.heap.kinds import Graphs, gradients_of, non_leaves, subclasses
from gpumagic.heap.readers import is_lasting_class, runs_the_session
from gpumagic.heap.storages import StorageTable, undisturbed
from gpumagic.source import frames

MAX_ROUNDS = 24
"""Passes over all objects at most, about 30 ms each for a million."""
MAX_BELOW = 20_000
"""Objects that a cycle leads to, at most."""
MAX_OBJECTS = 600
"""Objects that are gathered, at most: what more objects lead to is most likely no cycle."""


def find_keepers(
    numbers: set[int], followed: set[int], ours: Iterable[object]
) -> dict[int, Holder]:
    """Return the reference cycle or the installed module that keeps a storage, by the storage's number.

    Args:
        numbers: the storages to look for.
        followed: those of them from which to look; what a cycle leads to is kept by it too.
        ours: what refers to tensors and is of the session, or of the caller.
    """
    found: dict[int, Holder] = {}
    with undisturbed():
        tensors, number_of = _tensors_over(numbers)
        starts = [tensor for tensor in tensors if number_of[id(tensor)] in followed]
        keys = {id(tensor): number_of[id(tensor)] for tensor in starts}
        referrers = _Referrers(starts, ours=(tensors, starts, *ours))
        tensors.clear()
        starts.clear()  # `referrers` has them: each reference of ours counts in `_is_closed`
        try:
            for key, number in keys.items():
                module, cycle = referrers.keeper_of(key)
                if module is not None:
                    found[number] = module
                if not cycle:
                    continue
                kept = numbers.intersection(_numbers_below(referrers.below(cycle)))
                keeper = Holder("cycle", referrers.kinds(cycle))
                for below in kept:
                    found.setdefault(below, keeper)
        finally:
            referrers.objects.clear()
    return found


def _tensors_over(numbers: set[int]) -> tuple[list[Any], dict[int, int]]:
    """Return the live tensors over these storages, and the number of each by its `id`."""
    import torch

    kinds = subclasses(torch.Tensor)
    table = StorageTable()
    # A comprehension, since a loop over all objects of the process takes twice as long.
    tensors = [value for value in gc.get_objects() if type(value) in kinds]
    number_of: dict[int, int] = {}
    for tensor in tensors:
        for number in table.numbers(tensor):
            if number in numbers:
                number_of[id(tensor)] = number
    return [tensor for tensor in tensors if id(tensor) in number_of], number_of


def _numbers_below(objects: list[Any]) -> Iterator[int]:
    """Yield the numbers of the storages of some objects' tensors, of their gradients, and of what their graphs keep."""
    import torch

    kinds = subclasses(torch.Tensor)
    table = StorageTable()
    graphs = Graphs()
    tensors = [value for value in objects if type(value) in kinds]
    objects.clear()
    for result in non_leaves(tensors):
        tensors += graphs.walk(result.grad_fn) or ()
    graphs.release()
    for tensor in (*tensors, *gradients_of(tensors)):
        yield from table.numbers(tensor)


class _Referrers:
    """All that refers to some tensors, directly or indirectly, as far as it was followed."""

    def __init__(self, tensors: list[Any], ours: Iterable[object]) -> None:
        self.objects: dict[int, object] = dict(
            zip(map(id, tensors), tensors, strict=True)
        )
        """By their `id`."""
        self._referrers: dict[int, list[int]] = {}
        self._open: dict[int, Holder | None] = {}
        """Objects of which it is not known what refers to them, with the installed module that they belong to."""
        # From the caller on: a frame that is its own variable would live on, with its callers.
        running = frames.stack(sys._getframe(1))
        self._ours = set(map(id, ours))
        self._ours.update(map(id, running))
        self._ours.add(id(sys._getframe()))
        self._ours.add(id(self.objects))
        self._follow(tensors)

    def _follow(self, tensors: list[Any]) -> None:
        """Gather what refers to the tensors, what refers to that, and so on."""
        lasting = _modules_by_dict()
        newest = list(tensors)
        for _ in range(MAX_ROUNDS):
            if not newest or len(self.objects) > MAX_OBJECTS:
                break
            targets = set(map(id, newest))
            referrers = _compat.referrers(newest)
            self._ours |= {id(newest), id(referrers)}
            newest = []
            self._ours.add(id(newest))
            for referrer in referrers:
                key = id(referrer)
                if key in self._ours:
                    continue
                for target in targets.intersection(map(id, gc.get_referents(referrer))):
                    self._referrers.setdefault(target, []).append(key)
                if key in lasting or _is_lasting(referrer):
                    self._open[key] = lasting.get(key) or _module_of_class(referrer)
                elif key not in self.objects:
                    self.objects[key] = referrer
                    newest.append(referrer)
            referrers.clear()
        self._open.update(dict.fromkeys(map(id, newest)))
        newest.clear()

    def keeper_of(self, tensor: int) -> tuple[Holder | None, list[int]]:
        """Return the installed module that keeps a tensor, if one does, and else the objects of the cycle that does."""
        above: dict[int, None] = {}
        is_open = False
        waiting = deque(self._referrers.get(tensor, ()))
        while waiting:
            referrer = waiting.popleft()
            if referrer in self._open:
                is_open = True
                module = self._open[referrer]
                if module is not None:
                    return module, []
            elif referrer not in above:
                above[referrer] = None
                waiting += self._referrers.get(referrer, ())
        if is_open or not self._is_closed(above):
            return None, []
        return None, list(above)

    def below(self, cycle: Iterable[int]) -> list[Any]:
        """Return what the objects of a cycle lead to, themselves included, as far as `MAX_BELOW`."""
        found = {key: self.objects[key] for key in cycle}
        lasting = _modules_by_dict()
        waiting = list(found.values())
        while waiting and len(found) < MAX_BELOW:
            for referent in gc.get_referents(waiting.pop()):
                key = id(referent)
                if key in found or key in lasting:
                    continue
                if not _is_lasting(referent):
                    found[key] = referent
                    waiting.append(referent)
        waiting.clear()
        return list(found.values())

    def kinds(self, cycle: Sequence[int]) -> str:
        """Return the most telling classes of the objects of a cycle, the outermost first."""
        names: dict[str, None] = {}
        for key in reversed(cycle):
            names[_called(self.objects[key])] = None
        telling = [name for name in names if name not in _UNINFORMATIVE]
        shown = telling or list(names)
        return ", ".join(shown[:2])

    def _is_closed(self, cycle: Iterable[int]) -> bool:
        """Return whether all references to the objects of a cycle come from among them."""
        inner: Counter[int] = Counter()
        for key in cycle:
            # No name is given to what is referred to: it would be one more reference.
            inner.update(map(id, gc.get_referents(self.objects[key])))
        self.objects[
            0
        ] = []  # it has the references that all have from here, and no other
        own = sys.getrefcount(self.objects[0])
        del self.objects[0]
        return all(
            sys.getrefcount(self.objects[key]) - own == inner[key] for key in cycle
        )


_UNINFORMATIVE = ("dict", "cell", "frame", "tuple", "getset_descriptor")


def _called(value: Any) -> str:
    if issubclass(type(value), type):
        return f"class {name_of_type(value)}"
    return name_of_type(type(value))


def _is_lasting(value: object) -> bool:
    """Return whether an object lives as long as the process or the session."""
    kind = type(value)
    is_class = issubclass(kind, type) and is_lasting_class(value)  # type: ignore[arg-type]
    return is_class or issubclass(kind, ModuleType) or runs_the_session(kind)


def _module_of_class(value: object) -> Holder | None:
    """Return the installed module of a class; None for what is no class."""
    if not issubclass(type(value), type):
        return None
    module = dict_of(value).get("__module__")
    if type(module) is not str:
        return None
    return Holder("module", module)


def _modules_by_dict() -> dict[int, Holder | None]:
    """Return each module by the `id` of its variables; None for one that the user wrote."""
    found: dict[int, Holder | None] = {}
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType:
            variables = vars(module)
            file = variables.get("__file__")
            found[id(variables)] = None
            if frames.is_library(name, str(file or "")):
                found[id(variables)] = Holder("module", name)
    return found

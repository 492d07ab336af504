"""Which tensors only a reference cycle keeps alive, until the garbage collector runs.

Running a collection would change what is observed; asking who refers to whom does not. Starting from a tensor, all
that refers to it is gathered; it is a cycle if every reference to what was gathered comes from there, which is how
the collector itself decides.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from gpumagic import _compat
from gpumagic.heap.branches import name_of_type
from gpumagic.heap.kinds import Graphs, gradients_of, non_leaves, subclasses
from gpumagic.heap.readers import is_lasting_class
from gpumagic.heap.storages import StorageTable, undisturbed
from gpumagic.source import frames

MAX_ROUNDS = 16
"""Passes over all objects at most, about 30 ms each for a million."""
MAX_BELOW = 20_000
"""Objects that a cycle leads to, at most."""
MAX_OBJECTS = 600
"""Objects that are gathered, at most: what more objects lead to is most likely no cycle."""
CYCLE = "cycle of "
"""How the holder of a tensor in a cycle begins."""


def find_cycles(numbers: set[int], followed: set[int]) -> dict[int, str]:
    """Return ``"cycle of Node"`` by the numbers of the storages that only a reference cycle keeps.

    Args:
        numbers: the storages that have no holder.
        followed: those of them from which to look for cycles; what a cycle leads to is kept by it too.
    """
    found: dict[int, str] = {}
    with undisturbed():
        tensors, number_of = _tensors_over(numbers)
        starts = [each for each in tensors if number_of[id(each)] in followed]
        keys = list(map(id, starts))
        referrers = _Referrers(starts, ours=(tensors, starts))
        tensors.clear()
        starts.clear()  # `referrers` has them: each reference of ours counts in `_is_closed`
        try:
            for key in keys:
                cycle = referrers.cycle_of(key)
                for number in _numbers_below(referrers.below(cycle)) if cycle else ():
                    if number in numbers:
                        found.setdefault(number, CYCLE + referrers.kinds(cycle))
        finally:
            referrers.objects.clear()
    return found


def garbage_over(tensors: Iterable[Any], ours: Iterable[object]) -> dict[int, str]:
    """Return ``"cycle of KeyError"`` by the `id`s of the tensors that a cycle refers to as well, until the gc runs.

    Args:
        tensors: what other holders keep.
        ours: those holders, and the caller's own objects that contain the tensors.
    """
    starts = list(tensors)
    keys = list(map(id, starts))
    referrers = _Referrers(starts, ours=(*ours, starts))
    starts.clear()
    try:
        garbage = {key: referrers.garbage_over(key) for key in keys}
        return {key: CYCLE + referrers.kinds(found) for key, found in garbage.items() if found}
    finally:
        referrers.objects.clear()


def _tensors_over(numbers: set[int]) -> tuple[list[Any], dict[int, int]]:
    """Return the live tensors over these storages, and the number of each by its `id`."""
    import torch

    kinds, table = subclasses(torch.Tensor), StorageTable()
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    number_of = {id(each): number for each in tensors for number in table.numbers(each) if number in numbers}
    return [each for each in tensors if id(each) in number_of], number_of


def _numbers_below(objects: list[Any]) -> Iterator[int]:
    """Yield the numbers of the storages of some objects' tensors, of their gradients, and of what their graphs keep."""
    import torch

    kinds, table, graphs = subclasses(torch.Tensor), StorageTable(), Graphs()
    tensors = [each for each in objects if type(each) in kinds]
    objects.clear()
    for result in non_leaves(tensors):
        graph = graphs.walk(result.grad_fn)
        tensors += graph.tensors if graph is not None else ()
    graphs.release()
    for each in (*tensors, *gradients_of(tensors)):
        yield from table.numbers(each)


class _Referrers:
    """All that refers to some tensors, directly or indirectly, as far as it was followed."""

    def __init__(self, tensors: list[Any], ours: Iterable[object]) -> None:
        self.objects: dict[int, object] = {id(each): each for each in tensors}
        """By their `id`."""
        self._referrers: dict[int, list[int]] = {}
        self._open: set[int] = set()
        """Objects of which it is not known what refers to them; among them what lives as long as the process."""
        running = frames.stack(sys._getframe(1))  # a frame that is its own variable would live on, with its callers
        self._ours = {id(self.objects), id(sys._getframe()), *map(id, ours), *map(id, running)}
        self._follow(tensors)

    def _follow(self, tensors: list[Any]) -> None:
        lasting = module_dict_ids()
        newest = list(tensors)
        for _ in range(MAX_ROUNDS):
            if not newest or len(self.objects) > MAX_OBJECTS:
                break
            targets = set(map(id, newest))
            referrers = _compat.referrers(newest)
            self._ours |= {id(newest), id(referrers)}
            newest = []
            self._ours.add(id(newest))
            for each in referrers:
                if id(each) in self._ours:
                    continue
                for target in targets.intersection(map(id, gc.get_referents(each))):
                    self._referrers.setdefault(target, []).append(id(each))
                if id(each) in lasting or is_lasting(each):
                    self._open.add(id(each))
                elif id(each) not in self.objects:
                    self.objects[id(each)] = each
                    newest.append(each)
            referrers.clear()
        self._open.update(map(id, newest))
        newest.clear()

    def cycle_of(self, tensor: int) -> list[int]:
        """Return the objects of the cycle that keeps a tensor; none if something else keeps it."""
        cycle: dict[int, None] = {}
        waiting = list(self._referrers.get(tensor, ()))
        while waiting:
            each = waiting.pop(0)
            if each in self._open:
                return []
            if each not in cycle:
                cycle[each] = None
                waiting += self._referrers.get(each, ())
        return list(cycle) if self._is_closed(cycle) else []

    def garbage_over(self, tensor: int) -> list[int]:
        """Return the objects that lead to a tensor and that nothing but each other refers to."""
        above: dict[int, None] = {}
        waiting = list(self._referrers.get(tensor, ()))
        while waiting:
            if (each := waiting.pop(0)) not in above:
                above[each] = None
                waiting += self._referrers.get(each, ())
        counted = above.keys() - self._open
        unaccounted = self._with_other_references(counted)
        alive = set(unaccounted)
        while unaccounted:
            below = set(map(id, gc.get_referents(self.objects[unaccounted.pop()])))
            unaccounted |= (below & counted) - alive
            alive |= below
        return [each for each in above if each in counted and each not in alive]

    def below(self, cycle: Iterable[int]) -> list[Any]:
        """Return what the objects of a cycle lead to, themselves included, as far as `MAX_BELOW`."""
        found = {key: self.objects[key] for key in cycle}
        lasting, waiting = module_dict_ids(), list(found.values())
        while waiting and len(found) < MAX_BELOW:
            for each in gc.get_referents(waiting.pop()):
                if id(each) not in found and id(each) not in lasting and not is_lasting(each):
                    found[id(each)] = each
                    waiting.append(each)
        waiting.clear()
        return list(found.values())

    def kinds(self, cycle: Sequence[int]) -> str:
        """Return the most telling classes of the objects of a cycle, the outermost first."""
        names = list(dict.fromkeys(_called(self.objects[key]) for key in reversed(cycle)))
        return ", ".join(([name for name in names if name not in _UNINFORMATIVE] or names)[:2])

    def _is_closed(self, cycle: Iterable[int]) -> bool:
        """Return whether all references to the objects of a cycle come from among them."""
        return not self._with_other_references(cycle)

    def _with_other_references(self, group: Iterable[int]) -> set[int]:
        """Return which objects of a group something else refers to."""
        inner = Counter(id(each) for key in group for each in gc.get_referents(self.objects[key]))
        self.objects[0] = []  # it has the references that all have from here, and no other
        own = sys.getrefcount(self.objects[0])
        del self.objects[0]
        return {key for key in group if sys.getrefcount(self.objects[key]) - own != inner[key]}


_UNINFORMATIVE = ("dict", "cell", "frame", "tuple", "getset_descriptor")


def _called(value: Any) -> str:
    return f"class {name_of_type(value)}" if issubclass(type(value), type) else name_of_type(type(value))


def is_lasting(value: object) -> bool:
    """Return whether an object lives as long as the process: a module, a class of a library."""
    return issubclass(type(value), ModuleType) or (issubclass(type(value), type) and is_lasting_class(value))  # type: ignore[arg-type]


def module_dict_ids() -> set[int]:
    """Return the `id`s of the variables of all modules."""
    return {id(vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType}

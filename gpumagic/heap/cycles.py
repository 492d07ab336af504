"""Which tensors only a reference cycle keeps alive, until the garbage collector runs.

Running a collection would change what is observed; asking who refers to whom does not. Starting from a tensor, all
that refers to it is gathered; it is a cycle if every reference to what was gathered comes from there, which is how
the collector itself decides.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from gpumagic import _compat
from gpumagic.heap.kinds import subclasses
from gpumagic.heap.storages import StorageTable, undisturbed
from gpumagic.source import frames

MAX_ROUNDS = 12
"""Passes over all objects at most, about 30 ms each for a million."""
MAX_BELOW = 20_000
"""Objects that a cycle leads to, at most."""
MAX_OBJECTS = 300
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
        referrers = _Referrers(starts, ours=(tensors, starts))
        tensors.clear()
        try:
            for key in list(map(id, starts)):
                cycle = referrers.cycle_of(key)
                for each in referrers.below(cycle) if cycle else ():
                    if each in number_of:
                        found.setdefault(number_of[each], CYCLE + referrers.kinds(cycle))
        finally:
            referrers.objects.clear()
            starts.clear()
    return found


def _tensors_over(numbers: set[int]) -> tuple[list[Any], dict[int, int]]:
    """Return the live tensors over these storages, and the number of each by its `id`."""
    import torch

    kinds, table = subclasses(torch.Tensor), StorageTable()
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    number_of = {id(each): number for each in tensors for number in table.numbers(each) if number in numbers}
    return [each for each in tensors if id(each) in number_of], number_of


class _Referrers:
    """All that refers to some tensors, directly or indirectly, as far as it was followed."""

    def __init__(self, tensors: list[Any], ours: Iterable[object]) -> None:
        self.objects: dict[int, object] = {}
        """By their `id`."""
        self._referrers: dict[int, list[int]] = {}
        self._open: set[int] = set()
        """Objects of which it is not known what refers to them; among them what lives as long as the process."""
        running = frames.stack(sys._getframe(1))  # a frame that is its own variable would live on, with its callers
        self._ours = {id(self.objects), id(sys._getframe()), *map(id, ours), *map(id, running)}
        self._follow(tensors)

    def _follow(self, tensors: list[Any]) -> None:
        known, lasting = set(map(id, tensors)), module_dict_ids()
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
                if id(each) in lasting or is_module_or_class(each):
                    self._open.add(id(each))
                elif id(each) not in known:
                    known.add(id(each))
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

    def below(self, cycle: Iterable[int]) -> set[int]:
        """Return the `id`s of what the objects of a cycle lead to, as far as `MAX_BELOW`."""
        found: set[int] = set()
        lasting, waiting = module_dict_ids(), [self.objects[key] for key in cycle]
        while waiting and len(found) < MAX_BELOW:
            for each in gc.get_referents(waiting.pop()):
                if id(each) not in found and id(each) not in lasting and not is_module_or_class(each):
                    found.add(id(each))
                    waiting.append(each)
        waiting.clear()
        return found

    def kinds(self, cycle: Sequence[int]) -> str:
        """Return the most telling classes of the objects of a cycle, the outermost first."""
        names = list(dict.fromkeys(type(self.objects[key]).__name__ for key in reversed(cycle)))
        return ", ".join(([name for name in names if name not in _UNINFORMATIVE] or names)[:2])

    def _is_closed(self, cycle: Iterable[int]) -> bool:
        """Tell whether all references to the objects of a cycle come from among them."""
        inner = Counter(id(each) for key in cycle for each in gc.get_referents(self.objects[key]))
        self.objects[0] = []  # it has the references that all have from here, and no other
        own = sys.getrefcount(self.objects[0])
        del self.objects[0]
        return all(sys.getrefcount(self.objects[key]) - own == inner[key] for key in cycle)


_UNINFORMATIVE = ("dict", "cell", "frame", "tuple")


def is_module_or_class(value: object) -> bool:
    """Tell whether an object lives as long as the process: a module, a class."""
    return issubclass(type(value), ModuleType | type)


def module_dict_ids() -> set[int]:
    """Return the `id`s of the variables of all modules."""
    return {id(vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType}

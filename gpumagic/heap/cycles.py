"""Which tensors live only because the garbage collector has not come by yet.

Objects that refer to each other in a ring outlive their last name until the next collection. Running one would be
an act; asking who refers to whom is none. From a tensor back, all that refers to it is gathered; it is a ring if
every reference to what was gathered comes from there, which is how the collector itself tells.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any

from gpumagic import _compat
from gpumagic.heap.kinds import subclasses
from gpumagic.heap.storages import Ledger, undisturbed
from gpumagic.source import frames

MAX_ROUNDS = 12
"""Passes over all objects at most, some 30 ms each for a million."""
MAX_BELOW = 20_000
"""Objects that a ring leads to, at most."""
MAX_OBJECTS = 300
"""A ring of more objects than that is not followed: by then it is most likely none."""
RING = "cycle of "
"""What the holder of a tensor in a ring begins with."""


def find_cycles(numbers: set[int], followed: set[int]) -> dict[int, str]:
    """Return ``"cycle of Node"`` by the numbers of the storages that only a ring of objects keeps.

    Args:
        numbers: the storages that have no holder.
        followed: those among them from which to look for rings; what a ring leads to is kept by it too.
    """
    found: dict[int, str] = {}
    with undisturbed():
        tensors, number_of = _over(numbers)
        starts = [each for each in tensors if number_of[id(each)] in followed]
        behind = _Behind(starts, ours=(tensors, starts))
        tensors.clear()
        try:
            for key in list(map(id, starts)):
                ring = behind.ring_of(key)
                for each in behind.below(ring) if ring else ():
                    if each in number_of:
                        found.setdefault(number_of[each], RING + behind.kinds(ring))
        finally:
            behind.objects.clear()
            starts.clear()
    return found


def _over(numbers: set[int]) -> tuple[list[Any], dict[int, int]]:
    """Return the live tensors over these storages, and the number of each by its `id`."""
    import torch

    kinds, ledger = subclasses(torch.Tensor), Ledger()
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    number_of = {id(each): number for each in tensors for number in ledger.numbers(each) if number in numbers}
    return [each for each in tensors if id(each) in number_of], number_of


class _Behind:
    """All that refers to some tensors, directly or not, as far as it was followed."""

    def __init__(self, tensors: list[Any], ours: Iterable[object]) -> None:
        self.objects: dict[int, object] = {}
        """By their `id`."""
        self._referrers: dict[int, list[int]] = {}
        self._open: set[int] = set()
        """Objects of which it is not known who refers to them; among them what lives as long as the process."""
        self._ours = {id(self.objects), *map(id, ours), *map(id, _running())}
        self._follow(tensors)

    def _follow(self, tensors: list[Any]) -> None:
        known, lasting = set(map(id, tensors)), lasting_ids()
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
                if id(each) in lasting or lasts(each):
                    self._open.add(id(each))
                elif id(each) not in known:
                    known.add(id(each))
                    self.objects[id(each)] = each
                    newest.append(each)
            referrers.clear()
        self._open.update(map(id, newest))
        newest.clear()

    def ring_of(self, tensor: int) -> list[int]:
        """Return the objects of the ring that keeps a tensor; none if something else keeps it."""
        ring: dict[int, None] = {}
        waiting = list(self._referrers.get(tensor, ()))
        while waiting:
            each = waiting.pop(0)
            if each in self._open:
                return []
            if each not in ring:
                ring[each] = None
                waiting += self._referrers.get(each, ())
        return list(ring) if self._is_closed(ring) else []

    def below(self, ring: Iterable[int]) -> set[int]:
        """Return the `id`s of what the objects of a ring lead to, as far as `MAX_BELOW`."""
        found: set[int] = set()
        lasting, waiting = lasting_ids(), [self.objects[key] for key in ring]
        while waiting and len(found) < MAX_BELOW:
            for each in gc.get_referents(waiting.pop()):
                if id(each) not in found and id(each) not in lasting and not lasts(each):
                    found.add(id(each))
                    waiting.append(each)
        waiting.clear()
        return found

    def kinds(self, ring: Sequence[int]) -> str:
        """Return the most telling classes of the objects of a ring, the outermost first."""
        names = list(dict.fromkeys(type(self.objects[key]).__name__ for key in reversed(ring)))
        return ", ".join(([name for name in names if name not in _TELL_LITTLE] or names)[:2])

    def _is_closed(self, ring: Iterable[int]) -> bool:
        """Tell whether all references to the objects of a ring come from among them."""
        inner = Counter(id(each) for key in ring for each in gc.get_referents(self.objects[key]))
        self.objects[0] = []  # it has the references that all have from here, and no other
        own = sys.getrefcount(self.objects[0])
        del self.objects[0]
        return all(sys.getrefcount(self.objects[key]) - own == inner[key] for key in ring)


_TELL_LITTLE = ("dict", "cell", "frame", "tuple")


def lasts(value: object) -> bool:
    """Tell whether an object lives as long as the process: a module, a class."""
    return issubclass(type(value), ModuleType | type)


def lasting_ids() -> set[int]:
    """Return the `id`s of the variables of all modules."""
    return {id(vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType}


def _running() -> list[FrameType]:
    return list(frames.stack(sys._getframe(1)))  # a frame that is its own variable would live on, with its callers

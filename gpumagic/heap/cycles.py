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
CYCLE, MODULE = "cycle of ", "module "
"""How the holders of such tensors begin."""


def find_keepers(numbers: set[int], followed: set[int], ours: Iterable[object]) -> dict[int, str]:
    """Return ``"cycle of Node"`` or ``"module some_library"`` by the numbers of the storages that these keep.

    Args:
        numbers: the storages to look for.
        followed: those of them from which to look; what a cycle leads to is kept by it too.
        ours: what refers to tensors and is of the session, or of the caller.
    """
    found: dict[int, str] = {}
    with undisturbed():
        tensors, number_of = _tensors_over(numbers)
        starts = [each for each in tensors if number_of[id(each)] in followed]
        keys = {id(each): number_of[id(each)] for each in starts}
        referrers = _Referrers(starts, ours=(tensors, starts, *ours))
        tensors.clear()
        starts.clear()  # `referrers` has them: each reference of ours counts in `_is_closed`
        try:
            for key, number in keys.items():
                module, cycle = referrers.keeper_of(key)
                if module is not None:
                    found[number] = module
                for below in _numbers_below(referrers.below(cycle)) if cycle else ():
                    if below in numbers:
                        found.setdefault(below, CYCLE + referrers.kinds(cycle))
        finally:
            referrers.objects.clear()
    return found


def _tensors_over(numbers: set[int]) -> tuple[list[Any], dict[int, int]]:
    """Return the live tensors over these storages, and the number of each by its `id`."""
    import torch

    kinds, table = subclasses(torch.Tensor), StorageTable()
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    number_of = {
        id(each): number for each in tensors for number in table.numbers(each) if number in numbers
    }
    return [each for each in tensors if id(each) in number_of], number_of


def _numbers_below(objects: list[Any]) -> Iterator[int]:
    """Yield the numbers of the storages of some objects' tensors, of their gradients, and of what their graphs keep."""
    import torch

    kinds, table, graphs = subclasses(torch.Tensor), StorageTable(), Graphs()
    tensors = [each for each in objects if type(each) in kinds]
    objects.clear()
    for result in non_leaves(tensors):
        tensors += graphs.walk(result.grad_fn) or ()
    graphs.release()
    for each in (*tensors, *gradients_of(tensors)):
        yield from table.numbers(each)


class _Referrers:
    """All that refers to some tensors, directly or indirectly, as far as it was followed."""

    def __init__(self, tensors: list[Any], ours: Iterable[object]) -> None:
        self.objects: dict[int, object] = {id(each): each for each in tensors}
        """By their `id`."""
        self._referrers: dict[int, list[int]] = {}
        self._open: dict[int, str | None] = {}
        """Objects of which it is not known what refers to them, with the installed module that they belong to."""
        running = frames.stack(
            sys._getframe(1)
        )  # a frame that is its own variable would live on, with its callers
        self._ours = {id(self.objects), id(sys._getframe()), *map(id, ours), *map(id, running)}
        self._follow(tensors)

    def _follow(self, tensors: list[Any]) -> None:
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
            for each in referrers:
                if id(each) in self._ours:
                    continue
                for target in targets.intersection(map(id, gc.get_referents(each))):
                    self._referrers.setdefault(target, []).append(id(each))
                if id(each) in lasting or _is_lasting(each):
                    is_class = issubclass(type(each), type)
                    module = dict_of(each).get("__module__") if is_class else None
                    of_class = f"{MODULE}{module}" if type(module) is str else None
                    self._open[id(each)] = lasting.get(id(each)) or of_class
                elif id(each) not in self.objects:
                    self.objects[id(each)] = each
                    newest.append(each)
            referrers.clear()
        self._open.update((id(each), None) for each in newest)
        newest.clear()

    def keeper_of(self, tensor: int) -> tuple[str | None, list[int]]:
        """Return the installed module that keeps a tensor, if one does, and else the objects of the cycle that does."""
        above: dict[int, None] = {}
        is_open = False
        waiting = deque(self._referrers.get(tensor, ()))
        while waiting:
            each = waiting.popleft()
            if each in self._open:
                is_open = True
                if (module := self._open[each]) is not None:
                    return module, []
            elif each not in above:
                above[each] = None
                waiting += self._referrers.get(each, ())
        return None, [] if is_open or not self._is_closed(above) else list(above)

    def below(self, cycle: Iterable[int]) -> list[Any]:
        """Return what the objects of a cycle lead to, themselves included, as far as `MAX_BELOW`."""
        found = {key: self.objects[key] for key in cycle}
        lasting, waiting = _modules_by_dict(), list(found.values())
        while waiting and len(found) < MAX_BELOW:
            for each in gc.get_referents(waiting.pop()):
                if id(each) not in found and id(each) not in lasting and not _is_lasting(each):
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
        inner = Counter(id(each) for key in cycle for each in gc.get_referents(self.objects[key]))
        self.objects[0] = []  # it has the references that all have from here, and no other
        own = sys.getrefcount(self.objects[0])
        del self.objects[0]
        return all(sys.getrefcount(self.objects[key]) - own == inner[key] for key in cycle)


_UNINFORMATIVE = ("dict", "cell", "frame", "tuple", "getset_descriptor")


def _called(value: Any) -> str:
    return (
        f"class {name_of_type(value)}"
        if issubclass(type(value), type)
        else name_of_type(type(value))
    )


def _is_lasting(value: object) -> bool:
    """Return whether an object lives as long as the process or the session."""
    kind = type(value)
    is_class = issubclass(kind, type) and is_lasting_class(value)  # type: ignore[arg-type]
    return is_class or issubclass(kind, ModuleType) or runs_the_session(kind)


def _modules_by_dict() -> dict[int, str | None]:
    """Return what each module is called, by the `id` of its variables; None for one that the user wrote."""
    found: dict[int, str | None] = {}
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType:
            file = vars(module).get("__file__")
            found[id(vars(module))] = (
                f"{MODULE}{name}" if frames.is_library(name, str(file or "")) else None
            )
    return found

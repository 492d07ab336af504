"""Undoes what a run of some code changed, as far as possible, so that the code can run again from where it began.

Restored: names that the run bound or replaced, entries added to lists, dicts and sets, first gradients (removed: a
second backward would add to them), and random states. Reported but not restored: tensors changed in place, as by an
optimizer. Not seen: numpy arrays, files, and the attributes of other objects.

No tensor is copied, and nothing on an accelerator is kept alive: the run would have got that memory back when it
rebound the name.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping
from functools import partial
from typing import Any

from gpumagic.heap import holders, kinds
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.holders import Identities
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device
from gpumagic.source import cell_code


class Rollback:
    """The state before a run of `source`, which may bind variables of `namespace`; `undo` restores it, repeatedly."""

    def __init__(self, namespace: MutableMapping[str, object], source: str = "", shell: object | None = None) -> None:
        self._namespace, self._shell = namespace, shell
        cell = cell_code.read_cell(source)
        self._remade = cell.bound_first if cell is not None else frozenset[str]()
        mine, self._on_device = self._mine(), self._read_tensors()
        self._bound = Identities(mine)
        self._kept = {name: value for name, value in mine.items() if name not in self._on_device | self._remade}
        self._watched: dict[str, weakref.ref[Any]] = {}
        for name in mine.keys() - self._kept.keys():
            with contextlib.suppress(TypeError):  # not everything takes a weak reference
                self._watched[name] = weakref.ref(mine[name])
        containers: dict[str, Any] = {name: each for name, each in mine.items() if type(each) in (list, dict, set)}
        self._contents = {name: len(each) if type(each) is list else set(each) for name, each in containers.items()}
        self._random = list(_random_states())

    def undo(self) -> tuple[str, ...]:
        """Restore what can be restored, and return what cannot, in words."""
        lost = [*self._changed_tensors(), *self._restore_contents(), *self._restore_names()]
        for restore in self._random:
            restore()
        return tuple(lost)

    def _mine(self) -> dict[str, object]:
        """Return the variables except the shell's own."""
        own = getattr(self._shell, "user_ns_hidden", {})
        return {name: value for name, value in list(self._namespace.items()) if name not in own}

    def _read_tensors(self) -> set[str]:
        """Remember the tensors that the variables reach, and return the variables that reach memory of a device."""
        self._by_name: dict[str, set[int]] = {}
        self._tensors: dict[int, weakref.ref[Any]] = {}
        self._versions: dict[int, tuple[int, int | None]] = {}
        if "torch" not in sys.modules:
            return set()
        graph = HeapGraph(holders.excluded_objects(self._namespace, self._shell))
        try:
            with undisturbed():
                graph.explore(holders.variables(self._namespace, self._shell))
                for key, names in graph.roots_of().items():
                    for name in names:
                        self._by_name.setdefault(name, set()).add(key)
                tensors = graph.tensors
                self._tensors = {key: weakref.ref(each) for key, each in tensors.items()}
                self._versions = _versions(tensors.values())
                there = {key for key, each in tensors.items() if plain(each, "device").type not in ("cpu", "meta")}
                return {name for name, reached in self._by_name.items() if reached & there}
        finally:
            graph.release()

    def _changed_tensors(self) -> Iterator[str]:
        """Remove first gradients, and yield the variables whose tensors were changed, each under its first name."""
        alive = {key: tensor for key, found in self._tensors.items() if (tensor := found()) is not None}
        now = _versions(alive.values()) if alive else {}
        for key, (version, gradient) in now.items():
            if gradient is not None and self._versions[key][1] is None:
                sys.modules["torch"]._C.TensorBase.grad.__set__(alive[key], None)
                now[key] = version, None
        changed = {key for key, versions in now.items() if versions != self._versions[key]}
        for name, reached in self._by_name.items():
            if changed & reached:
                yield f"changes in place of {name}"
            changed -= reached

    def _restore_contents(self) -> Iterator[str]:
        for name, before in self._contents.items():
            value: Any = self._namespace.get(name)
            if not self._bound.is_still(name, value):
                continue
            if isinstance(before, int):
                del value[before:]
            else:
                for key in set(value) - before:
                    value.pop(key) if type(value) is dict else value.remove(key)
            if len(value) != (before if isinstance(before, int) else len(before)):
                yield f"what was taken out of {name}"

    def _restore_names(self) -> Iterator[str]:
        for name in self._mine().keys() - set(self._bound):
            del self._namespace[name]
        for name in self._bound:
            if name in self._namespace and self._bound.is_still(name, self._namespace[name]):
                continue
            old = self._watched[name]() if name in self._watched else self._kept.get(name)
            if name in self._kept or old is not None:
                self._namespace[name] = old
            elif name not in self._remade:
                yield f"the new value of {name}" if name in self._namespace else f"the deletion of {name}"
            elif name in self._on_device:  # the run makes a new one; both at once would not fit either
                self._namespace.pop(name, None)


def _versions(tensors: Collection[Any]) -> dict[int, tuple[int, int | None]]:
    """Return how often each tensor, and its gradient if it has one, was changed in place, by the tensor's `id`."""
    with undisturbed():
        leaves = kinds.leaves(tensors)
        gradients = {id(leaves[place]): _version(alias) for place, alias in kinds.peek_gradients(leaves) or ()}
        return {id(each): (_version(each), gradients.get(id(each))) for each in tensors}


def _version(tensor: Any) -> int:
    with contextlib.suppress(Exception):  # an inference tensor has no count
        return int(plain(tensor, "_version"))
    return 0


def _random_states() -> Iterator[Callable[[], object]]:
    """Yield what restores the random states of Python, numpy and torch, any number of times.

    Only devices in use are asked: any other has drawn nothing yet, and asking would initialise it.
    """
    yield partial(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield partial(numpy.set_state, numpy.get_state())
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield partial(torch.set_rng_state, torch.get_rng_state())
        for device in allocator.all_device_stats():
            backend, index = Device.parse(device)
            module: Any = allocator.device_module(backend)
            if hasattr(module, "get_rng_state"):
                place = () if backend == "mps" else (index,)
                yield partial(module.set_rng_state, module.get_rng_state(*place), *place)

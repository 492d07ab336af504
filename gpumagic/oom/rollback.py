"""Undoes what a run of some code changed, as far as possible, so that the code can run again from where it began.

No tensor is kept alive or copied. Restored: names that the run bound or replaced, entries added to lists, dicts and
sets, first gradients (removed, because a second backward would add to them), and random states. Reported but not
restored: tensors changed in place, as by an optimizer. Not seen: numpy arrays, files, and the attributes of other
objects.

Nothing on an accelerator is kept: the run would have got that memory back when it rebound the name.
"""

from __future__ import annotations

import ast
import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

from gpumagic.heap import holders, kinds
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.holders import Identities
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device
from gpumagic.report.base import grouped
from gpumagic.source import cell_code


def _version(tensor: Any) -> int:
    """Return how often a tensor has been changed in place; 0 for an inference tensor, which has no count."""
    try:
        with undisturbed():
            return int(plain(tensor, "_version"))
    except Exception:
        return 0


def _is_on_accelerator(tensor: Any) -> bool:
    """Return whether a tensor occupies memory of a device."""
    with undisturbed():
        return plain(tensor, "device").type not in ("cpu", "meta")


def _gradients(tensors: list[Any]) -> dict[int, int]:
    """Return the version of each tensor's gradient, by the tensor's `id`."""
    with undisturbed():
        leaves = kinds.leaves(tensors)
        return {id(leaves[i]): _version(alias) for i, alias in kinds.peek_gradients(leaves) or ()}


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


SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Rollback:
    """The state before a run of `source`, which may bind variables of `namespace`; `undo` restores it, repeatedly."""

    def __init__(self, namespace: MutableMapping[str, object], source: str = "", shell: object | None = None) -> None:
        self._namespace, self._shell = namespace, shell
        cell = cell_code.read_cell(source)
        nodes = cell.text.nodes() if cell is not None and cell.text is not None else ()
        self._remade = cell.bound_first if cell is not None else frozenset[str]()
        rebound = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
        mine, reached = self._mine(), self._reached()
        self._bound = Identities(mine)
        self._read_tensors(reached)
        self._kept: dict[str, object] = {}
        self._watched: dict[str, weakref.ref[Any]] = {}
        for name, value in mine.items():
            is_harmless = name in rebound - self._remade and not any(map(_is_on_accelerator, reached.get(name, ())))
            if type(value) in SCALARS or is_harmless:
                self._kept[name] = value
            else:
                with contextlib.suppress(TypeError):  # not everything takes a weak reference
                    self._watched[name] = weakref.ref(value)
        containers: dict[str, Any] = {name: each for name, each in mine.items() if type(each) in (list, dict, set)}
        self._contents = {name: len(each) if type(each) is list else set(each) for name, each in containers.items()}
        self._random = list(_random_states())

    def _read_tensors(self, reached: Mapping[str, list[Any]]) -> None:
        """Remember the versions of the tensors that each variable reaches, and of their gradients; keep none alive."""
        unique = {id(each): each for tensors in reached.values() for each in tensors}
        own = _gradients(list(unique.values()))
        self._tensors = {key: weakref.ref(each) for key, each in unique.items()}
        self._versions = {key: (_version(each), own.get(key)) for key, each in unique.items()}
        self._by_name = {name: set(map(id, tensors)) for name, tensors in reached.items()}

    def undo(self) -> tuple[str, ...]:
        """Restore what can be restored, and return what cannot, in words."""
        self._drop_new_gradients()
        lost = [*self._written(), *self._restore_contents(), *self._restore_names()]
        for restore in self._random:
            restore()
        return tuple(lost)

    def _drop_new_gradients(self) -> None:
        for key, found in self._tensors.items():
            tensor = found()
            if tensor is not None and self._versions[key][1] is None:
                with undisturbed():
                    if plain(tensor, "is_leaf") and plain(tensor, "grad") is not None:
                        sys.modules["torch"]._C.TensorBase.grad.__set__(tensor, None)

    def _mine(self) -> dict[str, object]:
        """Return the variables except the shell's own."""
        own = getattr(self._shell, "user_ns_hidden", {})
        return {name: value for name, value in list(self._namespace.items()) if name not in own}

    def _reached(self, *names: str) -> dict[str, list[Any]]:
        """Return the tensors that each variable reaches, all variables without names; the caller releases them."""
        if "torch" not in sys.modules:
            return {}
        named = [(name, self._namespace[name]) for name in names]
        graph = HeapGraph(holders.excluded_objects(self._namespace, self._shell))
        try:
            with undisturbed():
                graph.explore(named or holders.variables(self._namespace, self._shell))
                return grouped((name, graph.tensors[key]) for key, roots in graph.roots_of().items() for name in roots)
        finally:
            graph.release()

    def _written(self) -> Iterator[str]:
        """Yield the variables whose tensors were changed in place, each tensor under its first name."""
        alive = {key: each() for key, each in self._tensors.items()}
        own = _gradients([each for each in alive.values() if each is not None])
        written = {
            key for key, each in alive.items()
            if each is not None and (_version(each), own.get(key)) != self._versions[key]
        }  # fmt: skip
        for name, reached in self._by_name.items():
            if written & reached:
                yield f"changes in place of {name}"
            written -= reached

    def _has(self, name: str) -> bool:
        """Return whether a name is bound to the same object as before."""
        return name in self._namespace and self._bound.is_still(name, self._namespace[name])

    def _restore_contents(self) -> Iterator[str]:
        for name, before in self._contents.items():
            if self._has(name) and not _without_new_entries(self._namespace[name], before):
                yield f"what was taken out of {name}"

    def _restore_names(self) -> Iterator[str]:
        for name in self._mine().keys() - set(self._bound):
            del self._namespace[name]
        for name in [each for each in self._bound if not self._has(each)]:
            watched = self._watched.get(name)
            old = self._kept.get(name) if watched is None else watched()
            if name in self._kept or old is not None:
                self._namespace[name] = old
            elif name not in self._remade:
                yield f"the new value of {name}" if name in self._namespace else f"the deletion of {name}"
            elif name in self._namespace and any(map(_is_on_accelerator, self._reached(name).get(name, ()))):
                del self._namespace[name]  # the run makes a new one; both at once would not fit either


def _without_new_entries(value: Any, before: int | set[object]) -> bool:
    """Remove what came into a container, and return whether it has all that it had: its length, or its keys."""
    if isinstance(before, int):
        del value[before:]
        return len(value) == before
    for key in set(value) - before:
        value.pop(key) if type(value) is dict else value.remove(key)
    return len(value) == len(before)

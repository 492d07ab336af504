"""The state of the notebook before a run that may fail: what can be restored after it, and what cannot.

Restored are names that the run bound or replaced, lists that it appended to, first gradients (a second backward would
add to them) and random states. What else it has changed in place is only named, and so is what may have been changed
without being noticed.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping
from functools import partial
from typing import Any, NamedTuple

from gpumagic._compat import torch_private
from gpumagic.backends import backend_named
from gpumagic.heap import holders, kinds
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device
from gpumagic.oom.contents import Contents
from gpumagic.source import cell_code


class _Version(NamedTuple):
    """How often a tensor was changed in place, and its gradient if it has one."""

    of_tensor: int
    of_gradient: int | None


class _Tensor(NamedTuple):
    """A tensor as it was before the run."""

    reference: weakref.ref[Any]
    version: _Version


class Lost(NamedTuple):
    """What a rollback could not restore."""

    changes: tuple[str, ...]
    """In words: ``"changes in place of net"``."""
    unseen: tuple[str, ...]
    """Variables that the cell uses in which a change would not have been noticed."""


class Rollback:
    """The state before a run of `source`, which may bind variables of `namespace`; `undo` restores it, repeatedly.

    No tensor is copied, and nothing on an accelerator is kept alive: the run would have got that memory back when it
    rebound the name.
    """

    def __init__(
        self,
        namespace: MutableMapping[str, object],
        source: str = "",
        shell: object | None = None,
    ) -> None:
        self._namespace = namespace
        self._shell = shell
        variables = self._variables()
        cell = cell_code.read_cell(source)
        certain = cell.bound_first if cell is not None else frozenset[str]()
        # A shorter run may pass over the loop that binds a name: what can be kept of its old value is kept.
        self._remade = (
            certain.union(cell.bound_in_blocks) if cell is not None else certain
        )
        self._used = list(variables)
        if source and cell is not None:
            used = cell_code.names_used(cell.names, variables)
            self._used = [name for name in variables if name in used]
        self._tensors: dict[int, _Tensor] = {}
        self._reached: dict[str, set[int]] = {}
        """The `id`s of the tensors that each variable reaches."""
        self._on_device: set[str] = set()
        """The variables that reach memory of a device."""
        if "torch" in sys.modules:
            self._read_tensors()
        self._bound = holders.Identities(variables)
        self._kept: dict[str, object] = {}
        """Values that are bound to their names again; none has memory of a device."""
        self._watched: dict[str, weakref.ref[Any]] = {}
        """Values that are, if they still live by then."""
        self._lengths: dict[str, int] = {}
        for name, value in variables.items():
            if name not in self._on_device and name not in certain:
                self._kept[name] = value
            else:
                with contextlib.suppress(
                    TypeError
                ):  # not everything takes a weak reference
                    self._watched[name] = weakref.ref(value)
            if type(value) is list:
                self._lengths[name] = len(value)
        excluded = holders.excluded_objects(namespace, shell)
        self._contents = Contents(self._used_first(variables), excluded)
        self._random = list(_random_states())

    def undo(self) -> Lost:
        """Restore what can be restored, and return what cannot."""
        replaced = list(self._restore_names())
        tensors = list(self._changed_tensors())
        self._shorten_lists()
        lost = dict.fromkeys(tensors)
        for name in self._contents.changed(self._used_first(self._restored())):
            lost[f"changes in place of {name}"] = None
        lost.update(dict.fromkeys(replaced))
        for restore in self._random:
            restore()
        return Lost(tuple(lost), tuple(self._contents.unseen(self._used)))

    def _variables(self) -> dict[str, Any]:
        """Return the variables except the shell's own."""
        own = getattr(self._shell, "user_ns_hidden", {})
        return {
            name: value
            for name, value in list(self._namespace.items())
            if name not in own
        }

    def _restored(self) -> dict[str, Any]:
        """Return the variables that have the values that they had before the run."""
        variables = self._variables()
        return {
            name: value
            for name, value in variables.items()
            if self._is_old(name, value)
        }

    def _is_old(self, name: str, value: object) -> bool:
        """Return whether a value is the one that a name had before the run."""
        if name in self._kept:
            return value is self._kept[name]
        if name in self._watched:
            return value is self._watched[name]()
        return self._bound.is_still(name, value)

    def _used_first(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return variables with those first that the cell uses."""
        used = {name: variables[name] for name in self._used if name in variables}
        return used | variables

    def _read_tensors(self) -> None:
        """Remember the tensors that the variables reach, and the variables that reach memory of a device."""
        graph = HeapGraph(holders.excluded_objects(self._namespace, self._shell))
        try:
            with undisturbed():
                graph.explore(holders.variables(self._namespace, self._shell))
                versions = _versions(graph.tensors.values())
                for key, tensor in graph.tensors.items():
                    self._tensors[key] = _Tensor(weakref.ref(tensor), versions[key])
                for key, names in graph.roots_of().items():
                    if plain(graph.tensors[key], "device").type not in ("cpu", "meta"):
                        self._on_device.update(names)
                    for name in names:
                        self._reached.setdefault(name, set()).add(key)
        finally:
            graph.release()

    def _changed_tensors(self) -> Iterator[str]:
        """Remove first gradients, and yield the variables whose tensors were changed, each under its first name."""
        alive: dict[int, Any] = {}
        for key, known in self._tensors.items():
            tensor = known.reference()
            if tensor is not None:
                alive[key] = tensor
        versions = _versions(alive.values()) if alive else {}
        changed = set[int]()
        for key, after in versions.items():
            before = self._tensors[key].version
            if before.of_gradient is None and after.of_gradient is not None:
                torch_private.TENSOR_BASE.get().grad.__set__(alive[key], None)
                after = after._replace(of_gradient=None)  # noqa: PLW2901
            if after != before:
                changed.add(key)
        for name, reached in self._reached.items():
            if changed & reached:
                yield f"changes in place of {name}"
            changed -= reached

    def _shorten_lists(self) -> None:
        """Take away what was appended to lists."""
        for name, before in self._lengths.items():
            value: Any = self._namespace.get(name)
            if type(value) is list and self._is_old(name, value):
                del value[before:]

    def _restore_names(self) -> Iterator[str]:
        """Bind the names as they were, and yield what became of those that cannot be."""
        for name in self._variables().keys() - set(self._bound):
            del self._namespace[name]
        for name in self._bound:
            if name in self._namespace and self._bound.is_still(
                name, self._namespace[name]
            ):
                continue
            old = (
                self._watched[name]() if name in self._watched else self._kept.get(name)
            )
            if name in self._kept or old is not None:
                self._namespace[name] = old
            elif name not in self._remade:
                is_there = name in self._namespace
                yield (
                    f"the new value of {name}"
                    if is_there
                    else f"the deletion of {name}"
                )
            elif name in self._on_device:
                # The run makes a new one; both at once would not fit either.
                self._namespace.pop(name, None)


def _versions(tensors: Collection[Any]) -> dict[int, _Version]:
    """Return the versions of tensors by their `id`."""
    with undisturbed():
        leaves = kinds.leaves(tensors)
        gradients: dict[int, int] = {}
        for place, alias in kinds.peek_gradients(leaves) or ():
            gradients[id(leaves[place])] = _version(alias)
        return {
            id(tensor): _Version(_version(tensor), gradients.get(id(tensor)))
            for tensor in tensors
        }


def _version(tensor: Any) -> int:
    with contextlib.suppress(Exception):  # an inference tensor has no count
        return int(torch_private.VERSION.get()(tensor))
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
    if torch is None:
        return
    yield partial(torch.set_rng_state, torch.get_rng_state())
    for device in allocator.all_device_stats():
        backend, index = Device.parse(device)
        module: Any = allocator.device_module(backend)
        if hasattr(module, "get_rng_state"):
            place = () if backend_named(backend).has_one_device else (index,)
            yield partial(module.set_rng_state, module.get_rng_state(*place), *place)

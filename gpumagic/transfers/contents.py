"""What a variable holds: the tensors, modules and optimizers in it, through containers and dataclasses.

Containers are not changed: `rebuilt` makes new ones around what moved, so that other references keep the old one.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

from gpumagic.heap import branches, modules
from gpumagic.heap.storages import plain, undisturbed


@dataclass
class Contents:
    """The tensors, modules and optimizers that variables hold, each once, in the order found."""

    tensors: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    _seen: dict[int, object] = field(default_factory=dict)

    def add(self, value: object) -> bool:
        """Add what a value holds; return whether anything in it has a device."""
        kind = type(value)  # not isinstance(): a proxy's __class__ may evaluate or raise
        if kind in _ATOMS:
            return False
        known = self._list_of(kind)
        if known is self.optimizers:
            value = modules.unwrapped(value)
        parts = parts_of(value) if known is None else []
        is_new = id(value) not in self._seen
        if known is not None or parts:
            self._seen[id(value)] = value  # alive while its id is used
        if known is not None and is_new:
            known.append(value)
        inside = [self.add(part) for _, part in parts if type(part) not in _ATOMS] if is_new else [bool(parts)]
        return known is not None or any(inside)

    def _list_of(self, kind: type) -> list[Any] | None:
        import torch

        if issubclass(kind, torch.Tensor):
            return self.tensors
        if issubclass(kind, torch.nn.Module):
            return self.modules
        return self.optimizers if issubclass(kind, torch.optim.Optimizer) else None

    def with_gradients(self) -> Iterator[Any]:
        """Yield every tensor, those of modules and optimizers' parameters too, each with its gradient."""
        of_modules = (tensor for module in self.modules for _, _, tensor in slots_of(module))
        for tensor in (*of_modules, *self._others()):
            yield tensor
            with undisturbed():
                gradient = plain(tensor, "grad") if plain(tensor, "is_leaf") else None
            if gradient is not None:
                yield gradient

    def _others(self) -> list[Any]:
        groups = [group for optimizer in self.optimizers for group in modules.parameter_groups(optimizer)]
        return [*self.tensors, *(each for group in groups for each in group["params"])]

    def leaves(self) -> list[Any]:
        """Return the leaf tensors that require gradients, apart from those of modules."""
        with undisturbed():
            return [each for each in self._others() if plain(each, "is_leaf") and plain(each, "requires_grad")]


def slots_of(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the parameters and buffers of a module and its submodules: the dict that has it, the key, the tensor."""
    for _, part in modules.modules_in(module):
        own = branches.attributes_of(part)
        for kept in (own.get("_parameters"), own.get("_buffers")):
            if isinstance(kept, dict):
                yield from ((kept, key, tensor) for key, tensor in list(dict.items(kept)) if tensor is not None)


# ---- Containers

Step: TypeAlias = "tuple[str, Any]"
"""How a container holds a part: ``("item", key)`` or ``("attribute", name)``."""
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})


def parts_of(value: Any) -> list[tuple[Step, object]]:
    """Return the parts of a container or a dataclass, and nothing for any other value."""
    from torch.nn.utils.rnn import PackedSequence

    kind = type(value)
    if issubclass(kind, PackedSequence):  # its batch sizes must stay on the host
        return [(("item", place), part) for place, part in enumerate(tuple.__iter__(value)) if place != 1]
    parts: list[tuple[Step, object]] = []
    if issubclass(kind, dict) and not _ATOMS.issuperset(map(type, dict.values(value))):
        parts += [(("item", key), part) for key, part in dict.items(value)]
    elif issubclass(kind, list | tuple):
        items = list((tuple if issubclass(kind, tuple) else list).__iter__(value))
        if not _ATOMS.issuperset(map(type, items)):  # a million numbers, quickly
            parts += [(("item", place), part) for place, part in enumerate(items)]
    return parts + [(("attribute", name), part) for name, part in _attributes(value, kind)]


def _attributes(value: Any, kind: type) -> list[tuple[str, object]]:
    """Return a dataclass's fields, and the attributes that container subclasses have along with their items."""
    fields = branches.class_attribute(kind, "__dataclass_fields__")
    if isinstance(fields, dict):
        own = branches.attributes_of(value)
        return [(name, own[name]) for name in fields if name in own]
    keeps = (dict, list, collections.UserDict, collections.UserList, SimpleNamespace)
    return list(branches.attributes_of(value).items()) if issubclass(kind, keeps) else []


def rebuilt(value: object, replacement: Callable[[Any], object], done: dict[int, Any] | None = None) -> Any:
    """Return a copy of a tensor, container or dataclass with each tensor replaced, or itself if nothing differs.

    ``done`` is ``{id: result}`` for containers already rebuilt, so that two names of one stay two names of one.

    Raises:
        ValueError: a container holds itself.
    """
    import torch

    if type(value) in _ATOMS:
        return value
    done = {} if done is None else done
    if issubclass(type(value), torch.Tensor):
        return replacement(value)
    parts = parts_of(value)
    if not parts:
        return value
    if id(value) in done:
        if done[id(value)] is _UNFINISHED:
            raise ValueError("it holds itself")
        return done[id(value)]
    done[id(value)] = _UNFINISHED
    new = [(step, part if type(part) in _ATOMS else rebuilt(part, replacement, done)) for step, part in parts]
    same = all(part is old for (_, part), (_, old) in zip(new, parts, strict=True))
    done[id(value)] = value if same else _like(value, new)
    return done[id(value)]


_UNFINISHED = object()


def _like(value: Any, parts: list[tuple[Step, object]]) -> object:
    if issubclass(type(value), tuple):
        return _tuple_like(value, {place: part for (_, place), part in parts})
    made = copy.copy(value)
    for (kind, key), part in parts:
        if kind == "attribute":
            object.__setattr__(made, key, part)  # a frozen dataclass too: nothing else has the new one yet
        else:
            (dict if issubclass(type(made), dict) else list).__setitem__(made, key, part)
    return made


def _tuple_like(value: tuple[Any, ...], parts: dict[int, object]) -> object:
    new = [parts.get(place, part) for place, part in enumerate(value)]
    kind: Any = type(value)
    if hasattr(kind, "_make"):
        return kind._make(new)
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and its like return
        return kind(new)
    return tuple.__new__(kind, new)

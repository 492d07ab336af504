"""How to look inside an object without running anybody's code.

Containers, instances, modules and optimizers are opened by reading what CPython stores: `dict.items`, an
instance's `__dict__`, its slots. An attribute that a class could have overridden is never asked for, so lazy
objects stay lazy and dead proxies stay quiet.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Literal, NamedTuple

Style = Literal["name", ".", "[", "{", "state", "in"]
"""How a child hangs on its parent: a variable, an attribute, an index or key, a set's element, an optimizer's state,
or, with a pair of labels for key, in a place that no expression reaches: ``step.<closure>.x``."""

VARIABLE, OWN, CONTAINED, OPTIMIZER = range(4)
"""How well a step names what it leads to; the lowest is best."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_ATOMS = frozenset({int, float, complex, bool, str, bytes, bytearray, type(None), type, range, slice})
_PIECE = 512

_dict_of = type.__dict__["__dict__"].__get__
_mro_of = type.__dict__["__mro__"].__get__
_flags_of = type.__dict__["__flags__"].__get__


class Fields(NamedTuple):
    """How CPython itself reads the attributes of a type's instances."""

    instance_dict: Callable[[object], object] | None
    slots: tuple[tuple[str, Callable[[object], object]], ...]


class Branch(NamedTuple):
    """Children of one object that hang on it by the same kind of step."""

    style: Style
    rank: int
    children: Iterable[tuple[Any, object]]
    below: object = None
    """The parameter whose state the children are, for an optimizer's."""


class Opener(NamedTuple):
    """How the instances of one type are opened."""

    branches: Callable[[Any, Opener], Iterator[Branch]]
    fields: Fields | None = None
    container: type | None = None
    is_tensor: bool = False

    def length(self, value: object) -> int:
        """Return how many children a container has, 0 for anything else."""
        return int(self.container.__len__(value)) if self.container else 0  # type: ignore[attr-defined]


def made_by_class(kind: type) -> bool:
    """Return whether a type was made by a class statement."""
    return bool(_flags_of(kind) & _HEAP_TYPE)


def fields_of(kind: type) -> Fields | None:
    """Return how to read the attributes of a type's instances, or None if they have none."""
    instance_dict, slots = None, []
    for base in _mro_of(kind):
        for name, entry in _dict_of(base).items():
            if name == "__dict__" and type(entry) in (GetSetDescriptorType, MemberDescriptorType):
                instance_dict = instance_dict or entry.__get__
            elif type(entry) is MemberDescriptorType and made_by_class(base):
                slots.append((name, entry.__get__))
    return Fields(instance_dict, tuple(slots)) if instance_dict or slots else None


def attributes(value: object, fields: Fields | None) -> list[tuple[str, object]]:
    """Return the slots and instance attributes of an object."""
    if fields is None:
        return []
    found = [(name, _slot(read, value)) for name, read in fields.slots]
    own = fields.instance_dict(value) if fields.instance_dict else None
    if isinstance(own, dict):
        found += list(dict.items(own))
    return found


def _slot(read: Callable[[object], object], value: object) -> object:
    try:
        return read(value)
    except AttributeError:  # it was never set
        return None


def nothing(_value: object, _how: Opener) -> Iterator[Branch]:
    """Open what holds nothing."""
    return iter(())


def inner_tensors(value: object, how: Opener) -> Iterator[Branch]:
    """Open a tensor of a subclass."""
    # Only the tensors: a fake tensor also holds its mode, and that the whole tracer.
    import torch

    own = attributes(value, how.fields)
    yield Branch(".", CONTAINED, [(name, item) for name, item in own if issubclass(type(item), torch.Tensor)])


def instance(value: object, how: Opener) -> Iterator[Branch]:
    """Open an object of a class without an opener of its own."""
    # Attributes often lie inline in an instance, and asking for its `__dict__` would allocate one.
    if _may_hold(gc.get_referents(value)):
        yield Branch(".", CONTAINED, attributes(value, how.fields))


def _sequence(value: Any, how: Opener) -> Iterator[Branch]:
    items = list(_ITERATE[how.container](value))
    names = _dict_of(type(value)).get("_fields")
    if type(names) is tuple and len(names) == len(items):  # a named tuple
        yield Branch(".", CONTAINED, zip(names, items, strict=True))
    else:
        for start, piece in _promising(items):
            yield Branch("[", CONTAINED, enumerate(piece, start))
    yield Branch(".", CONTAINED, attributes(value, how.fields))


def _set(value: Any, how: Opener) -> Iterator[Branch]:
    for start, piece in _promising(list(_ITERATE[how.container](value))):
        yield Branch("{", CONTAINED, enumerate(piece, start))


def _dict(value: dict[Any, object], how: Opener) -> Iterator[Branch]:
    items = list(dict.items(value))
    for start, piece in _promising([item for _, item in items]):
        yield Branch("[", CONTAINED, items[start : start + len(piece)])
    keys = [key for key, _ in items]
    if _may_hold(keys):  # tensors hash by identity
        for start, piece in _promising(keys):
            yield Branch("{", CONTAINED, enumerate(piece, start))
    yield Branch(".", CONTAINED, attributes(value, how.fields))


def _promising(items: list[object]) -> Iterator[tuple[int, list[object]]]:
    """Yield the pieces of a long list, with their position, that hold more than atoms and containers of atoms."""
    if len(items) < _PIECE:
        yield 0, items
        return
    for start in range(0, len(items), _PIECE):
        piece = items[start : start + _PIECE]
        if _may_hold(piece) and (_any_tensor(piece) or _may_hold(gc.get_referents(*piece))):
            yield start, piece


def _any_tensor(items: list[object]) -> bool:
    import torch

    return any(issubclass(kind, torch.Tensor) for kind in set(map(type, items)))


def module(value: object, how: Opener) -> Iterator[Branch]:
    """Open a module: what it registers by its own names, then its other attributes."""
    own = dict(attributes(value, how.fields))
    for name in ("_parameters", "_buffers", "_modules"):
        children = own.pop(name, None)
        if isinstance(children, dict):
            yield Branch(".", OWN, list(dict.items(children)))
    yield Branch(".", CONTAINED, own.items())


def optimizer(value: object, how: Opener) -> Iterator[Branch]:
    """Open an optimizer: the states of its parameters, then its attributes."""
    own = dict(attributes(value, how.fields))
    states = own.pop("state", None)
    if isinstance(states, dict):
        for parameter, state in list(dict.items(states)):
            if isinstance(state, dict):
                yield Branch(".", OPTIMIZER, list(dict.items(state)), below=parameter)
    yield Branch(".", OPTIMIZER, own.items())


_ITERATE: dict[type | None, Callable[[Any], Iterable[object]]] = {
    list: list.__iter__, tuple: tuple.__iter__, deque: deque.__iter__,
    set: set.__iter__, frozenset: frozenset.__iter__,
}  # fmt: skip
CONTAINERS: dict[type, Callable[[Any, Opener], Iterator[Branch]]] = {
    dict: _dict, list: _sequence, tuple: _sequence, deque: _sequence, set: _set, frozenset: _set,
}  # fmt: skip


def _may_hold(values: Iterable[object]) -> bool:
    return not _ATOMS.issuperset(map(type, values))

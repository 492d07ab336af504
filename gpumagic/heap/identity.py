"""Which object a variable was bound to, told later without having kept it alive.

An address is no identity: CPython gives that of a freed object to the next one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

_weakref_offset_of = type.__dict__["__weakrefoffset__"].__get__  # a metaclass of the user's is not asked

_SMALL = (bool, int, float, complex, str, bytes, type(None))
_MEMBERS = 8
"""How many members of a container stand for it: one that is still in it, at its address, is enough."""
_DEPTH = 3
_CONTAINERS = (list, tuple, dict, set)


class Identities:
    """The objects that some variables were bound to; none that can hold a tensor is kept alive.

    Args:
        namespace: the variables.
    """

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self._marks = {name: mark(value) for name, value in list(namespace.items())}

    def __contains__(self, name: str) -> bool:
        return name in self._marks

    def __iter__(self) -> Iterator[str]:
        return iter(self._marks)

    def is_still(self, name: str, value: object) -> bool:
        """Return whether the variable was bound to this very object."""
        return name in self._marks and is_marked(self._marks[name], value)


class _Container:
    """A list, dict, tuple or set, which takes no weak references: its address and some of its members or keys."""

    def __init__(self, value: Any, depth: int) -> None:
        self.address = id(value)
        self.members = [mark(each, depth - 1) for each in _first(value)] if depth else []


class _Address:
    """An object that takes no weak references and has no members that are known."""

    def __init__(self, value: object) -> None:
        self.address = id(value)


def mark(value: object, depth: int = _DEPTH) -> object:
    """Return what `is_marked` tells an object by later; only numbers, texts and None are kept alive."""
    kind = type(value)
    if kind in _SMALL:
        return value
    if kind in _CONTAINERS:
        return _Container(value, depth)
    return weakref.ref(value) if _weakref_offset_of(kind) else _Address(value)


def is_marked(made: object, value: object) -> bool:
    """Return whether a mark was made of this very object."""
    if type(made) is weakref.ref:
        return made() is value
    if isinstance(made, _Address):
        return made.address == id(value)
    if not isinstance(made, _Container):
        return made is value
    if made.address != id(value) or type(value) not in _CONTAINERS:
        return False
    return not made.members or not value or any(is_marked(old, each) for old in made.members for each in _first(value))


def _first(value: Any) -> list[object]:
    return list(itertools.islice(value, _MEMBERS))

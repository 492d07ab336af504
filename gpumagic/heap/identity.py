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


class _Unreferable:
    """An object that takes no weak references: its address, and some of its members or keys, which must still be in it.

    A container among those is told by its address alone.
    """

    def __init__(self, value: Any, *, is_member: bool) -> None:
        self.address = id(value)
        has_members = type(value) in _CONTAINERS and not is_member
        self.members = [mark(each, is_member=True) for each in _first(value)] if has_members else []


def mark(value: object, *, is_member: bool = False) -> object:
    """Return what `is_marked` tells an object by later; only numbers, texts and None are kept alive."""
    if type(value) in _SMALL:
        return value
    if _weakref_offset_of(type(value)) and type(value) not in _CONTAINERS:
        return weakref.ref(value)
    return _Unreferable(value, is_member=is_member)


def is_marked(made: object, value: object) -> bool:
    """Return whether a mark was made of this very object."""
    if type(made) is weakref.ref:
        return made() is value
    if not isinstance(made, _Unreferable):
        return made is value
    if made.address != id(value):
        return False
    now = _first(value) if type(value) in _CONTAINERS else []
    return not made.members or not now or any(is_marked(old, each) for old in made.members for each in now)


def _first(value: Any) -> list[object]:
    return list(itertools.islice(value, _MEMBERS))

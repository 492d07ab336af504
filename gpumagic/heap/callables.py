"""What functions, classes and iterators hold: closures, defaults, bound objects, arguments, caches, attributes."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from gpumagic.heap.anatomy import CONTAINED, Branch, Opener, attributes, made_by_class

_closure_of = FunctionType.__dict__["__closure__"].__get__
_defaults_of = FunctionType.__dict__["__defaults__"].__get__
_class_dict_of = type.__dict__["__dict__"].__get__
_bound_of = {kind: kind.__dict__["__self__"].__get__ for kind in (MethodType, BuiltinMethodType)}
_PARTIAL = [(name, functools.partial.__dict__[name].__get__) for name in ("func", "args", "keywords")]

OPAQUE: frozenset[type] = frozenset().union(map(type, (
    iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed([]), reversed({}),
    {}.keys(), {}.values(), {}.items(), MappingProxyType({}), enumerate(()), zip(), map(len, ()), filter(None, ()),
    reversed(()), itertools.chain(), itertools.cycle(()), itertools.islice((), 0), itertools.repeat(0),
    itertools.starmap(len, ()), itertools.tee(())[0], itertools.product(), itertools.count(),
    functools.lru_cache(len), staticmethod(len), property(),
)), {classmethod})  # fmt: skip
"""Iterators, views, descriptors, caches: what they hold has no name of its own, and only the gc tells it."""


def function(value: FunctionType, _how: Opener) -> Iterator[Branch]:
    """Open a function: the variables it closes over, its defaults, its attributes."""
    cells = _closure_of(value)
    if cells:
        held = [(name, *gc.get_referents(cell)) for name, cell in zip(value.__code__.co_freevars, cells, strict=True)]
        yield Branch("in", CONTAINED, [(("closure", each[0]), each[1]) for each in held if len(each) > 1])  # not empty
    if defaults := _defaults_of(value):
        yield Branch(".", CONTAINED, [("__defaults__", defaults)])
    # Asking for its `__dict__` would allocate one; these are that, if it is there, and the defaults of keywords.
    shared = (value.__globals__, value.__builtins__) if hasattr(value, "__builtins__") else (value.__globals__,)
    for each in gc.get_referents(value):
        if type(each) is dict and each and not any(each is other for other in shared):
            yield Branch(".", CONTAINED, list(each.items()))


def bound(value: Any, _how: Opener) -> Iterator[Branch]:
    """Open a method: what it is bound to, and its function."""
    yield Branch(".", CONTAINED, [("__self__", _bound_of[type(value)](value))])
    if type(value) is MethodType:
        yield Branch(".", CONTAINED, [("__func__", value.__func__)])


def partial(value: Any, how: Opener) -> Iterator[Branch]:
    """Open a partial: its function and the arguments it has already."""
    yield Branch(".", CONTAINED, [(name, read(value)) for name, read in _PARTIAL])
    yield Branch(".", CONTAINED, attributes(value, how.fields))


def klass(value: Any, _how: Opener) -> Iterator[Branch]:
    """Open a class: its attributes."""
    if made_by_class(value):
        yield Branch(".", CONTAINED, list(_class_dict_of(value).items()))


def opaque(value: object, _how: Opener) -> Iterator[Branch]:
    """Open what only the gc can look into."""
    held = [each for each in gc.get_referents(value) if not issubclass(type(each), type | ModuleType)]
    yield Branch("in", CONTAINED, [(("...", None), each) for each in held])

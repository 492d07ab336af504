"""Which types can hold a tensor, and how to read what an instance holds without running anybody's code.

Containers, instances, modules and optimizers are read as CPython stores them: `dict.items`, an instance's
`__dict__`, its slots. So are functions, classes, iterators, frames and exceptions. An attribute that a class could
have overridden is never accessed, so lazy objects stay lazy and dead proxies stay quiet.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from gpumagic.heap import calls
from gpumagic.heap.branches import (
    CONTAINED,
    FIELD,
    OPTIMIZER,
    OWN,
    REGISTERED,
    Branch,
    Inside,
    Read,
    Reader,
    attributes,
    class_attribute,
    dict_of,
    fields_of,
    is_heap_type,
    key_code,
    name_of_type,
)
from gpumagic.heap.kinds import is_node
from gpumagic.heap.storages import plain
from gpumagic.source import frames

_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, bytearray, type(None), type, range, slice}
)
_TYPED = frozenset({int, str, bool, type(None)})
"""Types of keys that can be typed, but for very long ones."""
_IMPORT = frozenset({"__builtins__", "__loader__", "__spec__"})
_PIECE = 512


def reader_of(kind: type) -> Reader | None:
    """Return how to read the instances of a type, or None if they cannot hold a tensor."""
    import torch

    if kind in (torch.Tensor, torch.nn.Parameter):
        return Reader(lambda _value, _reader: iter(()), is_tensor=True)
    if issubclass(kind, torch.Tensor):
        return Reader(_tensor_subclass, fields_of(kind), is_tensor=True)
    if kind in calls.EXACTLY or runs_the_session(kind):
        return Reader(calls.EXACTLY[kind]) if kind in calls.EXACTLY else None
    has_own_class = not is_lasting_class(kind)
    for base, read in _bases():
        if issubclass(kind, base):
            container = base if base in _CONTAINERS else None
            fields = None if kind is container else fields_of(kind)
            in_c = (types.WrapperDescriptorType, types.MethodDescriptorType, type(None))
            reads = [
                type(class_attribute(kind, name)) for name in ("__getitem__", "__iter__", "values")
            ]
            is_indexed = kind is container or all(each in in_c for each in reads)
            return Reader(
                read, fields, container, has_own_class=has_own_class, is_indexed=is_indexed
            )
    if is_node(kind):
        return Reader(read_node, fields_of(kind))
    is_plain = kind is types.SimpleNamespace
    fields = fields_of(kind) if is_plain or is_heap_type(kind) else None
    is_opaque = not is_plain and calls.shows_more(kind)
    read = calls.read_opaque if is_opaque else _instance
    return (
        Reader(read, fields, has_own_class=has_own_class)
        if is_opaque or fields or has_own_class
        else None
    )


def is_lasting_class(kind: type) -> bool:
    """Return whether a class lives as long as the process: a library's, and a variable of its module.

    The class that torch makes for each parametrized module is no variable, and keeps that module.
    """
    name = dict_of(kind).get("__module__") if is_heap_type(kind) else None
    if type(name) is not str:
        return True
    module = sys.modules.get(name)
    own = _variables_of(module) if issubclass(type(module), types.ModuleType) else {}
    file = own.get("__file__")
    is_its_variable = not own or own.get(name_of_type(kind)) is kind
    return is_its_variable and frames.is_library(name, file if type(file) is str else "")


def runs_the_session(kind: type) -> bool:
    """Return whether a type is IPython's or the kernel's: through `get_ipython` or `exit` they lead everywhere."""
    configurable = sys.modules.get("traitlets.config.configurable")
    return configurable is not None and issubclass(kind, configurable.Configurable)


def _bases() -> Iterator[tuple[type, Read]]:
    import torch

    yield torch.nn.Module, read_module
    yield torch.optim.Optimizer, read_optimizer
    yield from _CONTAINERS.items()
    yield BaseException, calls.read_exception
    yield type, _class
    yield types.ModuleType, _module_of_variables
    for module, name, read in (
        ("numpy", "ndarray", calls.read_array),
        ("pandas.core.generic", "NDFrame", calls.read_frame),
    ):
        if kind := getattr(sys.modules.get(module), name, None):
            yield kind, read


def read_node(value: object, reader: Reader) -> Iterator[Branch]:
    """Read a node of an autograd graph: what was set on it; what it saved is the graph's."""
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def tensor_attributes(tensor: Any) -> Iterator[Branch]:
    """Read what was set on a plain tensor, and its hooks; asking for its `__dict__` would allocate one."""
    hooks = (
        (name, plain(tensor, name)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    yield Branch(".", CONTAINED, [(name, each) for name, each in hooks if each])
    own = [each for each in gc.get_referents(tensor) if type(each) is dict]
    yield Branch(".", CONTAINED, list(own[0].items()) if own else [])


def _tensor_subclass(value: object, reader: Reader) -> Iterator[Branch]:
    # Of torch's own only the tensors: a fake tensor also holds its mode, and that the whole tracer.
    import torch

    own = attributes(value, reader.fields)
    if str(dict_of(type(value)).get("__module__")).partition(".")[0] == "torch":
        own = [(name, item) for name, item in own if issubclass(type(item), torch.Tensor)]
    yield Branch(".", CONTAINED, own)


def _instance(value: object, reader: Reader) -> Iterator[Branch]:
    # Attributes often lie inline in an instance, and asking for its `__dict__` would allocate one.
    if _may_hold(gc.get_referents(value)):
        yield Branch(".", CONTAINED, attributes(value, reader.fields))


def own_class(value: object, reader: Reader) -> Iterator[Branch]:
    """Read what the class of an instance keeps, where it may go with it."""
    if (
        reader.has_own_class
        and type(class_attribute(type(value), "__class__")) is types.GetSetDescriptorType
    ):
        yield Branch("in", CONTAINED, [(Inside("class", code=".__class__"), type(value))])


def _sequence(value: Any, reader: Reader) -> Iterator[Branch]:
    items = list(reader.container.__iter__(value))
    names = dict_of(type(value)).get("_fields")
    if type(names) is tuple and all(
        type(class_attribute(type(value), name)) is FIELD for name in names
    ):
        yield Branch(".", CONTAINED, zip(names, items, strict=False))
    else:
        for start, piece in _promising(items):
            yield _indexed(reader, Branch("[", CONTAINED, enumerate(piece, start)))
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _indexed(reader: Reader, branch: Branch) -> Branch:
    """Return a branch as it is, or as what no expression reaches where the type overrides how it is indexed."""
    if reader.is_indexed:
        return branch
    return Branch(
        "in", branch.rank, [(Inside(key_code(key) or "..."), item) for key, item in branch.children]
    )


def _set(value: Any, reader: Reader) -> Iterator[Branch]:
    for start, piece in _promising(list(reader.container.__iter__(value))):
        yield _indexed(reader, Branch("items", CONTAINED, enumerate(piece, start)))
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _dict(value: dict[Any, object], reader: Reader) -> Iterator[Branch]:
    items = list(dict.items(value))
    keys = [key for key, _ in items]
    are_plain = _TYPED.issuperset(map(type, keys)) and all(
        key_code(key) is not None for key in keys[:_PIECE]
    )
    for start, piece in _promising([item for _, item in items]):
        part = items[start : start + len(piece)]
        odd = (
            ()
            if are_plain
            else [(start + i, item) for i, (key, item) in enumerate(part) if key_code(key) is None]
        )
        typed = (
            part if not odd else [(key, item) for key, item in part if key_code(key) is not None]
        )
        yield _indexed(reader, Branch("[", CONTAINED, typed))
        yield _indexed(reader, Branch("values", CONTAINED, odd))
    if _may_hold(keys):  # tensors hash by identity
        for start, piece in _promising(keys):
            yield _indexed(reader, Branch("items", CONTAINED, enumerate(piece, start)))
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _promising(items: list[object]) -> Iterator[tuple[int, list[object]]]:
    """Yield the pieces of a long list, with their position, that hold more than atoms and containers of atoms."""
    if len(items) < _PIECE:
        yield 0, items
        return
    import torch

    for start in range(0, len(items), _PIECE):
        piece = items[start : start + _PIECE]
        if _may_hold(piece) and (
            any(issubclass(kind, torch.Tensor) for kind in set(map(type, piece)))
            or _may_hold(gc.get_referents(*piece))
        ):
            yield start, piece


def read_module(value: object, reader: Reader) -> Iterator[Branch]:
    """Read a module: what it registers by its own names, then its other attributes."""
    own = dict(attributes(value, reader.fields))
    for name in REGISTERED:
        children = own.pop(name, None)
        if isinstance(children, dict):
            yield from _registered(name, list(dict.items(children)), type(value))
    yield Branch(".", CONTAINED, own.items())


def _registered(name: Any, children: list[tuple[Any, object]], kind: type) -> Iterator[Branch]:
    """Read one of a module's dicts; the layers of a `Sequential` are indexed by their position, not by their name."""
    from torch import nn

    getitem = class_attribute(kind, "__getitem__")
    numbered = [
        (place, str(place), child)
        for place, (key, child) in enumerate(children)
        if type(key) is str and key.isascii() and key.isdigit()
    ]
    if getitem is nn.Sequential.__getitem__ or (
        getitem in (nn.ModuleList.__getitem__, nn.ParameterList.__getitem__)
        and [key for _, key, _ in numbered] == [key for key, _ in children]
    ):
        yield Branch("[", OWN, [(place, child) for place, _, child in numbered])
        taken = {place for place, _, _ in numbered}
        children = [each for place, each in enumerate(children) if place not in taken]
    yield Branch(name, OWN, children)


def read_optimizer(value: object, reader: Reader) -> Iterator[Branch]:
    """Read an optimizer: the states of its parameters, then its attributes."""
    own = dict(attributes(value, reader.fields))
    states = own.pop("state", None)
    if isinstance(states, dict):
        for place, (parameter, state) in enumerate(list(dict.items(states))):
            if isinstance(state, dict):
                yield Branch(
                    "[", OPTIMIZER, list(dict.items(state)), parameter=(id(parameter), place)
                )
    yield Branch(".", OPTIMIZER, own.items())


def _class(value: Any, _reader: Reader) -> Iterator[Branch]:
    """Read what stands in a class, which is not always what its attribute gives."""
    for name, item in list(dict_of(value).items()) if is_heap_type(value) else ():
        if class_attribute(type(item), "__get__") is not None:
            key = key_code(name)
            yield Branch(
                "in", CONTAINED, [(Inside(str(name), code=key and f".__dict__[{key}]"), item)]
            )
        else:
            yield Branch(".", CONTAINED, [(name, item)])


def _module_of_variables(value: types.ModuleType, _reader: Reader) -> Iterator[Branch]:
    """Read a module of Python code that the user wrote; those of libraries lead everywhere."""
    own = _variables_of(value)
    name, file = own.get("__name__"), own.get("__file__")
    if (
        type(name) is str
        and name != "__main__"
        and type(file) is str
        and not frames.is_library(name, file)
    ):
        yield Branch(".", CONTAINED, module_variables(own))


def module_variables(own: dict[str, object]) -> list[tuple[str, object]]:
    """Return the variables of a module without what imported it: a loader may lead everywhere."""
    return [(name, value) for name, value in list(own.items()) if name not in _IMPORT]


_variables_of: Any = vars(types.ModuleType)["__dict__"].__get__


def _may_hold(values: Iterable[object]) -> bool:
    return not _ATOMS.issuperset(map(type, values))


_CONTAINERS: dict[type, Read] = {
    dict: _dict,
    list: _sequence,
    tuple: _sequence,
    deque: _sequence,
    set: _set,
    frozenset: _set,
}

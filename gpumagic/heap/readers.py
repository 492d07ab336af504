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

from gpumagic._compat import torch_private
from gpumagic.heap import calls
from gpumagic.heap.branches import (
    CONTAINED,
    FIELD,
    OPTIMIZER,
    OWN,
    REGISTERED,
    Attributes,
    Branch,
    Branches,
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
    if kind in calls.EXACTLY:
        return Reader(calls.EXACTLY[kind])
    for base, read in () if runs_the_session(kind) else _bases():
        if issubclass(kind, base):
            return _reader_of_base(kind, base, read)
    return _reader_of_instances(kind)


def _reader_of_base(kind: type, base: type, read: Read) -> Reader:
    """Return how to read the instances of a type that is or derives from one with a reader of its own."""
    container = base if base in _CONTAINERS else None
    is_exact = kind is container
    return Reader(
        read=read,
        fields=None if is_exact else fields_of(kind),
        container=container,
        has_own_class=not is_lasting_class(kind),
        is_indexed=is_exact or _is_read_by_c(kind),
    )


def _reader_of_instances(kind: type) -> Reader | None:
    """Return how to read the instances of any other type, or None if they cannot hold a tensor."""
    if runs_the_session(kind):
        return None
    if is_node(kind):
        return Reader(read_node, fields_of(kind))
    has_own_class = not is_lasting_class(kind)
    is_plain = kind is types.SimpleNamespace
    fields = fields_of(kind) if is_plain or is_heap_type(kind) else None
    if not is_plain and calls.shows_more(kind):
        return Reader(calls.read_opaque, fields, has_own_class=has_own_class)
    if fields is None and not has_own_class:
        return None
    return Reader(_instance, fields, has_own_class=has_own_class)


def _is_read_by_c(kind: type) -> bool:
    """Return whether a container is indexed and iterated as the built-in one is: no class of Python's overrides it."""
    in_c = (types.WrapperDescriptorType, types.MethodDescriptorType, type(None))
    methods = [
        class_attribute(kind, name) for name in ("__getitem__", "__iter__", "values")
    ]
    return all(type(method) in in_c for method in methods)


def is_lasting_class(kind: type) -> bool:
    """Return whether a class lives as long as the process: a library's, and a variable of its module.

    The class that torch makes for each parametrized module is no variable, and keeps that module.
    """
    if not is_heap_type(kind):
        return True
    name = dict_of(kind).get("__module__")
    if type(name) is not str:
        return True
    module = sys.modules.get(name)
    own: dict[str, object] = {}
    if issubclass(type(module), types.ModuleType):
        own = _variables_of(module)
    if own and own.get(name_of_type(kind)) is not kind:
        return False
    file = own.get("__file__")
    if type(file) is not str:
        file = ""
    return frames.is_library(name, file)


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
    array: type | None = getattr(sys.modules.get("numpy"), "ndarray", None)
    if array is not None:
        yield array, calls.read_array
    table: type | None = getattr(
        sys.modules.get("pandas.core.generic"), "NDFrame", None
    )
    if table is not None:
        yield table, calls.read_frame


def read_node(value: object, reader: Reader) -> Branches:
    """Read a node of an autograd graph: what was set on it; what it saved is the graph's."""
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def tensor_attributes(tensor: Any) -> Branches:
    """Read what was set on a plain tensor, and its hooks; asking for its `__dict__` would allocate one."""
    hooks: Attributes = []
    for name in torch_private.TENSOR_HOOKS:
        hook = plain(tensor, name)
        if hook:
            hooks.append((name, hook))
    yield Branch(".", CONTAINED, hooks)
    for referent in gc.get_referents(tensor):
        if type(referent) is dict:
            yield Branch(".", CONTAINED, list(referent.items()))
            return


def _tensor_subclass(value: object, reader: Reader) -> Branches:
    import torch

    module = str(dict_of(type(value)).get("__module__"))
    package, _, _ = module.partition(".")
    own: Attributes = []
    for name, item in attributes(value, reader.fields):
        # Of torch's own only the tensors: a fake tensor also holds its mode, and that the whole tracer.
        if package != "torch" or issubclass(type(item), torch.Tensor):
            own.append((name, item))
    yield Branch(".", CONTAINED, own)


def _instance(value: object, reader: Reader) -> Branches:
    # Attributes often lie inline in an instance, and asking for its `__dict__` would allocate one.
    if _may_hold(gc.get_referents(value)):
        yield Branch(".", CONTAINED, attributes(value, reader.fields))


def own_class(value: object, reader: Reader) -> Branches:
    """Read what the class of an instance keeps, where it may go with it."""
    kind = type(value)
    attribute = class_attribute(kind, "__class__")
    if reader.has_own_class and type(attribute) is types.GetSetDescriptorType:
        inside = Inside("class", code=".__class__")
        yield Branch("in", CONTAINED, [(inside, kind)])


def _sequence(value: Any, reader: Reader) -> Branches:
    items = list(reader.container.__iter__(value))
    names = _names_of_fields(type(value))
    if names is not None:
        yield Branch(".", CONTAINED, zip(names, items, strict=False))
    else:
        for start, piece in _promising(items):
            branch = Branch("[", CONTAINED, enumerate(piece, start))
            yield _indexed(reader, branch)
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _names_of_fields(kind: type) -> tuple[Any, ...] | None:
    """Return the names of a named tuple's fields; None for any other class."""
    names = dict_of(kind).get("_fields")
    if type(names) is not tuple:
        return None
    for name in names:
        if type(class_attribute(kind, name)) is not FIELD:
            return None
    return names


def _indexed(reader: Reader, branch: Branch) -> Branch:
    """Return a branch as it is, or as what no expression reaches where the type overrides how it is indexed."""
    if reader.is_indexed:
        return branch
    children: list[tuple[Inside, object]] = []
    for key, item in branch.children:
        place = key_code(key) or "..."
        children.append((Inside(place), item))
    return Branch("in", branch.rank, children)


def _set(value: Any, reader: Reader) -> Branches:
    elements = list(reader.container.__iter__(value))
    for start, piece in _promising(elements):
        branch = Branch("items", CONTAINED, enumerate(piece, start))
        yield _indexed(reader, branch)
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _dict(value: dict[Any, object], reader: Reader) -> Branches:
    # Comprehensions and `map`, since a dict may have a million items.
    items = list(dict.items(value))
    keys = [key for key, _ in items]
    first_keys = keys[:_PIECE]
    are_typed = _TYPED.issuperset(map(type, keys)) and None not in map(
        key_code, first_keys
    )
    for start, piece in _promising([item for _, item in items]):
        part = items[start : start + len(piece)]
        if are_typed:
            yield _indexed(reader, Branch("[", CONTAINED, part))
            continue
        typed: list[tuple[Any, object]] = []
        odd: list[tuple[int, object]] = []
        for position, (key, item) in enumerate(part, start):
            if key_code(key) is None:
                odd.append((position, item))
            else:
                typed.append((key, item))
        yield _indexed(reader, Branch("[", CONTAINED, typed))
        yield _indexed(reader, Branch("values", CONTAINED, odd))
    if _may_hold(keys):  # tensors hash by identity
        for start, piece in _promising(keys):
            branch = Branch("items", CONTAINED, enumerate(piece, start))
            yield _indexed(reader, branch)
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _promising(items: list[object]) -> Iterator[tuple[int, list[object]]]:
    """Yield the pieces of a long list, with their position, that hold more than atoms and containers of atoms."""
    if len(items) < _PIECE:
        yield 0, items
        return
    import torch

    for start in range(0, len(items), _PIECE):
        piece = items[start : start + _PIECE]
        if not _may_hold(piece):
            continue
        kinds = set(map(type, piece))
        has_tensors = any(issubclass(kind, torch.Tensor) for kind in kinds)
        if has_tensors or _may_hold(gc.get_referents(*piece)):
            yield start, piece


def read_module(value: object, reader: Reader) -> Branches:
    """Read a module: what it registers by its own names, then its other attributes."""
    own = dict(attributes(value, reader.fields))
    for name in REGISTERED:
        children = own.pop(name, None)
        if isinstance(children, dict):
            members = list(dict.items(children))
            yield from _registered(name, members, type(value))
    yield Branch(".", CONTAINED, own.items())


def _registered(name: Any, children: list[tuple[Any, object]], kind: type) -> Branches:
    """Read one of a module's dicts; the layers of a `Sequential` are indexed by their position, not by their name."""
    from torch import nn

    numbered: list[tuple[int, object]] = []
    others: list[tuple[Any, object]] = []
    are_in_order = True
    for position, (key, child) in enumerate(children):
        if type(key) is str and key.isascii() and key.isdigit():
            numbered.append((position, child))
            are_in_order &= key == str(position)
        else:
            others.append((key, child))
    getitem = class_attribute(kind, "__getitem__")
    is_list = getitem in (nn.ModuleList.__getitem__, nn.ParameterList.__getitem__)
    is_list_in_order = is_list and are_in_order and not others
    if getitem is nn.Sequential.__getitem__ or is_list_in_order:
        yield Branch("[", OWN, numbered)
        yield Branch(name, OWN, others)
    else:
        yield Branch(name, OWN, children)


def read_optimizer(value: object, reader: Reader) -> Branches:
    """Read an optimizer: the states of its parameters, then its attributes."""
    own = dict(attributes(value, reader.fields))
    states = own.pop("state", None)
    if isinstance(states, dict):
        for position, (parameter, state) in enumerate(list(dict.items(states))):
            if isinstance(state, dict):
                yield Branch(
                    "[",
                    OPTIMIZER,
                    children=list(dict.items(state)),
                    parameter=(id(parameter), position),
                )
    yield Branch(".", OPTIMIZER, own.items())


def _class(value: Any, _reader: Reader) -> Branches:
    """Read what stands in a class, which is not always what its attribute gives."""
    if not is_heap_type(value):
        return
    for name, item in list(dict_of(value).items()):
        if class_attribute(type(item), "__get__") is None:
            yield Branch(".", CONTAINED, [(name, item)])
            continue
        key = key_code(name)
        code = None
        if key is not None:
            code = f".__dict__[{key}]"
        inside = Inside(str(name), code=code)
        yield Branch("in", CONTAINED, [(inside, item)])


def _module_of_variables(value: types.ModuleType, _reader: Reader) -> Branches:
    """Read a module of Python code that the user wrote; those of libraries lead everywhere."""
    own = _variables_of(value)
    name = own.get("__name__")
    file = own.get("__file__")
    if type(name) is not str or type(file) is not str or name == "__main__":
        return
    if not frames.is_library(name, file):
        yield Branch(".", CONTAINED, module_variables(own))


def module_variables(own: dict[str, object]) -> Attributes:
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

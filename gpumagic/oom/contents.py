"""What variables hold, told later without keeping it alive: whether a run has changed anything in them in place.

Every container of Python's own and of the notebook's is looked into, as CPython stores it: lists and dicts and what
derives from them, arrays and tables, the attributes of objects and classes, closures, iterators, random generators. No
code of the user's runs. Tensors are not looked into, as they count their changes themselves.

Objects of libraries are not looked into either: many keep what they have computed once, and that is no change. What is
not looked into is told as well, since a change in it would not be noticed.
"""

from __future__ import annotations

import array
import contextlib
import gc
import io
import itertools
import random
import sys
import types
import weakref
import zlib
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import UUID

from gpumagic.heap import calls
from gpumagic.heap.branches import (
    Reader,
    attributes,
    class_attribute,
    dict_of,
    fields_of,
    flags_of,
    is_heap_type,
)
from gpumagic.heap.readers import is_lasting_class, module_variables
from gpumagic.source import frames

MOST_MEMBERS = 300_000
"""Members of containers that are compared in all: about 0.2 s."""
MOST_BYTES = 256 << 20
"""Bytes of arrays that are compared in all: about 0.2 s."""
LARGEST = 100_000
"""Members of a container that is not too large to be looked into."""
_LONG = 1_000
"""From so many members or characters on, their hash is remembered in place of them."""


class Contents:
    """What some variables held at one moment.

    Args:
        variables: with their names; where all is too much to compare, the last ones are left out.
        excluded: objects that are not looked into.
    """

    def __init__(
        self, variables: Mapping[str, object], excluded: Iterable[object] = ()
    ) -> None:
        self._excluded = frozenset(map(id, excluded))
        self._records: dict[int, _Record] = {}
        self._unseen: dict[str, set[int]] = {}
        """The `id`s of what was not looked into, by the variables that have it."""
        walk = _Walk(self._excluded)
        for name, value in variables.items():
            for part in walk.below(value):
                if part.is_unseen:
                    self._unseen.setdefault(name, set()).add(id(part.value))
                else:
                    self._records[id(part.value)] = _Record(
                        _weak(part.value), part.state
                    )

    def unseen(self, names: Iterable[str]) -> list[str]:
        """Return those of some variables in which a change may not be noticed."""
        return [name for name in names if name in self._unseen]

    def changed(self, variables: Mapping[str, object]) -> Iterator[str]:
        """Yield the names of the variables in which something has changed; what several have, under the first."""
        walk = _Walk(self._excluded)
        for name, value in variables.items():
            is_changed = False
            for part in walk.below(value):
                record = self._records.get(id(part.value))
                if record is not None and not part.is_unseen and not record.is_of(part):
                    is_changed = True
            if is_changed:
                yield name


class _Part(NamedTuple):
    """One object that a variable leads to, and what was read of it."""

    value: object
    members: list[object]
    state: object
    """What tells whether it has changed: tokens of its members, and what else it consists of."""
    is_unseen: bool = False
    """Whether it was not looked into."""


class _Record(NamedTuple):
    """What is remembered of a part."""

    reference: weakref.ref[Any] | None
    """To the object, where it can be referred to so: the `id` of one that is gone is given to another."""
    state: object

    def is_of(self, part: _Part) -> bool:
        """Return whether a part is the same object and has not changed."""
        if self.reference is not None and self.reference() is not part.value:
            return False
        return self.state == part.state


def _weak(value: object) -> weakref.ref[Any] | None:
    with contextlib.suppress(TypeError):
        return weakref.ref(value)
    return None


class _Walk:
    """A walk over what variables lead to, each object once."""

    def __init__(self, excluded: Iterable[int]) -> None:
        self._seen = set(excluded)
        self._members_left = MOST_MEMBERS
        self._bytes_left = MOST_BYTES
        self._looks: dict[type, _Look | None] = {}

    def below(self, value: object) -> Iterator[_Part]:
        """Yield a variable's value and what it leads to, but for what an earlier variable has led to."""
        waiting = deque([value])
        while waiting:
            value = waiting.popleft()
            look = self._look_at(type(value))
            if look is None or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            part = self._read(value, look)
            yield part
            waiting += part.members

    def _look_at(self, kind: type) -> _Look | None:
        if kind not in self._looks:
            self._looks[kind] = _look_at(kind)
        return self._looks[kind]

    def _read(self, value: object, look: _Look) -> _Part:
        if self._members_left <= 0:
            return _Part(value, [], None, is_unseen=True)
        try:
            members, data = look(value)
            content = self._content(data) if data is not None else None
        except (
            Exception
        ):  # another thread may change it meanwhile, and what is too large is left out
            return _Part(value, [], None, is_unseen=True)
        self._members_left -= len(members) + 1
        tokens = tuple(map(_token, members))
        if len(tokens) >= _LONG:
            return _Part(value, members, (len(tokens), hash(tokens), content))
        return _Part(value, members, (tokens, content))

    def _content(self, data: Any) -> object:
        """Return what stands for data that are no objects: the checksum of a buffer."""
        if type(data) is not memoryview:
            return data
        self._bytes_left -= data.nbytes
        if self._bytes_left < 0:
            raise _NotLookedInto
        return zlib.crc32(data if data.c_contiguous else data.tobytes())


_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})


def _token(member: Any) -> object:
    """Return what stands for a member of a container: a number or a text for itself, an object for its address."""
    kind = type(member)
    if kind not in _ATOMS:
        return (id(member),)
    if kind in (str, bytes) and len(member) >= _LONG:
        return len(member), hash(member)
    token: object = member
    return token


# ---- How the instances of a type are read


class _Contained(NamedTuple):
    """What an object consists of."""

    members: list[object]
    data: object = None
    """What is no object: a buffer as a `memoryview`, or what tells a position or a state; None for nothing."""


_Look = Callable[[Any], _Contained]
"""What reads an object; whatever it raises, the object counts as not looked into."""


class _NotLookedInto(Exception):
    """Raised for an object that may change without a trace, or that takes too long to compare."""


_FIXED = (
    range,
    slice,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    BaseException,
    weakref.ReferenceType,
    Fraction,
    PurePath,
    UUID,
)
"""Types whose instances do not change, but for what some of them keep for themselves."""
_PYTHONS_OWN = frozenset({"builtins", "itertools", "collections", "types", "functools"})
"""Modules of types of C that consist of what the gc shows of them, and of a position."""
_HAS_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC
_module_of_type: Callable[[type], str] = type.__dict__["__module__"].__get__
"""The name of a class's module, whatever its metaclass says."""
_variables_of: Any = vars(types.ModuleType)["__dict__"].__get__


def _look_at(kind: type) -> _Look | None:
    """Return what reads the instances of a type; None where they cannot change, or hold nothing."""
    if kind in _ATOMS or issubclass(kind, _FIXED):
        return None
    if issubclass(kind, _with_plain_attributes()):
        return _attribute_reader(kind)
    for base, look in (*_PYTHON.items(), *_of_libraries()):
        if issubclass(kind, base):
            return look
    if kind in calls.EXACTLY:
        return _read_call
    if is_heap_type(kind):
        return _refuse if is_lasting_class(kind) else _attribute_reader(kind)
    if not flags_of(kind) & _HAS_GC:
        return None
    return _read_of_c if _module_of_type(kind) in _PYTHONS_OWN else _refuse


def _refuse(_value: object) -> _Contained:
    raise _NotLookedInto


def _with_plain_attributes() -> tuple[type, ...]:
    """Return the classes of Python and torch whose attributes are what they consist of."""
    torch: Any = sys.modules.get("torch")
    classes = [types.SimpleNamespace, UserDict, UserList, ChainMap]
    if torch is not None:
        classes += [
            torch.nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
        ]
    return tuple(classes)


def _attribute_reader(kind: type) -> _Look:
    """Return what reads the attributes and slots of the instances of a type; their names are members, too."""
    fields = fields_of(kind)

    def read(value: object) -> _Contained:
        members: list[object] = []
        for pair in attributes(value, fields):
            members += pair
        return _Contained(members)

    return read


def _reader_of_container(
    base: Any, members_of: Callable[[Any], Iterable[object]] | None = None
) -> _Look:
    """Return what reads a container by the methods of the built-in one that it is or derives from."""

    def read(value: Any) -> _Contained:
        if base.__len__(value) > LARGEST:
            raise _NotLookedInto
        members = list(
            base.__iter__(value) if members_of is None else members_of(value)
        )
        kind = type(value)
        if is_heap_type(kind) and not is_lasting_class(kind):
            members += _attribute_reader(kind)(value).members
        return _Contained(members)

    return read


def _in_any_order(elements: Iterable[object]) -> list[object]:
    """Return the elements of a set in an order that does not tell what was put in and taken out again."""
    return sorted(elements, key=lambda element: hash(_token(element)))


def _read_class(value: Any) -> _Contained:
    """Read what stands in a class of the notebook's."""
    members: list[object] = []
    if not is_lasting_class(value):
        for item in list(dict_of(value).items()):
            members += item
    return _Contained(members)


def _read_module(value: Any) -> _Contained:
    """Read the variables of a module of the user's."""
    own = _variables_of(value)
    name = own.get("__name__")
    file = own.get("__file__")
    if type(name) is not str or type(file) is not str or frames.is_library(name, file):
        return _Contained([])
    return _Contained([variable for _, variable in module_variables(own)])


def _read_call(value: Any) -> _Contained:
    """Read a function's closure and defaults, or what a generator that waits has; where it waits is its position."""
    members: list[object] = []
    for branch in calls.EXACTLY[type(value)](value, Reader(calls.EXACTLY[type(value)])):
        members += (child for _, child in branch.children)
    if type(value) not in calls.SUSPENDED:
        return _Contained(members)
    frame = calls.read_attribute(value, "frame")
    return _Contained(members, "ended" if frame is None else frame.f_lasti)


def _read_of_c(value: Any) -> _Contained:
    """Read an iterator or a view by what the gc shows of it."""
    skipped = (type, types.ModuleType)
    members = [
        part for part in gc.get_referents(value) if not issubclass(type(part), skipped)
    ]
    hint = class_attribute(type(value), "__length_hint__")
    if type(hint) is types.MethodDescriptorType:
        return _Contained(members, hint(value))
    if type(value) is itertools.count:
        return _Contained(members, repr(value))
    return _Contained(members)


def _read_text(value: Any) -> _Contained:
    return _Contained([], hash(value.getvalue()))


def _read_random(value: Any) -> _Contained:
    return _Contained([], hash(random.Random.getstate(value)))


_PYTHON: dict[Any, _Look] = {
    OrderedDict: _reader_of_container(
        OrderedDict, lambda value: [*OrderedDict.__iter__(value), *dict.values(value)]
    ),
    dict: _reader_of_container(
        dict, lambda value: [*dict.__iter__(value), *dict.values(value)]
    ),
    list: _reader_of_container(list),
    tuple: _reader_of_container(tuple),
    deque: _reader_of_container(deque),
    set: _reader_of_container(set, lambda value: _in_any_order(set.__iter__(value))),
    frozenset: _reader_of_container(frozenset),
    type: _read_class,
    types.ModuleType: _read_module,
    bytearray: lambda value: _Contained([], memoryview(value)),
    array.array: lambda value: _Contained([], memoryview(value)),
    io.StringIO: _read_text,
    io.BytesIO: _read_text,
    random.SystemRandom: lambda _value: _Contained([]),
    random.Random: _read_random,
}
"""How Python's containers are read, and what derives from them."""


def _of_libraries() -> Iterator[tuple[Any, _Look]]:
    """Yield how the containers of torch, numpy and pandas are read, as far as these are imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield (
            torch.Tensor,
            lambda _value: _Contained([]),
        )  # it counts its changes itself
        yield (
            torch.Generator,
            lambda value: _Contained([], hash(tuple(value.get_state().tolist()))),
        )
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.ndarray, _read_array
        yield (
            numpy.random.Generator,
            lambda value: _Contained([], repr(value.bit_generator.state)),
        )
        yield (
            numpy.random.RandomState,
            lambda value: _Contained([], repr(value.get_state())),
        )
        yield numpy.random.BitGenerator, lambda value: _Contained([], repr(value.state))
    pandas: Any = sys.modules.get("pandas.core.generic")
    if pandas is not None:
        yield pandas.NDFrame, _read_table
    ctypes: Any = sys.modules.get("ctypes")
    if ctypes is not None:
        for kind in (ctypes.Array, ctypes.Structure, ctypes.Union):
            yield kind, lambda value: _Contained([], memoryview(value))


def _read_array(value: Any) -> _Contained:
    import numpy as np

    dtype = np.ndarray.dtype.__get__(value)
    if dtype.hasobject:
        return _Contained(np.ndarray.flatten(value).tolist())
    if not np.ndarray.flags.__get__(value).writeable:
        return _Contained([])
    if np.ndarray.nbytes.__get__(value) > MOST_BYTES:
        raise _NotLookedInto
    try:
        return _Contained([], memoryview(value))
    except ValueError:  # such as times, which no buffer has
        return _Contained([], memoryview(np.ndarray.tobytes(value)))


def _read_table(value: Any) -> _Contained:
    """Read a table of pandas by its arrays; what it keeps for columns that were read is no change."""
    manager = value._mgr
    labels = [id(axis) for axis in manager.axes]
    return _Contained([block.values for block in manager.blocks], tuple(labels))

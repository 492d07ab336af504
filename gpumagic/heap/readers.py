"""Which types can hold a tensor, and how to read what an instance holds without running anybody's code.

Containers, instances, modules and optimizers are read as CPython stores them: `dict.items`, an instance's
`__dict__`, its slots. So are functions, classes, iterators, frames and exceptions. An attribute that a class could
have overridden is never accessed, so lazy objects stay lazy and dead proxies stay quiet.
"""

from __future__ import annotations

import functools
import gc
import itertools
import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from gpumagic.source import frames

Style = Literal["name", ".", "[", "{", "state", "in"]
"""How a child is reached: by a variable, an attribute, an index or key, a set's element, an optimizer's state, or, with
a pair of labels for key, in a place that no expression reaches: ``step.<closure>.x``."""

VARIABLE, OWN, CONTAINED, OPTIMIZER = range(4)
"""How well a step names what it leads to; the lowest is best."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_ATOMS = frozenset({int, float, complex, bool, str, bytes, bytearray, type(None), type, range, slice})
_PIECE = 512

_closure_of = types.FunctionType.__dict__["__closure__"].__get__
_defaults_of = types.FunctionType.__dict__["__defaults__"].__get__
_bound_of = {each: each.__dict__["__self__"].__get__ for each in (types.MethodType, types.BuiltinMethodType)}
_PARTIAL = [(name, functools.partial.__dict__[name].__get__) for name in ("func", "args", "keywords")]
_dict_of = type.__dict__["__dict__"].__get__
_mro_of = type.__dict__["__mro__"].__get__
_flags_of = type.__dict__["__flags__"].__get__


Read = Callable[[Any, "Reader"], Iterator["Branch"]]


class Fields(NamedTuple):
    """How CPython itself reads the attributes of a type's instances."""

    instance_dict: Callable[[object], object] | None
    slots: tuple[tuple[str, Callable[[object], object]], ...]


class Branch(NamedTuple):
    """Children of one object that are reached by the same kind of step."""

    style: Style
    rank: int
    children: Iterable[tuple[Any, object]]
    parameter: object = None
    """For an optimizer: the parameter whose state the children are."""


class Reader(NamedTuple):
    """How the instances of one type are read."""

    read: Read
    fields: Fields | None = None
    container: Any = None
    """The built-in container that it is or derives from: its own methods read it, never those of a subclass."""
    is_tensor: bool = False

    def length(self, value: object) -> int:
        """Return how many children a container has, 0 for anything else."""
        return int(self.container.__len__(value)) if self.container else 0


def reader_of(kind: type) -> Reader | None:
    """Return how to read the instances of a type, or None if they cannot hold a tensor."""
    import torch

    if kind in (torch.Tensor, torch.nn.Parameter):
        return Reader(_nothing, is_tensor=True)
    if issubclass(kind, torch.Tensor):
        return Reader(_tensor_subclass, fields_of(kind), is_tensor=True)
    if kind in _EXACTLY:
        return Reader(_EXACTLY[kind])
    return None if _runs_the_session(kind) else _reader_by_base(kind)


def _reader_by_base(kind: type) -> Reader | None:
    for base, read in _bases():
        if issubclass(kind, base):
            container = base if base in _CONTAINERS else None
            return Reader(read, None if kind is container else fields_of(kind), container)
    if issubclass(kind, types.ModuleType) or not (is_heap_type(kind) or kind is types.SimpleNamespace):
        return None
    fields = fields_of(kind)
    return Reader(_instance, fields) if fields else None


def _runs_the_session(kind: type) -> bool:
    """Return whether a type is IPython's or the kernel's: through `get_ipython` or `exit` they lead everywhere."""
    configurable = sys.modules.get("traitlets.config.configurable")
    return configurable is not None and issubclass(kind, configurable.Configurable)


def _bases() -> Iterator[tuple[type, Read]]:
    import torch

    yield torch.nn.Module, read_module
    yield torch.optim.Optimizer, read_optimizer
    yield from _CONTAINERS.items()
    yield BaseException, _exception
    yield type, _class
    yield functools.partial, _partial_call
    if "_asyncio" in sys.modules:
        yield sys.modules["_asyncio"].Future, _opaque  # also tasks


def is_heap_type(kind: type) -> bool:
    """Return whether a type was made by a class statement."""
    return bool(_flags_of(kind) & _HEAP_TYPE)


def fields_of(kind: type) -> Fields | None:
    """Return how to read the attributes of a type's instances, or None if they have none."""
    instance_dict, slots = None, []
    for base in _mro_of(kind):
        for name, entry in _dict_of(base).items():
            if name == "__dict__" and type(entry) in (types.GetSetDescriptorType, types.MemberDescriptorType):
                instance_dict = instance_dict or entry.__get__
            elif type(entry) is types.MemberDescriptorType and is_heap_type(base):
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


def attributes_of(value: object) -> dict[str, Any]:
    """Return the slots and instance attributes of an object by name."""
    return dict(attributes(value, fields_of(type(value))))


def stored_attribute(owner: object, name: str, default: object = None) -> Any:
    """Return an attribute as an instance stores it, or a parameter, buffer or submodule as a module does."""
    own = attributes_of(owner)
    for registered in (own.get("_parameters"), own.get("_buffers"), own.get("_modules")):
        if isinstance(registered, dict) and name in registered:
            return registered[name]
    return own.get(name, default)


def _slot(read: Callable[[object], object], value: object) -> object:
    try:
        return read(value)
    except AttributeError:  # it was never set
        return None


_INFRASTRUCTURE = frozenset({
    "IPython", "ipykernel", "ipyparallel", "traitlets", "tornado", "asyncio", "zmq", "concurrent", "threading",
    "selectors", "socketserver", "runpy", "debugpy", "pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis",
    "gpumagic",
})  # fmt: skip
"""Packages whose running functions say nothing about who keeps a tensor: they run the session, or are us."""

_PREFIX = {types.GeneratorType: "gi_", types.CoroutineType: "cr_", types.AsyncGeneratorType: "ag_"}
SUSPENDED = tuple(_PREFIX)


def variables_of(frame: types.FrameType) -> list[tuple[str, object]]:
    """Return the local variables of a frame; none for a module's, which are its globals."""
    if frames.is_function_frame(frame):
        return list(frames.local_variables(frame).items())
    return [] if frame.f_locals is frame.f_globals else list(frame.f_locals.items())


def call_label(code: types.CodeType) -> str:
    """Return what a call of some code is called: ``"step()"``."""
    return f"{code.co_name.strip('<>')}()"


def running_functions() -> Iterator[tuple[str, list[tuple[str, object]]]]:
    """Yield every function that runs now, in any thread, innermost first: what it is called, and its variables."""
    own = threading.get_ident()
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    innermost_of = sys._current_frames()
    innermost_of[own] = sys._getframe(1)  # a frame that is its own variable would live on, and its callers with it
    for ident, innermost in innermost_of.items():
        where = "" if ident == own else f" in {threads.get(ident, 'a thread')}"
        for frame in frames.stack(innermost):
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _INFRASTRUCTURE:
                yield f"running {call_label(frame.f_code)}{where}", variables_of(frame)


def generator_label(generator: object) -> str:
    """Return what a suspended generator or coroutine is called."""
    return f"suspended {call_label(_read_attribute(generator, 'code'))}"


def _read_attribute(generator: object, what: str) -> Any:
    return type(generator).__dict__[_PREFIX[type(generator)] + what].__get__(generator)


def _nothing(_value: object, _reader: Reader) -> Iterator[Branch]:
    return iter(())


def _tensor_subclass(value: object, reader: Reader) -> Iterator[Branch]:
    # Only the tensors: a fake tensor also holds its mode, and that the whole tracer.
    import torch

    own = attributes(value, reader.fields)
    yield Branch(".", CONTAINED, [(name, item) for name, item in own if issubclass(type(item), torch.Tensor)])


def _instance(value: object, reader: Reader) -> Iterator[Branch]:
    # Attributes often lie inline in an instance, and asking for its `__dict__` would allocate one.
    if _may_hold(gc.get_referents(value)):
        yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _sequence(value: Any, reader: Reader) -> Iterator[Branch]:
    items = list(reader.container.__iter__(value))
    names = _dict_of(type(value)).get("_fields")
    if type(names) is tuple and len(names) == len(items):  # a named tuple
        yield Branch(".", CONTAINED, zip(names, items, strict=True))
    else:
        for start, piece in _promising(items):
            yield Branch("[", CONTAINED, enumerate(piece, start))
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _set(value: Any, reader: Reader) -> Iterator[Branch]:
    for start, piece in _promising(list(reader.container.__iter__(value))):
        yield Branch("{", CONTAINED, enumerate(piece, start))


def _dict(value: dict[Any, object], reader: Reader) -> Iterator[Branch]:
    items = list(dict.items(value))
    for start, piece in _promising([item for _, item in items]):
        yield Branch("[", CONTAINED, items[start : start + len(piece)])
    keys = [key for key, _ in items]
    if _may_hold(keys):  # tensors hash by identity
        for start, piece in _promising(keys):
            yield Branch("{", CONTAINED, enumerate(piece, start))
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
            any(issubclass(kind, torch.Tensor) for kind in set(map(type, piece))) or _may_hold(gc.get_referents(*piece))
        ):
            yield start, piece


def read_module(value: object, reader: Reader) -> Iterator[Branch]:
    """Read a module: what it registers by its own names, then its other attributes."""
    own = dict(attributes(value, reader.fields))
    for name in ("_parameters", "_buffers", "_modules"):
        children = own.pop(name, None)
        if isinstance(children, dict):
            yield Branch(".", OWN, list(dict.items(children)))
    yield Branch(".", CONTAINED, own.items())


def read_optimizer(value: object, reader: Reader) -> Iterator[Branch]:
    """Read an optimizer: the states of its parameters, then its attributes."""
    own = dict(attributes(value, reader.fields))
    states = own.pop("state", None)
    if isinstance(states, dict):
        for parameter, state in list(dict.items(states)):
            if isinstance(state, dict):
                yield Branch(".", OPTIMIZER, list(dict.items(state)), parameter=parameter)
    yield Branch(".", OPTIMIZER, own.items())


def _function(value: types.FunctionType, _reader: Reader) -> Iterator[Branch]:
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


def _method(value: Any, _reader: Reader) -> Iterator[Branch]:
    yield Branch(".", CONTAINED, [("__self__", _bound_of[type(value)](value))])
    if type(value) is types.MethodType:
        yield Branch(".", CONTAINED, [("__func__", value.__func__)])


def _partial_call(value: Any, reader: Reader) -> Iterator[Branch]:
    yield Branch(".", CONTAINED, [(name, read(value)) for name, read in _PARTIAL])
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _class(value: Any, _reader: Reader) -> Iterator[Branch]:
    if is_heap_type(value):
        yield Branch(".", CONTAINED, list(_dict_of(value).items()))


def _opaque(value: object, _reader: Reader) -> Iterator[Branch]:
    held = [each for each in gc.get_referents(value) if not issubclass(type(each), type | types.ModuleType)]
    yield Branch("in", CONTAINED, [(("...", None), each) for each in held])


def _generator(generator: object, _reader: Reader) -> Iterator[Branch]:
    frame: types.FrameType | None = _read_attribute(generator, "frame")
    if frame is None:
        return
    named = variables_of(frame)
    yield Branch("in", CONTAINED, [(("locals", name), value) for name, value in named])
    skipped = {id(value) for _, value in named} | {id(frame), id(frame.f_globals), id(frame.f_builtins)}
    stacked = [each for each in gc.get_referents(generator) if id(each) not in skipped]
    yield Branch(
        "in", CONTAINED, [(("locals", None), each) for each in stacked if type(each) is not types.FunctionType]
    )


def _exception(value: Any, reader: Reader) -> Iterator[Branch]:
    yield from _traceback(_traceback_of(value), reader)
    own = [(name, read(value)) for name, read in _ERROR_FIELDS]
    yield Branch(".", CONTAINED, own)
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _traceback(value: types.TracebackType | None, _reader: Reader) -> Iterator[Branch]:
    for step in frames.traceback_steps(value):
        yield from _frame(step.tb_frame, _reader)


def _frame(frame: types.FrameType, _reader: Reader) -> Iterator[Branch]:
    label = call_label(frame.f_code)
    yield Branch("in", CONTAINED, [((label, name), value) for name, value in variables_of(frame)])


def _may_hold(values: Iterable[object]) -> bool:
    return not _ATOMS.issuperset(map(type, values))


_traceback_of = BaseException.__dict__["__traceback__"].__get__
_ERROR_FIELDS: list[tuple[str, Any]] = [
    (name, BaseException.__dict__[name].__get__) for name in ("args", "__cause__", "__context__")
]
_group: Any = getattr(sys.modules["builtins"], "BaseExceptionGroup", None)  # since Python 3.11
if _group is not None:
    _exceptions_of = _group.__dict__["exceptions"].__get__
    _ERROR_FIELDS.append(("exceptions", lambda each: _exceptions_of(each) if isinstance(each, _group) else None))


_CONTAINERS: dict[type, Read] = {
    dict: _dict, list: _sequence, tuple: _sequence, deque: _sequence, set: _set, frozenset: _set,
}  # fmt: skip
_OPAQUE: frozenset[type] = frozenset().union(map(type, (
    iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed([]), reversed({}),
    {}.keys(), {}.values(), {}.items(), types.MappingProxyType({}), enumerate(()), zip(), map(len, ()),
    filter(None, ()), reversed(()), itertools.chain(), itertools.cycle(()), itertools.islice((), 0),
    itertools.repeat(0), itertools.starmap(len, ()), itertools.tee(())[0], itertools.product(), itertools.count(),
    functools.lru_cache(len), staticmethod(len), property(),
)), {classmethod})  # fmt: skip
"""Iterators, views, descriptors, caches: what they hold has no name of its own, and only the gc shows it."""
_EXACTLY: dict[type, Read] = {
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinMethodType: _method,
    types.FrameType: _frame,
    types.TracebackType: _traceback,
    queue.SimpleQueue: _opaque,
    **dict.fromkeys(SUSPENDED, _generator),
    **dict.fromkeys(_OPAQUE, _opaque),
}
"""Types that are hardly ever subclassed."""

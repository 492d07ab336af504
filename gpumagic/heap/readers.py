"""Which types can hold a tensor, and how each is read: functions, classes, iterators, calls, errors."""

from __future__ import annotations

import functools
import gc
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)
from typing import Any

from gpumagic.heap.object_fields import (
    CONTAINED,
    CONTAINERS,
    Branch,
    Opener,
    attributes,
    fields_of,
    inner_tensors,
    instance,
    made_by_class,
    module,
    nothing,
    optimizer,
)
from gpumagic.source import frames

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


PLUMBING = frozenset({
    "IPython", "ipykernel", "ipyparallel", "traitlets", "tornado", "asyncio", "zmq", "concurrent", "threading",
    "selectors", "socketserver", "runpy", "debugpy", "pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis",
    "gpumagic",
})  # fmt: skip
"""Packages whose running functions say nothing about who keeps a tensor: they run the session, or are us."""

_PREFIX = {GeneratorType: "gi_", CoroutineType: "cr_", AsyncGeneratorType: "ag_"}
SUSPENDED = tuple(_PREFIX)


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Return the local variables of a frame; none for a module's, which are its globals."""
    if frames.is_function_frame(frame):
        return list(frames.local_variables(frame).items())
    return [] if frame.f_locals is frame.f_globals else list(frame.f_locals.items())


def locals_of(frame: FrameType) -> list[object]:
    """Return the local objects of a frame."""
    return [value for _, value in variables_of(frame)]


def call_of(code: CodeType) -> str:
    """Return what a call of some code is called: ``"step()"``."""
    return f"{code.co_name.strip('<>')}()"


def running() -> Iterator[tuple[str, list[tuple[str, object]]]]:
    """Yield every function that runs now, in any thread, innermost first: what it is called, and its variables."""
    own = threading.get_ident()
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    innermost_of = sys._current_frames()
    innermost_of[own] = sys._getframe(1)  # a frame that is its own variable would live on, and its callers with it
    for ident, innermost in innermost_of.items():
        where = "" if ident == own else f" in {threads.get(ident, 'a thread')}"
        for frame in frames.stack(innermost):
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in PLUMBING:
                yield f"running {call_of(frame.f_code)}{where}", variables_of(frame)


def title(generator: object) -> str:
    """Return what a suspended generator or coroutine is called."""
    return f"suspended {call_of(_read(generator, 'code'))}"


def suspended(generator: object, _how: Opener) -> Iterator[Branch]:
    """Open a generator or a coroutine: its variables, and what it loops over or waits for, which has no name."""
    frame: FrameType | None = _read(generator, "frame")
    if frame is None:
        return
    named = variables_of(frame)
    yield Branch("in", CONTAINED, [(("locals", name), value) for name, value in named])
    skipped = {id(value) for _, value in named} | {id(frame), id(frame.f_globals), id(frame.f_builtins)}
    stacked = [each for each in gc.get_referents(generator) if id(each) not in skipped]
    yield Branch("in", CONTAINED, [(("locals", None), each) for each in stacked if type(each) is not FunctionType])


def error(value: Any, how: Opener) -> Iterator[Branch]:
    """Open an exception: the variables of the calls that failed, its arguments, what it was raised from."""
    yield from traceback(_traceback_of(value), how)
    own = [(name, read(value)) for name, read in _ERROR_FIELDS]
    yield Branch(".", CONTAINED, own)
    yield Branch(".", CONTAINED, attributes(value, how.fields))


def traceback(value: TracebackType | None, _how: Opener) -> Iterator[Branch]:
    """Open a traceback: the variables of its calls."""
    for step in frames.traceback_steps(value):
        yield from call(step.tb_frame, _how)


def call(frame: FrameType, _how: Opener) -> Iterator[Branch]:
    """Open a frame: its variables, not its caller."""
    label = call_of(frame.f_code)
    yield Branch("in", CONTAINED, [((label, name), value) for name, value in variables_of(frame)])


_traceback_of = BaseException.__dict__["__traceback__"].__get__
_ERROR_FIELDS: list[tuple[str, Any]] = [
    (name, BaseException.__dict__[name].__get__) for name in ("args", "__cause__", "__context__")
]
_group: Any = getattr(sys.modules["builtins"], "BaseExceptionGroup", None)  # since Python 3.11
if _group is not None:
    _exceptions_of = _group.__dict__["exceptions"].__get__
    _ERROR_FIELDS.append(("exceptions", lambda each: _exceptions_of(each) if isinstance(each, _group) else None))


def _read(generator: object, what: str) -> Any:
    return type(generator).__dict__[_PREFIX[type(generator)] + what].__get__(generator)


Open = Callable[[Any, Opener], Iterator[Branch]]

_EXACTLY: dict[type, Open] = {
    FunctionType: function,
    MethodType: bound,
    BuiltinMethodType: bound,
    FrameType: call,
    TracebackType: traceback,
    queue.SimpleQueue: opaque,
    **dict.fromkeys(SUSPENDED, suspended),
    **dict.fromkeys(OPAQUE, opaque),
}
"""Types of which there are no subclasses to speak of."""


def opener_of(kind: type) -> Opener | None:
    """Return how to open the instances of a type, or None if they cannot hold a tensor."""
    import torch

    if kind in (torch.Tensor, torch.nn.Parameter):
        return Opener(nothing, is_tensor=True)
    if issubclass(kind, torch.Tensor):
        return Opener(inner_tensors, fields_of(kind), is_tensor=True)
    if kind in _EXACTLY:
        return Opener(_EXACTLY[kind])
    return None if _runs_the_session(kind) else _opener_by_base(kind)


def _opener_by_base(kind: type) -> Opener | None:
    for base, open_ in _bases():
        if issubclass(kind, base):
            container = base if base in CONTAINERS else None
            return Opener(open_, None if kind is container else fields_of(kind), container)
    if issubclass(kind, ModuleType) or not (made_by_class(kind) or kind is SimpleNamespace):
        return None
    fields = fields_of(kind)
    return Opener(instance, fields) if fields else None


def _runs_the_session(kind: type) -> bool:
    """Return whether a type is IPython's or the kernel's: through `get_ipython` or `exit` they lead everywhere."""
    configurable = sys.modules.get("traitlets.config.configurable")
    return configurable is not None and issubclass(kind, configurable.Configurable)


def _bases() -> Iterator[tuple[type, Open]]:
    import torch

    yield torch.nn.Module, module
    yield torch.optim.Optimizer, optimizer
    yield from CONTAINERS.items()
    yield BaseException, error
    yield type, klass
    yield functools.partial, partial
    if "_asyncio" in sys.modules:
        yield sys.modules["_asyncio"].Future, opaque  # also tasks

"""What types written in C hold: functions and their calls, numpy's arrays, pandas' columns, iterators.

Of a call that is closures, defaults, the variables of frames, generators and failed calls. The other types have no
attributes to read: those that notebooks keep tensors in have expressions of their own; for the rest the gc shows what
they hold, and no expression reaches it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from gpumagic.heap.branches import (
    CONTAINED,
    Branch,
    Inside,
    Read,
    Reader,
    attributes,
    flags_of,
    is_heap_type,
    key_code,
    mro_of,
)
from gpumagic.source import frames

_INFRASTRUCTURE = frozenset({
    "IPython", "ipykernel", "ipyparallel", "traitlets", "tornado", "asyncio", "zmq", "concurrent", "threading",
    "selectors", "socketserver", "runpy", "debugpy", "pytest", "_pytest", "pluggy", "xdist", "execnet",
    "__channelexec__", "hypothesis", "gpumagic",
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
            if frames.module_of(frame).partition(".")[0] not in _INFRASTRUCTURE:
                yield f"running {call_label(frame.f_code)}{where}", variables_of(frame)


def generator_label(generator: object) -> str:
    """Return what a suspended generator or coroutine is called."""
    return f"suspended {call_label(_read_attribute(generator, 'code'))}"


def _read_attribute(generator: object, what: str) -> Any:
    return type(generator).__dict__[_PREFIX[type(generator)] + what].__get__(generator)


_closure_of, _defaults_of, _keyword_defaults_of = (
    types.FunctionType.__dict__[name].__get__ for name in ("__closure__", "__defaults__", "__kwdefaults__")
)


def _function(value: types.FunctionType, _reader: Reader) -> Iterator[Branch]:
    cells = _closure_of(value) or ()
    held = [(place, gc.get_referents(cell)) for place, cell in enumerate(cells)]
    names = value.__code__.co_freevars
    yield Branch("in", CONTAINED, [
        (Inside("closure", names[place], f".__closure__[{place}].cell_contents"), contents[0])
        for place, contents in held if contents
    ])  # fmt: skip
    defaults = [(name, read(value)) for name, read in _DEFAULTS]
    yield Branch(".", CONTAINED, [each for each in defaults if each[1]])
    yield Branch(".", CONTAINED, _attributes_of_function(value, [each for _, each in defaults]))


_DEFAULTS = (("__defaults__", _defaults_of), ("__kwdefaults__", _keyword_defaults_of))


def _attributes_of_function(value: types.FunctionType, defaults: list[object]) -> list[tuple[str, object]]:
    """Return the attributes that a function was given; asking for its `__dict__` would allocate one."""
    known = [value.__globals__, getattr(value, "__builtins__", None), *defaults]
    annotated = {*value.__code__.co_varnames, "return"}
    for each in gc.get_referents(value):
        if type(each) is dict and not any(each is other for other in known) and not annotated.issuperset(each):
            return list(each.items())
    return []


_bound_of = {each: each.__dict__["__self__"].__get__ for each in (types.MethodType, types.BuiltinMethodType)}


def _method(value: Any, _reader: Reader) -> Iterator[Branch]:
    yield Branch(".", CONTAINED, [("__self__", _bound_of[type(value)](value))])
    if type(value) is types.MethodType:
        yield Branch(".", CONTAINED, [("__func__", value.__func__)])


def _members(kind: Any, *names: str) -> Read:
    """Return what reads some attributes of a built-in type."""
    members = [(name, kind.__dict__[name].__get__) for name in names]

    def read(value: Any, _reader: Reader) -> Iterator[Branch]:
        yield Branch(".", CONTAINED, [(name, each(value)) for name, each in members])

    return read


def _generator(generator: object, _reader: Reader) -> Iterator[Branch]:
    frame: types.FrameType | None = _read_attribute(generator, "frame")
    if frame is None:
        return
    named = variables_of(frame)
    prefix = f".{_PREFIX[type(generator)]}frame"
    yield _locals("locals", frame, prefix, named)
    skipped = {id(value) for _, value in named} | {id(frame), id(frame.f_globals), id(frame.f_builtins)}
    stacked = [each for each in gc.get_referents(generator) if id(each) not in skipped]
    yield Branch(
        "in", CONTAINED, [(Inside("locals"), each) for each in stacked if type(each) is not types.FunctionType]
    )


def _locals(place: str, frame: types.FrameType, to_frame: str, named: list[tuple[str, object]]) -> Branch:
    """Return the variables of a frame; not all that a frame shows at its end are in `f_locals`."""
    code = frame.f_code
    shown = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return Branch("in", CONTAINED, [
        (Inside(place, name, f"{to_frame}.f_locals[{key_code(name)}]" if name in shown else None), value)
        for name, value in named
    ])  # fmt: skip


_traceback_of = BaseException.__dict__["__traceback__"].__get__
_ERROR_FIELDS: list[tuple[str, Any]] = [
    (name, BaseException.__dict__[name].__get__) for name in ("args", "__cause__", "__context__")
]
_group: Any = getattr(sys.modules["builtins"], "BaseExceptionGroup", None)  # since Python 3.11
if _group is not None:
    _exceptions_of = _group.__dict__["exceptions"].__get__
    _ERROR_FIELDS.append(("exceptions", lambda each: _exceptions_of(each) if issubclass(type(each), _group) else None))


def read_exception(value: Any, reader: Reader) -> Iterator[Branch]:
    """Read an exception: the variables of its frames, its arguments, what it was raised from."""
    yield from _steps(_traceback_of(value), ".__traceback__")
    yield Branch(".", CONTAINED, [(name, read(value)) for name, read in _ERROR_FIELDS])
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _traceback(value: types.TracebackType, _reader: Reader) -> Iterator[Branch]:
    return _steps(value, "")


def _steps(value: types.TracebackType | None, to_first: str) -> Iterator[Branch]:
    for step in frames.traceback_steps(value):
        label = call_label(step.tb_frame.f_code)
        yield _locals(label, step.tb_frame, f"{to_first}.tb_frame", variables_of(step.tb_frame))
        to_first += ".tb_next"


def _frame(frame: types.FrameType, _reader: Reader) -> Iterator[Branch]:
    yield _locals(call_label(frame.f_code), frame, "", variables_of(frame))


EXACTLY: dict[type, Read] = {
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinMethodType: _method,
    types.FrameType: _frame,
    types.TracebackType: _traceback,
    staticmethod: _members(staticmethod, "__func__"),
    classmethod: _members(classmethod, "__func__"),
    functools.partial: _members(functools.partial, "func", "args", "keywords"),
    property: _members(property, "fget", "fset", "fdel"),
    **dict.fromkeys(SUSPENDED, _generator),
}
"""How calls, functions and what wraps them in a class are read; hardly any of these is ever subclassed."""


_HAS_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC


def read_by_base(kind: type) -> Read | None:
    """Return how to read the instances of a type that derives from one of C's or of pandas', or None."""
    return next((read for base, read in _bases() if issubclass(kind, base)), None)


def _bases() -> Iterator[tuple[type, Read]]:
    yield types.CellType, _cell
    numpy: Any = sys.modules.get("numpy")
    pandas: Any = sys.modules.get("pandas")
    if hasattr(numpy, "ndarray"):
        yield numpy.ndarray, _array
    if hasattr(pandas, "DataFrame") and hasattr(pandas, "Series"):
        yield pandas.DataFrame, _columns
        yield pandas.Series, _columns


def shows_more(kind: type) -> bool:
    """Return whether instances of a type may hold what only the gc shows: it is C's, or derives from one of C's."""
    return any(flags_of(base) & _HAS_GC and not is_heap_type(base) for base in mro_of(kind) if base is not object)


def read_opaque(value: object, reader: Reader) -> Iterator[Branch]:
    """Read what the gc shows of an object, but for what its attributes hold."""
    own = attributes(value, reader.fields)
    yield Branch(".", CONTAINED, own)
    known = {id(each) for _, each in own}
    held = [each for each in gc.get_referents(value) if id(each) not in known and not _is_of_no_use(each, own)]
    yield Branch("in", CONTAINED, [(Inside("..."), each) for each in held])


def _is_of_no_use(value: object, own: list[tuple[str, object]]) -> bool:
    if issubclass(type(value), type | types.ModuleType):
        return True
    return type(value) is dict and bool(own) and value.keys() <= {name for name, _ in own}  # the attributes themselves


def _cell(value: types.CellType, _reader: Reader) -> Iterator[Branch]:
    held = gc.get_referents(value)
    yield Branch("in", CONTAINED, [(Inside("cell", code=".cell_contents"), each) for each in held])


def _array(value: Any, reader: Reader) -> Iterator[Branch]:
    for place, each in _elements(value):
        code = f"[{', '.join(map(str, place)) or '()'}]" if reader.is_indexed else None
        yield Branch("in", CONTAINED, [(Inside("array", code=code), each)])
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _elements(array: Any) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield the elements of an array of objects that may hold something, with their indices."""
    import numpy as np

    base = np.ndarray
    if base.dtype.__get__(array).kind != "O":
        return
    shape = base.shape.__get__(array)
    places = itertools.product(*map(range, shape))
    for place, each in zip(places, base.flatten(array).tolist(), strict=True):
        if type(each) not in (str, int, float, bool, type(None)):
            yield place, each


def _columns(value: Any, reader: Reader) -> Iterator[Branch]:
    """Read the columns of objects of a DataFrame or a Series, as pandas stores them: in blocks of columns."""
    own = dict(attributes(value, reader.fields))
    manager = own.pop("_mgr", None)
    for columns, array in _blocks(manager):
        for place, each in _elements(array):
            code = f"[{place[0]}]" if len(place) == 1 else f"[{place[1]}, {columns[place[0]]}]"
            yield Branch("in", CONTAINED, [(Inside("iloc", code=f".iloc{code}"), each)])
    yield Branch(".", CONTAINED, own.items())


def _blocks(manager: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield pandas' arrays of objects, with the columns that they are."""
    import numpy as np

    for block in getattr(manager, "blocks", ()):
        array, columns = getattr(block, "values", None), getattr(getattr(block, "mgr_locs", None), "as_array", None)
        if type(array) is np.ndarray and columns is not None:
            yield columns.tolist(), array

"""What types written in C hold: functions and their calls, numpy's arrays, tables, iterators.

Of a call that is closures, defaults, the variables of frames, generators and failed calls. Of what has no attributes to
read, the gc shows what it holds, and no expression reaches it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gpumagic.heap.branches import (
    CONTAINED,
    Branch,
    Inside,
    Read,
    Reader,
    attributes,
    dict_of,
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


def running_roots() -> Iterator[tuple[str, object]]:
    """Yield the variables of every function that runs now, in any thread, innermost first."""
    own = threading.get_ident()
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    innermost_of = sys._current_frames()
    innermost_of[own] = sys._getframe(
        1
    )  # a frame that is its own variable would live on, and its callers with it
    for ident, innermost in innermost_of.items():
        where = "" if ident == own else f" in {threads.get(ident, 'a thread')}"
        for frame in frames.stack(innermost):
            if frames.module_of(frame).partition(".")[0] not in _INFRASTRUCTURE:
                yield (
                    f"running {call_label(frame.f_code)}{where}",
                    types.SimpleNamespace(**dict(variables_of(frame))),
                )


def read_attribute(generator: object, what: str) -> Any:
    """Return the code or the frame of a generator or coroutine."""
    return type(generator).__dict__[_PREFIX[type(generator)] + what].__get__(generator)


def _function(value: types.FunctionType, reader: Reader) -> Iterator[Branch]:
    yield from _of_function(value, reader)
    # Its attributes: asking for its `__dict__` would allocate one.
    known = [value.__globals__, getattr(value, "__builtins__", None), value.__kwdefaults__]
    annotated = {*value.__code__.co_varnames, "return"}
    for each in gc.get_referents(value):
        if (
            type(each) is dict
            and not any(each is other for other in known)
            and not annotated.issuperset(each)
        ):
            yield Branch(".", CONTAINED, list(each.items()))


def _members(kind: Any, *names: str) -> Read:
    """Return what reads some attributes of a built-in type."""
    members = [(name, kind.__dict__[name].__get__) for name in names]

    def read(value: Any, _reader: Reader) -> Iterator[Branch]:
        yield Branch(".", CONTAINED, [(name, each(value)) for name, each in members])

    return read


_of_function = _members(types.FunctionType, "__closure__", "__defaults__", "__kwdefaults__")


def _generator(generator: object, _reader: Reader) -> Iterator[Branch]:
    frame: types.FrameType | None = read_attribute(generator, "frame")
    if frame is not None:
        yield _locals("locals", frame)
        named = [value for _, value in variables_of(frame)]
        skipped = set(map(id, (*named, frame, frame.f_globals, frame.f_builtins)))
        stacked = [
            each for each in gc.get_referents(generator) if type(each) is not types.FunctionType
        ]
        yield Branch(
            "in",
            CONTAINED,
            [(Inside("locals"), each) for each in stacked if id(each) not in skipped],
        )


def _locals(place: str, frame: types.FrameType) -> Branch:
    """Return the variables of a frame: what is typed to reach them would not be understood."""
    return Branch(
        "in", CONTAINED, [(Inside(place, name), value) for name, value in variables_of(frame)]
    )


_traceback_of = BaseException.__dict__["__traceback__"].__get__
_of_error = _members(BaseException, "args", "__cause__", "__context__")


def read_exception(value: Any, reader: Reader) -> Iterator[Branch]:
    """Read an exception: the variables of its frames, its arguments, what it was raised from."""
    yield from _traceback(_traceback_of(value), reader)
    yield from _of_error(value, reader)
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _traceback(value: types.TracebackType | None, _reader: Reader) -> Iterator[Branch]:
    for step in frames.traceback_steps(value):
        yield _locals(call_label(step.tb_frame.f_code), step.tb_frame)


def _cell(value: types.CellType, _reader: Reader) -> Iterator[Branch]:
    yield Branch(
        ".", CONTAINED, [("cell_contents", each) for each in gc.get_referents(value)]
    )  # none if it is empty


EXACTLY: dict[type, Read] = {
    types.CellType: _cell,
    types.FunctionType: _function,
    types.MethodType: _members(types.MethodType, "__self__", "__func__"),
    types.BuiltinMethodType: _members(types.BuiltinMethodType, "__self__"),
    types.FrameType: lambda frame, _reader: iter([_locals(call_label(frame.f_code), frame)]),
    types.TracebackType: _traceback,
    staticmethod: _members(staticmethod, "__func__"),
    classmethod: _members(classmethod, "__func__"),
    functools.partial: _members(functools.partial, "func", "args", "keywords"),
    property: _members(property, "fget", "fset", "fdel"),
    **dict.fromkeys(SUSPENDED, _generator),
}
"""How calls, functions and what wraps them in a class are read; hardly any of these is ever subclassed."""


_HAS_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC


def shows_more(kind: type) -> bool:
    """Return whether instances of a type may hold what only the gc shows: it is C's or Cython's, or derives from one.

    Cython's classes, such as those of pandas, can be changed like those of a class statement.
    """
    in_c = (
        base for base in mro_of(kind) if not is_heap_type(base) or "__pyx_vtable__" in dict_of(base)
    )
    return any(flags_of(base) & _HAS_GC and base is not object for base in in_c)


def read_opaque(value: object, reader: Reader) -> Iterator[Branch]:
    """Read what the gc shows of an object, but for what its attributes hold, its class and modules."""
    own = attributes(value, reader.fields)
    yield Branch(".", CONTAINED, own)
    known, names = {id(each) for _, each in own}, {name for name, _ in own}
    held = [
        each
        for each in gc.get_referents(value)
        if id(each) not in known
        and not issubclass(type(each), type | types.ModuleType)
        and not (type(each) is dict and names and each.keys() <= names)  # the attributes themselves
    ]
    yield Branch("in", CONTAINED, [(Inside("..."), each) for each in held])


def read_array(value: Any, reader: Reader) -> Iterator[Branch]:
    """Read an array of objects, by their indices."""
    for place, each in _objects_in(value):
        code = f"[{', '.join(map(str, place)) or '()'}]" if reader.is_indexed else None
        yield Branch("in", CONTAINED, [(Inside("array", code=code), each)])
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _objects_in(array: Any) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield what an array of objects has, by its place, but for numbers and texts."""
    import numpy as np

    if issubclass(type(array), np.ndarray) and np.ndarray.dtype.__get__(array).kind == "O":
        places = itertools.product(*map(range, np.ndarray.shape.__get__(array)))
        for place, each in zip(places, np.ndarray.flatten(array).tolist(), strict=True):
            if type(each) not in (str, int, float, bool, type(None)):
                yield place, each


def read_frame(value: Any, reader: Reader) -> Iterator[Branch]:
    """Read a DataFrame or a Series of pandas: its objects by column and row, then its attributes."""
    own = attributes(value, reader.fields)
    manager = dict(own).get("_mgr")  # it has all columns of a type in one array
    axes: Any = getattr(manager, "axes", ())
    columns = _typed_columns(value, list(axes[0])) if len(axes) > 1 else []
    for block in getattr(manager, "blocks", ()):
        for place, each in _objects_in(block.values):
            column = columns[block.mgr_locs.as_array[place[0]]] if columns else ""
            yield Branch(
                "in", CONTAINED, [(Inside("cell", code=f"{column}.iloc[{place[-1]}]"), each)]
            )
    yield Branch(".", CONTAINED, own)


def _typed_columns(table: Any, labels: list[Any]) -> list[str]:
    """Return how each column of a DataFrame is typed: by its label, or by its position where that is not certain."""
    import pandas as pd

    times, is_plain = (
        Counter(labels),
        type(table) is pd.DataFrame,
    )  # else `__getitem__` may be another
    are_tuples = any(type(each) is tuple for each in labels)  # of which a part is a key, too
    typed = [
        key_code(each) if is_plain and not are_tuples and times[each] == 1 else None
        for each in labels
    ]
    return [f"[{code}]" if code else f".iloc[:, {place}]" for place, code in enumerate(typed)]

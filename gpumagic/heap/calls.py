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
    Attributes,
    Branch,
    Branches,
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
from gpumagic.heap.held import Holder, Root
from gpumagic.source import frames

_INFRASTRUCTURE = frozenset({
    "IPython", "ipykernel", "ipyparallel", "traitlets", "tornado", "asyncio", "zmq", "concurrent", "threading",
    "selectors", "socketserver", "runpy", "debugpy", "pytest", "_pytest", "pluggy", "xdist", "execnet",
    "__channelexec__", "hypothesis", "gpumagic",
})  # fmt: skip
"""Packages whose running functions say nothing about who keeps a tensor: they run the session, or are us."""

_PREFIX = {
    types.GeneratorType: "gi_",
    types.CoroutineType: "cr_",
    types.AsyncGeneratorType: "ag_",
}
SUSPENDED = tuple(_PREFIX)


def variables_of(frame: types.FrameType) -> Attributes:
    """Return the local variables of a frame; none for a module's, which are its globals."""
    if frames.is_function_frame(frame):
        return list(frames.local_variables(frame).items())
    if frame.f_locals is frame.f_globals:
        return []
    return list(frame.f_locals.items())


def call_label(code: types.CodeType) -> str:
    """Return what a call of some code is called: ``"step()"``."""
    return f"{code.co_name.strip('<>')}()"


def running_roots() -> Iterator[Root]:
    """Yield the variables of every function that runs now, in any thread, innermost first, with their holders."""
    own = threading.get_ident()
    thread_names = {thread.ident: thread.name for thread in threading.enumerate()}
    innermost_of = sys._current_frames()
    # From the caller on: a frame that is its own variable would live on, and its callers with it.
    innermost_of[own] = sys._getframe(1)
    for ident, innermost in innermost_of.items():
        thread = ""
        if ident != own:
            thread = thread_names.get(ident, "a thread")
        for frame in frames.stack(innermost):
            package, _, _ = frames.module_of(frame).partition(".")
            if package not in _INFRASTRUCTURE:
                holder = Holder("running call", call_label(frame.f_code), thread)
                yield holder, _namespace_of(frame)


def _namespace_of(frame: types.FrameType) -> types.SimpleNamespace:
    """Return the variables of a frame as the attributes of an object."""
    variables = dict(variables_of(frame))
    return types.SimpleNamespace(**variables)


def read_attribute(generator: object, what: str) -> Any:
    """Return the code or the frame of a generator or coroutine."""
    kind = type(generator)
    attribute = kind.__dict__[_PREFIX[kind] + what]
    return attribute.__get__(generator)


def _function(value: types.FunctionType, reader: Reader) -> Branches:
    yield from _of_function(value, reader)
    # Its attributes: asking for its `__dict__` would allocate one.
    others = [
        value.__globals__,
        getattr(value, "__builtins__", None),
        value.__kwdefaults__,
    ]
    other_ids = set(map(id, others))
    annotated = {*value.__code__.co_varnames, "return"}
    for referent in gc.get_referents(value):
        if (
            type(referent) is dict
            and id(referent) not in other_ids
            and not annotated.issuperset(referent)
        ):
            yield Branch(".", CONTAINED, list(referent.items()))


def _members(kind: Any, *names: str) -> Read:
    """Return what reads some attributes of a built-in type."""
    members = [(name, kind.__dict__[name].__get__) for name in names]

    def read(value: Any, _reader: Reader) -> Branches:
        children = [(name, get(value)) for name, get in members]
        yield Branch(".", CONTAINED, children)

    return read


_of_function = _members(
    types.FunctionType, "__closure__", "__defaults__", "__kwdefaults__"
)


def _generator(generator: object, _reader: Reader) -> Branches:
    frame: types.FrameType | None = read_attribute(generator, "frame")
    if frame is None:
        return
    yield _locals("locals", frame)
    skipped = {id(frame), id(frame.f_globals), id(frame.f_builtins)}
    skipped.update(id(value) for _, value in variables_of(frame))
    for referent in gc.get_referents(generator):  # what is on its stack
        if type(referent) is not types.FunctionType and id(referent) not in skipped:
            yield Branch("in", CONTAINED, [(Inside("locals"), referent)])


def _locals(place: str, frame: types.FrameType) -> Branch:
    """Return the variables of a frame: what is typed to reach them would not be understood."""
    variables = [(Inside(place, name), value) for name, value in variables_of(frame)]
    return Branch("in", CONTAINED, variables)


_traceback_of = BaseException.__dict__["__traceback__"].__get__
_of_error = _members(BaseException, "args", "__cause__", "__context__")


def read_exception(value: Any, reader: Reader) -> Branches:
    """Read an exception: the variables of its frames, its arguments, what it was raised from."""
    yield from _traceback(_traceback_of(value), reader)
    yield from _of_error(value, reader)
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _traceback(value: types.TracebackType | None, _reader: Reader) -> Branches:
    for step in frames.traceback_steps(value):
        yield _locals(call_label(step.tb_frame.f_code), step.tb_frame)


def _frame(value: types.FrameType, _reader: Reader) -> Branches:
    yield _locals(call_label(value.f_code), value)


def _cell(value: types.CellType, _reader: Reader) -> Branches:
    contents = gc.get_referents(value)  # none if it is empty
    if contents:
        yield Branch(".", CONTAINED, [("cell_contents", contents[0])])


EXACTLY: dict[type, Read] = {
    types.CellType: _cell,
    types.FunctionType: _function,
    types.MethodType: _members(types.MethodType, "__self__", "__func__"),
    types.BuiltinMethodType: _members(types.BuiltinMethodType, "__self__"),
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


def shows_more(kind: type) -> bool:
    """Return whether instances of a type may hold what only the gc shows: it is C's or Cython's, or derives from one.

    Cython's classes, such as those of pandas, can be changed like those of a class statement.
    """
    for base in mro_of(kind):
        is_in_c = not is_heap_type(base) or "__pyx_vtable__" in dict_of(base)
        if is_in_c and base is not object and flags_of(base) & _HAS_GC:
            return True
    return False


def read_opaque(value: object, reader: Reader) -> Branches:
    """Read what the gc shows of an object, but for what its attributes hold, its class and modules."""
    own = attributes(value, reader.fields)
    yield Branch(".", CONTAINED, own)
    known = {id(attribute) for _, attribute in own}
    names = {name for name, _ in own}
    for referent in gc.get_referents(value):
        kind = type(referent)
        if id(referent) in known or issubclass(kind, type | types.ModuleType):
            continue
        is_attributes = kind is dict and names and referent.keys() <= names
        if not is_attributes:
            yield Branch("in", CONTAINED, [(Inside("..."), referent)])


def read_array(value: Any, reader: Reader) -> Branches:
    """Read an array of objects, by their indices."""
    for place, element in _objects_in(value):
        code = None
        if reader.is_indexed:
            indices = ", ".join(map(str, place)) or "()"
            code = f"[{indices}]"
        inside = Inside("array", code=code)
        yield Branch("in", CONTAINED, [(inside, element)])
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _objects_in(array: Any) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield the elements of an array of objects, each with its indices, but for numbers and texts."""
    import numpy as np

    if not issubclass(type(array), np.ndarray):
        return
    if np.ndarray.dtype.__get__(array).kind != "O":
        return
    shape = np.ndarray.shape.__get__(array)
    elements = np.ndarray.flatten(array).tolist()
    places = itertools.product(*map(range, shape))
    for place, element in zip(places, elements, strict=True):
        if type(element) not in (str, int, float, bool, type(None)):
            yield place, element


def read_frame(value: Any, reader: Reader) -> Branches:
    """Read a DataFrame or a Series of pandas: its objects by column and row, then its attributes."""
    own = attributes(value, reader.fields)
    manager = dict(own).get("_mgr")  # it has all columns of a type in one array
    axes: Any = getattr(manager, "axes", ())
    columns: list[str] = []
    if len(axes) > 1:
        columns = _typed_columns(value, labels=list(axes[0]))
    for block in getattr(manager, "blocks", ()):
        for place, element in _objects_in(block.values):
            column = ""
            if columns:
                column = columns[block.mgr_locs.as_array[place[0]]]
            row = place[-1]
            cell = Inside("cell", code=f"{column}.iloc[{row}]")
            yield Branch("in", CONTAINED, [(cell, element)])
    yield Branch(".", CONTAINED, own)


def _typed_columns(table: Any, labels: list[Any]) -> list[str]:
    """Return how each column of a DataFrame is typed: by its label, or by its position where that is not certain."""
    import pandas as pd

    # A subclass may have another `__getitem__`; of labels that are tuples a part is a key, too.
    have_tuples = any(type(label) is tuple for label in labels)
    are_keys = type(table) is pd.DataFrame and not have_tuples
    times = Counter(labels)
    typed: list[str] = []
    for position, label in enumerate(labels):
        code = None
        if are_keys and times[label] == 1:
            code = key_code(label)
        if code is None:
            typed.append(f".iloc[:, {position}]")
        else:
            typed.append(f"[{code}]")
    return typed

"""What calls hold: those that failed, generators and coroutines that wait, functions that still run."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType, TracebackType
from typing import Any

from gpumagic.heap.anatomy import CONTAINED, Branch, Opener, attributes
from gpumagic.source import frames

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
    if frames.is_a_functions(frame):
        return list(frames.own(frame).items())
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
        frame: FrameType | None = innermost
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in PLUMBING:
                yield f"running {call_of(frame.f_code)}{where}", variables_of(frame)
            frame = frame.f_back


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

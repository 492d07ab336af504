"""Frames and exceptions: whose code a frame runs, its variables, the cell's running line, and chained exceptions.

An out-of-memory error rarely comes alone: a wrapper raised ``from`` it, an ``except`` block failed in turn,
a DataLoader names a killed worker only in its cause. ``raise ... from None`` hides a context from the
traceback, not from memory.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from gpumagic import _compat

MISSING = object()


def resolve_names(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """Return what names are bound to in a frame, its locals before its globals; unbound ones are left out.

    The snapshot of a function's locals is released: see `local_variables`.
    """
    mine = local_variables(frame) if is_function_frame(frame) else frame.f_locals
    found = {name: mine[name] if name in mine else frame.f_globals.get(name, MISSING) for name in names}
    return {name: value for name, value in found.items() if value is not MISSING}


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a frame's locals: a function's, or those of comprehensions that run in a cell's frame.

    Where the frame keeps the snapshot that it returns, the snapshot is emptied, unless somebody else has it:
    `locals()` returns the same dict.
    """
    if not is_function_frame(frame):
        return _compat.inlined_variables(frame)
    snapshot: Any = frame.f_locals
    found = dict(snapshot)
    if _compat.FRAMES_KEEP_SNAPSHOTS and sys.getrefcount(snapshot) <= 3:  # the frame's, ours, and the argument's
        snapshot.clear()
    return found


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs; empty where it has none."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else ""


def is_in(frame: FrameType, modules: Iterable[str]) -> bool:
    """Return whether a frame runs code of one of these modules or packages."""
    module = module_of(frame)
    return any(module == each or module.startswith(f"{each}.") for each in modules)


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield some code, and that of the functions, classes, lambdas and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from code_objects(each)


def names_looked_up(code: CodeType) -> Iterator[str]:
    """Yield every name that code and the functions in it may look up outside of themselves."""
    for each in code_objects(code):  # `co_names` has attributes too
        yield from {
            step.argval for step in dis.get_instructions(each) if "GLOBAL" in step.opname or "NAME" in step.opname
        }


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs the user's own code: a cell, a script, or a module that is no library."""
    file = frame.f_globals.get("__file__")
    return not is_library(module_of(frame), file if type(file) is str else "")


@lru_cache(maxsize=8192)
def is_library(module: str, file: str) -> bool:
    """Whether a module is Python's, torch's, IPython's, ours, or of an installed package.

    Some names decide alone, since torch may be a checkout on PYTHONPATH. This interpreter does not
    know where packages are: `pip --user` and the system install them elsewhere.

    Args:
        module: its dotted name; empty where only the file is known.
        file: its file; empty where it has none. It decides alone for ``__main__``, which may be a library's command.
    """
    top = "" if module in _NAMELESS else module.partition(".")[0]
    if top in _LIBRARIES or file.startswith(_OWN_FOLDERS) or (top in sys.stdlib_module_names and not file):
        return True
    return not _INSTALLED.isdisjoint(Path(file).parts)


_LIBRARIES = {"torch", "IPython", "gpumagic"}
_NAMELESS = {"", "__main__", "__mp_main__"}
_INSTALLED = {"site-packages", "dist-packages"}
_OWN_FOLDERS = (*(os.path.join(each, "") for each in (Path(os.__file__).parent, Path(__file__).parents[1])), "<frozen ")  # noqa: PTH118  # with the separator


def is_function_frame(frame: FrameType) -> bool:
    """Whether the frame has locals of its own, unlike that of a cell or module."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def stack(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def code_at(frame: FrameType, line: int) -> str | None:
    """Return the text of a line of a frame's file, if it can be read."""
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip() or None


def related_exceptions(error: BaseException, outside: Collection[int] = ()) -> Iterator[BaseException]:
    """Yield the error and every exception it reaches, each once, nearest first.

    Args:
        error: where to begin.
        outside: ids of exceptions that are not part of it, though Python chained it: see `handled_exception_ids`.
    """
    seen = set(outside)
    waiting = deque([error])
    while waiting:
        current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        members = getattr(current, "exceptions", ())
        linked = [current.__cause__, current.__context__, *(members if isinstance(members, tuple | list) else ())]
        waiting.extend(each for each in linked if isinstance(each, BaseException))


def handled_exception_ids() -> frozenset[int]:
    """Return the ids of the exceptions being handled: the context of what is raised next."""
    current = sys.exc_info()[1]
    return frozenset() if current is None else frozenset(id(each) for each in related_exceptions(current))


def frames_in(error: BaseException, outside: Collection[int] = ()) -> Iterator[tuple[FrameType, int]]:
    """Yield each frame the error's whole graph holds with the line it stood on, callers before callees."""
    seen: set[int] = set()
    for each in related_exceptions(error, outside):
        for step in traceback_steps(each.__traceback__):
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def traceback_steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the links of one traceback, outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def summary_line(error: BaseException) -> str:
    """Return ``"Type: the first line of its text"``, as tracebacks end, even where `str` itself fails."""
    try:
        text = str(error).strip()
    except Exception:  # a foreign __str__ must not replace the user's error
        text = ""
    line = text.splitlines()[0].strip() if text else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__

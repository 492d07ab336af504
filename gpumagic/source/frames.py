"""Frames and exceptions: whose code a frame runs, its variables, the cell's running line, and chained exceptions.

An out-of-memory error rarely comes alone: a wrapper raised ``from`` it, an ``except`` block failed in turn,
a DataLoader names a killed worker only in its cause. ``raise ... from None`` hides a context from the
traceback, not from memory.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import get_ident
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
    for each in code_objects(code):
        yield from each.co_names


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs the user's own code: a cell, a script, or a module that is no library."""
    file = frame.f_globals.get("__file__")
    return not is_library(module_of(frame), file if type(file) is str else "")


@lru_cache(maxsize=8192)
def is_library(module: str, file: str) -> bool:
    """Whether a module is Python's, torch's, IPython's, ours, or of an installed package.

    Some names decide alone, since torch may be a checkout on PYTHONPATH. This interpreter does not
    know where packages are: `pip --user`, the system and `pip --target` install them elsewhere.

    Args:
        module: its dotted name; empty where only the file is known.
        file: its file; empty where it has none. It decides alone for ``__main__``, which may be a library's command.
    """
    folder, top = _imported_by_path(file) if module in _NAMELESS else _imported_by_name(module, file)
    if top in _LIBRARIES or file.startswith(_STANDARD_LIBRARY) or (top in sys.stdlib_module_names and not file):
        return True
    return not _INSTALLED.isdisjoint(Path(file).parts) or top in _installed_names(folder)


_LIBRARIES = {"torch", "IPython", "gpumagic"}
_NAMELESS = {"", "__main__", "__mp_main__"}
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = (os.path.join(Path(os.__file__).parent, ""), "<frozen ")  # noqa: PTH118  # with its separator


def _imported_by_name(module: str, file: str) -> tuple[str, str]:
    """Return the folder that a module's top-level package lies in, and that package's name."""
    path = Path(file)
    depth = module.count(".") + (path.stem == "__init__")
    return str(next(iter(path.parents[depth : depth + 1]), "")), module.partition(".")[0]


def _imported_by_path(file: str) -> tuple[str, str]:
    """Return the entry of `sys.path` that a file lies under, and the top-level name by which it is imported there."""
    entries = [os.path.join(entry, "") for entry in sys.path if type(entry) is str and entry]  # noqa: PTH118
    folder = max((entry for entry in entries if file.startswith(entry)), key=len, default="")
    return folder, file[len(folder) or len(file) :].partition(os.sep)[0].partition(".")[0]


@lru_cache(maxsize=256)
def _installed_names(folder: str) -> frozenset[str]:
    """Return the top-level names that the packages installed in a folder by `pip install --target` put there."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD") if folder else ():
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
        names.update(line.partition(",")[0].partition("/")[0].partition(".")[0] for line in lines)
    return frozenset(names)


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


_MODULE_MOVES = frozenset({"to", "cuda", "cpu", "xpu", "to_empty"})


@dataclass(frozen=True, slots=True)
class CallSite:
    """A place in the cell; all None where the cell's own code is not on the stack."""

    line: int | None = None
    code: str | None = None
    name: str | None = None
    module_call: str | None = None
    """``"Module.to"`` and so on where a module's own move made the call."""


class CallSites:
    """Finds the cell's innermost running line, looking outward from an operator's call.

    Args:
        namespace: the globals in which the cell runs (the notebook's ``user_ns``, a script's ``globals()``).
        filename: the file of the code being watched; None for a cell, whose file is that of the nearest
            module-level frame over ``namespace``.
        waiting_thread: the thread that waits for this one, whose line it is where this one has none.
    """

    def __init__(
        self, namespace: Mapping[str, object], filename: str | None = None, waiting_thread: int | None = None
    ) -> None:
        self.namespace = namespace
        self._is_cell = filename is None
        self.filename = filename
        self._thread = get_ident()
        self._waiting_thread = waiting_thread

    def find(self, subject: object = None) -> CallSite:
        """Return where the cell stands now; ``subject`` is the object moved, whose name the line may say."""
        found, module_frame = self._frames()
        if self._is_cell:
            self.filename = self._cell_file(found) or self.filename
        frame = self._innermost(found)
        if frame is None and self._waiting_thread is not None:
            frame = self._innermost(self._over_namespace(sys._current_frames().get(self._waiting_thread))[0])
        if frame is None:
            return CallSite()
        module_call = None
        if module_frame is not None:
            subject, module_call = module_frame.f_locals.get("self"), f"Module.{module_frame.f_code.co_name}"
        code = code_at(frame, frame.f_lineno)
        return CallSite(frame.f_lineno, code, _name(frame, subject), module_call)

    def _innermost(self, found: list[FrameType]) -> FrameType | None:
        return next((each for each in found if each.f_code.co_filename == self.filename), None)

    def _frames(self) -> tuple[list[FrameType], FrameType | None]:
        # Autograd works for the cell in threads of its own.
        is_here = get_ident() == self._thread
        return self._over_namespace(sys._getframe(2) if is_here else sys._current_frames().get(self._thread))

    def _over_namespace(self, innermost: FrameType | None) -> tuple[list[FrameType], FrameType | None]:
        """Return the frames over the namespace, innermost first, and a module's move made from the innermost."""
        found: list[FrameType] = []
        module_frame = None
        frame = innermost  # not by `stack`: this runs for every transfer
        while frame is not None:
            if frame.f_globals is self.namespace:
                found.append(frame)
            elif not found and frame.f_code.co_name in _MODULE_MOVES and module_of(frame) == "torch.nn.modules.module":
                module_frame = frame
            frame = frame.f_back
        return found, module_frame

    @staticmethod
    def _cell_file(found: list[FrameType]) -> str | None:
        """Return the file of the nearest module-level frame whose code can be read, which that of `exec` cannot."""
        files = (each.f_code.co_filename for each in found if not is_function_frame(each))
        return next((each for each in files if linecache.getline(each, 1)), None)


def _name(frame: FrameType, subject: object) -> str | None:
    """Return the variable that the frame's code names and that is bound to the subject: a global, else its own."""
    if subject is None:
        return None
    found = next((name for name in frame.f_code.co_names if frame.f_globals.get(name) is subject), None)
    if found is None:
        found = next((name for name, value in local_variables(frame).items() if value is subject), None)
    return found

"""Whose a frame is, and its variables, read without leaving a trace in it."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

from gpumagic import _compat

MISSING = object()


def variables(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """Return what the names are bound to in a frame: its own variables before its globals; what is unbound is left out.

    What a function's frame answers with is let go of again: see `own`.
    """
    mine = own(frame) if is_a_functions(frame) else frame.f_locals
    found = {name: mine[name] if name in mine else frame.f_globals.get(name, MISSING) for name in names}
    return {name: value for name, value in found.items() if value is not MISSING}


def own(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame's own: a function's, or those of comprehensions that run in a cell's.

    Where the frame answers with a snapshot that it keeps, that is emptied again, unless somebody else has it:
    `locals()` returns the same dict.
    """
    if not is_a_functions(frame):
        return _compat.inlined(frame)
    snapshot: Any = frame.f_locals
    found = dict(snapshot)
    if _compat.FRAMES_KEEP_SNAPSHOTS and sys.getrefcount(snapshot) <= 3:  # the frame's, ours, and the argument's
        snapshot.clear()
    return found


def is_users(frame: FrameType) -> bool:
    """Whether the frame's file is neither torch's, Python's, IPython's nor ours."""
    package = str(Path(__file__).parent.parent)
    libraries = (package, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen")
    return not frame.f_code.co_filename.startswith(libraries)


def is_a_functions(frame: FrameType) -> bool:
    """Whether the frame has variables of its own, as a cell's or a module's has not."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)

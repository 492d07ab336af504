"""Whose a frame is, and its variables, read without leaving a trace in it."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

MISSING = object()


def variables(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """Return what the names are bound to in a frame: its own variables before its globals; what is unbound is left out.

    Before Python 3.13 a function's frame answers with a snapshot, which it keeps, and that would keep the variables
    alive for as long as the function runs (gh-113939). It is emptied again, unless somebody else has it: `locals()`
    returns the same dict.
    """
    own = frame.f_locals
    found = {name: own[name] if name in own else frame.f_globals.get(name, MISSING) for name in names}
    is_snapshot = sys.version_info < (3, 13) and is_a_functions(frame)
    if is_snapshot and sys.getrefcount(own) <= 3:  # the frame's, ours, and the argument's
        own.clear()
    return {name: value for name, value in found.items() if value is not MISSING}


def is_users(frame: FrameType) -> bool:
    """Whether the frame's file is neither torch's, Python's, IPython's nor ours."""
    package = str(Path(__file__).parent.parent)
    libraries = (package, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen")
    return not frame.f_code.co_filename.startswith(libraries)


def is_a_functions(frame: FrameType) -> bool:
    """Whether the frame has variables of its own, as a cell's or a module's has not."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)

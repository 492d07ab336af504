"""Release the memory that a failure pins: frames of the traceback, and every place that keeps the exception.

The order matters. Frames are cleared and their locals read once more, because `frame.clear` leaves the
snapshot that an earlier read of `f_locals` made (IPython reads it for each frame it prints; gh-113939, fixed in
Python 3.13). Collecting or emptying a cache before that, or inside an `except` block, frees nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Collection
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpumagic.memory import allocator
from gpumagic.source import frames
from gpumagic.source.frames import related_exceptions, traceback_steps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

DEBUGGER_FRAMES = ("curframe", "curframe_locals", "botframe", "stopframe", "returnframe", "userframe")
"""Where the debugger that `%debug` leaves behind keeps frames, beside its `stack`."""

INSPECTOR = "google.colab._variable_inspector"
"""Colab's Variables pane: its thread copies the notebook's variables, and so keeps deleted ones alive."""
INSPECTOR_PERIOD = 0.25
"""Seconds after which that copy has been renewed."""

LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


def clear_exception(error: BaseException, shell: InteractiveShell | None = None, outside: Collection[int] = ()) -> None:
    """Clear the frames of a failure, remove its tracebacks and have Python and IPython forget it.

    Frames that still run are left alone. What the exception itself holds, in its arguments, is freed when the
    caller releases it.

    Args:
        error: the exception; its causes, contexts and group members are cleared with it.
        shell: the shell that showed it, whose references are removed.
        outside: ids of exceptions that were being handled before, and are left alone.
    """
    family = list(related_exceptions(error, outside))
    tracebacks = [step for each in family for step in traceback_steps(each.__traceback__)]
    frames = [step.tb_frame for step in tracebacks]
    _forget_in_python(family)
    if shell is not None:
        _forget_in_shell(shell, {id(step) for step in tracebacks})
    for each in family:
        each.__traceback__ = None
    del family, tracebacks
    while frames:
        clear_frame(frames.pop())


def reclaim() -> None:
    """Collect garbage and return the cached memory of every backend to its driver.

    Call it after `clear_exception`, outside any `except` block: the exception being handled keeps what it holds.
    """
    _collect()
    if INSPECTOR in sys.modules:
        time.sleep(INSPECTOR_PERIOD)
        _collect()


def _collect() -> None:
    gc.collect()
    allocator.empty_caches()
    # Pinned host memory is cached apart: only some versions of torch can return it, and only backends that pin have it.
    accelerator: Any = getattr(sys.modules.get("torch"), "accelerator", None)
    in_use = accelerator is not None and any(map(allocator.is_initialised, ("cuda", "xpu")))
    if in_use and hasattr(accelerator, "empty_host_cache"):
        accelerator.empty_host_cache()


def clear_frame(frame: FrameType) -> None:
    """Clear a frame's variables, unless it still runs."""
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        return
    frame.f_locals  # noqa: B018  # reading it renews, hence clears, the snapshot of an earlier read


def _forget_in_python(family: list[BaseException]) -> None:
    kept = (getattr(sys, "last_value", None), getattr(sys, "last_exc", None))
    if not any(each is value for each in family for value in kept if value is not None):
        return
    for name in LAST_ERROR:
        if hasattr(sys, name):
            delattr(sys, name)


def _forget_in_shell(shell: InteractiveShell, tracebacks: set[int]) -> None:
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if id(getattr(formatter, "tb", None)) in tracebacks:
        formatter.tb = None
    debugger: Any = getattr(formatter, "pdb", None)
    if debugger is not None and not _is_in_use(debugger):  # else it keeps the frames of this or of an earlier failure
        for name in DEBUGGER_FRAMES:
            if hasattr(debugger, name):
                setattr(debugger, name, None)
        debugger.stack = []


def _is_in_use(debugger: object) -> bool:
    running = (each for each in frames.stack(sys._getframe()) if each.f_code.co_name == "interaction")
    return any(each.f_locals.get("self") is debugger for each in running)

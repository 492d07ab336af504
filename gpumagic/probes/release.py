"""Give back the memory that a failure pins: frames of the traceback, and every place that keeps the exception.

The order matters. Frames are cleared and their locals read once more, because `frame.clear` leaves the
snapshot that an earlier read of `f_locals` made (IPython reads it for each frame it prints; gh-113939, fixed in
Python 3.13). Collecting or emptying a cache before that, or inside an `except` block, frees nothing.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpumagic.probes import allocator, exception_graph

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

DEBUGGER_FRAMES = ("curframe", "botframe", "stopframe", "returnframe", "userframe")
"""Where the debugger that `%debug` leaves behind keeps frames; `stack` and `curframe_locals` go with them."""

LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


def release(error: BaseException, shell: InteractiveShell | None = None) -> None:
    """Free what a failure keeps alive: strip its frames, forget it, collect garbage, empty the caches.

    Call it outside any `except` block: the exception being handled keeps what it holds. Frames that still run
    are left alone.

    Args:
        error: the exception; its causes, contexts and group members are stripped with it.
        shell: the shell that showed it, whose copies are to be forgotten.
    """
    family = list(exception_graph.walk(error))
    tracebacks = [step for each in family for step in exception_graph.traceback_steps(each.__traceback__)]
    frames = [step.tb_frame for step in tracebacks]
    _forget_in_python(family)
    if shell is not None:
        _forget_in_shell(shell, {id(step) for step in tracebacks}, {id(frame) for frame in frames})
    for each in family:
        each.__traceback__ = None
    del family, tracebacks
    while frames:
        _empty(frames.pop())
    gc.collect()
    allocator.empty_caches()
    _empty_host_cache()


def forget_result(shell: InteractiveShell | None, error: BaseException, instead: BaseException | None) -> None:
    """Replace an error in the shell's last result, which keeps it (and its arguments) until the next cell ends."""
    result: Any = getattr(shell, "last_execution_result", None)
    if getattr(result, "error_in_exec", None) is error:
        result.error_in_exec = instead


def _empty(frame: FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        return
    frame.f_locals  # noqa: B018  # reading it renews, hence empties, the snapshot of an earlier read


def _forget_in_python(family: list[BaseException]) -> None:
    kept = (getattr(sys, "last_value", None), getattr(sys, "last_exc", None))
    if not any(each is value for each in family for value in kept if value is not None):
        return
    for name in LAST_ERROR:
        if hasattr(sys, name):
            delattr(sys, name)


def _forget_in_shell(shell: InteractiveShell, tracebacks: set[int], frames: set[int]) -> None:
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if id(getattr(formatter, "tb", None)) in tracebacks:
        formatter.tb = None
    debugger = getattr(formatter, "pdb", None)
    if debugger is None:
        return
    held = [getattr(debugger, name, None) for name in DEBUGGER_FRAMES]
    if any(id(frame) in frames for frame in held if frame is not None):
        for name in (*DEBUGGER_FRAMES, "curframe_locals"):
            if hasattr(debugger, name):
                setattr(debugger, name, None)
        debugger.stack = []


def _empty_host_cache() -> None:
    """Give back cached pinned host memory, where this torch can and a backend that pins is in use."""
    accelerator: Any = getattr(sys.modules.get("torch"), "accelerator", None)
    in_use = accelerator is not None and any(map(allocator.is_initialised, ("cuda", "xpu")))
    if in_use and hasattr(accelerator, "empty_host_cache"):
        accelerator.empty_host_cache()

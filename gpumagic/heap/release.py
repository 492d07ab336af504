"""Releases what a failure pins, and what IPython keeps because it showed it.

One output is referred to from up to seven places, and only when all of them forget it is it freed: `del Out[12]`
alone frees nothing (ipython#10082, #14129). The last error has three roots, each on its own: `sys.last_traceback` and
its kin, the formatter's `tb`, and the result of the last cell. Clearing the frames as well ends the cycles that frames
and errors are in.

The order matters. Frames are cleared and their locals read once more, because `frame.clear` leaves the
snapshot that an earlier read of `f_locals` made (IPython reads it for each frame it prints; gh-113939, fixed in
Python 3.13). Collecting or emptying a cache before that, or inside an `except` block, frees nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Collection, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from gpumagic.backends import BACKENDS
from gpumagic.heap import holders
from gpumagic.heap.graph import MAX_STEPS_OF_ALL, HeapGraph
from gpumagic.memory import allocator
from gpumagic.source import frames
from gpumagic.source.frames import related_exceptions, traceback_steps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

DEBUGGER_FRAMES = (
    "curframe",
    "curframe_locals",
    "botframe",
    "stopframe",
    "returnframe",
    "userframe",
)
"""Where the debugger that `%debug` leaves behind keeps frames, beside its `stack`."""

INSPECTOR = "google.colab._variable_inspector"
"""Colab's Variables pane: its thread copies the notebook's variables, and so keeps deleted ones alive."""
INSPECTOR_PERIOD = 0.25
"""Seconds after which that copy has been renewed."""

LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


NO_OUTPUT = ""
"""What IPython itself binds `_` to before anything was shown."""


def forget_outputs(shell: InteractiveShell, values: Collection[int]) -> None:
    """Make IPython forget the values with these ids, which the caller keeps alive meanwhile.

    No binding of the user's changes: `_` is only reset where IPython has set it last.
    """
    outputs: dict[int, object] = shell.user_ns.get("_oh", {})
    for number, value in list(dict.items(outputs)):
        if id(value) in values:
            dict.pop(outputs, number, None)
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        _unbind_outputs(shell, namespace, values)
    for name in holders.LAST_OUTPUTS:
        if id(getattr(shell.displayhook, name, None)) in values:
            setattr(shell.displayhook, name, NO_OUTPUT)
    result = shell.last_execution_result
    if result is not None and id(result.result) in values:
        result.result = None


def _unbind_outputs(
    shell: InteractiveShell, namespace: dict[str, Any], values: Collection[int]
) -> None:
    """Unbind the names that IPython has given to values in one of its namespaces."""
    for name, value in list(namespace.items()):
        if id(value) not in values or not holders.is_output_name(name):
            continue
        if shell.user_ns_hidden.get(name) is not value:
            continue
        if name in holders.LAST_OUTPUTS:
            namespace[name] = NO_OUTPUT
        else:
            namespace.pop(name, None)


def forget_last_error(
    namespace: Mapping[str, object], shell: InteractiveShell | None
) -> None:
    """Make Python and IPython forget the last error.

    Its frames are cleared, unless a variable leads to a part of it: then the error stays whole, and so does what it
    keeps.
    """
    errors = holders.remembered_errors(shell)
    _forget_in_python()
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if formatter is not None:
        formatter.tb = None
    result: Any = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None
    graph = HeapGraph(holders.excluded_objects(namespace, shell), MAX_STEPS_OF_ALL)
    try:
        graph.explore(holders.variables(namespace, shell))
        parts = set(map(id, holders.parts_of_errors(errors)))
        if not parts.isdisjoint(graph.objects):
            return
    finally:
        graph.release()
    while errors:
        error = errors.pop()
        if isinstance(error, BaseException):
            clear_exception(error, shell)
        else:
            clear_frame(error.tb_frame)


def _forget_in_python() -> None:
    for name in LAST_ERROR:
        vars(sys).pop(name, None)


def clear_exception(
    error: BaseException,
    shell: InteractiveShell | None = None,
    outside: Collection[int] = (),
) -> None:
    """Clear the frames of a failure, remove its tracebacks and have Python and IPython forget it.

    Frames that still run are left alone. What the exception itself holds, in its arguments, is freed when the
    caller releases it.

    Args:
        error: the exception; its causes, contexts and group members are cleared with it.
        shell: the shell that showed it, whose references are removed.
        outside: ids of exceptions that were being handled before, and are left alone.
    """
    family = list(related_exceptions(error, outside))
    tracebacks: list[TracebackType] = []
    for relative in family:
        tracebacks += traceback_steps(relative.__traceback__)
    frames = [step.tb_frame for step in tracebacks]
    relatives = set(map(id, family))
    last_errors = (getattr(sys, "last_value", None), getattr(sys, "last_exc", None))
    if any(id(last) in relatives for last in last_errors):
        _forget_in_python()
    if shell is not None:
        _forget_in_shell(shell, {id(step) for step in tracebacks})
    for relative in family:
        relative.__traceback__ = None
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
    if not hasattr(accelerator, "empty_host_cache"):
        return
    pinning = [backend.name for backend in BACKENDS if backend.copies_pinned]
    if any(map(allocator.is_initialised, pinning)):
        accelerator.empty_host_cache()


def clear_frame(frame: FrameType) -> None:
    """Clear a frame's variables, unless it still runs."""
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        return
    frame.f_locals  # noqa: B018  # reading it renews, hence clears, the snapshot of an earlier read


def _forget_in_shell(shell: InteractiveShell, tracebacks: set[int]) -> None:
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if id(getattr(formatter, "tb", None)) in tracebacks:
        formatter.tb = None
    debugger: Any = getattr(formatter, "pdb", None)
    if debugger is None or _is_in_use(debugger):
        return
    for (
        name
    ) in DEBUGGER_FRAMES:  # else it keeps the frames of this or of an earlier failure
        if hasattr(debugger, name):
            setattr(debugger, name, None)
    debugger.stack = []


def _is_in_use(debugger: object) -> bool:
    """Return whether somebody types into the debugger now."""
    for frame in frames.stack(sys._getframe()):
        if frame.f_code.co_name != "interaction":
            continue
        if frame.f_locals.get("self") is debugger:
            return True
    return False

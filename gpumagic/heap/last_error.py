"""The last failed cell: all that Python and IPython still keep of its error, and forgetting it.

Three roots keep it, each on its own: `sys.last_traceback` with its kin, the formatter's `tb`, and the result of
the last cell. Emptying the frames as well ends the cycles that frames and errors are in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from gpumagic.heap import holders
from gpumagic.heap.references import MAX_STEPS, References
from gpumagic.oom import release
from gpumagic.source.frames import related_exceptions, traceback_steps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def forget(namespace: Mapping[str, object], shell: InteractiveShell | None) -> None:
    """Make Python and IPython forget the last error.

    Its frames are emptied, unless a variable leads to a part of it: then the error stays whole, and so does what
    it keeps.
    """
    errors, tracebacks = _errors(shell), _tracebacks(shell)
    _let_go(shell)
    if _is_kept_by_user(_parts(errors, tracebacks), namespace, shell):
        return
    while errors:
        release.strip(errors.pop(), shell)
    while tracebacks:
        release.empty(tracebacks.pop().tb_frame)


def remembered(shell: InteractiveShell | None) -> list[object]:
    """Return the errors and tracebacks that Python and IPython keep for a look at the last failure."""
    return [*_errors(shell), *_tracebacks(shell)]


def frames(shell: InteractiveShell | None) -> list[FrameType]:
    """Return the frames of the calls that failed, of every error that led to the last."""
    parts = _parts(_errors(shell), _tracebacks(shell))
    return [each for each in parts if isinstance(each, FrameType)]


def _errors(shell: InteractiveShell | None) -> list[BaseException]:
    result = getattr(shell, "last_execution_result", None)
    found = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    found += [getattr(result, name, None) for name in ("error_in_exec", "error_before_exec")]
    unique = {id(each): each for each in found if isinstance(each, BaseException)}
    return list(unique.values())


def _tracebacks(shell: InteractiveShell | None) -> list[TracebackType]:
    """Return every link of the tracebacks that are kept beside the errors.

    They may be of an earlier error: after a usage error, IPython's formatter still has the traceback before it.
    """
    kept = (getattr(sys, "last_traceback", None), getattr(getattr(shell, "InteractiveTB", None), "tb", None))
    unique = {id(step): step for each in kept for step in traceback_steps(each)}
    return list(unique.values())


def _let_go(shell: InteractiveShell | None) -> None:
    for name in release.LAST_ERROR:
        vars(sys).pop(name, None)
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if formatter is not None:
        formatter.tb = None
    result: Any = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None


def _is_kept_by_user(parts: list[object], namespace: Mapping[str, object], shell: InteractiveShell | None) -> bool:
    """Tell whether a variable leads to a part of an error."""
    graph = References(holders.never_opened(namespace, shell), MAX_STEPS)
    try:
        graph.explore(holders.variables(namespace, shell), wanted=set(map(id, parts)))
        return any(True for _ in graph.ways(map(id, parts)))
    finally:
        graph.release()


def _parts(errors: Iterable[BaseException], tracebacks: Iterable[TracebackType]) -> list[object]:
    """Return the errors with all they were raised from, and every traceback and frame of theirs."""
    family = [each for error in errors for each in related_exceptions(error)]
    steps = [step for each in family for step in traceback_steps(each.__traceback__)]
    return [*family, *(part for step in [*steps, *tracebacks] for part in (step, step.tb_frame))]

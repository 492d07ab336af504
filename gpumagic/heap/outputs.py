"""What keeps tensors beside variables: IPython's outputs, the last error, and installed modules.

One output is referred to from up to seven places, and only when all of them forget it is it freed: `del Out[12]`
alone frees nothing (ipython#10082, #14129). The last error has three roots, each on its own: `sys.last_traceback` and
its kin, the formatter's `tb`, and the result of the last cell. Clearing the frames as well ends the cycles that frames
and errors are in.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from gpumagic.heap import holders, release
from gpumagic.heap.graph import MAX_STEPS_OF_ALL, HeapGraph
from gpumagic.heap.paths import Names
from gpumagic.heap.storages import StorageTable, undisturbed
from gpumagic.source.frames import related_exceptions, traceback_steps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_LAST = ("_", "__", "___")
_NUMBERED = re.compile(r"_\d+")
_NOTHING = ""  # what IPython itself binds `_` to before anything was shown


def shown_outputs(shell: InteractiveShell) -> Iterator[tuple[str, object]]:
    """Yield each value that IPython keeps because it displayed it, with the place: ``"Out[12]"``, ``"_"``...

    What the user has bound to one of these names is left out.
    """
    for number, value in list(dict.items(_outputs(shell))):
        yield f"Out[{number}]", value
    for name, value in list(shell.user_ns_hidden.items()):
        if _is_output_name(name):
            yield name, value
    for name in _LAST:
        yield name, getattr(shell.displayhook, name, _NOTHING)
    yield "last result", getattr(shell.last_execution_result, "result", None)


def forget_outputs(shell: InteractiveShell, values: Collection[int]) -> None:
    """Make IPython forget the values with these ids, which the caller keeps alive meanwhile.

    No binding of the user's changes: `_` is only reset where IPython has set it last.
    """
    outputs = _outputs(shell)
    for number in [number for number, value in dict.items(outputs) if id(value) in values]:
        dict.pop(outputs, number)
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        for name, value in list(namespace.items()):
            if id(value) not in values or not _is_output_name(name) or shell.user_ns_hidden.get(name) is not value:
                continue
            if name in _LAST:
                namespace[name] = _NOTHING
            else:
                del namespace[name]
    for name in _LAST:
        if id(getattr(shell.displayhook, name, None)) in values:
            setattr(shell.displayhook, name, _NOTHING)
    result = shell.last_execution_result
    if result is not None and id(result.result) in values:
        result.result = None


def _is_output_name(name: object) -> bool:
    return type(name) is str and (name in _LAST or _NUMBERED.fullmatch(name) is not None)


def _outputs(shell: InteractiveShell) -> dict[int, object]:
    outputs = shell.user_ns.get("_oh")
    return outputs if isinstance(outputs, dict) else {}


def forget_last_error(namespace: Mapping[str, object], shell: InteractiveShell | None) -> None:
    """Make Python and IPython forget the last error.

    Its frames are cleared, unless a variable leads to a part of it: then the error stays whole, and so does what it
    keeps.
    """
    errors, tracebacks = _errors(shell), _tracebacks(shell)
    _forget_references(shell)
    if _is_kept_by_user(_parts(errors, tracebacks), namespace, shell):
        return
    while errors:
        release.clear_exception(errors.pop(), shell)
    while tracebacks:
        release.clear_frame(tracebacks.pop().tb_frame)


def remembered_errors(shell: InteractiveShell | None) -> list[object]:
    """Return the errors and tracebacks that Python and IPython keep of the last failure."""
    return [*_errors(shell), *_tracebacks(shell)]


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


def _forget_references(shell: InteractiveShell | None) -> None:
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
    graph = HeapGraph(holders.excluded_objects(namespace, shell), MAX_STEPS_OF_ALL, depth=MAX_STEPS_OF_ALL)
    try:
        graph.explore(holders.variables(namespace, shell))
        return any(id(part) in graph.objects for part in parts)
    finally:
        graph.release()


def _parts(errors: Iterable[BaseException], tracebacks: Iterable[TracebackType]) -> list[object]:
    """Return the errors with all they were raised from, and every traceback and frame of theirs."""
    family = [each for error in errors for each in related_exceptions(error)]
    steps = [step for each in family for step in traceback_steps(each.__traceback__)]
    return [*family, *(part for step in [*steps, *tracebacks] for part in (step, step.tb_frame))]


def in_modules(
    numbers: set[int], modules: set[str], namespace: Mapping[str, object], shell: object | None
) -> dict[int, tuple[str, str]]:
    """Return which of some modules, ``"module some_library"``, keeps storages, and where, by their numbers."""
    graph, table = HeapGraph(holders.excluded_objects(namespace, shell), MAX_STEPS_OF_ALL), StorageTable()
    found: dict[int, tuple[str, str]] = {}
    try:
        with undisturbed():
            paths_to = graph.explore(each for each in holders.module_roots(namespace, True) if each[0] in modules)
            names = Names(paths_to)
            for each, tensor in graph.tensors.items():
                first = min(paths_to[each], key=lambda path: path.depth)
                for number in numbers.intersection(table.numbers(tensor)):
                    found[number] = first.root(), names.description(first)
        return found
    finally:
        graph.release()


def of_the_session(namespace: Mapping[str, object], shell: InteractiveShell | None) -> Iterator[object]:
    """Yield what refers to outputs and to the variables of failed calls, and is forgotten with them."""
    yield from holders.excluded_objects(namespace, shell)
    for owner in (getattr(shell, "displayhook", None), getattr(shell, "last_execution_result", None)):
        yield owner
        yield getattr(owner, "__dict__", None)
    parts = _parts(_errors(shell), _tracebacks(shell))
    for frame in [each for each in parts if isinstance(each, FrameType)]:
        yield frame
        shared = {id(frame.f_globals), id(frame.f_builtins)}
        # A frame that was printed keeps a snapshot of its variables.
        yield from (each for each in gc.get_referents(frame) if type(each) is dict and id(each) not in shared)

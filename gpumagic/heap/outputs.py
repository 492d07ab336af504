"""What keeps tensors beside variables: IPython's outputs, the last error, and installed modules.

One output is referred to from up to seven places, and only when all of them forget it is it freed: `del Out[12]`
alone frees nothing (ipython#10082, #14129). The last error has three roots, each on its own: `sys.last_traceback` and
its kin, the formatter's `tb`, and the result of the last cell. Clearing the frames as well ends the cycles that frames
and errors are in.

Searching a million objects of libraries takes most of a second, so the gc is asked first, in a few passes, whether
anything but the session refers to the tensors, or to the lists and dicts they are in.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from gpumagic import _compat
from gpumagic.heap import cycles, holders, release
from gpumagic.heap.branches import Reader
from gpumagic.heap.graph import MAX_STEPS_OF_ALL, HeapGraph
from gpumagic.heap.holders import Held
from gpumagic.heap.paths import Names
from gpumagic.heap.readers import reader_of
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


MAX_STEPS_OF_MODULES = 1_500_000
"""Children read: about a second for torch, pandas and what they import."""
_MAX_OBJECTS = 32
"""Objects whose referrers the gc is asked for: it compares each reference there is with each of them."""
_MAX_ROUNDS = 4
"""Passes of the gc, about 20 ms each."""


def kept_elsewhere(
    tensors: list[Any], held: Mapping[int, Held], namespace: Mapping[str, object], shell: InteractiveShell | None,
    ours: Iterable[object],
) -> tuple[dict[int, Held], bool]:  # fmt: skip
    """Return which of some tensors more than the session keeps, by their `id`, and whether all modules were searched.

    That is an installed module, or the frames of an earlier failure, which are garbage until the gc runs.

    Args:
        tensors: what the session's outputs or its last error keep.
        held: which of these keeps each, by its `id`.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        ours: lists of the caller's that contain the tensors too.
    """
    if not tensors:
        return {}, True
    known = [tensors, *ours, *_of_the_session(namespace, shell)]
    if _only_session_refers_to(tensors, set(map(id, known))):
        return {}, True
    found, is_whole = _kept_by_modules(set(map(id, tensors)), lambda each: [id(each)], namespace, shell)
    for tensor, cycle in cycles.garbage_over([each for each in tensors if id(each) not in found], known).items():
        label, place = (f"{each} and {cycle}" for each in held[tensor][:2])
        found[tensor] = Held(label, place, releasable=False)
    return found, is_whole


def in_modules(numbers: set[int], namespace: Mapping[str, object], shell: object | None) -> dict[int, Held]:
    """Return which installed module keeps the storages with these numbers, by the number."""
    with undisturbed():
        table = StorageTable()
        return _kept_by_modules(numbers, table.numbers, namespace, shell)[0]


def _kept_by_modules(
    wanted: set[int], keys_of: Callable[[Any], Iterable[int]], namespace: Mapping[str, object], shell: object | None
) -> tuple[dict[int, Held], bool]:
    """Return which installed module keeps the tensors with some of these keys, by the key, and whether it read all."""
    roots = list(holders.module_roots(namespace, installed=True))
    excluded = holders.excluded_objects(namespace, shell)
    if wanted.isdisjoint(key for each in _tensors_below(roots, excluded) for key in keys_of(each)):
        return {}, True
    graph = HeapGraph(excluded, MAX_STEPS_OF_MODULES)
    found: dict[int, Held] = {}
    try:
        paths_to = graph.explore(roots)
        names = Names(paths_to)
        for each, tensor in graph.tensors.items():
            for key in wanted.intersection(keys_of(tensor)):
                first = min(paths_to[each], key=lambda path: path.depth)
                found[key] = Held(first.root(), names.description(first), releasable=False)
        return found, not graph.gave_up
    finally:
        graph.release()


def _tensors_below(roots: Iterable[tuple[str, object]], excluded: Iterable[object]) -> Iterator[Any]:
    """Yield the tensors that the gc finds below some roots: all that an exploration would, and more.

    The gc follows references in C, which takes a fifth of the time; it does not tell by which names.
    """
    seen = cycles.module_dict_ids() | set(map(id, excluded))
    readers: dict[type, Reader | None] = {}
    waiting: list[Any] = [value for _, value in roots]
    while waiting:
        seen.update(map(id, waiting))
        met = gc.get_referents(*waiting)
        for each in waiting:
            reader = readers.get(type(each))
            if reader is not None and reader.is_beyond_gc:
                met += [child for branch in reader.read(each, reader) for _, child in branch.children]
        unseen = dict(zip(map(id, met), met, strict=True))
        waiting = [unseen[address] for address in unseen.keys() - seen]
        readers.update((kind, reader_of(kind)) for kind in set(map(type, waiting)) - readers.keys())
        waiting = [each for each in waiting if readers[type(each)] is not None]
        kinds = {kind for kind in set(map(type, waiting)) if (reader := readers[kind]) is not None and reader.is_tensor}
        if kinds:
            yield from (each for each in waiting if type(each) in kinds)


def _only_session_refers_to(tensors: list[Any], known: set[int]) -> bool:
    """Tell whether all that refers to some tensors, or to what contains them, is known; False if that takes long."""
    waiting, lasting = list(tensors), cycles.module_dict_ids()
    for _ in range(_MAX_ROUNDS):
        if len(waiting) > _MAX_OBJECTS:
            break
        known.add(id(waiting))
        found = _compat.referrers(waiting)
        waiting = [each for each in found if id(each) not in known]
        if not waiting:
            return True
        if any(id(each) in lasting or cycles.is_lasting(each) for each in waiting):
            return False
        known.update(map(id, waiting), [id(found)])
    return False


def _of_the_session(namespace: Mapping[str, object], shell: InteractiveShell | None) -> Iterator[object]:
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

"""What keeps tensors: the roots that `graph.HeapGraph` explores, and which of them holds a tensor without a name.

Roots are the notebook's variables first, then what the session cannot release (running functions, modules), then
IPython's outputs and the last error.
"""

from __future__ import annotations

import contextvars
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from gpumagic.heap import calls, readers
from gpumagic.heap.branches import key_code, name_of_type
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.paths import Names, is_typeable
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.source import frames

TRACEBACK = "last traceback"
SCRIPTS = "get_ipython()._main_mod_cache["
"""How the holder of a variable of a script begins that `%run` ran: IPython keeps all of them."""

_variables_of: Any = vars(ModuleType)["__dict__"].__get__


def name_storages(namespace: Mapping[str, object], shell: object | None = None) -> dict[int, tuple[str, ...]]:
    """Return every name that reaches a storage, best first, by the storage's address (``untyped_storage()._cdata``).

    Args:
        namespace: the notebook's variables.
        shell: the shell they belong to, whose own variables (``_``, ``Out``) do not count as names.
    """
    graph, table = HeapGraph(excluded_objects(namespace, shell)), StorageTable()
    found: dict[int, list[str]] = {}
    try:
        with undisturbed(), gc_disabled():
            names = Names(graph.explore(variables(namespace, shell)))
            for key, tensor in graph.tensors.items():
                for address in table.addresses(tensor):
                    found.setdefault(address, []).extend(names.of(key))
    finally:
        graph.release()
    return {address: tuple(dict.fromkeys(names)) for address, names in found.items()}


class Held(NamedTuple):
    """What keeps a tensor that no variable reaches."""

    label: str
    """``"Out[3]"``, ``"last traceback"``, ``"running train()"``..."""
    place: str
    """The path to it from there: ``"Out[3]['k'][0]"``, ``"last traceback.<step()>.hidden"``."""
    releasable: bool
    """Whether it is freed once IPython and Python forget outputs and the last error."""
    variable: str | None = None
    """The variable that reaches it where no expression does."""


def unnamed_holders(
    graph: HeapGraph, namespace: Mapping[str, object], shell: object | None, others: Iterable[tuple[str, object]] = ()
) -> dict[int, Held]:
    """Return what keeps each tensor that no variable reaches, by the tensor's `id`, as far as it is found.

    Args:
        graph: one that has explored the variables already: what they reach is not read again.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        others: further roots with their labels, such as generators.
    """
    found: dict[int, Held] = {}
    # What the session cannot release comes first: a tensor of an output that a thread uses too is not releasable.
    lasting = [*running_roots(), *others, *session_roots(shell), *module_roots(namespace), *ambient_roots()]
    for roots, releasable in ((lasting, False), (list(hidden_roots(namespace, shell)), True)):
        order = {label: position for position, (label, _) in reversed(list(enumerate(roots)))}
        paths_to = graph.explore(roots)
        names = Names(paths_to)
        for tensor, paths in paths_to.items():
            first = min(paths, key=lambda path: (order[path.root()], path.depth))
            if tensor not in found:
                found[tensor] = Held(first.root(), names.description(first), releasable)
            elif releasable and found[tensor].label.startswith(SCRIPTS):  # to free it, both have to let go
                found[tensor] = found[tensor]._replace(label=f"{found[tensor].label} and {first.root()}")
    return found


def variables(namespace: Mapping[str, object], shell: object | None) -> list[tuple[str, object]]:
    """Return the user's variables: all but those that IPython put there itself and nobody has rebound."""
    hidden = _dict_of(shell, "user_ns_hidden")
    missing = object()
    return [
        # A variable may have been bound by other means than typing its name.
        (name if is_typeable(name) else f"globals()[{key_code(name)}]", value)
        for name, value in list(namespace.items())
        if type(name) is str and hidden.get(name, missing) is not value
    ]


def hidden_roots(namespace: Mapping[str, object], shell: object | None) -> Iterator[tuple[str, object]]:
    """Yield, with a label, all that IPython and Python keep beside the variables, the most telling first."""
    outputs = namespace.get("_oh")
    if shell is not None and isinstance(outputs, dict):
        yield from ((f"Out[{number}]", value) for number, value in list(dict.items(outputs)))
    hidden = _dict_of(shell, "user_ns_hidden")
    for name, value in list(hidden.items()):
        if name in ("_", "__", "___") and namespace.get(name) is value:
            yield name, value
    for name, value in list(hidden.items()):
        if type(name) is str and name.startswith("_"):
            yield (name if namespace.get(name) is value else f"user_ns_hidden[{name!r}]"), value
    result = getattr(shell, "last_execution_result", None)
    errors = [getattr(sys, name, None) for name in ("last_exc", "last_value", "last_traceback")]
    errors += [getattr(result, name, None) for name in ("error_in_exec", "error_before_exec")]
    yield from ((TRACEBACK, value) for value in (*errors, getattr(getattr(shell, "InteractiveTB", None), "tb", None)))
    if shell is not None:
        yield "display hook", SimpleNamespace(**getattr(getattr(shell, "displayhook", None), "__dict__", {}))
        yield "last result", getattr(result, "result", None)


def session_roots(shell: object | None) -> Iterator[tuple[str, object]]:
    """Yield the callbacks of the session's events and, by an expression, the variables of scripts that `%run` ran.

    These outlive those of the notebook that are deleted.
    """
    yield "get_ipython().events.callbacks", getattr(getattr(shell, "events", None), "callbacks", None)
    for file, module in list(_dict_of(shell, "_main_mod_cache").items()):
        own = readers.module_variables(_variables_of(module)) if type(module) is ModuleType else []
        yield f"{SCRIPTS}{key_code(file)}]", SimpleNamespace(**dict(own))


def running_roots() -> Iterator[tuple[str, object]]:
    """Yield the variables of the functions that run now, in any thread."""
    for label, own in calls.running_functions():
        yield label, SimpleNamespace(**dict(own))


def module_roots(namespace: Mapping[str, object], installed: bool = False) -> Iterator[tuple[str, object]]:
    """Yield the variables of the modules that the user wrote, or of those that were installed, but for ours."""
    for name, module in list(sys.modules.items()):
        own: Any = _variables_of(module) if type(module) is ModuleType else {}
        file = own.get("__file__")
        if own is namespace or type(file) is not str or name.partition(".")[0] == "gpumagic":
            continue
        if frames.is_library(name, file) == installed:
            yield f"module {name}", SimpleNamespace(**dict(readers.module_variables(own)))


def ambient_roots() -> Iterator[tuple[str, object]]:
    """Yield what Python keeps for the current context, and for objects that are to be finalized."""
    for variable, value in contextvars.copy_context().items():
        yield f"context variable {variable.name}", value
    registry: Any = getattr(weakref.finalize, "_registry", {})
    for info in list(registry.values()):
        label = f"finalizer {_called(info.func)}()"
        yield label, SimpleNamespace(func=info.func, args=info.args, kwargs=info.kwargs)


def _called(function: object) -> str:
    kinds = (FunctionType, BuiltinFunctionType, MethodType)
    named: Any = function
    return str(named.__name__) if type(function) in kinds else name_of_type(type(function))


def excluded_objects(namespace: Mapping[str, object], shell: object | None) -> list[object]:
    """Return what no search may pass through: everything is reached from there, which keeps nothing alive."""
    excluded = [namespace, namespace.get("_oh"), _dict_of(shell, "user_ns_hidden"), sys.modules, sys.__dict__]
    return excluded if shell is None else [*excluded, shell, getattr(shell, "user_module", None)]


def _dict_of(shell: object | None, name: str) -> Mapping[Any, object]:
    found = getattr(shell, name, None)
    return found if isinstance(found, dict) else {}

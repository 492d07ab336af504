"""Who keeps a tensor alive: the notebook's own names first, then IPython's outputs and the last traceback.

`why` gives every way to one tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from gpumagic.heap import readers
from gpumagic.heap.paths import Names, Search, spell, variable
from gpumagic.heap.storages import Ledger, uncollected, undisturbed
from gpumagic.source import frames

TRACEBACK = "last traceback"

_variables_of: Any = vars(ModuleType)["__dict__"].__get__


def name_storages(namespace: Mapping[str, object], shell: object | None = None) -> dict[int, tuple[str, ...]]:
    """Return every name that reaches a storage, best first, by the storage's address (``untyped_storage()._cdata``).

    Args:
        namespace: the notebook's variables.
        shell: the shell they belong to, whose own variables (``_``, ``Out``) do not count as names.
    """
    search = Search(closed=never_opened(namespace, shell))
    ledger = Ledger()
    found: dict[int, list[str]] = {}
    try:
        with undisturbed(), uncollected():
            names = Names(search.run(variables(namespace, shell)))
            for key, tensor in search.tensors.items():
                for address in ledger.addresses(tensor):
                    found.setdefault(address, []).extend(names.of(key))
    finally:
        search.release()
    return {address: tuple(dict.fromkeys(names)) for address, names in found.items()}


def variables(namespace: Mapping[str, object], shell: object | None) -> list[tuple[str, object]]:
    """Return the user's variables: all but those that IPython put there itself and nobody has rebound."""
    hidden = _mapping(shell, "user_ns_hidden")
    missing = object()
    return [
        (variable(name), value)
        for name, value in list(namespace.items())
        if type(name) is str and hidden.get(name, missing) is not value
    ]


def search_for(namespace: Mapping[str, object], shell: object | None) -> Search:
    """Return a search that does not wander into the shell."""
    return Search(closed=never_opened(namespace, shell))


class Held(NamedTuple):
    """What keeps a tensor that no variable reaches."""

    label: str
    """``"Out[3]"``, ``"last traceback"``, ``"running train()"``..."""
    place: str
    """The way to it from there: ``"Out[3]['k'][0]"``, ``"last traceback.<step()>.hidden"``."""
    releasable: bool
    """Whether forgetting what IPython and Python keep by themselves, outputs and the last error, lets go of it."""


def hidden_holders(
    search: Search, namespace: Mapping[str, object], shell: object | None, others: Iterable[tuple[str, object]] = ()
) -> dict[int, Held]:
    """Return what keeps each tensor that no variable reaches, by the tensor's `id`, as far as it can be told.

    Args:
        search: one that has followed the variables already: what they reach is not looked for again.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        others: further roots with their labels, such as generators.
    """
    found: dict[int, Held] = {}
    # What the session does not let go of comes first: a tensor of an output that a thread uses too is not releasable.
    lasting = [*running_roots(), *others, *module_roots(namespace)]
    for roots, releasable in ((lasting, False), (list(hidden_roots(namespace, shell)), True)):
        order = {label: position for position, (label, _) in reversed(list(enumerate(roots)))}
        ways_to = search.run(roots)
        names = Names(ways_to)
        for tensor, ways in ways_to.items():
            if tensor not in found:
                first = min(ways, key=lambda way: (order[way.root()], way.depth))
                found[tensor] = Held(first.root(), spell(first, names.best), releasable)
    return found


def hidden_roots(namespace: Mapping[str, object], shell: object | None) -> Iterator[tuple[str, object]]:
    """Yield, with a label, all that IPython and Python keep beside the variables, the most telling first."""
    outputs = namespace.get("_oh")
    if shell is not None and isinstance(outputs, dict):
        yield from ((f"Out[{number}]", value) for number, value in list(dict.items(outputs)))
    hidden = _mapping(shell, "user_ns_hidden")
    for name, value in list(hidden.items()):
        if name in ("_", "__", "___") and namespace.get(name) is value:
            yield name, value
    for name, value in list(hidden.items()):
        if type(name) is str and name.startswith("_"):
            yield (name if namespace.get(name) is value else f"user_ns_hidden[{name!r}]"), value
    yield from ((TRACEBACK, value) for value in _kept_by_errors(shell))
    if shell is not None:
        yield "display hook", SimpleNamespace(**getattr(getattr(shell, "displayhook", None), "__dict__", {}))
        yield "last result", getattr(getattr(shell, "last_execution_result", None), "result", None)


def running_roots() -> Iterator[tuple[str, object]]:
    """Yield the variables of the functions that run now, in any thread."""
    for label, variables_ in readers.running():
        yield label, SimpleNamespace(**dict(variables_))


def module_roots(namespace: Mapping[str, object], installed: bool = False) -> Iterator[tuple[str, object]]:
    """Yield the variables of the modules that the user wrote, or of those that were installed, but for ours."""
    for name, module in list(sys.modules.items()):
        own: Any = _variables_of(module) if type(module) is ModuleType else {}
        file = own.get("__file__")
        if own is namespace or type(file) is not str or name.partition(".")[0] == "gpumagic":
            continue
        if frames.is_library(name, file) == installed:
            yield f"module {name}", SimpleNamespace(**own)


def _kept_by_errors(shell: object | None) -> Iterator[object]:
    """Yield the last errors and tracebacks wherever they are kept."""
    result = getattr(shell, "last_execution_result", None)
    yield from (getattr(sys, name, None) for name in ("last_exc", "last_value", "last_traceback"))
    yield from (getattr(result, name, None) for name in ("error_in_exec", "error_before_exec"))
    yield getattr(getattr(shell, "InteractiveTB", None), "tb", None)


def never_opened(namespace: Mapping[str, object], shell: object | None) -> list[object]:
    """Return what no search may pass through: everything is reached from there, and that is no reason to live."""
    outputs = namespace.get("_oh")
    closed = [namespace, outputs, _mapping(shell, "user_ns_hidden"), sys.modules, sys.__dict__]
    return closed if shell is None else [*closed, shell, getattr(shell, "user_module", None)]


def _mapping(shell: object | None, name: str) -> Mapping[Any, object]:
    found = getattr(shell, name, None)
    return found if isinstance(found, dict) else {}

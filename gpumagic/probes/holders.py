"""Who keeps a tensor alive: the notebook's own names first, then IPython's outputs and the last traceback."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from gpumagic.probes import exception_graph
from gpumagic.probes.paths import Names, Search
from gpumagic.probes.storages import Ledger, uncollected, undisturbed
from gpumagic.reports import Holder, TensorReport

TRACEBACK = "last traceback"


def name_storages(namespace: Mapping[str, object], shell: object | None = None) -> dict[int, tuple[str, ...]]:
    """Return every name that reaches a storage, best first, by the storage's address (``untyped_storage()._cdata``).

    Args:
        namespace: the notebook's variables.
        shell: the shell they belong to, whose own variables (``_``, ``Out``) do not count as names.
    """
    search = Search(closed=_never_opened(namespace, shell))
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


def released_by(report: TensorReport) -> tuple[Holder, ...]:
    """Return what unbinding each variable would release, most first: the storages that only it reaches."""
    totals: dict[tuple[str, str], list[Any]] = {}
    for row in report:
        roots = {root_of(name) for name in row.names}
        if len(roots) == 1 and row.nbytes:
            total = totals.setdefault((roots.pop(), row.device), [0, row.kind])
            total[0] += row.nbytes
            total[1] = row.kind if row.kind == total[1] else "several"
    held = [Holder(name, device, nbytes, kind) for (name, device), (nbytes, kind) in totals.items()]
    return tuple(sorted(held, key=lambda holder: -holder.nbytes))


def root_of(name: str) -> str:
    """Return the variable a name starts from: ``"model"`` for ``"model.fc.weight"``."""
    ends = [position for position in (name.find("."), name.find("["), name.find("{")) if position > 0]
    return name[: min(ends)] if ends else name


def variables(namespace: Mapping[str, object], shell: object | None) -> list[tuple[str, object]]:
    """Return the user's variables: all but those that IPython put there itself and nobody has rebound."""
    hidden = _mapping(shell, "user_ns_hidden")
    missing = object()
    return [
        (name, value)
        for name, value in list(namespace.items())
        if type(name) is str and hidden.get(name, missing) is not value
    ]


def search_for(namespace: Mapping[str, object], shell: object | None) -> Search:
    """Return a search that does not wander into the shell."""
    return Search(closed=_never_opened(namespace, shell))


def hidden_holders(search: Search, namespace: Mapping[str, object], shell: object | None) -> dict[int, str]:
    """Return what keeps each tensor that no variable reaches, by the tensor's `id`, as far as it can be told."""
    roots = list(hidden_roots(namespace, shell))
    order = {label: position for position, (label, _) in reversed(list(enumerate(roots)))}
    found = search.run(roots)
    return {tensor: min((way.root() for way in ways), key=order.__getitem__) for tensor, ways in found.items()}


def hidden_roots(namespace: Mapping[str, object], shell: object | None) -> Iterator[tuple[str, object]]:
    """Yield, with a label, all that keeps objects in a session beside its variables, the most telling first."""
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
        yield "display hook", getattr(shell, "displayhook", None)
        yield "last result", getattr(getattr(shell, "last_execution_result", None), "result", None)


def _kept_by_errors(shell: object | None) -> Iterator[object]:
    """Yield the local objects of every frame that the last error keeps, and the errors themselves."""
    result = getattr(shell, "last_execution_result", None)
    errors = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None)]
    errors += [getattr(result, "error_in_exec", None), getattr(result, "error_before_exec", None)]
    tracebacks = [getattr(sys, "last_traceback", None), getattr(getattr(shell, "InteractiveTB", None), "tb", None)]
    for error in errors:
        if isinstance(error, BaseException):
            for each in exception_graph.walk(error):
                yield each.args
                yield getattr(each, "__dict__", None)
                tracebacks.append(each.__traceback__)
    seen: set[int] = set()
    for traceback in tracebacks:
        for step in exception_graph.traceback_steps(traceback):
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield from locals_of(step.tb_frame)


def locals_of(frame: FrameType) -> list[object]:
    """Return the local objects of a frame without reading `f_locals`."""
    # Not f_locals: before Python 3.13 reading it leaves a snapshot in the frame that keeps the objects alive.
    not_local = {id(frame.f_globals), id(frame.f_builtins), id(frame.f_back), id(frame.f_code), id(frame.f_trace)}
    return [value for value in gc.get_referents(frame) if id(value) not in not_local]


def _never_opened(namespace: Mapping[str, object], shell: object | None) -> list[object]:
    outputs = namespace.get("_oh")
    closed = [namespace, outputs, _mapping(shell, "user_ns_hidden"), sys.modules, sys.__dict__]
    return closed if shell is None else [*closed, shell, getattr(shell, "user_module", None)]


def _mapping(shell: object | None, name: str) -> Mapping[Any, object]:
    found = getattr(shell, name, None)
    return found if isinstance(found, dict) else {}

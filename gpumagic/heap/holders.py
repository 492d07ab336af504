"""What keeps tensors: the roots that `graph.HeapGraph` explores, and which of them holds a tensor without a name.

Roots are the notebook's variables first, then what the session cannot release (running functions, modules), then
IPython's outputs and the last error.
"""

from __future__ import annotations

import contextvars
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType, ModuleType, SimpleNamespace, TracebackType
from typing import Any

from gpumagic.heap import calls, readers
from gpumagic.heap.branches import Attributes, Names, Path, is_typeable, key_code
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.held import (
    LAST_RESULT,
    LAST_TRACEBACK,
    Held,
    Holder,
    Namespace,
    Root,
)
from gpumagic.source import frames

LAST_OUTPUTS = ("_", "__", "___")

_variables_of: Any = vars(ModuleType)["__dict__"].__get__


def unnamed_holders(
    graph: HeapGraph,
    namespace: Namespace,
    shell: object | None,
    others: Iterable[Root] = (),
) -> dict[int, Held]:
    """Return what keeps each tensor that no variable reaches, by the tensor's `id`, as far as it is found.

    Args:
        graph: one that has explored the variables already: what they reach is not read again.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        others: further roots with their holders, such as generators.
    """
    # What the session cannot release comes first: a tensor of an output that a thread uses too is not releasable.
    found = _explore(graph, _lasting_roots(namespace, shell, others), releasable=False)
    releasable = _explore(graph, hidden_roots(namespace, shell), releasable=True)
    for tensor, held in releasable.items():
        lasting = found.setdefault(tensor, held)
        if (
            lasting is not held and lasting.by[0].kind == "script"
        ):  # to free it, both have to let go
            found[tensor] = lasting._replace(by=lasting.by + held.by)
    return found


def _lasting_roots(
    namespace: Namespace,
    shell: object | None,
    others: Iterable[Root],
) -> list[Root]:
    """Return the roots that IPython and Python cannot be made to forget, with their holders."""
    roots: list[Root] = [*calls.running_roots(), *others]
    # The callbacks of the session's events, and the variables of scripts that `%run` ran, outlive the notebook's.
    callbacks = getattr(getattr(shell, "events", None), "callbacks", None)
    roots.append((Holder("event callbacks"), callbacks))
    for file, module in list(_dict_of(shell, "_main_mod_cache").items()):
        if type(module) is ModuleType:
            holder = Holder("script", str(key_code(file)))
            roots.append((holder, _module_namespace(module)))
    roots += module_roots(namespace)
    for variable, value in contextvars.copy_context().items():
        holder = Holder("context variable", variable.name)
        roots.append((holder, value))
    return roots


def _module_namespace(module: ModuleType) -> SimpleNamespace:
    """Return the variables of a module as the attributes of an object."""
    variables = readers.module_variables(_variables_of(module))
    return SimpleNamespace(**dict(variables))


def _explore(
    graph: HeapGraph, roots: list[Root], *, releasable: bool
) -> dict[int, Held]:
    """Return what keeps each tensor that some roots lead to, by its `id`: of several roots the first."""
    order: dict[Holder, int] = {}
    for position, (holder, _) in enumerate(roots):
        order.setdefault(holder, position)
    paths_to = graph.explore(roots)
    names = Names(paths_to)
    found: dict[int, Held] = {}

    def nearness(path: Path) -> tuple[int, int]:
        return order[path.start().key], path.depth

    for tensor, paths in paths_to.items():
        nearest = min(paths, key=nearness)
        root: Holder = nearest.start().key
        place = names.description(nearest)
        unbinds = None
        if root.kind == "script":
            unbinds = _unbind(nearest, names)
        found[tensor] = Held((root,), place, releasable, unbinds=unbinds)
    return found


def _unbind(path: Path, names: Names) -> str | None:
    """Return the statement that deletes the variable with which a path begins below its root."""
    variable = names.code(path.steps()[1])
    return None if variable is None else f"del {variable}"


def variables(namespace: Namespace, shell: object | None) -> Attributes:
    """Return the user's variables: all but those that IPython put there itself and nobody has rebound."""
    hidden = _dict_of(shell, "user_ns_hidden")
    missing = object()
    found: Attributes = []
    for name, value in list(namespace.items()):
        if type(name) is not str or hidden.get(name, missing) is value:
            continue
        code = name
        if not is_typeable(name):  # it was bound by other means than typing its name
            code = f"globals()[{key_code(name)}]"
        found.append((code, value))
    return found


def hidden_roots(namespace: Namespace, shell: object | None) -> list[Root]:
    """Return what IPython keeps because it showed it, and the last error: each value once, with its holder.

    What the user has bound to ``_`` and the like is left out.
    """
    roots = _shown_roots(namespace, shell) if shell is not None else []
    roots += [(LAST_TRACEBACK, error) for error in remembered_errors(shell)]
    once: dict[int, Root] = {}
    for holder, value in roots:
        once.setdefault(id(value), (holder, value))
    return list(once.values())


def _shown_roots(namespace: Namespace, shell: object) -> list[Root]:
    """Return what IPython keeps because it showed it, some of it more than once."""
    roots: list[Root] = []
    outputs = namespace.get("_oh")
    if isinstance(outputs, dict):
        for number, value in list(
            dict.items(outputs)
        ):  # a subshell may add to them meanwhile
            output = Holder("output", f"Out[{number}]")
            roots.append((output, value))
    for name, value in list(_dict_of(shell, "user_ns_hidden").items()):
        if is_output_name(name):
            roots.append((Holder("output name", name), value))
    displayhook = getattr(shell, "displayhook", None)
    for name in LAST_OUTPUTS:
        value = getattr(displayhook, name, None)
        roots.append((Holder("output name", name), value))
    last = getattr(shell, "last_execution_result", None)
    roots.append((LAST_RESULT, getattr(last, "result", None)))
    return roots


def is_output_name(name: object) -> bool:
    """Return whether IPython gives a name to what it shows: ``_``, ``__``, ``_12``."""
    if type(name) is not str:
        return False
    return name in LAST_OUTPUTS or re.fullmatch(r"_\d+", name) is not None


def remembered_errors(shell: object | None) -> list[BaseException | TracebackType]:
    """Return the errors that Python and IPython keep of the last failure, then the links of their tracebacks.

    These may be of an earlier error: after a usage error, IPython's formatter still has the traceback before it.
    """
    result = getattr(shell, "last_execution_result", None)
    formatter = getattr(shell, "InteractiveTB", None)
    errors = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    errors += [
        getattr(result, name, None) for name in ("error_in_exec", "error_before_exec")
    ]
    once: dict[int, BaseException | TracebackType] = {}
    for error in errors:
        if isinstance(error, BaseException):
            once[id(error)] = error
    for traceback in (
        getattr(sys, "last_traceback", None),
        getattr(formatter, "tb", None),
    ):
        for step in frames.traceback_steps(traceback):
            once[id(step)] = step
    return list(once.values())


def parts_of_errors(errors: Iterable[BaseException | TracebackType]) -> list[object]:
    """Return errors with all they were raised from, and every traceback and frame of theirs."""
    family: list[BaseException] = []
    steps: list[TracebackType] = []
    for error in errors:
        if isinstance(error, BaseException):
            family += frames.related_exceptions(error)
        else:
            steps.append(error)
    for relative in family:
        steps += frames.traceback_steps(relative.__traceback__)
    return [*family, *steps, *(step.tb_frame for step in steps)]


def objects_of_the_session(
    namespace: Namespace, shell: object | None
) -> Iterator[object]:
    """Yield what refers to outputs and to the variables of failed calls, and is forgotten with them."""
    yield from excluded_objects(namespace, shell)
    for name in ("displayhook", "last_execution_result"):
        owner = getattr(shell, name, None)
        yield owner
        yield getattr(owner, "__dict__", None)
    for part in parts_of_errors(remembered_errors(shell)):
        if isinstance(part, FrameType):
            yield part
            shared = {id(part.f_globals), id(part.f_builtins)}
            # A frame that was printed keeps a snapshot of its variables.
            for referent in gc.get_referents(part):
                if type(referent) is dict and id(referent) not in shared:
                    yield referent


def module_roots(namespace: Namespace, installed: bool = False) -> Iterator[Root]:
    """Yield the variables of the modules that the user wrote, or of those that were installed, but for ours."""
    for name, module in list(sys.modules.items()):
        if type(module) is not ModuleType:
            continue
        own = _variables_of(module)
        file = own.get("__file__")
        if own is namespace or type(file) is not str:
            continue
        package, _, _ = name.partition(".")
        if package == "gpumagic":
            continue
        if frames.is_library(name, file) == installed:
            yield Holder("module", name), _module_namespace(module)


def excluded_objects(namespace: Namespace, shell: object | None) -> list[object]:
    """Return what no search may pass through: everything is reached from there, which keeps nothing alive."""
    excluded = [namespace, namespace.get("_oh"), sys.modules, sys.__dict__]
    excluded.append(_dict_of(shell, "user_ns_hidden"))
    if shell is not None:
        excluded += [shell, getattr(shell, "user_module", None)]
    return excluded


def _dict_of(shell: object | None, name: str) -> Mapping[Any, object]:
    """Return a dict that the shell has; an empty one where it has none."""
    attribute = getattr(shell, name, None)
    return attribute if isinstance(attribute, dict) else {}


# ---- What variables were bound to

_SMALL = (bool, int, float, complex, str, bytes, type(None))
_MEMBERS = 8
"""Members of a container that stand for it: one that is still in it, at its address, is enough."""
_weakref_offset_of = type.__dict__["__weakrefoffset__"].__get__
"""Tells whether instances of a class can be referred to weakly; a metaclass of the user's is not asked."""


class Identities:
    """The objects that some variables were bound to, told later without having kept one alive.

    An address alone is no identity: CPython gives that of a freed object to the next one.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._are: dict[str, Callable[[Any], bool]] = {}
        for name, value in list(namespace.items()):
            self._are[name] = _identity(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._are)

    def is_still(self, name: str, value: object) -> bool:
        """Return whether the variable was bound to this very object."""
        return name in self._are and self._are[name](value)


def _identity(value: Any, depth: int = 1) -> Callable[[Any], bool]:
    """Return what tells an object later; only numbers, texts and None are kept alive."""
    kind = type(value)
    is_container = kind in (list, tuple, dict, set)
    if kind in _SMALL:
        return lambda other: other is value
    if _weakref_offset_of(kind) and not is_container:
        reference = weakref.ref(value)
        return lambda other: reference() is other
    members: list[Callable[[Any], bool]] = []
    if is_container and depth:
        members = [_identity(member, depth - 1) for member in islice(value, _MEMBERS)]
    address = id(value)

    def was_member(value: object) -> bool:
        return any(is_the_same(value) for is_the_same in members)

    def is_it(other: Any) -> bool:
        if id(other) != address:
            return False
        if not members or type(other) is not kind:
            return True
        now = list(islice(other, _MEMBERS))
        return not now or any(map(was_member, now))

    return is_it

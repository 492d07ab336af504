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
from typing import Any, NamedTuple

from gpumagic.heap import calls, readers
from gpumagic.heap.branches import Names, is_typeable, key_code
from gpumagic.heap.graph import HeapGraph
from gpumagic.source import frames

TRACEBACK = "last traceback"
LAST_OUTPUTS = ("_", "__", "___")
SCRIPTS = "get_ipython()._main_mod_cache["
"""How the holder of a variable of a script begins that `%run` ran: IPython keeps all of them."""

_variables_of: Any = vars(ModuleType)["__dict__"].__get__


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
    graph: HeapGraph,
    namespace: Mapping[str, object],
    shell: object | None,
    others: Iterable[tuple[str, object]] = (),
) -> dict[int, Held]:
    """Return what keeps each tensor that no variable reaches, by the tensor's `id`, as far as it is found.

    Args:
        graph: one that has explored the variables already: what they reach is not read again.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        others: further roots with their labels, such as generators.
    """
    found: dict[int, Held] = {}
    # The callbacks of the session's events, and the variables of scripts that `%run` ran, outlive the notebook's.
    callbacks = (
        "get_ipython().events.callbacks",
        getattr(getattr(shell, "events", None), "callbacks", None),
    )
    scripts = [
        (
            f"{SCRIPTS}{key_code(file)}]",
            SimpleNamespace(**dict(readers.module_variables(_variables_of(module)))),
        )
        for file, module in list(_dict_of(shell, "_main_mod_cache").items())
        if type(module) is ModuleType
    ]
    context = [
        (f"context variable {each.name}", value)
        for each, value in contextvars.copy_context().items()
    ]
    # What the session cannot release comes first: a tensor of an output that a thread uses too is not releasable.
    lasting = [
        *calls.running_roots(),
        *others,
        callbacks,
        *scripts,
        *module_roots(namespace),
        *context,
    ]
    for roots, releasable in ((lasting, False), (list(hidden_roots(namespace, shell)), True)):
        order = {label: position for position, (label, _) in reversed(list(enumerate(roots)))}
        paths_to = graph.explore(roots)
        names = Names(paths_to)
        for tensor, paths in paths_to.items():
            first = min(paths, key=lambda path: (order[path.root()], path.depth))
            if tensor not in found:
                found[tensor] = Held(first.root(), names.description(first), releasable)
            elif releasable and found[tensor].label.startswith(
                SCRIPTS
            ):  # to free it, both have to let go
                found[tensor] = found[tensor]._replace(
                    label=f"{found[tensor].label} and {first.root()}"
                )
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


def hidden_roots(namespace: Mapping[str, object], shell: object | None) -> list[tuple[str, object]]:
    """Return, each once, with its label, what IPython keeps because it showed it, and the last error.

    What the user has bound to ``_`` and the like is left out.
    """
    roots: list[tuple[str, object]] = []
    if shell is not None:
        outputs = namespace.get("_oh")
        roots += [
            (f"Out[{key}]", each)
            for key, each in (dict.items(outputs) if isinstance(outputs, dict) else ())
        ]
        roots += [
            each
            for each in list(_dict_of(shell, "user_ns_hidden").items())
            if is_output_name(each[0])
        ]
        roots += [
            (name, getattr(getattr(shell, "displayhook", None), name, None))
            for name in LAST_OUTPUTS
        ]
        roots += [
            ("last result", getattr(getattr(shell, "last_execution_result", None), "result", None))
        ]
    roots += [(TRACEBACK, each) for each in remembered_errors(shell)]
    found: dict[int, tuple[str, object]] = {}
    for label, value in roots:
        found.setdefault(id(value), (label, value))
    return list(found.values())


def is_output_name(name: object) -> bool:
    """Return whether IPython gives a name to what it shows: ``_``, ``__``, ``_12``."""
    return type(name) is str and (name in LAST_OUTPUTS or re.fullmatch(r"_\d+", name) is not None)


def remembered_errors(shell: object | None) -> list[BaseException | TracebackType]:
    """Return the errors that Python and IPython keep of the last failure, then the links of their tracebacks.

    These may be of an earlier error: after a usage error, IPython's formatter still has the traceback before it.
    """
    result = getattr(shell, "last_execution_result", None)
    errors = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    errors += [getattr(result, name, None) for name in ("error_in_exec", "error_before_exec")]
    kept = (
        getattr(sys, "last_traceback", None),
        getattr(getattr(shell, "InteractiveTB", None), "tb", None),
    )
    steps = (step for each in kept for step in frames.traceback_steps(each))
    found: list[BaseException | TracebackType] = [
        each for each in errors if isinstance(each, BaseException)
    ]
    return list({id(each): each for each in (*found, *steps)}.values())


def parts_of_errors(found: Iterable[BaseException | TracebackType]) -> list[object]:
    """Return errors with all they were raised from, and every traceback and frame of theirs."""
    errors = [each for each in found if isinstance(each, BaseException)]
    family = [each for error in errors for each in frames.related_exceptions(error)]
    steps = [step for each in family for step in frames.traceback_steps(each.__traceback__)]
    steps += [each for each in found if isinstance(each, TracebackType)]
    return [*family, *(part for step in steps for part in (step, step.tb_frame))]


def objects_of_the_session(
    namespace: Mapping[str, object], shell: object | None
) -> Iterator[object]:
    """Yield what refers to outputs and to the variables of failed calls, and is forgotten with them."""
    yield from excluded_objects(namespace, shell)
    for owner in (
        getattr(shell, "displayhook", None),
        getattr(shell, "last_execution_result", None),
    ):
        yield owner
        yield getattr(owner, "__dict__", None)
    for frame in parts_of_errors(remembered_errors(shell)):
        if isinstance(frame, FrameType):
            yield frame
            shared = {id(frame.f_globals), id(frame.f_builtins)}
            # A frame that was printed keeps a snapshot of its variables.
            yield from (
                each
                for each in gc.get_referents(frame)
                if type(each) is dict and id(each) not in shared
            )


def module_roots(
    namespace: Mapping[str, object], installed: bool = False
) -> Iterator[tuple[str, object]]:
    """Yield the variables of the modules that the user wrote, or of those that were installed, but for ours."""
    for name, module in list(sys.modules.items()):
        own: Any = _variables_of(module) if type(module) is ModuleType else {}
        file = own.get("__file__")
        if own is namespace or type(file) is not str or name.partition(".")[0] == "gpumagic":
            continue
        if frames.is_library(name, file) == installed:
            yield f"module {name}", SimpleNamespace(**dict(readers.module_variables(own)))


def excluded_objects(namespace: Mapping[str, object], shell: object | None) -> list[object]:
    """Return what no search may pass through: everything is reached from there, which keeps nothing alive."""
    excluded = [
        namespace,
        namespace.get("_oh"),
        _dict_of(shell, "user_ns_hidden"),
        sys.modules,
        sys.__dict__,
    ]
    return excluded if shell is None else [*excluded, shell, getattr(shell, "user_module", None)]


def _dict_of(shell: object | None, name: str) -> Mapping[Any, object]:
    found = getattr(shell, name, None)
    return found if isinstance(found, dict) else {}


# ---- What variables were bound to

_SMALL = (bool, int, float, complex, str, bytes, type(None))
_MEMBERS = 8
"""Members of a container that stand for it: one that is still in it, at its address, is enough."""
_weakref_offset_of = type.__dict__[
    "__weakrefoffset__"
].__get__  # a metaclass of the user's is not asked


class Identities:
    """The objects that some variables were bound to, told later without having kept one alive.

    An address alone is no identity: CPython gives that of a freed object to the next one.
    """

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self._are = {name: _identity(value) for name, value in list(namespace.items())}

    def __iter__(self) -> Iterator[str]:
        return iter(self._are)

    def is_still(self, name: str, value: object) -> bool:
        """Return whether the variable was bound to this very object."""
        return name in self._are and self._are[name](value)


def _identity(value: Any, depth: int = 1) -> Callable[[Any], bool]:
    """Return what tells an object later; only numbers, texts and None are kept alive."""
    is_container = type(value) in (list, tuple, dict, set)
    if type(value) in _SMALL:
        return lambda other: other is value
    if _weakref_offset_of(type(value)) and not is_container:
        reference = weakref.ref(value)
        return lambda other: reference() is other
    address, kind = id(value), type(value)
    members = (
        [_identity(each, depth - 1) for each in islice(value, _MEMBERS)]
        if is_container and depth
        else []
    )

    def is_it(other: Any) -> bool:
        now = list(islice(other, _MEMBERS)) if members and type(other) is kind else []
        return id(other) == address and (
            not now or any(member(each) for member in members for each in now)
        )

    return is_it

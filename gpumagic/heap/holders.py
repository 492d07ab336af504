"""The search for tensors: from which roots, and along which paths.

Roots are the notebook's variables first, then IPython's outputs, the last error, running functions and modules. One
pass finds every path to each tensor; `paths` writes them as code.

Small containers come first, so that a list of a million records cannot hide the model beside it, and what no
expression reaches comes last. `references` finds all holders of one tensor.
"""

from __future__ import annotations

import contextvars
import gc
import heapq
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from gpumagic.heap import calls, readers
from gpumagic.heap.branches import VARIABLE, Branch, Reader, key_code, name_of_type
from gpumagic.heap.paths import Names, Path, is_typeable
from gpumagic.heap.readers import reader_of
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.source import frames

TRACEBACK = "last traceback"

_variables_of: Any = vars(ModuleType)["__dict__"].__get__


def name_storages(namespace: Mapping[str, object], shell: object | None = None) -> dict[int, tuple[str, ...]]:
    """Return every name that reaches a storage, best first, by the storage's address (``untyped_storage()._cdata``).

    Args:
        namespace: the notebook's variables.
        shell: the shell they belong to, whose own variables (``_``, ``Out``) do not count as names.
    """
    search, table = tensor_search(namespace, shell), StorageTable()
    found: dict[int, list[str]] = {}
    try:
        with undisturbed(), gc_disabled():
            names = Names(search.run(variables(namespace, shell)))
            for key, tensor in search.tensors.items():
                for address in table.addresses(tensor):
                    found.setdefault(address, []).extend(names.of(key))
    finally:
        search.release()
    return {address: tuple(dict.fromkeys(names)) for address, names in found.items()}


def tensor_search(namespace: Mapping[str, object], shell: object | None) -> Search:
    """Return a search that does not enter the shell."""
    return Search(excluded_objects(namespace, shell))


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
    search: Search, namespace: Mapping[str, object], shell: object | None, others: Iterable[tuple[str, object]] = ()
) -> dict[int, Held]:
    """Return what keeps each tensor that no variable reaches, by the tensor's `id`, as far as it is found.

    Args:
        search: one that has followed the variables already: what they reach is not searched again.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        others: further roots with their labels, such as generators.
    """
    found: dict[int, Held] = {}
    # What the session cannot release comes first: a tensor of an output that a thread uses too is not releasable.
    lasting = [*running_roots(), *others, *module_roots(namespace), *ambient_roots()]
    for roots, releasable in ((lasting, False), (list(hidden_roots(namespace, shell)), True)):
        order = {label: position for position, (label, _) in reversed(list(enumerate(roots)))}
        paths_to = search.run(roots)
        names = Names(paths_to)
        for tensor, paths in paths_to.items():
            if tensor not in found:
                first = min(paths, key=lambda path: (order[path.root()], path.depth))
                found[tensor] = Held(first.root(), names.description(first), releasable)
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


MAX_DEPTH = 32
MAX_STEPS = 250_000
"""Children looked at before a search gives up: about 50 ms."""
LARGE = 1_000
"""Containers of at least this many children wait until the smaller ones have been read."""
_HUGE = 50_000
"""Containers of at least this many are only read if some tensor has no name yet."""
MAX_PATHS = 16
"""Paths kept of one tensor, but for those from further variables."""


class Search:
    """Finds tensors from named roots; what one run has read, a later one does not read again.

    Args:
        excluded: objects that are never read, such as the shell.
        steps: how many children one run looks at before it gives up.
    """

    def __init__(self, excluded: Iterable[object] = (), steps: int = MAX_STEPS) -> None:
        self._excluded = list(excluded)  # kept, or another object could get one's `id`
        self._seen = set(map(id, self._excluded))
        self._readers: dict[type, Reader | None] = {}
        self._limit = self._steps = steps
        self._queue: deque[tuple[object, Path]] = deque()
        self._large: list[tuple[int, int, object, Path]] = []
        self._unreached: deque[tuple[object, Path]] = deque()
        """What no expression reaches, in case that one does."""
        self._plain: list[tuple[Any, Path]] = []
        """Plain tensors, of which hardly any has attributes."""
        self._order = count()
        self.gave_up = False
        self._paths: dict[int, list[Path]] = {}
        self.tensors: dict[int, Any] = {}
        """The tensors and storages met, so that an `id` stays theirs."""
        self.owners: list[object] = []
        """The modules and optimizers met."""
        self.nodes: dict[int, Any] = {}
        """The nodes of autograd graphs met, which have paths too."""

    def release(self) -> None:
        """Release every object, however the search ended."""
        for each in (self.tensors, self.owners, self.nodes, self._excluded):
            each.clear()
        self._forget()

    def _forget(self) -> None:
        for each in (self._queue, self._large, self._unreached, self._plain):
            each.clear()

    def run(self, roots: Iterable[tuple[str, object]], wanted: Iterable[int] | None = None) -> dict[int, list[Path]]:
        """Follow each root to every tensor below it; return the paths to each, by the tensor's `id`.

        Args:
            roots: names, or labels, with what they stand for.
            wanted: the tensors to find; huge containers are not read once each of them has a path.
        """
        self._steps, self._paths = self._limit, {}
        missing = None if wanted is None else set(wanted)
        self._meet(Branch("name", VARIABLE, list(roots)), None)
        while self._steps > 0 and (self._queue or self._large or self._plain or self._unreached):
            if self._queue:
                self._read(*self._queue.popleft())
            elif self._plain:
                self._read_tensors()
            elif self._large:
                length, _, value, path = heapq.heappop(self._large)
                if length >= _HUGE and missing is not None and missing <= self._paths.keys():
                    break
                self._steps -= length // 4  # even what holds nothing is glanced at
                self._read(value, path)
            else:
                self._meet_again(*self._unreached.popleft())
        self.gave_up |= self._steps <= 0
        self._forget()
        return self._paths

    def _read(self, value: object, path: Path) -> None:
        reader = self._readers[type(value)]
        assert reader is not None
        if path.depth >= MAX_DEPTH:
            return
        if reader.read in (readers.read_module, readers.read_optimizer):
            self.owners.append(value)
        elif reader.read is readers.read_node:
            self.nodes[id(value)] = value
            self._paths.setdefault(id(value), []).append(path)
        for branch in reader.read(value, reader):
            if self._steps <= 0:
                return
            self._meet(branch, path)
        if reader.has_own_class and id(type(value)) not in self._seen:
            for branch in readers.own_class(value, reader):
                self._meet(branch, path)

    def _read_tensors(self) -> None:
        """Read what was set on plain tensors: one question to the gc tells whether there is anything."""
        waiting, self._plain = self._plain, []
        shown = set(map(type, gc.get_referents(*[tensor for tensor, _ in waiting])))
        for tensor, path in waiting if any(issubclass(kind, dict) for kind in shown) else ():
            for branch in readers.tensor_attributes(tensor):
                self._meet(branch, path)

    def _meet(self, branch: Branch, parent: Path | None) -> None:
        style, rank, children, parameter = branch
        if parameter is not None:
            assert parent is not None
            parent = Path(parent, "state", parameter, rank, parent.depth + 1)
        rank, depth = (rank, 0) if parent is None else (max(rank, parent.rank), parent.depth + 1)
        known, seen = self._readers, self._seen
        children = list(islice(children, self._steps))
        self._steps -= len(children)
        for key, child in children:
            kind = type(child)
            reader = known[kind] if kind in known else known.setdefault(kind, reader_of(kind))
            if reader is None:
                continue
            if reader.is_tensor:
                self._note(child, Path(parent, style, key, rank, depth, kind), reader)
                if reader.fields is None:
                    continue
            if id(child) in seen:
                continue
            if style == "in" and key.code is None:
                self._unreached.append((child, Path(parent, style, key, rank, depth, kind)))
                continue
            seen.add(id(child))
            length = reader.length(child)
            if length >= LARGE:
                entry = (length, next(self._order), child, Path(parent, style, key, rank, depth, kind))
                heapq.heappush(self._large, entry)
            elif length or reader.container is None or reader.fields is not None:
                self._queue.append((child, Path(parent, style, key, rank, depth, kind)))

    def _meet_again(self, value: object, path: Path) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._queue.append((value, path))

    def _note(self, tensor: object, path: Path, reader: Reader) -> None:
        if reader.fields is None and id(tensor) not in self.tensors and path.depth < MAX_DEPTH:
            self._plain.append((tensor, path))
        self.tensors[id(tensor)] = tensor
        paths = self._paths.setdefault(id(tensor), [])
        if len(paths) < MAX_PATHS or path.root() not in {each.root() for each in paths}:
            paths.append(path)  # each variable that reaches it counts, further paths from the same do not

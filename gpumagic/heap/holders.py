"""The search for tensors: from which roots, along which paths, and how a path is written.

Roots are the notebook's variables first, then IPython's outputs, the last error, running functions and modules. One
pass finds every path to each tensor. A path is written as code wherever code can reach the tensor, and evaluates to
it; what no expression reaches stands between angle brackets: ``step.<closure>.x``, ``cache[<Point>]``.

Small containers come first, so that a list of a million records cannot hide the model beside it. `references` finds
all holders of one tensor.
"""

from __future__ import annotations

import heapq
import keyword
import math
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from gpumagic.heap import readers
from gpumagic.heap.readers import VARIABLE, Branch, Reader, Style, reader_of
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.source import frames
from gpumagic.source.text import parse_tree

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
    lasting = [*running_roots(), *others, *module_roots(namespace)]
    for roots, releasable in ((lasting, False), (list(hidden_roots(namespace, shell)), True)):
        order = {label: position for position, (label, _) in reversed(list(enumerate(roots)))}
        paths_to = search.run(roots)
        names = Names(paths_to)
        for tensor, paths in paths_to.items():
            if tensor not in found:
                first = min(paths, key=lambda path: (order[path.root()], path.depth))
                found[tensor] = Held(first.root(), spell(first, names.best), releasable)
    return found


def variables(namespace: Mapping[str, object], shell: object | None) -> list[tuple[str, object]]:
    """Return the user's variables: all but those that IPython put there itself and nobody has rebound."""
    hidden = _dict_of(shell, "user_ns_hidden")
    missing = object()
    return [
        # A variable may have been bound by other means than typing its name.
        (name if is_typeable(name) else f"globals()[{_key(name)}]", value)
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
    for label, own in readers.running_functions():
        yield label, SimpleNamespace(**dict(own))


def module_roots(namespace: Mapping[str, object], installed: bool = False) -> Iterator[tuple[str, object]]:
    """Yield the variables of the modules that the user wrote, or of those that were installed, but for ours."""
    for name, module in list(sys.modules.items()):
        own: Any = _variables_of(module) if type(module) is ModuleType else {}
        file = own.get("__file__")
        if own is namespace or type(file) is not str or name.partition(".")[0] == "gpumagic":
            continue
        if frames.is_library(name, file) == installed:
            yield f"module {name}", SimpleNamespace(**own)


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
_MAX_PATHS = 16


class Path(NamedTuple):
    """One step from a parent to a child; the first step is a name."""

    parent: Path | None
    style: Style
    key: Any
    rank: int
    """The worst rank of the steps so far: how well it names what it leads to."""
    depth: int
    kind: type | None = None
    """The type of what the step leads to."""

    def root(self) -> str:
        """Return the name that the path starts from."""
        return str(self.steps()[0].key)

    def steps(self) -> list[Path]:
        """Return the path's beginnings, from its root to itself."""
        path: Path | None = self
        found = []
        while path is not None:
            found.append(path)
            path = path.parent
        return found[::-1]


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
        self._order = count()
        self.gave_up = False
        self._paths: dict[int, list[Path]] = {}
        self.tensors: dict[int, Any] = {}
        """The tensors met, so that an `id` stays theirs."""
        self.owners: list[object] = []
        """The modules and optimizers met."""

    def release(self) -> None:
        """Release every object, however the search ended."""
        self.tensors.clear()
        self.owners.clear()
        self._excluded.clear()
        self._queue.clear()
        self._large.clear()

    def run(self, roots: Iterable[tuple[str, object]], wanted: Iterable[int] | None = None) -> dict[int, list[Path]]:
        """Follow each root to every tensor below it; return the paths to each, by the tensor's `id`.

        Args:
            roots: names, or labels, with what they stand for.
            wanted: the tensors to find; huge containers are not read once each of them has a path.
        """
        self._steps, self._paths = self._limit, {}
        missing = None if wanted is None else set(wanted)
        self._meet(Branch("name", VARIABLE, list(roots)), None)
        while self._steps > 0 and (self._queue or self._large):
            if self._queue:
                value, path = self._queue.popleft()
            else:
                length, _, value, path = heapq.heappop(self._large)
                if length >= _HUGE and missing is not None and missing <= self._paths.keys():
                    break
                self._steps -= length // 4  # even what holds nothing is glanced at
            if path.depth < MAX_DEPTH:
                self._read(value, path)
        self.gave_up |= self._steps <= 0
        self._queue.clear()
        self._large.clear()
        return self._paths

    def _read(self, value: object, path: Path) -> None:
        reader = self._readers[type(value)]
        assert reader is not None
        if reader.read in (readers.read_module, readers.read_optimizer):
            self.owners.append(value)
        for branch in reader.read(value, reader):
            if self._steps <= 0:
                return
            self._meet(branch, path)

    def _meet(self, branch: Branch, parent: Path | None) -> None:
        style, rank, children, parameter = branch
        if parameter is not None:
            assert parent is not None
            parent = Path(parent, "state", id(parameter), rank, parent.depth + 1)
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
                self._note(child, Path(parent, style, key, rank, depth, kind))
                if reader.fields is None:
                    continue
            if id(child) in seen:
                continue
            seen.add(id(child))
            length = reader.length(child)
            if length >= LARGE:
                entry = (length, next(self._order), child, Path(parent, style, key, rank, depth, kind))
                heapq.heappush(self._large, entry)
            elif length or reader.container is None or reader.fields is not None:
                self._queue.append((child, Path(parent, style, key, rank, depth, kind)))

    def _note(self, tensor: object, path: Path) -> None:
        self.tensors[id(tensor)] = tensor
        paths = self._paths.setdefault(id(tensor), [])
        if len(paths) < _MAX_PATHS or path.root() not in {each.root() for each in paths}:
            paths.append(path)  # each variable that reaches it counts, further paths from the same do not


class Names:
    """The names of tensors by their `id`, best first; spelled only when asked for."""

    def __init__(self, paths: Mapping[int, list[Path]]) -> None:
        self._paths = paths

    def of(self, tensor_id: int) -> list[str]:
        """Return the names of a tensor, a plain variable before a module's path before other containers."""
        paths = self._paths.get(tensor_id)
        if paths is None:
            return []
        if len(paths) == 1:
            return [spell(path, self.best) for path in paths]
        return [name for _, _, name in sorted((path.rank, path.depth, spell(path, self.best)) for path in paths)]

    def paths(self, tensor_id: int) -> list[Path]:
        """Return the paths to a tensor, in no order."""
        return list(self._paths.get(tensor_id, ()))

    def are_none(self) -> bool:
        """Return whether no tensor has a name."""
        return not self._paths

    def best(self, tensor_id: int) -> str | None:
        """Return the best name of a tensor that does not lead through an optimizer's state."""
        paths = [path for path in self._paths.get(tensor_id, ()) if not _through_state(path)]
        first = min(paths, key=lambda path: (path.rank, path.depth), default=None)
        return None if first is None else spell(first, self.best)


def _through_state(path: Path) -> bool:
    return any(step.style == "state" for step in path.steps())


LONGEST_KEY = 200
"""Characters of a key that are written; the name of a longer one is cut, and no code."""


def spell(path: Path, name_of: Callable[[int], str | None]) -> str:
    """Return a path as one would type it: ``model.layers[3].weight``, ``cfg['k']``, ``opt.state[w].exp_avg``.

    Args:
        path: the path to a tensor.
        name_of: returns the name of the tensor with an `id`, for optimizer states.
    """
    if path.parent is None:
        return str(path.key)
    before = spell(path.parent, name_of)
    if path.style == "state":
        return f"{before}.state[{name_of(path.key) or '...'}]"
    if path.style == "in":
        place, name = path.key
        return f"{before}.<{place}>.{name}" if name and name.isidentifier() else f"{before}.<{place}>"
    if path.style == "{":
        return before + "{...}"
    if path.style == "." and type(path.key) is str:
        return before + _attribute(path.key, path.parent.kind)
    return f"{before}[{_key(path.key)}]"


def is_typeable(name: str) -> bool:
    """Return whether Python reads a name as it is stored: it normalises what is typed, ``ﬁ`` to ``fi`` (PEP 3131)."""
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    return is_name and (name.isascii() or unicodedata.normalize("NFKC", name) == name)


def is_code(line: str) -> bool:
    """Return whether a line can be run, as one with ``step.<closure>.x`` cannot."""
    return "[...]" not in line and parse_tree(line) is not None


def _attribute(name: str, owner: type | None) -> str:
    if is_typeable(name):
        return f".{name}"
    import torch.nn

    if owner is not None and issubclass(owner, torch.nn.ModuleDict | torch.nn.ParameterDict):
        return f"[{_key(name)}]"
    if owner is not None and issubclass(owner, torch.nn.Module):
        is_number = name.isascii() and name.isdigit()  # the layers of a Sequential are indexed by ints
        return f"[{name}]" if is_number else f".__getattr__({_key(name)})"
    return f".__getattribute__({_key(name)})"


def _key(key: Any, depth: int = 0) -> str:
    text = f"<{type(key).__name__}>"  # the repr of anything else is its author's code
    if type(key) is float and not math.isfinite(key):
        text = "<nan>" if math.isnan(key) else f"float('{key}')"  # another nan does not find it
    elif type(key) is tuple and depth < 3:
        inner = [_key(each, depth + 1) for each in key]
        text = f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    elif type(key) in (str, float, bool, type(None), bytes) or (type(key) is int and key.bit_length() < 4096):
        text = repr(key)  # longer numbers may not be written (sys.set_int_max_str_digits)
    return text if len(text) <= LONGEST_KEY else f"<{text[:36]}...>"

"""Every way from some names to the tensors they reach, in one pass, and how each is typed.

What is written is code wherever code can reach the tensor, and evaluates to it. What no expression reaches stands
between angle brackets, so that nobody takes it for code: ``step.<closure>.x``, ``cache[<Point>]``.

Small containers come first, so that a list of a million records cannot hide the model beside it.
"""

from __future__ import annotations

import heapq
import keyword
import math
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from typing import Any, NamedTuple

from gpumagic.heap.object_fields import VARIABLE, Branch, Opener, Style, module, optimizer
from gpumagic.heap.readers import opener_of

LONGEST_KEY = 200
"""Characters of a key that are written; the name of a longer one is cut, and no code."""


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


def is_typed(name: str) -> bool:
    """Return whether Python reads a name as it is stored: it normalises what is typed, ``ﬁ`` to ``fi`` (PEP 3131)."""
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    return is_name and (name.isascii() or unicodedata.normalize("NFKC", name) == name)


def variable(name: str) -> str:
    """Return how to type a variable that may have been bound by other means than typing its name."""
    return name if is_typed(name) else f"globals()[{_key(name)}]"


def spell(path: Path, name_of: Callable[[int], str | None]) -> str:
    """Return a path as one would type it: ``model.layers[3].weight``, ``cfg['k']``, ``opt.state[w].exp_avg``.

    Args:
        path: the way to a tensor.
        name_of: returns the name of the tensor with an `id`, for optimizer states.
    """
    if path.parent is None:
        return str(path.key)
    if path.style == "state":
        return spell(path.parent, name_of) + f".state[{name_of(path.key) or '...'}]"
    return spell(path.parent, name_of) + step(path.style, path.key, path.parent.kind)


def step(style: Style, key: Any, owner: type | None) -> str:
    """Return how to type one step from an object of a type: ``.weight``, ``[3]``, ``['k']``."""
    if style == "in":
        place, name = key
        return f".<{place}>.{name}" if name and name.isidentifier() else f".<{place}>"
    if style == "{":
        return "{...}"
    if style == "." and type(key) is str:
        return _attribute(key, owner)
    return f"[{_key(key)}]"


def _attribute(name: str, owner: type | None) -> str:
    if is_typed(name):
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


MAX_DEPTH = 32
MAX_STEPS = 250_000
"""Children looked at before a search gives up: about 50 ms."""
LARGE = 1_000
"""Children that make a container wait until the smaller ones have been opened."""
_HUGE = 50_000
"""Children that are only looked at if some tensor has no name yet."""
_MAX_PATHS = 16


class Search:
    """Finds tensors from named roots; what one run has opened, a later one does not open again.

    Args:
        closed: objects that are never opened, such as the shell.
        steps: how many children one run looks at before it gives up.
    """

    def __init__(self, closed: Iterable[object] = (), steps: int = MAX_STEPS) -> None:
        self._closed = list(closed)  # kept, or another object could come by one's `id`
        self._seen = set(map(id, self._closed))
        self._openers: dict[type, Opener | None] = {}
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
        """Let go of every object, however the search ended."""
        self.tensors.clear()
        self.owners.clear()
        self._closed.clear()
        self._queue.clear()
        self._large.clear()

    def run(self, roots: Iterable[tuple[str, object]], wanted: Iterable[int] | None = None) -> dict[int, list[Path]]:
        """Follow each root to every tensor below it; return the ways to each, by the tensor's `id`.

        Args:
            roots: names, or labels, with what they stand for.
            wanted: the tensors to find; huge containers stay closed once none of them is without a way.
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
                self._open(value, path)
        self.gave_up |= self._steps <= 0
        self._queue.clear()
        self._large.clear()
        return self._paths

    def _open(self, value: object, path: Path) -> None:
        opener = self._openers[type(value)]
        assert opener is not None
        if opener.branches in (module, optimizer):
            self.owners.append(value)
        for branch in opener.branches(value, opener):
            if self._steps <= 0:
                return
            self._meet(branch, path)

    def _meet(self, branch: Branch, parent: Path | None) -> None:
        style, rank, children, below = branch
        if below is not None:
            assert parent is not None
            parent = Path(parent, "state", id(below), rank, parent.depth + 1)
        rank, depth = (rank, 0) if parent is None else (max(rank, parent.rank), parent.depth + 1)
        openers, seen = self._openers, self._seen
        children = list(islice(children, self._steps))
        self._steps -= len(children)
        for key, child in children:
            kind = type(child)
            opener = openers[kind] if kind in openers else openers.setdefault(kind, opener_of(kind))
            if opener is None:
                continue
            if opener.is_tensor:
                self._note(child, Path(parent, style, key, rank, depth, kind))
                if opener.fields is None:
                    continue
            if id(child) in seen:
                continue
            seen.add(id(child))
            length = opener.length(child)
            if length >= LARGE:
                entry = (length, next(self._order), child, Path(parent, style, key, rank, depth, kind))
                heapq.heappush(self._large, entry)
            elif length or opener.container is None or opener.fields is not None:
                self._queue.append((child, Path(parent, style, key, rank, depth, kind)))

    def _note(self, tensor: object, path: Path) -> None:
        self.tensors[id(tensor)] = tensor
        ways = self._paths.setdefault(id(tensor), [])
        if len(ways) < _MAX_PATHS or path.root() not in {way.root() for way in ways}:
            ways.append(path)  # each variable that reaches it counts, further ways of the same do not


class Names:
    """The names of tensors by their `id`, best first; spelled only when asked for."""

    def __init__(self, paths: Mapping[int, list[Path]]) -> None:
        self._paths = paths

    def of(self, tensor_id: int) -> list[str]:
        """Return the ways to write a tensor, a plain variable before a module's path before other containers."""
        ways = self._paths.get(tensor_id)
        if ways is None:
            return []
        if len(ways) == 1:
            return [spell(way, self.best) for way in ways]
        ranked = sorted((way.rank, way.depth, spell(way, self.best)) for way in ways)
        return [name for _, _, name in ranked]

    def ways(self, tensor_id: int) -> list[Path]:
        """Return the ways to a tensor, in no order."""
        return list(self._paths.get(tensor_id, ()))

    def are_none(self) -> bool:
        """Return whether no tensor has a name."""
        return not self._paths

    def best(self, tensor_id: int) -> str | None:
        """Return the best way to write a tensor that is not itself an optimizer's state of another."""
        ways = [way for way in self._paths.get(tensor_id, ()) if not _through_state(way)]
        if not ways:
            return None
        first = min(ways, key=lambda way: (way.rank, way.depth))
        return spell(first, self.best)


def _through_state(path: Path | None) -> bool:
    while path is not None:
        if path.style == "state":
            return True
        path = path.parent
    return False

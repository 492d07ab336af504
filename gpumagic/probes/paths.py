"""Every way from some names to the tensors they reach, in one pass over what the names hold.

Small containers come first, so that a list of a million records cannot hide the model beside it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, NamedTuple

from gpumagic.probes.anatomy import VARIABLE, Branch, Opener, Style, opener_of

MAX_DEPTH = 32
MAX_STEPS = 250_000
"""Children looked at before a search gives up: about 50 ms."""
_LARGE = 1_000
_MAX_PATHS = 16


class Path(NamedTuple):
    """One step from a parent to a child; the first step is a name."""

    parent: Path | None
    style: Style
    key: Any
    rank: int
    """The worst rank of the steps so far: how well it names what it leads to."""
    depth: int

    def root(self) -> str:
        """Return the name that the path starts from."""
        path = self
        while path.parent is not None:
            path = path.parent
        return str(path.key)


class Search:
    """Finds tensors from named roots; what one run has opened, a later one does not open again.

    Args:
        closed: objects that are never opened, such as the shell.
        steps: how many children one run looks at before it gives up.
    """

    def __init__(self, closed: Iterable[object] = (), steps: int = MAX_STEPS) -> None:
        self._seen = {id(each) for each in closed}
        self._openers: dict[type, Opener | None] = {}
        self._limit = self._steps = steps
        self._queue: deque[tuple[object, Path]] = deque()
        self._large: list[tuple[int, int, object, Path]] = []
        self._order = count()
        self.gave_up = False
        self._paths: dict[int, list[Path]] = {}
        self.tensors: dict[int, Any] = {}
        """The tensors met, so that an `id` stays theirs."""

    def release(self) -> None:
        """Let go of every object, however the search ended."""
        self.tensors.clear()
        self._queue.clear()
        self._large.clear()

    def run(self, roots: Iterable[tuple[str, object]]) -> dict[int, list[Path]]:
        """Follow each root to every tensor below it; return the ways to each, by the tensor's `id`."""
        self._steps, self._paths = self._limit, {}
        self._meet(Branch("name", VARIABLE, list(roots)), None)
        while self._queue or self._large:
            value, path = self._queue.popleft() if self._queue else heapq.heappop(self._large)[2:]
            opener = self._openers[type(value)]
            assert opener is not None
            self._steps -= opener.length(value) // 8  # even what is skipped is glanced at
            if self._steps <= 0 or path.depth >= MAX_DEPTH:
                self.gave_up = True
                continue
            for branch in opener.branches(value, opener):
                self._meet(branch, path)
        return self._paths

    def _meet(self, branch: Branch, parent: Path | None) -> None:
        if branch.below is not None:
            assert parent is not None
            parent = Path(parent, "state", id(branch.below), branch.rank, parent.depth + 1)
        style = branch.style
        rank, depth = (branch.rank, 0) if parent is None else (max(branch.rank, parent.rank), parent.depth + 1)
        openers, seen = self._openers, self._seen
        for key, child in branch.children:
            self._steps -= 1
            kind = type(child)
            try:
                opener = openers[kind]
            except KeyError:
                opener = openers[kind] = opener_of(kind)
            if opener is None:
                continue
            path = Path(parent, style, key, rank, depth)
            if opener.is_tensor:
                self._note(child, path)
                if opener.fields is None:
                    continue
            if id(child) not in seen:
                seen.add(id(child))
                self._await(child, path, opener)

    def _note(self, tensor: object, path: Path) -> None:
        self.tensors[id(tensor)] = tensor
        ways = self._paths.setdefault(id(tensor), [])
        if len(ways) < _MAX_PATHS:
            ways.append(path)

    def _await(self, value: object, path: Path, opener: Opener) -> None:
        length = opener.length(value)
        if length >= _LARGE:
            heapq.heappush(self._large, (length, next(self._order), value, path))
        elif length or opener.container is None or opener.fields:
            self._queue.append((value, path))


class Names:
    """The names of tensors by their `id`, best first; spelled only when asked for."""

    def __init__(self, paths: Mapping[int, list[Path]]) -> None:
        self._paths = paths

    def of(self, tensor_id: int) -> list[str]:
        """Return the ways to write a tensor, a plain variable before a module's path before other containers."""
        ways = self._paths.get(tensor_id, ())
        if len(ways) == 1:
            return [spell(way, self.best) for way in ways]
        ranked = sorted((way.rank, way.depth, spell(way, self.best)) for way in ways)
        return [name for _, _, name in ranked]

    def best(self, tensor_id: int) -> str | None:
        """Return the best way to write a tensor that is not itself an optimizer's state of another."""
        ways = [way for way in self._paths.get(tensor_id, ()) if not _through_state(way)]
        if not ways:
            return None
        first = min(ways, key=lambda way: (way.rank, way.depth))
        return spell(first, self.best)


def spell(path: Path, name_of: Callable[[int], str | None]) -> str:
    """Return a path as one would type it: ``model.layers[3].weight``, ``cfg['k']``, ``opt.state[w].exp_avg``.

    Args:
        path: the way to a tensor.
        name_of: returns the name of the tensor with an `id`, for optimizer states.
    """
    if path.parent is None:
        return str(path.key)
    before = spell(path.parent, name_of)
    if path.style == "state":
        return f"{before}.state[{name_of(path.key) or '...'}]"
    if path.style == "{":
        return f"{before}{{...}}"
    if path.style == "." and type(path.key) is str:
        if path.key.isidentifier():
            return f"{before}.{path.key}"
        if path.key.isdigit():  # the layers of a Sequential are numbered by strings and indexed by ints
            return f"{before}[{path.key}]"
    return f"{before}[{_key(path.key)}]"


def _key(key: object) -> str:
    if type(key) in (str, int, float, bool, type(None), bytes):
        text = repr(key)
        return text if len(text) <= 40 else f"{text[:36]}..."
    return type(key).__name__  # the repr of anything else is its author's code


def _through_state(path: Path | None) -> bool:
    while path is not None:
        if path.style == "state":
            return True
        path = path.parent
    return False

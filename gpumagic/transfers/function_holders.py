"""Who holds torch's functions: the names that can be exchanged, and everything that cannot.

The count of references to a function tells cheaply whether anybody new holds it; only then is the heap searched
(some 30 ms with 170,000 objects). Looking collects nothing and keeps nothing but the names found.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from gpumagic import _compat

Function = Callable[..., Any]
_DEPTH = 4
"""How far up a table is followed until a module of torch's must own it: set, cache's dict, cache."""
_tables: list[object] = []
"""Torch's own tables of functions, once found; kept, so that another object cannot take their identity."""


@dataclass(frozen=True)
class Place:
    """A global name that is bound to a function."""

    owner: dict[Any, Any]
    key: Any
    function: Function

    def holds(self, value: object) -> bool:
        """Return whether the name is bound to ``value`` now."""
        return self.owner.get(self.key) is value


@dataclass(frozen=True)
class Census:
    """Who holds some functions."""

    counts: tuple[int, ...]
    places: tuple[Place, ...]
    stranger: str | None
    """What holds one of them in a way that cannot be exchanged: ``"torch.zeros is kept in a list"``."""
    is_lasting: bool = True
    """Whether the places are modules' alone, so that keeping this keeps nothing else alive."""

    def is_true(self, functions: Sequence[Function]) -> bool:
        """Return whether nothing has changed since."""
        return counts(functions) == self.counts and all(each.holds(each.function) for each in self.places)


def counts(objects: Iterable[object]) -> tuple[int, ...]:
    """Return the count of references to each."""
    return tuple(sys.getrefcount(each) for each in objects)


def take(functions: Sequence[Function], namespace: Mapping[str, object], own: Iterable[object] = ()) -> Census:
    """Search the heap for whoever holds the functions.

    Args:
        functions: whose holders are wanted.
        namespace: the globals of the user's code, exchanged as a module's are.
        own: holders of ours.
    """
    places, stranger, is_lasting = _search(functions, namespace, own)
    return Census(counts(functions), places, stranger, is_lasting)  # counted once the search holds nothing more


def _search(
    functions: Sequence[Function], namespace: Mapping[str, object], own: Iterable[object]
) -> tuple[tuple[Place, ...], str | None, bool]:
    strict = tuple(each for each in functions if not isinstance(each, FunctionType))  # Python's own are held by anybody
    modules = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    globals_ = modules | {id(namespace)}
    wanted, called = {id(each) for each in functions}, {id(each) for each in strict}
    ours = {id(each) for each in (*own, *_tables)} | {id(functions), id(strict)}
    holders = _compat.referrers(functions)
    hidden = _hidden(strict, holders)
    globals_ |= {id(each) for each in holders if isinstance(each, dict) and "__builtins__" in each}  # those of an exec
    strangers = [
        each for each in holders if id(each) not in globals_ and id(each) not in ours and _can_call(each, called)
    ]
    stranger = _named(strangers, called, globals_) or hidden
    places = tuple(
        Place(holder, key, value)
        for holder in holders
        if id(holder) in globals_
        for key, value in list(holder.items())
        if id(value) in wanted
    )
    return places, stranger, all(id(each.owner) in modules for each in places)


def put_back(leaked: Mapping[int, tuple[object, object]], own: Iterable[object] = ()) -> None:
    """Replace objects by others wherever something holds them that can be written to.

    Args:
        leaked: by id, the object and what is to stand in its place.
        own: holders that keep it.
    """
    ours = {id(each) for each in own} | {id(leaked)} | {id(pair) for pair in leaked.values()}
    for holder in _compat.referrers(each for each, _ in leaked.values()):
        if id(holder) not in ours:
            _replace(holder, leaked)


def _replace(holder: Any, leaked: Mapping[int, tuple[object, object]]) -> None:
    def settled(value: object) -> object:
        found = leaked.get(id(value))
        return value if found is None else found[1]

    if isinstance(holder, list):
        holder[:] = map(settled, holder)
    elif isinstance(holder, CellType):
        holder.cell_contents = settled(holder.cell_contents)
    elif isinstance(holder, functools.partial):
        settled_args = tuple(map(settled, holder.args))
        keywords = {key: settled(value) for key, value in holder.keywords.items()}
        holder.__setstate__((settled(holder.func), settled_args, keywords, vars(holder)))  # type: ignore[attr-defined]
    else:
        names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(names, dict):
            names.update({key: settled(value) for key, value in names.items() if id(value) in leaked})


def _can_call(holder: object, wanted: set[int]) -> bool:
    """Return whether the holder may lead to a call: not torch's own binding, not a table that is asked by function."""
    if isinstance(holder, (staticmethod, FrameType)):
        return isinstance(holder, FrameType) and holder.f_code.co_filename != __file__
    if isinstance(holder, dict):
        return any(id(value) in wanted for value in list(holder.values()))
    if type(holder).__module__.partition(".")[0] == "gpumagic":
        return False
    return any(id(each) in wanted for each in gc.get_referents(holder))


def _named(strangers: list[object], wanted: set[int], globals_: set[int]) -> str | None:
    for stranger in _not_torchs(strangers, globals_):
        held = next((each for each in gc.get_referents(stranger) if id(each) in wanted), None)
        if held is not None:  # a frame that has ended meanwhile holds nothing
            return f"torch.{held.__name__} is kept in a {type(stranger).__name__}"
    return None


def _not_torchs(strangers: list[object], globals_: set[int]) -> list[object]:
    """Return those of the holders that no module, function or class of torch's leads to."""
    torchs = {id(vars(module)) for name, module in list(sys.modules.items()) if _is_torchs(name) and module}
    unknown = {id(each): {id(each)} for each in strangers}  # by owner, the strangers that it leads to
    owners = list(strangers)
    cleared = {id(each) for each in strangers if _is_torchs(getattr(each, "__module__", None))}
    for _ in range(_DEPTH):
        if len(cleared) == len(strangers):
            break
        above: list[object] = []
        leads: dict[int, set[int]] = {}
        for owner in _compat.referrers(owners):
            if owner is owners or owner is strangers or isinstance(owner, FrameType):
                continue
            reached = set().union(*(unknown.get(id(each), ()) for each in gc.get_referents(owner))) - cleared
            if id(owner) in torchs or _is_torchs(_module_of(owner)):
                cleared |= reached
            elif reached and id(owner) not in globals_:
                leads[id(owner)] = reached
                above.append(owner)
        owners, unknown = above, leads
    _tables.extend(each for each in strangers if id(each) in cleared)
    return [each for each in strangers if id(each) not in cleared]


def _module_of(owner: object) -> object:
    is_code = isinstance(owner, (FunctionType, type)) or hasattr(owner, "cache_info")
    return getattr(owner, "__module__", None) if is_code else None


def _is_torchs(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "functorch", "gpumagic")


def _hidden(functions: Sequence[Function], holders: Sequence[object]) -> str | None:
    """Return which function is held by something that the heap does not show, as a running function's variable is."""
    probe = object()
    at_rest = counts([probe])[0] - 2  # what counting itself holds, beside this variable and that list
    shown = Counter(id(each) for holder in holders for each in gc.get_referents(holder))
    for function, count in zip(functions, counts(functions), strict=True):
        if count - at_rest > shown[id(function)]:
            return f"torch.{function.__name__} is kept by a running function"
    return None

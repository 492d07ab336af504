"""What holds torch's functions: names that can be rebound, and references that rule patches out.

The search takes about 30 ms with 170,000 objects. It runs no garbage collection and keeps only the bindings found.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from gpumagic import _compat
from gpumagic.source.text import parse_tree

Function = Callable[..., Any]
_DEPTH = 4
"""How far up a table is followed until a torch module must own it: set, cache's dict, cache."""
_tables: list[object] = []
"""Torch's own tables of functions, once found; kept, so that another object cannot take their id."""


class Binding(NamedTuple):
    """A global name that is bound to a function."""

    owner: dict[Any, Any]
    key: Any
    function: Function


def search(
    functions: Sequence[Function], namespace: Mapping[str, object]
) -> tuple[tuple[Binding, ...], str | None, bool]:
    """Search the heap for what holds the functions; the user's ``namespace`` is patched like a module's globals.

    Returns:
        The bindings to patch, what holds a function in a way that cannot be patched (``"torch.zeros is kept in a
        list"``), and whether all bindings are in modules, so that keeping them keeps nothing else alive.
    """
    # Functions written in Python have many harmless holders.
    strict = tuple(each for each in functions if not isinstance(each, FunctionType))
    modules = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    globals_ = modules | {id(namespace)}
    wanted, called = {id(each) for each in functions}, {id(each) for each in strict}
    ours = {id(each) for each in _tables} | {id(functions), id(strict)}
    holders = _compat.referrers(functions)
    hidden = _find_hidden(strict, holders)
    globals_ |= {id(each) for each in holders if isinstance(each, dict) and "__builtins__" in each}  # those of an exec
    callers = [
        each for each in holders if id(each) not in globals_ and id(each) not in ours and _can_call(each, called)
    ]
    unpatchable = _describe(callers, called, globals_) or hidden
    bindings = tuple(
        Binding(holder, key, value)
        for holder in holders
        if id(holder) in globals_
        for key, value in list(holder.items())
        if id(value) in wanted
    )
    return bindings, unpatchable, all(id(each.owner) in modules for each in bindings)


def replace_everywhere(leaked: Mapping[int, tuple[object, object]], own: object) -> None:
    """Replace objects in every holder that can be written to.

    Args:
        leaked: ``{id of an object: (object, replacement)}``.
        own: the holder that keeps them.
    """
    ours = {id(own), id(leaked)} | {id(pair) for pair in leaked.values()}
    for holder in _compat.referrers(each for each, _ in leaked.values()):
        if id(holder) not in ours:
            _replace(holder, leaked)


def _replace(holder: Any, leaked: Mapping[int, tuple[object, object]]) -> None:
    def replaced(value: object) -> object:
        found = leaked.get(id(value))
        return value if found is None else found[1]

    if isinstance(holder, list):
        holder[:] = map(replaced, holder)
    elif isinstance(holder, CellType):
        holder.cell_contents = replaced(holder.cell_contents)
    elif isinstance(holder, functools.partial):
        args = tuple(map(replaced, holder.args))
        keywords = {key: replaced(value) for key, value in holder.keywords.items()}
        holder.__setstate__((replaced(holder.func), args, keywords, vars(holder)))  # type: ignore[attr-defined]
    else:
        names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(names, dict):
            names.update({key: replaced(value) for key, value in names.items() if id(value) in leaked})


def _can_call(holder: object, wanted: set[int]) -> bool:
    """Return whether a holder may call a function: neither torch's own binding nor a table with functions as keys."""
    if isinstance(holder, (staticmethod, FrameType)):
        return isinstance(holder, FrameType) and holder.f_code.co_filename != __file__
    if isinstance(holder, dict):
        return any(id(value) in wanted for value in list(holder.values()))
    if type(holder).__module__.partition(".")[0] == "gpumagic":
        return False
    return any(id(each) in wanted for each in gc.get_referents(holder))


def _describe(callers: list[object], wanted: set[int], globals_: set[int]) -> str | None:
    for holder in _outside_torch(callers, globals_):
        held = next((each for each in gc.get_referents(holder) if id(each) in wanted), None)
        if held is not None:  # a frame that has ended meanwhile holds nothing
            return f"torch.{held.__name__} is kept in a {type(holder).__name__}"
    return None


def _outside_torch(holders: list[object], globals_: set[int]) -> list[object]:
    """Return the holders that no module, function or class of torch leads to."""
    torch_globals = {id(vars(module)) for name, module in list(sys.modules.items()) if _is_in_torch(name) and module}
    unknown = {id(each): {id(each)} for each in holders}  # by owner, the holders that it leads to
    owners = list(holders)
    cleared = {id(each) for each in holders if _is_in_torch(getattr(each, "__module__", None))}
    for _ in range(_DEPTH):
        if len(cleared) == len(holders):
            break
        above: list[object] = []
        leads: dict[int, set[int]] = {}
        for owner in _compat.referrers(owners):
            if owner is owners or owner is holders or isinstance(owner, FrameType):
                continue
            reached = set().union(*(unknown.get(id(each), ()) for each in gc.get_referents(owner))) - cleared
            if id(owner) in torch_globals or _is_in_torch(_module_of(owner)):
                cleared |= reached
            elif reached and id(owner) not in globals_:
                leads[id(owner)] = reached
                above.append(owner)
        owners, unknown = above, leads
    _tables.extend(each for each in holders if id(each) in cleared)
    return [each for each in holders if id(each) not in cleared]


def _module_of(owner: object) -> object:
    is_code = isinstance(owner, (FunctionType, type)) or hasattr(owner, "cache_info")
    return getattr(owner, "__module__", None) if is_code else None


def _is_in_torch(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "functorch", "gpumagic")


def _find_hidden(functions: Sequence[Function], holders: Sequence[object]) -> str | None:
    """Return which function is held by something that the gc does not show, such as a running function's variable."""
    probe = object()
    at_rest = _counts([probe])[0] - 2  # what counting itself holds, apart from this variable and that list
    shown = Counter(id(each) for holder in holders for each in gc.get_referents(holder))
    for function, count in zip(functions, _counts(functions), strict=True):
        if count - at_rest > shown[id(function)]:
            return f"torch.{function.__name__} is kept by a running function"
    return None


def _counts(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


def find_in_source(source: str, names: Collection[str]) -> str | None:
    """Return why the text of a block rules out patches of torch's functions of these names."""
    if "__torch_function__" in source:
        return "the cell overrides __torch_function__"
    tree = parse_tree(source)
    if tree is None:  # a cell with magics in it
        return None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in called:
            return f"the cell uses torch.{node.attr} as a value"
    return None

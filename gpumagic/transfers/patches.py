"""Patches of torch's functions: they are replaced by wrappers while a run is open, and everything else is untouched.

Names that were imported earlier (`from torch import zeros`) are rebound where they are, in every module and in the
notebook. References that a cell keeps of a wrapper, in a name or a list, are replaced when the run ends.

The reference counts of the functions tell cheaply whether there is a new holder; only then is the heap searched (about
30 ms with 170,000 objects). The search runs no garbage collection and keeps only the bindings found. Imports torch at
its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import RLock
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.overrides
import torch.utils._device as device_state

from gpumagic import _compat
from gpumagic.transfers import calls, wrappers
from gpumagic.transfers import recorder as recorders
from gpumagic.transfers.calls import Watched
from gpumagic.transfers.recorder import Function, Recorder, device_context
from gpumagic.transfers.wrappers import CompilerWrapper, ConstructorWrapper, FunctionWrapper

times_patched = 0
"""How often tensors' methods have been patched in this process."""
_open: list[Recorder] = []
_counting_storages: list[Recorder] = []
_bindings: list[Binding] = []
_lock = RLock()
_BUILT_IN = type(torch.zeros)
_DEPTH = 4
"""How far up a table is followed until a torch module must own it: set, cache's dict, cache."""
_tables: list[object] = []
"""Torch's own tables of functions, once found; kept, so that another object cannot take their id."""


def begin(recorder: Recorder) -> None:
    """Handle this thread's calls for a run from now on, or leave them to its function mode."""
    recorders.begin(recorder)
    with _lock:
        if not _counting_storages:
            _patch_storages()
        _counting_storages.append(recorder)
        if not recorder.uses_patches:
            return
        _open.append(recorder)
        if not recorder.has_mode:
            recorder.previous_device = device_state.CURRENT_DEVICE
            device_state.CURRENT_DEVICE = recorder.device  # what torch.compile guards on
        if len(_open) == 1:
            _patch()


def end(recorder: Recorder) -> None:
    """Undo `begin`. Idempotent, so that it can be called after an interrupt anywhere."""
    recorders.end(recorder)
    release(recorder)
    with _lock:
        _counting_storages[:] = [each for each in _counting_storages if each is not recorder]
        if not _counting_storages:
            _restore_storages()


def release(recorder: Recorder) -> None:
    """Restore torch's functions, unless another run needs the patches."""
    with _lock:
        if recorder in _open:
            if not recorder.has_mode:
                _leave_device(recorder)
            _open.remove(recorder)
        if not _open and _bindings:
            _restore()


def find_holders(namespace: Mapping[str, object]) -> Holders | None:
    """Return what holds torch's functions, or None while they are patched already."""
    global _holders  # noqa: PLW0603  what was found last; another cell's is as good while nothing has changed
    with _lock:
        if _open:
            return None
        if _holders is None or not _holders.are_current(_functions()):
            _restore()  # a patch that the user took back late may have left a wrapper
            _holders = None  # its bindings hold the functions too
            _holders = search(_functions(), namespace)
        return _holders


_holders: Holders | None = None


@cache
def _wrappers() -> dict[Function, FunctionWrapper]:
    heeding = {each.function: _wrapper_type(each)(each.function, each.handler) for each in calls.functions()}
    modes = torch.overrides._get_current_function_mode_stack
    return {**heeding, modes: FunctionWrapper(modes, wrappers.mode_stack, heeds_modes=False),
            **{each: CompilerWrapper(each) for each in _compilers()}}  # fmt: skip


def _wrapper_type(watched: Watched) -> type[FunctionWrapper]:
    is_simple = watched.handler is calls.construct and type(watched.function) is _BUILT_IN
    return ConstructorWrapper if is_simple and "sparse" not in watched.name else FunctionWrapper


@cache
def _functions() -> tuple[Function, ...]:
    return tuple(_wrappers())


@cache
def _initial_counts() -> tuple[int, ...]:
    """Return the reference counts of the wrappers while nothing but this module holds them."""
    return _counts(_wrappers().values())


@cache
def _methods() -> tuple[tuple[Watched, bool, Function], ...]:
    """Return tensors' watched methods, whether the class itself has them, and their wrappers."""
    own = vars(torch.Tensor)
    found = tuple((each, each.name in own, wrappers.wrap_method(each)) for each in calls.methods())
    calls.handlers().update({method: wrappers.handler_of_wrapper(each) for each, _, method in found})
    return found


def _compilers() -> tuple[Function, ...]:
    return (torch.compile, torch.jit.script, torch.jit.trace, torch.jit.trace_module)


def _patch() -> None:
    global times_patched  # noqa: PLW0603  of this process
    times_patched += 1
    _initial_counts()
    assert _holders is not None
    _bindings[:] = _holders.bindings
    for binding in _bindings:
        binding.owner[binding.key] = _wrappers()[binding.function]
    for watched, _, method in _methods():
        setattr(torch.Tensor, watched.name, method)


def _restore() -> None:
    """Restore what was patched, unless the cell has put something of its own there."""
    global _holders  # noqa: PLW0603  as in `find_holders`
    for watched, is_own, method in _methods():
        if vars(torch.Tensor).get(watched.name) is not method:
            continue
        if is_own:
            setattr(torch.Tensor, watched.name, watched.function)
        else:
            delattr(torch.Tensor, watched.name)
    for binding in _bindings:
        if binding.is_bound_to(_wrappers()[binding.function]):
            binding.owner[binding.key] = binding.function
    kept = zip(_wrappers().items(), _counts(_wrappers().values()), _initial_counts(), strict=True)
    leaked = {id(wrapper): (wrapper, function) for (function, wrapper), now, before in kept if now > before}
    if leaked:
        _replace_everywhere(leaked)
    if _holders is not None and not _holders.are_in_modules:
        _holders = None  # it must not keep a namespace alive
    _bindings.clear()


def _leave_device(recorder: Recorder) -> None:
    """Restore torch's note of the default device, also where a later context restores it when it ends."""
    if device_state.CURRENT_DEVICE is recorder.device:
        device_state.CURRENT_DEVICE = recorder.previous_device
    for each in _open:  # in another thread: there is one note for all
        if each.previous_device is recorder.device:
            each.previous_device = recorder.previous_device
    mode = device_context()
    while mode is not None:
        if mode.old_device is recorder.device:
            mode.old_device = recorder.previous_device
        mode = getattr(mode, "prev_mode", None)


@dataclass(frozen=True)
class Binding:
    """A global name that is bound to a function."""

    owner: dict[Any, Any]
    key: Any
    function: Function

    def is_bound_to(self, value: object) -> bool:
        """Return whether the name is bound to ``value`` now."""
        return self.owner.get(self.key) is value


@dataclass(frozen=True)
class Holders:
    """What holds torch's functions."""

    counts: tuple[int, ...]
    bindings: tuple[Binding, ...]
    unpatchable: str | None
    """What holds one of them in a way that cannot be patched: ``"torch.zeros is kept in a list"``."""
    are_in_modules: bool = True
    """Whether all bindings are in modules, so that keeping this keeps nothing else alive."""

    def are_current(self, functions: Sequence[Function]) -> bool:
        """Return whether nothing has changed since."""
        return _counts(functions) == self.counts and all(each.is_bound_to(each.function) for each in self.bindings)


def _counts(objects: Iterable[object]) -> tuple[int, ...]:
    return tuple(sys.getrefcount(each) for each in objects)


def search(functions: Sequence[Function], namespace: Mapping[str, object]) -> Holders:
    """Search the heap for what holds the functions; the user's ``namespace`` is patched like a module's globals."""
    bindings, unpatchable, are_in_modules = _search(functions, namespace)
    return Holders(_counts(functions), bindings, unpatchable, are_in_modules)  # counted when the search holds none


def _search(
    functions: Sequence[Function], namespace: Mapping[str, object]
) -> tuple[tuple[Binding, ...], str | None, bool]:
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


def _replace_everywhere(leaked: Mapping[int, tuple[object, object]]) -> None:
    """Replace wrappers by their functions in every other holder that can be written to.

    Args:
        leaked: ``{id of a wrapper: (wrapper, function)}``.
    """
    ours = {id(_wrappers()), id(leaked)} | {id(pair) for pair in leaked.values()}
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


def _patch_storages() -> None:
    for name in wrappers.STORAGE_COPIES:
        if name not in vars(torch.UntypedStorage):  # torch's own are a base class's
            setattr(torch.UntypedStorage, name, wrappers.wrap_storage_method(name))


def _restore_storages() -> None:
    for name in wrappers.STORAGE_COPIES:
        if hasattr(vars(torch.UntypedStorage).get(name), "__wrapped__"):
            delattr(torch.UntypedStorage, name)

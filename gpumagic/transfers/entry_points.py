"""The fast way: torch's functions that create and move are exchanged for a while, everything else runs untouched.

In place of `torch.zeros` stands one of `stand_ins`. Names that were imported earlier (`from torch import zeros`) are
exchanged where they are, in every module and in the notebook (`function_holders`). What the cell keeps of a stand-in,
in a name or a list, is put back after. Imports torch at its top, so it is itself imported only when a cell is run on a
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from threading import RLock

import torch
import torch.overrides
import torch.utils._device as device_state

from gpumagic.transfers import function_holders, placing, runs, stand_ins, watched_calls
from gpumagic.transfers.device_mode import outermost
from gpumagic.transfers.function_holders import Census, Place
from gpumagic.transfers.recorder import Function, Recorder
from gpumagic.transfers.stand_ins import Compiler, Constructor, EntryPoint
from gpumagic.transfers.watched_calls import Watched

exchanges = 0
"""How often tensors' methods have been exchanged in this process."""
_open: list[Recorder] = []
_BUILT_IN = type(torch.zeros)
_places: list[Place] = []
_lock = RLock()


def begin(recorder: Recorder) -> None:
    """Handle this thread's calls for a run from now on, or leave them to its function mode."""
    runs.begin(recorder)
    if not recorder.watches_threads:
        return
    with _lock:
        _open.append(recorder)
        if not recorder.has_mode:
            recorder.device_before = device_state.CURRENT_DEVICE
            device_state.CURRENT_DEVICE = recorder.device  # what torch.compile guards on
        if len(_open) == 1:
            _exchange()


def end(recorder: Recorder) -> None:
    """Undo `begin`; again does nothing, so that it can be called after an interrupt anywhere."""
    runs.end(recorder)
    withdraw(recorder)


def withdraw(recorder: Recorder) -> None:
    """Need the exchange no longer for a run."""
    with _lock:
        if recorder in _open:
            if not recorder.has_mode:
                _leave_device(recorder)
            _open.remove(recorder)
        if not _open and _places:
            _put_back()


def census(namespace: Mapping[str, object]) -> Census | None:
    """Return who holds the functions, or None while they are exchanged already."""
    global _census  # noqa: PLW0603  what was found last; another cell's is as good while nothing has changed
    with _lock:
        if _open:
            return None
        if _census is None or not _census.is_true(_functions()):
            _put_back()  # a patch that the user took back late may have left an entry point
            _census = None  # its places hold the functions too
            _census = function_holders.take(_functions(), namespace)
        return _census


_census: Census | None = None


@cache
def _entries() -> dict[Function, EntryPoint]:
    heeding = {each.function: _kind(each)(each.function, each.handler) for each in watched_calls.functions()}
    modes = torch.overrides._get_current_function_mode_stack
    return {**heeding, modes: EntryPoint(modes, stand_ins.mode_stack, heeds_modes=False),
            **{each: Compiler(each) for each in _compilers()}}  # fmt: skip


def _kind(watched: Watched) -> type[EntryPoint]:
    is_simple = watched.handler is placing.construct and type(watched.function) is _BUILT_IN
    return Constructor if is_simple and "sparse" not in watched.name else EntryPoint


@cache
def _functions() -> tuple[Function, ...]:
    return tuple(_entries())


@cache
def _at_rest() -> tuple[int, ...]:
    return function_holders.counts(_entries().values())


@cache
def _methods() -> tuple[tuple[Watched, bool, Function], ...]:
    """Return tensors' watched methods, whether the class itself has them, and what takes their place."""
    own = vars(torch.Tensor)
    found = tuple((each, each.name in own, stand_ins.method(each)) for each in watched_calls.methods())
    watched_calls.handlers().update({method: stand_ins.as_mode(each) for each, _, method in found})
    return found


def _compilers() -> tuple[Function, ...]:
    return (torch.compile, torch.jit.script, torch.jit.trace, torch.jit.trace_module)


def _exchange() -> None:
    global exchanges  # noqa: PLW0603  of this process
    exchanges += 1
    _at_rest()
    assert _census is not None
    _places[:] = _census.places
    for place in _places:
        place.owner[place.key] = _entries()[place.function]
    for watched, _, method in _methods():
        setattr(torch.Tensor, watched.name, method)


def _put_back() -> None:
    """Restore what was exchanged, unless the cell has put something of its own there."""
    global _census  # noqa: PLW0603  as in `census`
    for watched, is_own, method in _methods():
        if vars(torch.Tensor).get(watched.name) is not method:
            continue
        if is_own:
            setattr(torch.Tensor, watched.name, watched.function)
        else:
            delattr(torch.Tensor, watched.name)
    for place in _places:
        if place.holds(_entries()[place.function]):
            place.owner[place.key] = place.function
    kept = zip(_entries().items(), function_holders.counts(_entries().values()), _at_rest(), strict=True)
    leaked = {id(entry): (entry, function) for (function, entry), now, before in kept if now > before}
    if leaked:
        function_holders.put_back(leaked, own=(_entries(),))
    if _census is not None and not _census.is_lasting:
        _census = None  # it must not keep a name space alive
    _places.clear()


def _leave_device(recorder: Recorder) -> None:
    """Put torch's note of the default device back, also where a later context is to do that when it ends."""
    if device_state.CURRENT_DEVICE is recorder.device:
        device_state.CURRENT_DEVICE = recorder.device_before
    for each in _open:  # in another thread: the note is one for all
        if each.device_before is recorder.device:
            each.device_before = recorder.device_before
    mode = outermost()
    while mode is not None:
        if mode.old_device is recorder.device:
            mode.old_device = recorder.device_before
        mode = getattr(mode, "prev_mode", None)

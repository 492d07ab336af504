"""The fast way: torch's functions that create and move are exchanged for a while, everything else runs untouched.

A stand-in for a function equals it, hashes, pickles and reads as it. Both kinds hand a call to its handler if the
calling thread has a run or works for one, and else to torch. Imports torch at its top, so it is itself imported only
when a cell is run on a device.

In place of `torch.zeros` stands a wrapper. Names that were imported earlier (`from torch import zeros`) are
exchanged where they are, in every module and in the notebook (`function_holders`). What the cell keeps of a stand-in,
in a name or a list, is put back after. Imports torch at its top, so it is itself imported only when a cell is run on a
device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import cache
from threading import RLock, get_ident
from typing import Any

import torch
import torch.overrides
import torch.utils._device as device_state
from torch._C import _len_torch_function_stack

from gpumagic.transfers import calls, function_holders, indexing, runs
from gpumagic.transfers.calls import Watched
from gpumagic.transfers.device_mode import RecordingContext, outermost
from gpumagic.transfers.function_holders import Census, Place
from gpumagic.transfers.recorder import Function, Handler, Recorder

_FREE = frozenset({"dtype", "requires_grad", "names"})
"""What a constructor may be told beside its sizes without saying where."""
_active = runs.active.get


class EntryPoint:
    """Stands for a function of torch's: calls of a thread that is on a device go to the handler.

    Args:
        function: the one it stands for.
        handler: what to do instead of calling it.
        heeds_modes: whether function modes that the cell has entered come first.
    """

    def __init__(self, function: Function, handler: Handler, *, heeds_modes: bool = True) -> None:
        functools.update_wrapper(self, function, updated=())
        del self.__wrapped__
        self._function = function
        self._handler = handler
        self._heeds_modes = heeds_modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = _active(get_ident()) or runs.joined()
        if recorder is None or recorder.is_busy:
            return self._function(*args, **kwargs)
        recorder.is_busy = True
        try:
            if self._heeds_modes and _len_torch_function_stack():
                return _under_modes(recorder, self._function, self._handler, args, kwargs)
            return self._handler(recorder, self._function, args, kwargs)
        finally:
            recorder.is_busy = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_function"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._function)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __repr__(self) -> str:
        return repr(self._function)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._function.__reduce_ex__(protocol)


class Constructor(EntryPoint):
    """Stands for a constructor that is written in C and needs, in most calls, nothing but the default device."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = _active(get_ident())
        if (
            recorder is None or recorder.landed is None or recorder.is_busy or recorder.is_suspended
            or (kwargs and not _FREE.issuperset(kwargs)) or not args or type(args[-1]) is torch.Tensor
            or _len_torch_function_stack()
        ):  # fmt: skip
            return super().__call__(*args, **kwargs)
        result = self._function(*args, **kwargs, device=recorder.device)
        nbytes = result.nbytes
        if nbytes:
            made = recorder.landed
            made.count += 1
            made.nbytes += nbytes
        else:
            recorder.add_created(result)
        return result


class Compiler(EntryPoint):
    """Stands for what compiles functions, before which torch's names are bound to torch's own again.

    Args:
        function: the one it stands for.
    """

    def __init__(self, function: Function) -> None:
        super().__init__(function, _call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = runs.of_this_thread()
        if recorder is not None and recorder.change_over is not None:  # another thread's run stays as it is
            recorder.change_over(f"torch.{self._function.__name__} was called")
        return self._function(*args, **kwargs)


def method(watched: Watched) -> Function:
    """Return what stands for a method: a function, since a bound method of one costs no object."""
    if watched.handler is indexing.get:
        return _indexing(watched)
    function, handler, is_reading = watched.function, watched.handler, watched.is_reading

    @functools.wraps(function)
    def stand_in(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_reading and self.is_cpu:
            return function(self, *args, **kwargs)
        recorder = _active(get_ident()) or runs.joined()
        if recorder is None or recorder.is_busy:
            return function(self, *args, **kwargs)
        recorder.is_busy = True
        try:
            return handler(recorder, function, (self, *args), kwargs)
        finally:
            recorder.is_busy = False

    return stand_in


def _indexing(watched: Watched) -> Function:
    """Return what stands for `__getitem__`, which is called too often for more than a look at most indices."""
    function, plain, is_plain = watched.function, indexing.PLAIN, indexing.is_plain

    @functools.wraps(function)
    def __getitem__(self: torch.Tensor, index: Any) -> Any:  # noqa: N807
        __tracebackhide__ = True
        if type(index) in plain or is_plain(index):
            return function(self, index)
        recorder = _active(get_ident()) or runs.joined()
        if recorder is None or recorder.is_busy:
            return function(self, index)
        recorder.is_busy = True
        try:
            return indexing.get(recorder, function, (self, index), {})
        finally:
            recorder.is_busy = False

    return __getitem__


def as_mode(watched: Watched) -> Handler:
    """Return the handler for a method's stand-in, which function modes are told of meanwhile."""

    def handle(recorder: Recorder, _: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        return watched.handler(recorder, watched.function, args, kwargs)

    return handle


def _under_modes(recorder: Recorder, func: Function, handler: Handler, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function where the cell has entered a function mode: torch calls that first, then the device context."""
    __tracebackhide__ = True
    if outermost() is None:
        with RecordingContext(recorder, look_only=recorder.is_suspended):
            return func(*args, **kwargs)
    outer, recorder.is_suspended = recorder.is_suspended, True  # the cell's own device context says where
    try:
        return handler(recorder, func, args, kwargs)
    finally:
        recorder.is_suspended = outer


def mode_stack(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Tell torch of a device context: `get_default_device` and checkpointing look for one among the modes."""
    stack = func(*args, **kwargs)
    return stack if outermost() is not None or recorder.is_suspended else [RecordingContext(recorder), *stack]


def _call(_: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    return func(*args, **kwargs)


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
    heeding = {each.function: _kind(each)(each.function, each.handler) for each in calls.functions()}
    modes = torch.overrides._get_current_function_mode_stack
    return {**heeding, modes: EntryPoint(modes, mode_stack, heeds_modes=False),
            **{each: Compiler(each) for each in _compilers()}}  # fmt: skip


def _kind(watched: Watched) -> type[EntryPoint]:
    is_simple = watched.handler is calls.construct and type(watched.function) is _BUILT_IN
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
    found = tuple((each, each.name in own, method(each)) for each in calls.methods())
    calls.handlers().update({method: as_mode(each) for each, _, method in found})
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

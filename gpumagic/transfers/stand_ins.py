"""What stands in the place of torch's functions and tensors' methods, while a run is open.

A stand-in for a function equals it, hashes, pickles and reads as it. Both kinds hand a call to its handler if the
calling thread has a run or works for one, and else to torch. Imports torch at its top, so it is itself imported only
when a cell is run on a device.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import Any

import torch
from torch._C import _len_torch_function_stack

from gpumagic.transfers import indexing, runs
from gpumagic.transfers.device_mode import RecordingContext, outermost
from gpumagic.transfers.recorder import Function, Handler, Recorder
from gpumagic.transfers.watched_calls import Watched

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

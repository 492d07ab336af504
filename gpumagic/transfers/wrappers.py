"""What stands in place of torch's functions while a cell runs on a device.

A wrapper equals its function, hashes, pickles and prints like it. It passes a call to the handler if the calling thread
has a run or works for one, and to torch otherwise. `patches` puts wrappers in place. Imports torch at its top, so it is
imported only when a cell runs on a device.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch._C import _len_torch_function_stack

from gpumagic.memory import allocator
from gpumagic.source import frames
from gpumagic.transfers import indexing
from gpumagic.transfers import recorder as recorders
from gpumagic.transfers.calls import Watched
from gpumagic.transfers.device_mode import RecordingContext
from gpumagic.transfers.recorder import Function, Handler, Recorder, device_context, worker_recorder
from gpumagic.transfers.tracing import Tracer

_SIZES_ONLY = frozenset({"dtype", "requires_grad", "names"})
"""What a constructor may take beside its sizes without naming a device."""
_active = recorders.active.get


class FunctionWrapper:
    """Passes calls of a torch function to its handler, in a thread that is on a device.

    With ``heeds_modes``, function modes that the cell has entered come first.
    """

    def __init__(self, function: Function, handler: Handler, *, heeds_modes: bool = True) -> None:
        functools.update_wrapper(self, function, updated=())
        del self.__wrapped__
        self._function = function
        self._handler = handler
        self._heeds_modes = heeds_modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = _active(get_ident()) or worker_recorder()
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


class ConstructorWrapper(FunctionWrapper):
    """Wraps a constructor that is written in C and needs, in most calls, nothing but the default device."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = _active(get_ident())
        if (
            recorder is None or recorder.created_here is None or recorder.is_busy or recorder.is_suspended
            or (kwargs and not _SIZES_ONLY.issuperset(kwargs)) or not args or type(args[-1]) is torch.Tensor
            or _len_torch_function_stack()
        ):  # fmt: skip
            return super().__call__(*args, **kwargs)
        result = self._function(*args, **kwargs, device=recorder.device)
        nbytes = result.nbytes
        if nbytes:
            made = recorder.created_here
            made.count += 1
            made.nbytes += nbytes
        else:
            recorder.add_created(result)
        return result


class CompilerWrapper(FunctionWrapper):
    """Wraps what compiles functions, before which torch's names are bound to torch's own functions again."""

    def __init__(self, function: Function) -> None:
        super().__init__(function, _call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = recorders.current_recorder()
        if recorder is not None and recorder.switch_to_mode is not None:  # another thread's run stays as it is
            recorder.switch_to_mode(f"torch.{self._function.__name__} was called")
        return self._function(*args, **kwargs)


def wrap_method(watched: Watched) -> Function:
    """Return the wrapper of a method: a function, since a bound method of one costs no object."""
    if watched.handler is indexing.get:
        return _wrap_getitem(watched)
    function, handler, is_reading = watched.function, watched.handler, watched.is_reading

    @functools.wraps(function)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_reading and self.is_cpu:
            return function(self, *args, **kwargs)
        recorder = _active(get_ident()) or worker_recorder()
        if recorder is None or recorder.is_busy:
            return function(self, *args, **kwargs)
        recorder.is_busy = True
        try:
            return handler(recorder, function, (self, *args), kwargs)
        finally:
            recorder.is_busy = False

    return wrapper


def _wrap_getitem(watched: Watched) -> Function:
    """Return the wrapper of `__getitem__`, which is called too often for more than a check of most indices."""
    function, plain, is_plain = watched.function, indexing.PLAIN, indexing.is_plain

    @functools.wraps(function)
    def __getitem__(self: torch.Tensor, index: Any) -> Any:  # noqa: N807
        __tracebackhide__ = True
        if type(index) in plain or is_plain(index):
            return function(self, index)
        recorder = _active(get_ident()) or worker_recorder()
        if recorder is None or recorder.is_busy:
            return function(self, index)
        recorder.is_busy = True
        try:
            return indexing.get(recorder, function, (self, index), {})
        finally:
            recorder.is_busy = False

    return __getitem__


def handler_of_wrapper(watched: Watched) -> Handler:
    """Return the handler for a method's wrapper, which function modes get as the function while it is in place."""

    def handle(recorder: Recorder, _: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        return watched.handler(recorder, watched.function, args, kwargs)

    return handle


def _under_modes(recorder: Recorder, func: Function, handler: Handler, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function where the cell has entered a function mode: torch calls that first, then the device context."""
    __tracebackhide__ = True
    if device_context() is None:
        with RecordingContext(recorder, look_only=recorder.is_suspended):
            return func(*args, **kwargs)
    outer, recorder.is_suspended = recorder.is_suspended, True  # the cell's own device context says where
    try:
        return handler(recorder, func, args, kwargs)
    finally:
        recorder.is_suspended = outer


def mode_stack(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return torch's modes and a device context, which `get_default_device` and checkpointing look for."""
    stack = func(*args, **kwargs)
    return stack if device_context() is not None or recorder.is_suspended else [RecordingContext(recorder), *stack]


def _call(_: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    return func(*args, **kwargs)


def wrap_storage_method(name: str) -> Function:
    """Return the wrapper of a method of `UntypedStorage`, through which every copy of a storage goes.

    `torch.save`, `torch.load`, `pickle` and `storage.cpu()` copy storages, which no function mode sees, since a storage
    is not a tensor. The wrapper counts for the run that its thread works for.
    """
    function: Function = getattr(torch.UntypedStorage, name)
    ends = STORAGE_COPIES[name]

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        start = time.perf_counter()
        result = function(self, *args, **kwargs)
        quick = kwargs.get("non_blocking", name == "copy_" and len(args) > 1 and args[1])
        _count_storage(*ends(self, *args, **kwargs), start, non_blocking=bool(quick))
        return result

    return wrapper


STORAGE_COPIES: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "copy_": lambda self, source, *_, **__: (source, source.device, self.device),
    "_write_file": lambda self, *_, **__: (self, self.device, "cpu"),
    "_set_from_file": lambda self, *_, **__: (self, "cpu", self.device),
}
"""Method -> what takes its arguments and returns the storage that is copied, from where, and to where."""


def _count_storage(storage: Any, source: object, target: object, start: float, *, non_blocking: bool) -> None:
    nbytes = storage.nbytes()
    if str(source) == str(target) or not nbytes:
        return
    recorder = recorders.current_recorder()
    if recorder is None or recorder.is_traced:  # the tracer sees it
        return
    cause, subject = _find_request(sys._getframe(2))
    seconds = time.perf_counter() - start
    recorder.add_copy(str(source), str(target), nbytes, seconds, cause, subject, non_blocking=non_blocking)


@dataclass(frozen=True)
class Attribute:
    """A function that is no function of tensors, and what calls its wrapper while a cell runs."""

    owner: Any
    name: str
    function: Function
    wrapper: Function


_patched: list[Attribute] = []


def patch_attributes(backend: str) -> None:
    """Put the wrappers of what is no function of tensors in place, those of a backend too."""
    patched = [each.wrapper for each in _patched]
    for each in _attributes(backend):
        if each.function not in patched:
            _patched.append(each)
            setattr(each.owner, each.name, each.wrapper)


def restore_attributes() -> None:
    """Undo `patch_attributes`, except where something else has been put there since."""
    while _patched:
        each = _patched.pop()
        if vars(each.owner).get(each.name) is each.wrapper:
            setattr(each.owner, each.name, each.function)


def _attributes(backend: str) -> Iterator[Attribute]:
    """Yield what waits for a device by name, and what `DataParallel` distributes and collects tensors with."""
    modules = [each for each in (getattr(torch, "accelerator", None), allocator.device_module(backend)) if each]
    classes = [getattr(module, name, None) for module in modules for name in ("Stream", "Event")]
    for owner in (*modules, *classes):
        function = None if owner in (None, torch.Stream, torch.Event) else vars(owner).get("synchronize")
        if function is not None:  # those two are classes of C++, which cannot be patched
            yield Attribute(owner, "synchronize", function, _wrap_wait(function))
    for name in ("_scatter", "_gather"):
        function = getattr(torch._C, name, None)  # CUDA's builds have them
        if function is not None:
            yield Attribute(torch._C, name, function, _wrap_distribution(function))


def _wrap_distribution(function: Function) -> Function:
    """Return the wrapper of a function of C++ that copies between several devices."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = recorders.current_recorder()
        if recorder is None or recorder.is_traced:
            return function(*args, **kwargs)
        outer, recorder.cause = recorder.cause, recorder.cause or function.__name__.strip("_")
        try:
            with Tracer(recorder):
                return function(*args, **kwargs)
        finally:
            recorder.cause = outer

    return wrapper


def _wrap_wait(function: Function) -> Function:
    """Return the wrapper of a function by which a line waits for a device, a stream or an event."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        result = function(*args, **kwargs)
        recorder = None if torch.compiler.is_compiling() else recorders.current_recorder()
        if recorder is not None:
            recorder.log.add_sync()
        return result

    return wrapper


def _find_request(innermost: FrameType) -> tuple[str, object]:
    """Return what made a copy of a storage, and what it was asked to transfer, where that is known."""
    cause, subject = "storage." + innermost.f_code.co_name.lstrip("_"), None
    for frame in frames.stack(innermost):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "torch.serialization" and function in ("save", "load"):
            cause, subject = f"torch.{function}", frames.local_variables(frame).get("obj")
        elif module == "torch.storage" and function in ("__reduce__", "_load_from_bytes"):
            cause, subject = "pickle", None
        elif module == "torch._tensor" and function == "__reduce_ex__" and cause == "pickle":
            subject = frames.local_variables(frame).get("self")
    return cause, subject

"""What each of torch's functions that creates or moves tensors means: where its result goes and what is counted.

A handler stands in for one call: it gives the function the default device if it takes one, calls it, and counts. How
calls come to the handlers is not its business: `entry_points` puts them in place of the functions, `recording` brings
them in by a function mode. Imports torch at its top, so it is itself imported only when a cell is run on a device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors

from gpumagic.probes.transfers import TransferLog, is_host

Function = Callable[..., Any]
Handler = Callable[["Recorder", Function, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Request:
    """A move that a line asks for, while it is made; the tracer counts what crosses meanwhile as this."""

    cause: str
    subject: object


@dataclass(eq=False)
class Recorder:
    """One run: its default device, its log, and what is going on in it right now."""

    device: torch.device
    log: TransferLog
    is_traced: bool = False
    """Whether a dispatch mode counts the copies that it sees, so that handlers only name them."""
    counted: int = 0
    """How many moves have been counted."""
    has_mode: bool = False
    """Whether calls come by a function mode."""
    inside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the calls of a function that is being handled come to the handlers too."""
    cause: str | None = None
    """What to say did a move, instead of the function itself (`print` calls many)."""
    request: Request | None = None
    is_busy: bool = field(default=False)
    """Whether a handler is at work: what the function itself calls is not handled again."""
    is_suspended: bool = False
    """Whether new tensors go where torch would put them, as they do in `backward` under torch's own context."""
    is_explicit: bool = False
    """Whether the call being handled says itself which device it works on."""
    change_over: Callable[[str], None] | None = None
    """Goes on under the function mode, for the reason given."""
    device_before: torch.device | None = None
    """What torch noted as the default device before this run."""

    def call(self, func: Function, args: Any, kwargs: dict[str, Any], cause: str, subject: object) -> tuple[Any, Any]:
        """Return what the function returns for a line that asks for a move, and the seconds it took.

        They are None where a dispatch mode has counted the move already.
        """
        __tracebackhide__ = True
        outer, self.request = self.request, Request(self.cause or cause, subject)
        counted, start = self.counted, time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self.request = outer
        return result, None if self.counted != counted else time.perf_counter() - start

    def add_created(self, tensor: torch.Tensor) -> None:
        """Count a new tensor."""
        device = tensor.device
        self.log.add_created(device, 0 if device.type == "meta" else tensor.numel() * tensor.element_size())

    def add_move(
        self, subject: object, result: torch.Tensor, seconds: float, cause: str, *, non_blocking: bool = False
    ) -> None:
        """Count a move if ``result`` lies elsewhere than ``subject``; reading back to the host is also a wait.

        Where a move also converts, CUDA does that on the host, or on the device where it is non-blocking, and between
        devices after the copy (torch's aten/src/ATen/native/cuda/Copy.cu, with peer access between devices).
        """
        source = device_of(subject) if isinstance(subject, torch.Tensor) else "cpu"
        target = device_of(result)
        if source == target or "meta" in (source, target):
            return
        converted = not non_blocking if is_host(source) else is_host(target) and non_blocking
        crossing = result if converted or not isinstance(subject, torch.Tensor) else subject
        nbytes = result.numel() * crossing.element_size()
        if not nbytes:
            return  # nothing is copied, and nobody waits
        self.counted += 1
        self.log.add_move(source, target, nbytes, seconds, self.cause or cause, subject, result)
        if is_host(target):
            self.log.add_sync()

    def add_read(self, tensor: torch.Tensor, nbytes: int, seconds: float, cause: str) -> None:
        """Count Python values read from a device tensor: a copy to the host that the host waits for."""
        self.counted += 1
        self.log.add_move(device_of(tensor), "cpu", nbytes, seconds, self.cause or cause, tensor)
        self.log.add_sync()

    @contextlib.contextmanager
    def looking_inside(self, cause: str) -> Iterator[None]:
        """Handle the calls made by the function that is being handled, as done by ``cause``."""
        outer = self.cause, self.is_busy, self.request
        self.cause, self.is_busy, self.request = cause, False, Request(cause, None)
        try:
            with self.inside():
                yield
        finally:
            self.cause, self.is_busy, self.request = outer


@dataclass(frozen=True)
class Watched:
    """A function that is watched, and where it is looked up."""

    owner: Any
    name: str
    function: Function
    handler: Handler

    @property
    def is_reading(self) -> bool:
        """Return whether it does nothing worth counting to a tensor on the host."""
        return self.handler in (_item, _tolist, _numpy, _equal, _print, _format, _sync)


@cache
def functions() -> tuple[Watched, ...]:
    """Return the watched functions of torch's modules."""
    owners = (torch, torch.fft, torch.nested)
    constructors = [_placed(owners, each, _construct) for each in _device_constructors() - _FROM_HOST]
    return (
        *constructors,
        *(_placed(owners, each, _construct_from_host) for each in _FROM_HOST),
        *_found(torch, _CREATORS, _create),
        *_found(torch, ("is_nonzero", "allclose"), _item),
        *_found(torch, ("equal",), _equal),
        *_found(torch, _SYNCS, _sync),
        *_found(torch.autograd, ("grad",), _suspend),
    )


@cache
def methods() -> tuple[Watched, ...]:
    """Return the watched methods of tensors."""
    tensor, backend = torch.Tensor, torch._C._get_privateuse1_backend_name()
    return (
        *_found(tensor, _METHOD_CREATORS, _create),
        *_found(tensor, ("new_tensor",), _new_tensor),
        *_found(tensor, ("to", "cuda", "cpu", "xpu", "type", backend), _move),
        *_found(tensor, ("copy_",), _copy),
        *_found(tensor, _ITEMS, _item),
        *_found(tensor, ("tolist",), _tolist),
        *_found(tensor, ("numpy",), _numpy),
        *_found(tensor, ("equal",), _equal),
        *_found(tensor, ("__repr__",), _print),
        *_found(tensor, ("__format__",), _format),
        *_found(tensor, _SYNCS, _sync),
        *_found(tensor, ("backward",), _suspend),
    )


@cache
def handlers() -> dict[Function, Handler]:
    """Return the handler of each watched function."""
    return {each.function: each.handler for each in (*functions(), *methods())}


_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_CREATORS = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "normal")
_METHOD_CREATORS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
_ITEMS = ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "allclose")
_SYNCS = ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere")


def _placed(owners: tuple[Any, ...], function: Function, handler: Handler) -> Watched:
    name = function.__name__
    owner = next(each for each in owners if getattr(each, _PUBLIC.get(name, name), None) is function)
    return Watched(owner, _PUBLIC.get(name, name), function, handler)


_PUBLIC = {"fft_fftfreq": "fftfreq", "fft_rfftfreq": "rfftfreq"}


def _found(owner: Any, names: tuple[str, ...], handler: Handler) -> list[Watched]:
    return [Watched(owner, name, getattr(owner, name), handler) for name in names if hasattr(owner, name)]


def _construct(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    recorder.is_explicit = True
    if kwargs.get("device") is None:
        generator = kwargs.get("generator")
        if generator is not None:
            # A generator works on its own device only, so it says where; DataLoader's sampler relies on it.
            kwargs["device"] = generator.device
        elif not recorder.is_suspended:
            kwargs["device"] = recorder.device
            recorder.is_explicit = False
    return _create(recorder, func, args, kwargs)


def _create(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    try:
        result = func(*args, **kwargs)
    finally:
        recorder.is_explicit = False
    if isinstance(result, torch.Tensor):
        recorder.add_created(result)
    return result


def _construct_from_host(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    if kwargs.get("device") is None and not _has_device(args) and not recorder.is_suspended:
        kwargs = {**kwargs, "device": recorder.device}
    subject = args[0] if args else next(iter(kwargs.values()), None)
    return _from_host(recorder, func, args, kwargs, subject)


def _has_device(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.device) for each in args[1:])  # as_tensor(x, dtype, device) takes it by place


def _new_tensor(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    return _from_host(recorder, func, args, kwargs, args[1] if len(args) > 1 else kwargs.get("data"))


def _from_host(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any], subject: object) -> Any:
    """Call a constructor that copies Python, numpy or tensor data, which is a move if the target is elsewhere."""
    __tracebackhide__ = True
    result, seconds = recorder.call(func, args, kwargs, func.__name__, subject)
    if result is not subject:
        recorder.add_created(result)
    if seconds is not None:
        recorder.add_move(subject, result, seconds, func.__name__)
    return result


def _move(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    cause = f".{func.__name__}"
    result, seconds = recorder.call(func, args, kwargs, cause, args[0])
    if isinstance(result, torch.Tensor) and seconds is not None:  # tensor.type() without arguments names the type
        recorder.add_move(args[0], result, seconds, cause, non_blocking=_is_non_blocking(args, kwargs))
    return result


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The first flag by place, in every form of `to`, `cuda`, `cpu` and `copy_`.
    return bool(kwargs.get("non_blocking", next((each for each in args if isinstance(each, bool)), False)))


def _copy(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    source = args[1] if len(args) > 1 else kwargs.get("src")
    result, seconds = recorder.call(func, args, kwargs, "copy_", source)
    if seconds is not None:
        recorder.add_move(source, result, seconds, "copy_", non_blocking=_is_non_blocking(args, kwargs))
    return result


def _item(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, torch.Tensor) or is_free_to_read(tensor):
        return func(*args, **kwargs)
    cause = _spoken(func.__name__)
    result, seconds = recorder.call(func, args, kwargs, cause, tensor)
    if seconds is not None:
        nbytes = 1 if func.__name__ in ("allclose", "equal") else tensor.element_size()  # they read one truth value
        recorder.add_read(tensor, nbytes, seconds, cause)
    return result


def _tolist(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    result, seconds = recorder.call(func, args, kwargs, ".tolist", args[0])
    if not (is_free_to_read(args[0]) or seconds is None):
        recorder.add_read(args[0], args[0].numel() * args[0].element_size(), seconds, ".tolist")
    return result


def _numpy(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `numpy`, which raises for a tensor on a device unless it is forced to copy it."""
    __tracebackhide__ = True
    result, seconds = recorder.call(func, args, kwargs, ".numpy", args[0])
    if not (is_free_to_read(args[0]) or seconds is None) and args[0].numel():
        recorder.add_read(args[0], args[0].numel() * args[0].element_size(), seconds, ".numpy")
    return result


def _equal(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `equal`, which reads one truth value, unless the shapes or the memory tell (torch's cuda/Equal.cpp)."""
    __tracebackhide__ = True
    tensor, other = args[0] if args else kwargs.get("input"), args[1] if len(args) > 1 else kwargs.get("other")
    result, seconds = recorder.call(func, args, kwargs, ".equal", tensor)
    if not (isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor)) or is_free_to_read(tensor):
        return result
    is_told = tensor.size() != other.size() or not tensor.numel() or tensor is other
    if not (is_told or seconds is None):
        recorder.add_read(tensor, 1, seconds, ".equal")
    return result


def _format(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    if args[0].dim() == 0:
        return _item(recorder, func, args, kwargs)
    text = _print(recorder, torch.Tensor.__repr__, args[:1], {})
    return format(text, args[1])


def _print(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Format a tensor so that the copies formatting makes are seen one by one."""
    __tracebackhide__ = True
    from torch._tensor_str import _str

    tensor = args[0]
    if is_free_to_read(tensor) or type(tensor).__repr__ is not torch.Tensor.__repr__:
        return func(*args, **kwargs)
    # As `Tensor.__torch_function__` calls `__repr__`: the parts of a subclass's tensor are then plain ones.
    with recorder.looking_inside("print"), torch._C.DisableTorchFunctionSubclass():
        return _str(tensor, **kwargs)


def _sync(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    result = func(*args, **kwargs)
    tensor = args[0] if args else kwargs.get("input")
    if isinstance(tensor, torch.Tensor) and not is_free_to_read(tensor) and not recorder.is_traced:
        recorder.log.add_sync()
    return result


def _suspend(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call what runs the user's own code without torch's device context in force, but with an eye on its moves."""
    __tracebackhide__ = True
    outer = recorder.is_busy, recorder.is_suspended
    recorder.is_busy, recorder.is_suspended = False, True
    try:
        return func(*args, **kwargs)  # under the mode, torch has taken that away, and what it calls is not seen
    finally:
        recorder.is_busy, recorder.is_suspended = outer


def _spoken(name: str) -> str:
    """Return ``"bool()"`` for ``"__bool__"`` and ``".item"`` for ``"item"``."""
    return f"{name.strip('_')}()" if name.startswith("__") else f".{name}"


def is_free_to_read(tensor: torch.Tensor) -> bool:
    """Return whether reading the tensor's values costs no copy."""
    return tensor.device.type in ("cpu", "meta")


def device_of(tensor: torch.Tensor) -> str:
    """Return a tensor's device by name."""
    return str(tensor.device)

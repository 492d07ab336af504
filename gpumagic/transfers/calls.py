"""Which of torch's functions create, transfer or read tensors, and the handler of each.

A handler replaces one call: it gives the function the default device if it takes one, calls it, and counts. Calls come
to the handlers from `wrappers`, which take the place of the functions, or through the function mode in `device_mode`.
Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors

from gpumagic.transfers import indexing
from gpumagic.transfers.recorder import Function, Handler, Recorder, is_free_to_read, watch_gradients
from gpumagic.transfers.tracing import Tracer, bytes_of_size


def handle_move(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a method that returns its tensor elsewhere, or as it is."""
    __tracebackhide__ = True
    cause = f".{func.__name__}"
    result, seconds = recorder.call(func, args, kwargs, cause, args[0])
    if isinstance(result, torch.Tensor) and seconds is not None:  # tensor.type() without arguments names the type
        recorder.add_move(args[0], result, seconds, cause, non_blocking=_is_non_blocking(args, kwargs))
        watch_gradients(recorder, args[0], result)
    return result


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The first positional flag, in every form of `to`, `cuda`, `cpu` and `copy_`.
    return bool(kwargs.get("non_blocking", next((each for each in args if isinstance(each, bool)), False)))


def handle_copy(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy a tensor's values into another."""
    __tracebackhide__ = True
    source = args[1] if len(args) > 1 else kwargs.get("src")
    result, seconds = recorder.call(func, args, kwargs, "copy_", source)
    if seconds is not None:
        recorder.add_move(source, result, seconds, "copy_", non_blocking=_is_non_blocking(args, kwargs))
        watch_gradients(recorder, source, result)
    return result


def construct(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a constructor with the default device, unless it is given another, or a generator."""
    __tracebackhide__ = True
    recorder.is_explicit = True
    if kwargs.get("device") is None:
        generator = kwargs.get("generator")
        if generator is not None:
            # A generator works on its own device only, so it decides; DataLoader's sampler relies on it.
            kwargs["device"] = generator.device
        elif not recorder.is_suspended:
            kwargs["device"] = recorder.device
            recorder.is_explicit = False
    if any(isinstance(each, torch.Tensor) and not is_free_to_read(each) for each in args) and not recorder.is_traced:
        return _construct_from_values(recorder, func, args, kwargs)
    return create(recorder, func, args, kwargs)


def _construct_from_values(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a constructor that reads sizes or numbers from a device, as `torch.full(shape, t)` does."""
    __tracebackhide__ = True
    outer, recorder.cause = recorder.cause, recorder.cause or func.__name__
    try:
        with Tracer(recorder):
            return create(recorder, func, args, kwargs)
    finally:
        recorder.cause = outer


def create(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that makes a new tensor."""
    __tracebackhide__ = True
    try:
        result = func(*args, **kwargs)
    finally:
        recorder.is_explicit = False
    if isinstance(result, torch.Tensor):
        recorder.add_created(result)
    return result


def construct_from_host(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a constructor that copies Python data or another tensor."""
    __tracebackhide__ = True
    if kwargs.get("device") is None and not _has_device(args) and not recorder.is_suspended:
        kwargs = {**kwargs, "device": recorder.device}
    subject = args[0] if args else next(iter(kwargs.values()), None)
    return _from_host(recorder, func, args, kwargs, subject)


def _has_device(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.device) for each in args[1:])  # as_tensor(x, dtype, device) takes it by position


def new_tensor(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `tensor.new_tensor`, which makes a tensor where the first one is."""
    __tracebackhide__ = True
    return _from_host(recorder, func, args, kwargs, args[1] if len(args) > 1 else kwargs.get("data"))


def _from_host(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any], subject: object) -> Any:
    """Call a constructor that copies Python, numpy or tensor data, which is a transfer if the target is a device."""
    __tracebackhide__ = True
    result, seconds = recorder.call(func, args, kwargs, func.__name__, subject)
    if result is not subject:
        recorder.add_created(result)
    if seconds is not None:
        recorder.add_move(subject, result, seconds, func.__name__)
    return result


def item(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Read one value."""
    __tracebackhide__ = True
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, torch.Tensor) or is_free_to_read(tensor):
        return func(*args, **kwargs)
    cause = _cause_of(func.__name__)
    result, seconds = recorder.call(func, args, kwargs, cause, tensor)
    if seconds is not None:
        nbytes = 1 if func.__name__ in ("allclose", "equal") else tensor.element_size()  # they read one truth value
        recorder.add_read(tensor, nbytes, seconds, cause)
    return result


def tolist(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Read all values."""
    __tracebackhide__ = True
    result, seconds = recorder.call(func, args, kwargs, ".tolist", args[0])
    if not (is_free_to_read(args[0]) or seconds is None):
        recorder.add_read(args[0], args[0].numel() * args[0].element_size(), seconds, ".tolist")
    return result


def numpy(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `numpy`, which raises for a tensor on a device unless it is forced to copy it."""
    __tracebackhide__ = True
    result, seconds = recorder.call(func, args, kwargs, ".numpy", args[0])
    if not (is_free_to_read(args[0]) or seconds is None) and args[0].numel():
        recorder.add_read(args[0], args[0].numel() * args[0].element_size(), seconds, ".numpy")
    return result


def equal(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `equal`, which reads one truth value, unless shapes or addresses decide (torch's cuda/Equal.cpp)."""
    __tracebackhide__ = True
    tensor, other = args[0] if args else kwargs.get("input"), args[1] if len(args) > 1 else kwargs.get("other")
    result, seconds = recorder.call(func, args, kwargs, ".equal", tensor)
    if not (isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor)) or is_free_to_read(tensor):
        return result
    is_decided = tensor.size() != other.size() or not tensor.numel() or tensor is other
    if not (is_decided or seconds is None):
        recorder.add_read(tensor, 1, seconds, ".equal")
    return result


def format_(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Format one value by a format specification, and other tensors as `print` does."""
    __tracebackhide__ = True
    if args[0].dim() == 0:
        return item(recorder, func, args, kwargs)
    text = print_(recorder, torch.Tensor.__repr__, args[:1], {})
    return format(text, args[1])


def print_(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Format a tensor so that each copy that formatting makes is counted."""
    __tracebackhide__ = True
    from torch._tensor_str import _str

    tensor = args[0]
    if is_free_to_read(tensor) or type(tensor).__repr__ is not torch.Tensor.__repr__:
        return func(*args, **kwargs)
    # As `Tensor.__torch_function__` calls `__repr__`: the parts of a subclass's tensor are then plain ones.
    with recorder.handling_inner_calls("print"), torch._C.DisableTorchFunctionSubclass():
        return _str(tensor, **kwargs)


def sync(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that reads from the device how many elements its result has, and so waits for it."""
    __tracebackhide__ = True
    tensor = args[0] if args else kwargs.get("input")
    cause = f".{func.__name__}"
    result, seconds = recorder.call(func, args, kwargs, cause, tensor)
    if isinstance(tensor, torch.Tensor) and not is_free_to_read(tensor) and seconds is not None:
        in_slices = kwargs.get("dim") is not None
        recorder.add_read(tensor, bytes_of_size(func.__name__, tensor, in_slices=in_slices), seconds, cause)
    return result


def where(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `where`, which is `nonzero` if it is given only a condition."""
    __tracebackhide__ = True
    return func(*args, **kwargs) if len(args) + len(kwargs) > 1 else sync(recorder, func, args, kwargs)


def _cause_of(name: str) -> str:
    """Return ``"bool()"`` for ``"__bool__"`` and ``".item"`` for ``"item"``."""
    return f"{name.strip('_')}()" if name.startswith("__") else f".{name}"


@dataclass(frozen=True)
class Watched:
    """A watched function, and where it is looked up."""

    owner: Any
    name: str
    function: Function
    handler: Handler

    @property
    def is_reading(self) -> bool:
        """Whether it does nothing to a tensor on the host that needs counting."""
        return self.handler in _READING


@cache
def functions() -> tuple[Watched, ...]:
    """Return the watched functions of torch's modules."""
    owners = (torch, torch.fft, torch.nested)
    constructors = [_placed(owners, each, construct) for each in _device_constructors() - _FROM_HOST]
    return (
        *constructors,
        *(_placed(owners, each, construct_from_host) for each in _FROM_HOST),
        *_found(torch, _CREATORS, create),
        *_found(torch, ("is_nonzero", "allclose"), item),
        *_found(torch, ("equal",), equal),
        *_found(torch, _SYNCS, sync),
        *_found(torch, ("where",), where),
        *_found(torch.autograd, ("grad",), _suspend),
    )


@cache
def methods() -> tuple[Watched, ...]:
    """Return the watched methods of tensors."""
    tensor, backend = torch.Tensor, torch._C._get_privateuse1_backend_name()
    return (
        *_found(tensor, _METHOD_CREATORS, create),
        *_found(tensor, ("new_tensor",), new_tensor),
        *_found(tensor, ("to", "cuda", "cpu", "xpu", "type", backend), handle_move),
        *_found(tensor, ("copy_",), handle_copy),
        *_found(tensor, _ITEMS, item),
        *_found(tensor, ("tolist",), tolist),
        *_found(tensor, ("numpy",), numpy),
        *_found(tensor, ("equal",), equal),
        *_found(tensor, ("__repr__",), print_),
        *_found(tensor, ("__format__",), format_),
        *_found(tensor, _SYNCS, sync),
        *_found(tensor, ("__getitem__",), indexing.get),
        *_found(tensor, ("__setitem__",), indexing.put),
        *_found(tensor, ("index_put_", "index_put"), indexing.put_at),
        *_found(tensor, ("backward",), _suspend),
    )


@cache
def handlers() -> dict[Function, Handler]:
    """Return the handler of each watched function."""
    return {each.function: each.handler for each in (*functions(), *methods())}


_READING = (item, tolist, numpy, equal, print_, format_, sync)
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


def _suspend(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call what runs the user's own code without the device context in force, and count the transfers in it."""
    __tracebackhide__ = True
    outer = recorder.is_busy, recorder.is_suspended
    recorder.is_busy, recorder.is_suspended = False, True
    try:
        return func(*args, **kwargs)  # under the mode, torch has disabled it, and inner calls are not seen
    finally:
        recorder.is_busy, recorder.is_suspended = outer

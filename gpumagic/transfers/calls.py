"""What the function mode does with the functions that it has to know: those that create, and those that ask for copies.

A handler makes one call: it gives a constructor the default device, counts what is created, or notes who asks for
copies, which `operators` counts. Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors

from gpumagic.transfers import causes
from gpumagic.transfers.recorder import Function, Recorder, is_real

Handler = Callable[[Recorder, Function, tuple[Any, ...], dict[str, Any]], Any]


def construct(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a constructor with the default device, unless it is given another, or a generator."""
    __tracebackhide__ = True
    generator = kwargs.get("generator")
    if kwargs.get("device") is None and generator is None:
        kwargs["device"] = recorder.device
        return create(recorder, func, args, kwargs)
    if generator is not None:  # it works on its own device only, so it decides; DataLoader's sampler relies on it
        kwargs["device"] = kwargs.get("device") or generator.device
    return create(recorder, func, args, kwargs)


def create(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that makes a new tensor."""
    __tracebackhide__ = True
    result = func(*args, **kwargs)
    if type(result) is torch.Tensor or is_real(result):
        recorder.add_created(result)
    return result


def construct_from_host(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a constructor that copies Python data, an array or another tensor."""
    __tracebackhide__ = True
    # as_tensor(x, dtype, device) takes it by position
    if kwargs.get("device") is None and not any(isinstance(each, torch.device) for each in args[1:]):
        kwargs = {**kwargs, "device": recorder.device}
    return create_from_host(recorder, func, args, kwargs)


def create_from_host(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what makes a tensor of Python data, an array or another tensor."""
    __tracebackhide__ = True
    result = ask(recorder, func, args, kwargs)
    if result is not (args[0] if args else None) and is_real(result):
        recorder.add_created(result)
    return result


def format_(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Format one value by a format specification, and other tensors as `print` does."""
    __tracebackhide__ = True
    return ask_like(func if args[0].dim() == 0 else torch.Tensor.__repr__, recorder, func, args, kwargs)


def ask(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function by which a line asks for copies."""
    __tracebackhide__ = True
    return ask_like(func, recorder, func, args, kwargs)


def ask_to_read(recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that reads values of a tensor, which it copies only if that is on a device."""
    __tracebackhide__ = True
    if args and args[0].is_cpu:
        return func(*args, **kwargs) if kwargs else func(*args)
    return ask_like(func, recorder, func, args, kwargs)


def ask_like(like: Function, recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function by which a line asks for copies, under another one's name."""
    __tracebackhide__ = True
    outer, recorder.request = recorder.request, (like, args, kwargs)
    try:
        return func(*args, **kwargs)
    finally:
        recorder.request = outer


@cache
def handlers() -> dict[Function, Handler]:
    """Return the handler of each function that the mode has to know."""
    tensor = torch.Tensor
    from_host = {torch.tensor, torch.as_tensor, torch.asarray}
    return {
        **dict.fromkeys(causes.requests(), ask),
        **dict.fromkeys(causes.reading(), ask_to_read),
        **dict.fromkeys(_device_constructors(), construct),
        **dict.fromkeys(from_host, construct_from_host),
        **dict.fromkeys((getattr(torch, name) for name in _CREATORS), create),
        **dict.fromkeys((getattr(tensor, name) for name in _METHOD_CREATORS), create),
        tensor.new_tensor: create_from_host,
        tensor.__format__: format_,
    }


_CREATORS = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "normal")
_METHOD_CREATORS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")

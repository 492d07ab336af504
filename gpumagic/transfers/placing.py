"""Calls that create tensors: which device theirs is, and what they count as."""

from __future__ import annotations

from typing import Any

import torch

from gpumagic.transfers.recorder import Function, Recorder, is_free_to_read


def construct(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a constructor with the default device, unless it is told another, or a generator."""
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
    if any(isinstance(each, torch.Tensor) and not is_free_to_read(each) for each in args) and not recorder.is_traced:
        return _construct_from_values(recorder, func, args, kwargs)
    return create(recorder, func, args, kwargs)


def _construct_from_values(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a constructor that reads sizes or numbers from a device, as `torch.full(shape, t)` does."""
    __tracebackhide__ = True
    outer, recorder.cause = recorder.cause, recorder.cause or func.__name__
    try:
        with recorder.tracing():
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
    """Call a constructor that copies what Python or another tensor has."""
    __tracebackhide__ = True
    if kwargs.get("device") is None and not _has_device(args) and not recorder.is_suspended:
        kwargs = {**kwargs, "device": recorder.device}
    subject = args[0] if args else next(iter(kwargs.values()), None)
    return _from_host(recorder, func, args, kwargs, subject)


def _has_device(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.device) for each in args[1:])  # as_tensor(x, dtype, device) takes it by place


def new_tensor(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `tensor.new_tensor`, which makes a tensor where the first one is."""
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

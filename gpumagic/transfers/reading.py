"""Calls that read a tensor's values into Python, for which the host waits."""

from __future__ import annotations

from typing import Any

import torch

from gpumagic.transfers.recorder import Function, Recorder, is_free_to_read


def item(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Read one value."""
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


def format_(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Write a tensor into a text: one value by a format, others as `print` does."""
    __tracebackhide__ = True
    if args[0].dim() == 0:
        return item(recorder, func, args, kwargs)
    text = print_(recorder, torch.Tensor.__repr__, args[:1], {})
    return format(text, args[1])


def print_(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Format a tensor so that the copies formatting makes are seen one by one."""
    __tracebackhide__ = True
    from torch._tensor_str import _str

    tensor = args[0]
    if is_free_to_read(tensor) or type(tensor).__repr__ is not torch.Tensor.__repr__:
        return func(*args, **kwargs)
    # As `Tensor.__torch_function__` calls `__repr__`: the parts of a subclass's tensor are then plain ones.
    with recorder.looking_inside("print"), torch._C.DisableTorchFunctionSubclass():
        return _str(tensor, **kwargs)


def sync(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call what cannot know the shape of its result before the device is done."""
    __tracebackhide__ = True
    result = func(*args, **kwargs)
    tensor = args[0] if args else kwargs.get("input")
    if isinstance(tensor, torch.Tensor) and not is_free_to_read(tensor) and not recorder.is_traced:
        recorder.log.add_sync()
    return result


def _spoken(name: str) -> str:
    """Return ``"bool()"`` for ``"__bool__"`` and ``".item"`` for ``"item"``."""
    return f"{name.strip('_')}()" if name.startswith("__") else f".{name}"

"""Calls that move tensors because a line says so: `.to` and its like, and `copy_`."""

from __future__ import annotations

from typing import Any

import torch

from gpumagic.transfers import returning
from gpumagic.transfers.recorder import Function, Recorder


def move(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a method that returns its tensor elsewhere, or as it is."""
    __tracebackhide__ = True
    cause = f".{func.__name__}"
    result, seconds = recorder.call(func, args, kwargs, cause, args[0])
    if isinstance(result, torch.Tensor) and seconds is not None:  # tensor.type() without arguments names the type
        recorder.add_move(args[0], result, seconds, cause, non_blocking=_is_non_blocking(args, kwargs))
        returning.watch(recorder, args[0], result)
    return result


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The first flag by place, in every form of `to`, `cuda`, `cpu` and `copy_`.
    return bool(kwargs.get("non_blocking", next((each for each in args if isinstance(each, bool)), False)))


def copy(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy a tensor's values into another."""
    __tracebackhide__ = True
    source = args[1] if len(args) > 1 else kwargs.get("src")
    result, seconds = recorder.call(func, args, kwargs, "copy_", source)
    if seconds is not None:
        recorder.add_move(source, result, seconds, "copy_", non_blocking=_is_non_blocking(args, kwargs))
        returning.watch(recorder, source, result)
    return result

"""Copies of storages between devices, as `torch.save`, `torch.load`, `pickle`, and `storage.cpu()` make them.

No function mode sees them, since a storage is no tensor. Every one of them goes through a method of `UntypedStorage`,
which is exchanged while a run is open, and counts for the run that its thread works for.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from threading import Lock
from types import FrameType
from typing import Any

from gpumagic.source import frames

_counting: list[object] = []
_lock = Lock()


def begin(run: object) -> None:
    """Count copies of storages from now on, because a run wants it."""
    with _lock:
        if not _counting:
            _exchange()
        _counting.append(run)


def end(run: object) -> None:
    """Undo `begin`; again does nothing."""
    with _lock:
        _counting[:] = [each for each in _counting if each is not run]
        if not _counting:
            _put_back()


def _exchange() -> None:
    import torch

    for name, watched in _COPYING.items():
        if name not in vars(torch.UntypedStorage):  # torch's own are a base class's
            setattr(torch.UntypedStorage, name, watched(getattr(torch.UntypedStorage, name)))


def _put_back() -> None:
    import torch

    for name in _COPYING:
        if hasattr(vars(torch.UntypedStorage).get(name), "__wrapped__"):
            delattr(torch.UntypedStorage, name)


def _copying(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def copy_(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        start = time.perf_counter()
        result = function(self, source, *args, **kwargs)
        _count(source.device, self.device, source.nbytes(), start)
        return result

    return copy_


def _writing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def _write_file(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        start = time.perf_counter()
        result = function(self, *args, **kwargs)
        _count(self.device, "cpu", self.nbytes(), start)
        return result

    return _write_file


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def _set_from_file(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        start = time.perf_counter()
        result = function(self, *args, **kwargs)
        _count("cpu", self.device, self.nbytes(), start)
        return result

    return _set_from_file


_COPYING = {"copy_": _copying, "_write_file": _writing, "_set_from_file": _reading}


def _count(source: object, target: object, nbytes: int, start: float) -> None:
    from gpumagic.transfers import runs

    if str(source) == str(target) or not nbytes:
        return
    recorder = runs.of_this_thread()
    if recorder is None or recorder.is_traced:  # which sees it
        return
    cause, subject = _asked_for(sys._getframe(2))
    recorder.add_copy(str(source), str(target), nbytes, time.perf_counter() - start, cause, subject)


def _asked_for(innermost: FrameType) -> tuple[str, object]:
    """Return what made a copy of a storage, and what it was asked to move, as far as that is known."""
    cause = "storage." + innermost.f_code.co_name.lstrip("_")
    subject: object = None
    for frame in frames.stack(innermost):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "torch.serialization" and function in ("save", "load"):
            cause, subject = f"torch.{function}", frames.own(frame).get("obj")
        elif module == "torch.storage" and function in ("__reduce__", "_load_from_bytes"):
            cause, subject = "pickle", None
        elif module == "torch._tensor" and function == "__reduce_ex__" and cause == "pickle":
            subject = frames.own(frame).get("self")
    return cause, subject

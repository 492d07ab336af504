"""Copies of storages between devices: what `torch.save` and `torch.load` do, and `storage.cpu()` and its like.

No function mode sees them, since a storage is no tensor. Every one of them goes through `UntypedStorage.copy_`, which
is exchanged while a run is open, and counts for the run that was opened last in its thread.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from threading import Lock, get_ident
from types import FrameType
from typing import Any

from gpumagic.probes import frames
from gpumagic.probes.transfers import TransferLog, is_host

_logs: dict[int, list[TransferLog]] = {}
"""By thread, the logs of the runs that are open, the innermost last."""
_lock = Lock()


def begin(log: TransferLog) -> None:
    """Count this thread's copies of storages in a log from now on."""
    with _lock:
        if not _logs:
            _exchange()
        _logs.setdefault(get_ident(), []).append(log)


def end(log: TransferLog) -> None:
    """Undo `begin`; again does nothing."""
    with _lock:
        mine = _logs.get(get_ident(), [])
        mine[:] = [each for each in mine if each is not log]
        if not mine:
            _logs.pop(get_ident(), None)
        if not _logs:
            _put_back()


def _exchange() -> None:
    import torch

    if "copy_" not in vars(torch.UntypedStorage):  # torch's own is a base class's
        torch.UntypedStorage.copy_ = _watched(torch.UntypedStorage.copy_)


def _put_back() -> None:
    import torch

    if hasattr(vars(torch.UntypedStorage).get("copy_"), "__wrapped__"):
        del torch.UntypedStorage.copy_


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def copy_(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        start = time.perf_counter()
        result = function(self, source, *args, **kwargs)
        logs = _logs.get(get_ident())
        if logs and source.device != self.device and source.nbytes():
            cause, subject = _asked_for(sys._getframe(1))
            places = str(source.device), str(self.device)
            logs[-1].add_move(*places, source.nbytes(), time.perf_counter() - start, cause, subject)
            if is_host(places[1]):
                logs[-1].add_sync()
        return result

    return copy_


def _asked_for(frame: FrameType | None) -> tuple[str, object]:
    """Return what made a copy of a storage, and what it was asked to move, as far as that is known."""
    cause = "storage." + (frame.f_code.co_name.lstrip("_") if frame is not None else "copy_")
    while frame is not None:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "torch.serialization" and function in ("save", "load"):
            return f"torch.{function}", frames.own(frame).get("obj")
        frame = frame.f_back
    return cause, None

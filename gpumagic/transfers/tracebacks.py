"""Tracebacks of the user's errors without the frames that `%%ondevice` has between a line and torch."""

from __future__ import annotations

import sys
from typing import Any

from gpumagic.source import frames

_BETWEEN = frozenset(f"gpumagic.transfers.{each}" for each in ("device_mode", "operators", "recording"))
_CALLED_BY_THESE = frozenset({"torch._ops", "torch.utils._device"})
_SHOW = "showtraceback"
_open: list[object] = []
_shells: list[Any] = []


def drop_own_frames(error: BaseException | None) -> None:
    """Leave these frames out of the tracebacks of an error and of those that it is chained to."""
    for each in () if error is None else frames.related_exceptions(error):
        for step in frames.traceback_steps(each.__traceback__):
            after = step.tb_next
            while after is not None and frames.module_of(after.tb_frame) in _BETWEEN:
                after = after.tb_next
                while after is not None and frames.module_of(after.tb_frame) in _CALLED_BY_THESE:
                    after = after.tb_next
            if after is not step.tb_next:
                step.tb_next = after


def watch(run: object) -> None:
    """Have IPython, which shows a cell's traceback before the run ends, leave them out until `unwatch`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    _open.append(run)
    if shell is not None and _SHOW not in vars(shell):
        _shells.append(shell)
        show = shell.showtraceback

        def showtraceback(*args: Any, **kwargs: Any) -> Any:
            drop_own_frames(sys.exc_info()[1])
            return show(*args, **kwargs)

        vars(shell)[_SHOW] = showtraceback


def unwatch(run: object) -> None:
    """Undo `watch`. Idempotent, so that it can be called after an interrupt anywhere."""
    _open[:] = [each for each in _open if each is not run]
    while _shells and not _open:
        vars(_shells[-1]).pop(_SHOW, None)
        _shells.pop()

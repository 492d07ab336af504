"""Gradients, inference mode, autocast after Ctrl-C: a block of torch's that was torn open is closed.

`no_grad`, `enable_grad`, `set_grad_enabled`, `inference_mode`, `autocast` and a `step` restore their mode in Python. A
Ctrl-C that comes before they have done so leaves it, and nothing in the rest of the session has gradients ("element 0
of tensors does not require grad"), or all of it computes in half precision, with weights cast before their last update.
Torch does not repair that. A guarded cell does: where the interrupt came in torch's own code that switches a mode, all
are as they were when the cell began. After an interrupt anywhere else, what a statement has set stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from gpumagic.source import frames

_SWITCHING = (
    "torch.autograd.grad_mode", "torch.optim.optimizer", "torch.amp.autocast_mode", "torch.cuda.amp.autocast_mode",
    "torch.cpu.amp.autocast_mode", "torch.utils._contextlib", "torch._dynamo", "torch._jit_internal", "gpumagic",
)  # fmt: skip
"""Modules that switch a mode, and those whose functions are called while it is switched; ours is a function mode."""


class Modes(NamedTuple):
    """The modes of a thread."""

    gradients: bool = True
    """Whether they are recorded."""
    autocast: Mapping[str, tuple[bool, Any]] = MappingProxyType({})
    """Whether it is on and its dtype, by the type of device."""
    caches: bool = True
    """Whether autocast keeps the weights that it has cast."""
    nesting: int = 0
    """How many blocks of autocast are open; as the last one ends, torch forgets the weights that were cast."""


def current() -> Modes:
    """Return the thread's modes."""
    torch = sys.modules.get("torch")
    if torch is None:
        return Modes()
    kinds = ("cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name())
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    return Modes(bool(torch.is_grad_enabled()), autocast, bool(torch.is_autocast_cache_enabled()), _nesting(torch))


def repair(at_start: Modes, error: BaseException | None) -> None:
    """Restore the modes that a cell began with, if a Ctrl-C has torn open a block of torch's that would have.

    Args:
        at_start: `current` as the cell began.
        error: what ended the cell.
    """
    for each in () if error is None else frames.related_exceptions(error):
        switching = list(_switching_frames(each)) if isinstance(each, KeyboardInterrupt) else []
        for frame in switching:
            block = getattr(frame.f_locals.get("self"), "__dict__", {})
            if "_inference_mode_context" in block:  # else it ends once its traceback is forgotten; twice is as once
                block["_inference_mode_context"].__exit__(None, None, None)
        if switching:
            _restore(at_start)


def _switching_frames(interrupt: KeyboardInterrupt) -> Iterator[FrameType]:
    """Yield the frames that were switching a mode when the interrupt came, the innermost first."""
    stack = [step.tb_frame for step in frames.traceback_steps(interrupt.__traceback__)]
    while stack and not frames.is_in(stack[-1], ("torch",)):
        stack.pop()  # a signal's handler that is written in Python, such as asyncio's
    while stack and frames.is_in(stack[-1], _SWITCHING):
        yield stack.pop()


def _restore(modes: Modes) -> None:
    torch = sys.modules["torch"]
    torch._C._set_grad_enabled(modes.gradients)
    for kind, (_, dtype) in current().autocast.items():
        is_on, dtype = modes.autocast.get(kind, (False, dtype))  # noqa: PLW2901  # none where the cell imported torch
        torch.set_autocast_enabled(kind, is_on)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(modes.caches)
    while _nesting(torch) > modes.nesting:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _nesting(torch: Any) -> int:
    """Return how many blocks of autocast are open, which torch tells only by one more; Ctrl-C can't come in between."""
    both = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    return int([*map(type(both[0]).__call__, both)][1])

"""Grad mode after Ctrl-C: what it has torn open is closed, what the cell has set stays set.

`no_grad`, `enable_grad`, `set_grad_enabled` and an optimizer's `step` restore the mode in Python code. A Ctrl-C that
comes before they have done so leaves it, and nothing in the rest of the session has gradients ("element 0 of tensors
does not require grad"). Torch does not repair that. A guarded cell does, where it is certain that such a block was torn
open: the interrupt came in torch's own code that switches the mode, and the block had found the mode as the cell did.
Everything else is the cell's own doing, such as a statement `torch.set_grad_enabled(False)` that has run.
"""

from __future__ import annotations

import sys
from types import FrameType

from gpumagic.source import frames

_SWITCHING = (
    "torch.autograd.grad_mode", "torch.optim.optimizer", "torch.utils._contextlib", "torch._dynamo", "gpumagic",
)  # fmt: skip
"""Modules that switch the mode, and those whose functions are called while it is switched; ours is a function mode."""


def current() -> bool:
    """Return whether gradients are recorded; torch begins with it."""
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def repair(at_start: bool, error: BaseException | None) -> None:
    """Restore the mode that a cell began with, if a Ctrl-C has torn open a block of torch's that would have.

    Args:
        at_start: `current` as the cell began.
        error: what ended the cell.
    """
    if error is None or current() is at_start:
        return
    for each in frames.related_exceptions(error):
        if isinstance(each, KeyboardInterrupt) and _mode_before_torn_block(each) is at_start:
            sys.modules["torch"]._C._set_grad_enabled(at_start)


def _mode_before_torn_block(interrupt: KeyboardInterrupt) -> bool | None:
    """Return what the block that was interrupted while it switched the mode would have restored; None without one."""
    stack = [step.tb_frame for step in frames.traceback_steps(interrupt.__traceback__)]
    while stack and not _is_in(stack[-1], ("torch",)):
        stack.pop()  # a signal's handler that is written in Python, such as asyncio's
    before = None
    for frame in reversed(stack):
        if not _is_in(frame, _SWITCHING):
            break
        found = _remembered(frame)
        before = before if found is None else found
    return before


def _is_in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return any(module == name or module.startswith(f"{name}.") for name in modules)


def _remembered(frame: FrameType) -> bool | None:
    """Return the mode that a frame of torch's is to restore: a block's `prev`, a step's `prev_grad`."""
    if str(frame.f_globals.get("__name__")).startswith("torch.optim."):
        found = frame.f_locals.get("prev_grad")
    else:
        found = getattr(frame.f_locals.get("self"), "__dict__", {}).get("prev")
    return found if isinstance(found, bool) else None

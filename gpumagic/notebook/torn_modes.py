"""Gradients, inference mode, autocast after Ctrl-C: what it has torn open is closed, what the cell has set stays set.

`no_grad`, `enable_grad`, `set_grad_enabled`, `inference_mode`, `autocast` and a `step` restore their mode in Python. A
Ctrl-C that comes before they have done so leaves it, and nothing in the rest of the session has gradients ("element 0
of tensors does not require grad"), or all of it computes in half precision, with weights cast before their last update.
Torch does not repair that. A guarded cell does, where it is certain that such a block was torn open: the interrupt came
in torch's own code that switches the mode, and the block had found the mode as the cell did. Everything else is the
cell's own doing, such as a statement `torch.set_grad_enabled(False)` that has run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from gpumagic.source import frames

_OF_GRADIENTS = ("torch.autograd.grad_mode", "torch.optim.optimizer")
_OF_AUTOCAST = ("torch.amp.autocast_mode", "torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode")
_SWITCHING = (
    *_OF_GRADIENTS, *_OF_AUTOCAST, "torch.utils._contextlib", "torch._dynamo", "torch._jit_internal", "gpumagic",
)  # fmt: skip
"""Modules that switch a mode, and those whose functions are called while it is switched; ours is a function mode."""


class Modes(NamedTuple):
    """The modes of a thread."""

    gradients: bool = True
    """Whether they are recorded."""
    autocast: Mapping[str, tuple[bool, Any]] = MappingProxyType({})
    """Whether it is on and its dtype, by the type of device."""
    nesting: int = 0
    """How many blocks of autocast are open; as the last one ends, torch forgets the weights that were cast."""

    @property
    def casting(self) -> set[str]:
        """The types of devices for which autocast is on."""
        return {kind for kind, (is_on, _) in self.autocast.items() if is_on}


def current() -> Modes:
    """Return the thread's modes."""
    torch = sys.modules.get("torch")
    if torch is None:
        return Modes()
    kinds = ("cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name())
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    return Modes(bool(torch.is_grad_enabled()), autocast, _nesting(torch))


def repair(at_start: Modes, error: BaseException | None) -> None:
    """Restore the modes that a cell began with, if a Ctrl-C has torn open a block of torch's that would have.

    Args:
        at_start: `current` as the cell began.
        error: what ended the cell.
    """
    if error is None:
        return
    for each in frames.related_exceptions(error):
        if isinstance(each, KeyboardInterrupt):
            switching = list(_switching_frames(each))
            _end_inference(switching)
            _repair_gradients(switching, at_start.gradients)
            _repair_autocast(switching, at_start)


def _switching_frames(interrupt: KeyboardInterrupt) -> Iterator[FrameType]:
    """Yield the frames that were switching a mode when the interrupt came, the innermost first."""
    stack = [step.tb_frame for step in frames.traceback_steps(interrupt.__traceback__)]
    while stack and not frames.is_in(stack[-1], ("torch",)):
        stack.pop()  # a signal's handler that is written in Python, such as asyncio's
    while stack and frames.is_in(stack[-1], _SWITCHING):
        yield stack.pop()


def _end_inference(switching: list[FrameType]) -> None:
    """End torn blocks of `inference_mode`, which otherwise end once their traceback is forgotten; twice is as once."""
    for block in map(_attributes, switching):
        if "_inference_mode_context" in block:
            block["_inference_mode_context"].__exit__(None, None, None)


def _repair_gradients(switching: list[FrameType], at_start: bool) -> None:
    found = [_remembered(frame) for frame in switching if not frames.is_in(frame, _OF_AUTOCAST)]
    before = [mode for mode in found if mode is not None]
    if before and before[-1] is at_start:
        sys.modules["torch"]._C._set_grad_enabled(at_start)


def _remembered(frame: FrameType) -> bool | None:
    """Return the mode that a frame of torch's is to restore: a block's `prev`, a step's `prev_grad`."""
    found = frame.f_locals.get("prev_grad") if frames.is_in(frame, ("torch.optim",)) else _attributes(frame).get("prev")
    return found if isinstance(found, bool) else None


def _repair_autocast(switching: list[FrameType], at_start: Modes) -> None:
    """Do what the end of a torn block would have done, if it had found autocast as the cell did."""
    blocks = [_attributes(frame) for frame in switching if frames.is_in(frame, _OF_AUTOCAST)]
    if not blocks:
        return
    torch, block = sys.modules["torch"], blocks[-1]
    if "prev_fastdtype" in block:
        kind, found = block["device"], (block["prev"], block["prev_fastdtype"])
        if found == at_start.autocast.get(kind, (False, found[1])):
            torch.set_autocast_enabled(kind, found[0])
            torch.set_autocast_dtype(kind, found[1])
            torch.set_autocast_cache_enabled(block["prev_cache_enabled"])
    if current().casting == at_start.casting:  # also where the torn block was inside another, which has ended
        while _nesting(torch) > at_start.nesting:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _attributes(frame: FrameType) -> dict[str, Any]:
    found: dict[str, Any] = getattr(frame.f_locals.get("self"), "__dict__", {})
    return found


def _nesting(torch: Any) -> int:
    """Return how many blocks of autocast are open, which torch tells only by one more; Ctrl-C can't come in between."""
    both = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    return int([*map(type(both[0]).__call__, both)][1])

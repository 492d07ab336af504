"""The device context that `RecordingContext` is made from: torch's own, or before torch 2.6 one that nests like it.

Torch 2.4 puts a device context on top of the function modes, where whatever is left next takes it off
(pytorch#133666); torch 2.5 puts it below them (PR#133729) and fails on leaving two; since 2.6 an inner one takes the
outer one's place at the bottom until it is left. Imports torch at its top.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _device as device_state


class _NestingContext(device_state.DeviceContext):  # type: ignore[misc, unused-ignore]
    """Takes the place of the device context at the bottom of the modes, and gives it back."""

    prev_mode: TorchFunctionMode | None = None
    old_device: Any = None

    def __enter__(self) -> _NestingContext:  # noqa: PYI034  # as torch's own
        self.old_device, device_state.CURRENT_DEVICE = device_state.CURRENT_DEVICE, self.device
        above = _taken_off()
        if above and isinstance(above[-1], device_state.DeviceContext):
            self.prev_mode = above.pop()
        _put_on([*above, self])
        return self

    def __exit__(self, *error: object) -> None:
        device_state.CURRENT_DEVICE = self.old_device
        modes = [self.prev_mode if each is self else each for each in _taken_off()]
        _put_on([each for each in modes if each is not None])


def _taken_off() -> list[TorchFunctionMode]:
    """Take all function modes off, the innermost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def _put_on(modes: list[TorchFunctionMode]) -> None:
    for each in reversed(modes):
        _push_mode(each)


NestingContext: type[device_state.DeviceContext] = (
    device_state.DeviceContext if torch.__version__ >= (2, 6) else _NestingContext
)

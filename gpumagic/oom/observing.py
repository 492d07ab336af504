"""Observer."""

from __future__ import annotations

import sys
from collections.abc import Callable

MAX_LOOKS = 4
"""Looks at most while one guard is open: a look costs some tens of milliseconds."""


class Gate:
    """Lets the observer look while it is open.

    Args:
        look: takes a device's name and returns what is to be known; it must not allocate on the device.
    """

    def __init__(self, look: Callable[[str], object]) -> None:
        self._look = look
        self._looks = 0
        self.seen: dict[str, object] = {}
        """What the last look at each device saw."""

    def open(self) -> None:
        """Have the allocator tell this gate of its failures, where there is such an allocator."""
        if _attach():
            _gates.append(self)

    def close(self) -> None:
        """Look no more."""
        if self in _gates:
            _gates.remove(self)

    def told(self, device: str) -> None:
        """Look at a device; never raises, because torch would raise that in place of its own error."""
        self._looks += 1
        try:
            if self._looks <= MAX_LOOKS:
                self.seen[device] = self._look(device)
            else:
                self.seen.pop(device, None)  # it is of an earlier failure
        except BaseException:
            self.seen.pop(device, None)


_gates: list[Gate] = []
"""The open ones, the innermost last."""
_attached: list[object] = []


def _attach() -> bool:
    """Attach the observer unless it is, and return whether it is now."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    if _attached:
        return True
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or torch.cuda.memory.get_allocator_backend() != "native":
        return False
    attach(_observe)
    _attached.append(attach)
    return True


def _observe(device: int, requested: int, total: int, free: int) -> None:
    """Called by torch's allocator."""
    del requested, total, free
    if _gates:
        _gates[-1].told(f"cuda:{device}")



"""What was moved: whether it is the same as before, whether it and its copy are still alive, whether it was pinned.

Known by weak references and by the counter that torch raises with every change in place, so nothing is kept alive
and a new batch in an old one's place is not taken for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PINNABLE = frozenset({"cuda", "xpu"})
"""Backends that copy from pinned memory without a detour, while the host goes on; MPS shares the host's memory."""
WORTH_ASKING = 1024**2
"""Bytes below which it is not asked whether memory is pinned: asking takes a call of the driver's."""
_MANY = 1000
"""Tensors remembered before those that are gone are looked for."""


@dataclass
class Moved:
    """The tensors that the lines of one run moved.

    Attributes:
        copies: ``{(variable, source): (the tensor, its copy)}``, weakly.
    """

    copies: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    _before: dict[tuple[object, int], tuple[Any, int]] = field(default_factory=dict)
    _full: int = _MANY

    def is_repeat(self, place: object, subject: object) -> bool:
        """Return whether the same tensor, unchanged, was moved at this place before."""
        import torch

        if not isinstance(subject, torch.Tensor) or subject.is_inference():  # those do not count their changes
            return False
        key, version = (place, id(subject)), subject._version
        known = self._before.get(key)
        if known is not None and known[0]() is subject:
            self._before[key] = known[0], version
            return bool(known[1] == version)
        if len(self._before) > self._full:
            self._before = {each: kept for each, kept in self._before.items() if kept[0]() is not None}
            self._full = 2 * len(self._before) + _MANY
        self._before[key] = weakref.ref(subject), version
        return False

    def note_copy(self, name: str | None, source: str, subject: object, result: object) -> None:
        """Remember, weakly, a variable's tensor and its copy."""
        import torch

        if name is not None and isinstance(subject, torch.Tensor) and isinstance(result, torch.Tensor):
            self.copies[name, source] = weakref.ref(subject), weakref.ref(result)

    def still_both(self, variables: Mapping[str, object]) -> tuple[str, ...]:
        """Return the variables that are still bound to what was moved while its copy is alive, too."""
        return tuple(
            name
            for (name, _), (subject, result) in self.copies.items()
            if result() is not None and subject() is not None and variables.get(name) is subject()
        )


def is_pageable(subject: object, target: str, nbytes: int) -> bool | None:
    """Return whether a copy came from memory that is not pinned; None where that makes no difference, or little."""
    import torch

    if target.partition(":")[0] not in PINNABLE or nbytes < WORTH_ASKING or not isinstance(subject, torch.Tensor):
        return None
    return subject.device.type == "cpu" and not subject.is_pinned()

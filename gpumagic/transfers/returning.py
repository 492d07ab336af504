"""Gradients that flow back through a move, which copies them to where the moved tensor came from.

Autograd makes those copies in C++, where no function of Python's is called. So the graph's node of a move that a line
asked for gets a hook, which is taken away again when the run ends; it keeps no tensor, and leaves gradients alone.
A move that was made before the run has none.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gpumagic.transfers.recorder import Recorder

CAUSE = "backward"
_MANY = 1000
"""Hooks remembered before those whose graphs are gone are looked for."""


@dataclass
class Hooks:
    """The hooks of one run."""

    handles: list[Any] = field(default_factory=list)
    _full: int = _MANY

    def add(self, handle: Any) -> None:
        """Remember one."""
        if len(self.handles) > self._full:
            self.handles = [each for each in self.handles if each.hooks_dict_ref() is not None]
            self._full = 2 * len(self.handles) + _MANY
        self.handles.append(handle)

    def remove(self) -> None:
        """Take all away."""
        while self.handles:
            self.handles.pop().remove()


def watch(recorder: Recorder, source: object, result: object) -> None:
    """Count the copy that a gradient makes on its way back from ``result`` to ``source``, if ever it does."""
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)) or recorder.hooks is None:
        return
    if not source.requires_grad or source.device == result.device or "meta" in (source.device.type, result.device.type):
        return
    node = _node(result)
    if node is None:  # under no_grad
        return
    run = weakref.ref(recorder)

    def count(given: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]) -> None:
        recorder = run()
        if recorder is not None:
            _count(recorder, given, arrived)

    recorder.hooks.add(node.register_hook(count))


def _node(result: torch.Tensor) -> Any:
    """Return the node of the graph that copies back; of what was written to a view, its base's."""
    node, base = result.grad_fn, result._base
    is_view = node is not None and base is not None and "Copy" not in node.name()
    return base.grad_fn if is_view and base is not None else node


def _count(recorder: Recorder, given: tuple[Any, ...], arrived: tuple[Any, ...]) -> None:
    start = next((each for each in arrived if each is not None), None)
    if start is None:
        return
    for gradient in given:
        if gradient is not None and gradient.device != start.device:
            recorder.here().add_move(start, gradient, None, CAUSE)
            watch(recorder, start, gradient)  # where the gradient itself is differentiated

"""What the graphs of earlier cells keep for backward, so that a rehearsal lets go of it when the cell does.

A tensor that leads to a graph is sent without it, and backward through it cannot be rehearsed; but the storages that
its nodes saved are sent along, and live in the rehearsal for as long as the tensor does. Only where they lie in the
allocator's segments is known: what they leave behind is gaps, and how large those are decides what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpumagic.heap.autograd import Graphs


class OldGraphs:
    """Finds what the graphs keep; a node that several share is read once.

    Args:
        are_sent: whether anything is to be found.
    """

    def __init__(self, are_sent: bool) -> None:
        self._graphs = Graphs() if are_sent else None

    def storages(self, tensor: Any) -> Iterator[Any]:
        """Yield the storages on the tensor's device that its graph keeps."""
        import torch

        if self._graphs is None or tensor.device.type == "cpu":
            return
        graph = self._graphs.of(tensor.grad_fn)
        for saved in graph.tensors if graph is not None else ():
            if (
                saved.device == tensor.device
                and saved.layout == torch.strided
                and not torch._is_functional_tensor(saved)
            ):
                yield saved.untyped_storage()

    def note(self) -> str:
        """Return what to say of a tensor that leads to a graph."""
        kept = "whose memory stays in use" + ("" if self._graphs is None else " as long as the tensor")
        return f"a tensor with a graph from an earlier cell is rehearsed without that graph, {kept}"

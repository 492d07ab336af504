"""Operators whose results are as large as values say: masks, positions, distinct values."""

from __future__ import annotations

from typing import Any

import torch

from gpumagic.dryrun.stage.calls import Call
from gpumagic.dryrun.stage.contents import Contents


class Selections:
    """Sizes such results by what is known of the values, or assumed.

    Args:
        contents: knows small values, and says what is assumed for the others.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def indices(self, call: Call, here: torch.device) -> list[torch.Tensor | None]:
        """Return the indices as the device's kernel gets them: on the device, masks turned into positions."""
        moved: list[torch.Tensor | None] = []
        for index in next(value for argument, value in call.named() if argument.name == "indices"):
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                moved.append(index if index is None else index.to(here))
                continue
            count = self._contents.selected(index)
            moved += [torch.empty(count, dtype=torch.int64, device=here) for _ in range(index.dim())]
        return moved

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `nonzero` returns."""
        value = self._contents.of(tensor)
        if value is not None:
            return value.nonzero().to(tensor.device)
        count = self._contents.selected(tensor)
        # CUDA's and the CPU's kernels both lay the positions out by dimension.
        return torch.empty(tensor.dim(), count, dtype=torch.int64, device=tensor.device).t()

    def masked(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what `masked_select` returns."""
        whole = torch.broadcast_tensors(mask, tensor)[0]
        return torch.empty(self._contents.selected(whole), dtype=tensor.dtype, device=tensor.device)

    def unique(self, tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Return what `unique` returns where all values are distinct."""
        self._contents.suppose("all values are taken to be distinct")
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        index = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
        return flat, index, torch.empty(tensor.numel(), dtype=torch.int64, device=tensor.device)


def gru_cell(_input_gates: Any, _hidden_gates: Any, hx: Any, *_: Any) -> tuple[Any, ...]:
    """Return the new state and what backward needs."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def gru_cell_backward(grad: Any, _workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """Return the gradients of gates, state and biases."""
    rows, columns = grad.shape
    gates = [grad.new_empty(rows, 3 * columns) for _ in range(2)]
    biases = [grad.new_empty(3 * columns) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def lstm_cell_backward(dhy: Any, dcy: Any, cx: Any, _cy: Any, workspace: Any, has_bias: bool) -> Any:
    """Return the gradients of gates, cell and bias."""
    if dhy is None and dcy is None:
        return None, None, None
    gates = torch.empty_like(workspace)
    return gates, torch.empty_like(cx), workspace.new_empty(workspace.shape[1]) if has_bias else None


def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Let the CPU's kernel choose, which reads sizes only: tensors never written to cost no memory."""

    def host(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").requires_grad_(
            tensor.requires_grad and tensor.is_floating_point()
        )

    choice: int = torch._fused_sdp_choice(
        host(query), host(key), host(value), *map(host, args), **{k: host(v) for k, v in kwargs.items()}
    )
    return choice

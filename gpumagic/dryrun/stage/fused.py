"""Kernels that devices run as one: cells of recurrent networks, and the choice of an attention kernel."""

from __future__ import annotations

from typing import Any

import torch


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

"""Modules, leaves of the autograd graph and optimizers: what must stay the object it is while its tensors move.

Every change made here is written down first, and `Changes.undo` takes all of them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from gpumagic.transfers.move.contents import Contents, rebuilt

Successor = Callable[[Any], Any]


def slots_of(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield where a module and those inside it keep parameters and buffers: the dict, the key, the tensor."""
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            yield from ((kept, key, tensor) for key, tensor in list(kept.items()) if tensor is not None)


def tensors_of(module: Any) -> list[Any]:
    """Return a module's parameters, their gradients and its buffers."""
    found = [tensor for _, _, tensor in slots_of(module)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def state_to_move(optimizer: Any, parameters: Collection[int]) -> list[Any]:
    """Return the tensors an optimizer keeps beside the parameters of these ids.

    A step counter stays on the host unless the optimizer says otherwise, as in `Optimizer.load_state_dict`.
    """
    found: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if id(parameter) in parameters else None
            for key, value in (state or {}).items():
                if key != "step" or group.get("capturable") or group.get("fused"):
                    found += _tensors_in(value)
    return found


def _tensors_in(value: object) -> list[Any]:
    contents = Contents()
    contents.add(value)
    return contents.tensors


class Changes:
    """Changes to modules, leaves and optimizers, with what takes them back."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._final: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []

    def successor(self, tensor: Any) -> Any:
        """Return what stands for a tensor now: itself where it stayed the same object or did not move."""
        if id(tensor) in self._final:
            return self._final[id(tensor)]
        return self._copies.get(id(tensor), tensor)

    def on_undo(self, act: Callable[[], object]) -> None:
        """Add something to do when all is taken back."""
        self._undo.append(act)

    def undo(self) -> None:
        """Take everything back, the last first."""
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()
        self._final.clear()

    def move_module(self, module: Any, device: str) -> None:
        """Put the copies into a module, by its own `_apply` and, where its class has its own `to`, with its consent."""
        import torch

        slots = list(slots_of(module))
        self._undo.append(lambda: module._apply(lambda tensor: tensor))  # an RNN keeps a list of its weights
        for kept, key, tensor in slots:
            self._remember(tensor)
            self._undo.append(partial(kept.__setitem__, key, tensor))
        module._apply(lambda tensor: self._copies.get(id(tensor), tensor))
        for kept, key, tensor in slots:  # a tied weight stays one where torch had to make new parameters
            kept[key] = self._final.setdefault(id(tensor), kept[key])
        if type(module).to is not torch.nn.Module.to:
            module.to(device)

    def move_leaf(self, leaf: Any) -> None:
        """Put its copy into a leaf that collects gradients, or make a new leaf where torch cannot."""
        import torch

        new = self._copies.get(id(leaf))
        if new is None or id(leaf) in self._final:
            return  # it is there already, or a module's
        gradient = None if leaf.grad is None else self.successor(leaf.grad)
        if torch._has_compatible_shallow_copy_type(leaf, new):
            self._remember(leaf)
            leaf.grad = None
            leaf.data = new
            leaf.grad = gradient
            self._final[id(leaf)] = leaf
            return
        made = torch.nn.Parameter(new) if isinstance(leaf, torch.nn.Parameter) else new.requires_grad_()
        made.grad = gradient
        self._final[id(leaf)] = made

    def move_optimizer(self, optimizer: Any) -> None:
        """Point an optimizer at what stands for its parameters now, and put the copies of its state in."""
        state = dict(optimizer.state)
        self._undo += [partial(optimizer.state.update, state), optimizer.state.clear]
        done: dict[int, Any] = {}
        new = {self.successor(key): rebuilt(value, self.successor, done) for key, value in state.items()}
        for parameters in [group["params"] for group in optimizer.param_groups]:
            self._undo.append(partial(parameters.__setitem__, slice(None), list(parameters)))
            parameters[:] = [self.successor(parameter) for parameter in parameters]
        optimizer.state.clear()
        optimizer.state.update(new)

    def _remember(self, tensor: Any) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        before = tensor.data, None if gradient is None else gradient.data

        def restore() -> None:
            tensor.grad = None
            tensor.data = before[0]
            if gradient is not None:
                gradient.data = before[1]
                tensor.grad = gradient

        self._undo.append(restore)

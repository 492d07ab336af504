"""Tells which module a block belongs to: whose forward or backward asked for it, or whose parameter it goes with."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from gpumagic.dryrun.worker.kinds import with_storages
from gpumagic.heap.running_module import RunningModule


class History(Protocol):
    """What is told."""

    module: int | None
    """Whose are the blocks that are asked for from now on."""

    def own(self, key: int, module: int) -> None:
        """Say whose a storage is that is in use."""


class Modules(RunningModule):
    """The modules of one run, by number.

    Args:
        history: what is told.
        key_of: tells the storage of a tensor, if it is on the device of the dry run; else 0.
    """

    def __init__(self, history: History, key_of: Callable[[torch.Tensor], int]) -> None:
        super().__init__(lambda number: setattr(history, "module", number))
        self._history = history
        self._key_of = key_of
        self._owners: dict[int, int] = {}

    def look_around(self, namespace: Mapping[str, Any]) -> list[str]:
        """Say whose the parameters, gradients and optimizers' state are; return the modules' names by number."""
        self.name_all(namespace)
        for module, _ in self.numbered():
            self.entered(module)
        of_leaf = {
            leaf: number for module, number in self.numbered() for leaf in module._parameters.values()
            if leaf is not None
        }  # fmt: skip
        for leaf, number in of_leaf.items():
            if leaf.grad is not None:
                self._own(leaf.grad, number)
        for each in gc.get_objects():
            if issubclass(type(each), torch.optim.Optimizer):
                for leaf, state in each.state.items():
                    for value in state.values() if isinstance(state, dict) and leaf in of_leaf else ():
                        self._own(value, of_leaf[leaf])
        return self.names

    def entered(self, module: torch.nn.Module) -> None:
        """Say whose its parameters and buffers are."""
        number = self.number(module)
        for kind in "_parameters", "_buffers":
            for each in (vars(module).get(kind) or {}).values():
                self._own(each, number)

    def _own(self, tensor: object, number: int) -> None:
        for each in with_storages(tensor):
            key = self._key_of(each)
            if key and self._owners.get(key) != number:
                self._owners[key] = number
                self._history.own(key, number)

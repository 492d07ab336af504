"""The models that a cell leaves behind: what each is made of, tensor by tensor, so that the parent can reckon."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

CALLED = "__dry_run__"
RETURNED = "the model"
"""What a model is called that a function returns."""


class Models:
    """Finds the models of a run.

    Args:
        namespace: where the cell runs; a function that it calls in place of code is seen to return.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._returned: list[dict[str, Any]] = []
        function = namespace.get(CALLED)
        if function is not None:
            namespace[CALLED] = self._seeing(function)

    def _seeing(self, function: Callable[[], object]) -> Callable[[], object]:
        def called() -> object:
            made = function()
            if isinstance(made, nn.Module):
                self._returned.append(_described(RETURNED, made))
            return made

        return called

    def as_data(self) -> list[dict[str, Any]]:
        """Return the models as plain data: those with tensors that are part of no other one."""
        named: dict[int, tuple[str, nn.Module]] = {}
        for name, value in self._namespace.items():
            if isinstance(value, nn.Module) and not name.startswith("_"):
                named.setdefault(id(value), (name, value))
        inner = {id(each) for _, module in named.values() for each in module.modules() if each is not module}
        found = [_described(name, module) for key, (name, module) in named.items() if key not in inner]
        return [each for each in (*self._returned, *found) if each["groups"]]


def _described(name: str, module: nn.Module) -> dict[str, Any]:
    groups = Counter(_groups(module))
    return {"name": name, "kind": type(module).__name__, "groups": [[*key, times] for key, times in groups.items()]}


def _groups(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield what each tensor is: shared ones come once."""
    linear = _quantizable(module)
    for role, tensors in (("parameter", module.parameters()), ("buffer", module.buffers())):
        for each in tensors:
            if torch.nn.parameter.is_lazy(each):  # its module has not run, so it has no shape
                continue
            dtype, device = str(each.dtype).removeprefix("torch."), str(each.device)
            yield role, dtype, each.itemsize, tuple(each.shape), each.requires_grad, device, id(each) in linear


def _quantizable(module: nn.Module) -> set[int]:
    """Return the weights that bitsandbytes makes smaller: those of linear layers, but for the last, the output."""
    head = _output(module)
    taken = {
        id(each.weight)
        for each in module.modules()
        if isinstance(each, nn.Linear) and each is not head and isinstance(each.weight, torch.Tensor)
    }
    shared = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    return taken - shared


def _output(module: nn.Module) -> Any:
    """Return the layer that transformers leaves as it is when it loads a model in int8 or int4."""
    outputs: Any = module
    with contextlib.suppress(Exception):  # a `__getattr__` of the user's may raise anything
        head = outputs.get_output_embeddings()
        if head is not None:
            return head
    with contextlib.suppress(Exception):
        return outputs.lm_head
    return None

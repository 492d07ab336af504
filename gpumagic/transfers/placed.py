"""What a value has on which device: a tensor, the parts of a module or an optimizer, the tensors in a container."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from gpumagic._compat import torch_private
from gpumagic.heap import kinds
from gpumagic.heap.storages import nbytes_of
from gpumagic.report.base import Holder

PlacedKind = Literal["tensor", "module", "optimizer", "generator", "container"]
"""What has a device, or parts that have one."""
_CONTAINERS = (list, tuple, dict)
_MAX_ITEMS = 10_000
"""Items of a container that are read."""


def tensors_elsewhere(variables: Mapping[str, object], device: str) -> list[Holder]:
    """Return the variables that have bytes on a device other than ``device``, most bytes first."""
    holders = []
    for name, value in variables.items():
        kind = kind_of(value)
        if kind not in ("tensor", "module", "container"):
            continue
        with contextlib.suppress(Exception):  # of a tensor of a class of its own
            for place, nbytes in bytes_by_device(value, kind).items():
                if nbytes and place not in (device, "meta"):
                    holders.append(Holder(name, place, nbytes))
    return sorted(holders, key=lambda holder: -holder.nbytes)


def kind_of(value: Any) -> PlacedKind | None:
    """Return what a value is that has a device, or whose parts may have one; None for anything else."""
    import torch

    own = type(value)  # not isinstance(): a proxy's __class__ may evaluate or raise
    if issubclass(own, torch.Tensor):
        return "tensor"
    if issubclass(own, torch.nn.Module):
        return "module"
    if issubclass(own, torch.optim.Optimizer):
        return "optimizer"
    if issubclass(own, torch.Generator):
        return "generator"
    return "container" if issubclass(own, _CONTAINERS) else None


def bytes_by_device(value: Any, kind: PlacedKind) -> Counter[str]:
    """Return the bytes by device of the tensors that a value of a kind holds, each tensor once."""
    totals: Counter[str] = Counter()
    if kind == "generator":
        totals[str(value.device)] = 0
        return totals
    with torch_private.DISABLE_TORCH_FUNCTION.get()():
        tensors = {id(tensor): tensor for tensor in tensors_in(value, kind)}
        for tensor in tensors.values():
            totals[str(tensor.device)] += nbytes_of(tensor)
    return totals


def tensors_in(value: Any, kind: PlacedKind | None) -> Iterator[Any]:
    """Yield the tensors that a value of a kind holds, but for those that have no memory yet."""
    if kind == "tensor":
        if not _is_lazy(value):
            yield value
    elif kind == "module":
        yield from _tensors_of_module(value)
    elif kind == "optimizer":
        yield from _tensors_of_optimizer(kinds.unwrapped(value))
    elif kind == "container":
        for item in itertools.islice(_items_of(value), _MAX_ITEMS):
            if kind_of(item) == "tensor":
                yield item


def _is_lazy(tensor: Any) -> bool:
    """Return whether a parameter or a buffer of a lazy module has no shape and no memory yet."""
    import torch

    return bool(torch.nn.parameter.is_lazy(tensor))


def _tensors_of_module(module: Any) -> Iterator[Any]:
    for _, part in kinds.modules_in(module):
        for kind in (torch_private.PARAMETERS, torch_private.BUFFERS):
            for _, tensor in kinds.registered(part, kind):
                if not _is_lazy(tensor):
                    yield tensor


def _tensors_of_optimizer(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer, and its state, without the counts of steps."""
    for group in kinds.parameter_groups(optimizer):
        yield from group["params"]
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step" and kind_of(value) == "tensor":
                yield value


def _items_of(container: Any) -> Iterable[Any]:
    """Return what a list, a tuple or a dict has, without a method of a subclass of the user's."""
    if issubclass(type(container), dict):
        return dict.values(container)
    if issubclass(type(container), list):
        return list.__iter__(container)
    return tuple.__iter__(container)

"""Who brings what: the tensors that each named variable, and the optimizers behind it, have elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.transfers.move.contents import Contents
from gpumagic.transfers.move.owners import state_to_move, tensors_of

CAUSE = "--move"


@dataclass
class Load:
    """What one variable brings along."""

    name: str
    contents: Contents = field(default_factory=Contents)
    tensors: list[Any] = field(default_factory=list)


def of(names: list[str], namespace: Mapping[str, Any], device: str) -> tuple[Contents, list[Load]]:
    """Return what the names hold together, and who brings which tensor that is not there yet; each only once.

    Raises:
        OptionError: a name that is not there, or holds nothing that has a device.
    """
    whole, taken = Contents(), set[int]()
    loads = [look_up(name, namespace) for name in names]
    for load in loads:
        whole.add(namespace[load.name])
        load.tensors = _not_there(_own_tensors(load.contents), taken, device)
    moving = {id(each) for each in _own_tensors(whole)}
    for name, optimizer in _followers(whole, moving, namespace):
        kept = state_to_move(optimizer, moving)
        loads.append(Load(name, tensors=_not_there(kept, taken, device)))
        if all(optimizer is not each for each in whole.optimizers):
            whole.optimizers.append(optimizer)
    return whole, loads


def look_up(name: str, namespace: Mapping[str, Any]) -> Load:
    """Return what a variable brings along, as far as its value tells; raise `OptionError` where that is nothing."""
    if name not in namespace:
        near = difflib.get_close_matches(name, [each for each in namespace if not each.startswith("_")], n=1)
        hint = f"did you mean {near[0]}?" if near else "write names of variables, such as --move model,x"
        raise OptionError(f"{CAUSE}: there is no variable {name!r}; {hint}")
    load = Load(name)
    if not load.contents.add(namespace[name]):
        kind = type(namespace[name]).__name__
        hint = "; torch.from_numpy makes it a tensor" if kind == "ndarray" else ""
        if hasattr(type(namespace[name]), "to"):
            hint = f"; it has a .to() of its own: {name} = {name}.to(...)"
        raise OptionError(f"{CAUSE}: {name!r} ({kind}) holds no tensor, module or optimizer that could move{hint}")
    return load


def _own_tensors(contents: Contents) -> list[Any]:
    found = [tensor for module in contents.modules for tensor in tensors_of(module)]
    for tensor in (*contents.tensors, *contents.parameters()):
        found.append(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            found.append(tensor.grad)
    return found


def _not_there(tensors: Iterable[Any], taken: set[int], device: str) -> list[Any]:
    found = []
    for tensor in tensors:
        if str(tensor.device) != device and id(tensor) not in taken:
            taken.add(id(tensor))
            found.append(tensor)
    return found


def _followers(whole: Contents, moving: set[int], namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the optimizers that are asked for or that work on what is asked for, with a name of each."""
    import torch

    found: dict[int, tuple[str, Any]] = {}
    for name, value in list(namespace.items()):
        if issubclass(type(value), torch.optim.Optimizer) and not name.startswith("_"):
            works_on = {id(each) for group in value.param_groups for each in group["params"]}
            if works_on & moving:
                found.setdefault(id(value), (name, value))
    for optimizer in whole.optimizers:
        found.setdefault(id(optimizer), ("optimizer", optimizer))
    return list(found.values())

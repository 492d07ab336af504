"""What tensors are for: found from the modules and optimizers that are alive, wherever they are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpumagic.heap.anatomy import Fields, attributes, fields_of


def subclasses(*bases: type) -> set[type]:
    """Return the classes and all that derive from them, without asking their metaclasses."""
    found: set[type] = set()
    waiting = list(bases)
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += type.__subclasses__(kind)
    return found


def roles(owners: Iterable[object]) -> dict[int, str]:
    """Return the kind of each tensor that a module or an optimizer among ``owners`` holds, by the tensor's `id`."""
    import torch

    found: dict[int, str] = {}
    fields: dict[type, Fields | None] = {}
    for owner in owners:
        if type(owner) not in fields:
            fields[type(owner)] = fields_of(type(owner))
        own = dict(attributes(owner, fields[type(owner)]))
        if issubclass(type(owner), torch.nn.Module):
            found.update((id(each), "parameter") for each in _values(own.get("_parameters")))
            found.update((id(each), "buffer") for each in _values(own.get("_buffers")))
        else:
            for state in _values(own.get("state")):
                for each in _values(state):
                    found.setdefault(id(each), "optimizer state")
    return found


def _values(mapping: Any) -> list[object]:
    return list(dict.values(mapping)) if isinstance(mapping, dict) else []

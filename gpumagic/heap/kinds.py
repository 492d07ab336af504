"""What tensors are for: parameters, gradients, optimizer state, buffers.

Read from the modules and optimizers that have a name, without running their code. What is on the device at both ends
was there at the peak too; the rest of the peak is activations, and whatever else came and went. What is there only at
the end came at some time, which `--trace` knows by its address.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumagic.heap import autograd, storages
from gpumagic.heap.object_fields import Fields, attributes, fields_of
from gpumagic.memory.timeline import KeptStorage, KeptStorages


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


MOST_TENSORS = 400
"""Tensors beyond which a cell that is not traced does not look: each takes five microseconds."""


def find_kept(namespace: Mapping[str, object], most: int | None = MOST_TENSORS) -> KeptStorages:
    """Return the storages of the modules and optimizers in a name space, those in host memory left out.

    Args:
        namespace: whose values are looked at.
        most: return nothing where there are more tensors than that.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "optim"):
        return {}
    values = list(namespace.values())
    modules = list(_modules([each for each in values if issubclass(type(each), torch.nn.Module)]))
    optimizers = [each for each in values if issubclass(type(each), torch.optim.Optimizer)]
    if not modules and not optimizers:
        return {}
    from gpumagic.heap.storages import undisturbed

    found: dict[int, KeptStorage] = {}
    with undisturbed():
        states = [state for each in optimizers for state in _values_of(_own(each).get("state"))]
        weights = [each for module in modules for each in _tensors(_own(module).get("_parameters"))]
        if most is not None and len(weights) + sum(map(len, states)) > most:
            return {}
        _note(found, "parameters", weights)
        _note(found, "buffers", (each for module in modules for each in _tensors(_own(module).get("_buffers"))))
        seen = autograd.peek(autograd.leaves(weights)) or []
        _note(found, "gradients", (alias for _, alias in seen))
        _note(found, "optimizer state", (each for state in states for each in _tensors(state)))
    storages.forget_the_dead()
    return found


def _note(found: dict[int, KeptStorage], part: str, tensors: Iterable[Any]) -> None:
    import torch

    for each in tensors:
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.device.type in ("cpu", "meta"):
            continue
        if each.layout is torch.strided:
            storage = each.untyped_storage()
            found.setdefault(
                storages.number_of(storage), KeptStorage(str(each.device), part, storage.nbytes(), storage.data_ptr())
            )


def _modules(roots: Iterable[object]) -> Iterator[object]:
    """Yield modules and all inside them, each once."""
    waiting, seen = list(roots), set()
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += _values_of(_own(module).get("_modules"))


def _own(owner: object) -> dict[object, Any]:
    return dict(attributes(owner, fields_of(type(owner))))


def _tensors(mapping: Any) -> list[Any]:
    return [each for each in _values_of(mapping) if each is not None]


def _values_of(mapping: Any) -> list[Any]:
    return list(dict.values(mapping)) if isinstance(mapping, dict) else []

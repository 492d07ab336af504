"""What was on a device from the start of a cell to its end, and what for: weights, gradients, optimizer state.

Read from the modules and optimizers that have a name, without running their code. What is on the device at both ends
was there at the peak too; the rest of the peak is activations, and whatever else came and went. What is there only at
the end came at some time, which `--trace` knows by its address.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumagic.heap import gradients, identity
from gpumagic.heap.anatomy import attributes, fields_of
from gpumagic.memory.timeline import Kept, KeptStorages

MOST = 400
"""Tensors beyond which a cell that is not traced does not look: each takes five microseconds."""


def look(namespace: Mapping[str, object], most: int | None = MOST) -> KeptStorages:
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

    found: dict[int, Kept] = {}
    with undisturbed():
        states = [state for each in optimizers for state in _values(_own(each).get("state"))]
        weights = [each for module in modules for each in _tensors(_own(module).get("_parameters"))]
        if most is not None and len(weights) + sum(map(len, states)) > most:
            return {}
        _note(found, "parameters", weights)
        _note(found, "buffers", (each for module in modules for each in _tensors(_own(module).get("_buffers"))))
        seen = gradients.peek(gradients.leaves(weights)) or []
        _note(found, "gradients", (alias for _, alias in seen))
        _note(found, "optimizer state", (each for state in states for each in _tensors(state)))
    identity.forget_the_dead()
    return found


def _note(found: dict[int, Kept], part: str, tensors: Iterable[Any]) -> None:
    import torch

    for each in tensors:
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.device.type in ("cpu", "meta"):
            continue
        if each.layout is torch.strided:
            storage = each.untyped_storage()
            found.setdefault(
                identity.of_storage(storage), Kept(str(each.device), part, storage.nbytes(), storage.data_ptr())
            )


def _modules(roots: Iterable[object]) -> Iterator[object]:
    """Yield modules and all inside them, each once."""
    waiting, seen = list(roots), set()
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += _values(_own(module).get("_modules"))


def _own(owner: object) -> dict[object, Any]:
    return dict(attributes(owner, fields_of(type(owner))))


def _tensors(mapping: Any) -> list[Any]:
    return [each for each in _values(mapping) if each is not None]


def _values(mapping: Any) -> list[Any]:
    return list(dict.values(mapping)) if isinstance(mapping, dict) else []

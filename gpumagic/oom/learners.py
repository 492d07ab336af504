"""The models and optimizers at work when a cell failed: what they hold, and which savings they have on already."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumagic.heap import autograd
from gpumagic.oom.rules.facts import Model, Optimizer

Named = Iterable[tuple[str, object, bool]]
"""``(name, value, whether only a function's variable names it)``."""


def models(named: Named, device: str) -> tuple[Model, ...]:
    """Return the modules among these that have parameters on the device, largest first, each once."""
    import torch

    found: dict[int, Model] = {}
    for name, value, local in named:
        if issubclass(type(value), torch.nn.Module) and id(value) not in found:
            module: Any = value
            made = [each for each in module.parameters() if not torch.nn.parameter.is_lazy(each)]
            here = [each for each in made if str(each.device) == device]
            if here:
                found[id(value)] = _model(name, module, here, local=local)
    return tuple(sorted(found.values(), key=lambda model: -model.nbytes))


def optimizers(named: Named, device: str) -> tuple[Optimizer, ...]:
    """Return the optimizers among these with parameters on the device."""
    import torch

    found: dict[int, Optimizer] = {}
    for name, value, local in named:
        if issubclass(type(value), torch.optim.Optimizer) and id(value) not in found:
            optimizer: Any = value
            here = [each for group in optimizer.param_groups for each in group["params"] if str(each.device) == device]
            if here:
                found[id(value)] = _optimizer(name, optimizer, here, local=local)
    return tuple(found.values())


def progress(modules: list[Any]) -> float | None:
    """Return how far the innermost of nested running modules stands among all leaves of the outermost, 0 to 1."""
    if len(modules) < 2:
        return None
    leaves = [each for each in modules[0].modules() if not any(each.children())]
    inside = {id(each) for each in modules[-1].modules()}
    place = next((i for i, leaf in enumerate(leaves) if id(leaf) in inside), None)
    return None if place is None or len(leaves) < 2 else (place + 1) / len(leaves)


def _model(name: str, module: Any, parameters: list[Any], *, local: bool) -> Model:
    import torch

    blocks, depth, leaves = _blocks(name, module)
    return Model(
        name=name,
        nbytes=sum(each.nbytes for each in parameters),
        float32_nbytes=sum(each.nbytes for each in parameters if each.dtype == torch.float32),
        training=module.training,
        checkpoints=_checkpoints(module),
        gradients=sum(alias.nbytes for _, alias in autograd.peek(autograd.leaves(parameters)) or ()),
        blocks=blocks,
        depth=depth,
        leaves_in_block=leaves,
        sequential=issubclass(type(module), torch.nn.Sequential),
        local=local,
    )


def _checkpoints(module: Any) -> bool | None:
    """Return whether a module recomputes activations; None where neither a switch nor a wrapped forward tells."""
    if any(_is_wrapped(each) for each in module.modules()):
        return True
    switch = getattr(module, "is_gradient_checkpointing", None)
    if isinstance(switch, bool):
        return switch
    return False if callable(getattr(type(module), "gradient_checkpointing_enable", None)) else None


def _is_wrapped(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and getattr(forward.func, "__name__", "") == "checkpoint"


def _blocks(name: str, module: Any) -> tuple[str | None, int, int]:
    """Return code for the longest list of like children with layers of their own, its length, and their layers."""
    import torch

    best: tuple[str | None, int, int] = (None, 0, 0)
    for path, child in module.named_modules():
        if not issubclass(type(child), torch.nn.ModuleList | torch.nn.Sequential):
            continue
        blocks = list(child)
        if len(blocks) > max(best[1], 1) and len({type(each) for each in blocks}) == 1 and any(blocks[0].children()):
            leaves = sum(not any(each.children()) for each in blocks[0].modules())
            best = (_code(name, path), len(blocks), leaves)
    return best


def _code(name: str, path: str) -> str:
    parts = [f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".") if part]
    return name + "".join(parts)


def _optimizer(name: str, optimizer: Any, parameters: list[Any], *, local: bool) -> Optimizer:
    own = {id(each) for each in parameters}
    states: list[Mapping[str, Any]] = [dict(state) for each, state in optimizer.state.items() if id(each) in own]
    return Optimizer(
        name=name,
        kind=type(optimizer).__name__,
        nbytes=sum(each.nbytes for each in parameters),
        state=sum(value.nbytes for state in states for value in _tensors(state)),
        foreach=optimizer.defaults.get("foreach"),
        fused=optimizer.defaults.get("fused"),
        local=local,
    )


def _tensors(state: Mapping[str, Any]) -> Iterator[Any]:
    import torch

    for value in state.values():
        if issubclass(type(value), torch.Tensor) and value.numel() > 1:
            yield value

"""Modules and optimizers by what they store: an overridden `parameters()`, property or `__iter__` is not called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpumagic.heap.branches import attributes_of, dict_of


def modules_in(module: object) -> Iterator[tuple[str, Any]]:
    """Yield a module and all inside it with their paths, each once, as `named_modules` of torch would."""
    waiting, seen = [("", module)], set()
    while waiting:
        path, each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        below = list(children_of(each))
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in reversed(below)]


def children_of(module: object) -> Iterator[tuple[str, Any]]:
    """Yield what a module has registered as its own modules."""
    yield from registered(module, "_modules")


def registered(module: object, kind: str) -> list[tuple[str, Any]]:
    """Return what a module has under ``"_modules"``, ``"_parameters"`` or ``"_buffers"``, by name."""
    found: Any = attributes_of(module).get(kind)
    if isinstance(found, dict):
        entries = list(dict.items(found))
    elif dict_of(type(found)).get("__module__") == "torch.jit._script":  # a dictionary of C++'s
        entries = list(found.items())
    else:
        entries = []
    return [(name, each) for name, each in entries if each is not None]


def parameters_of(module: object) -> list[Any]:
    """Return the parameters of a module and of all inside it, each once."""
    found: dict[int, Any] = {}
    for _, each in modules_in(module):
        found.update((id(tensor), tensor) for _, tensor in registered(each, "_parameters"))
    return list(found.values())


_WRAPPED = ("optimizer", "_optimizer")
"""What the optimizers of accelerate and Lightning call the one that they wrap."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the parameters: the one inside, where this is a wrapper such as accelerate's."""
    import torch

    stored = attributes_of(optimizer)
    inner = [stored[name] for name in _WRAPPED if issubclass(type(stored.get(name)), torch.optim.Optimizer)]
    return unwrapped(inner[0]) if inner and "param_groups" not in stored else optimizer


def parameter_groups(optimizer: object) -> list[dict[str, Any]]:
    """Return an optimizer's groups of parameters."""
    groups = attributes_of(optimizer).get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []

"""Modules by number, and by the names that they have in a notebook. Imports torch at its top."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch

from gpumagic.heap.branches import attributes_of, modules_in, name_of_type


class NamedModules:
    """Modules by number.

    Attributes:
        names: by number the shortest way to a module from a variable, as ``"model.blocks.3.attn"``; else its class.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[int, tuple[ref[torch.nn.Module], int]] = {}  # by identity: no `__hash__` of the user's

    def name_all(self, namespace: Mapping[str, Any]) -> None:
        """Name the modules that variables lead to, by the shortest way."""
        named: set[int] = set()
        for name, value in [*_roots(namespace), *_held(namespace)]:
            for path, module in modules_in(value):
                if id(module) not in named:
                    named.add(id(module))
                    self.names[self.number(module)] = ".".join(filter(None, (name, path)))

    def number(self, module: torch.nn.Module) -> int:
        """Return a module's number; one that no variable leads to is named by the class that it is in."""
        known = self._known(module)
        if known is not None:
            return known
        for path, each in modules_in(module):
            if self._known(each) is None:
                self._numbers[id(each)] = ref(each), len(self.names)
                self.names.append(".".join(filter(None, (name_of_type(type(module)), path))))
        return self._numbers[id(module)][1]

    def numbered(self) -> list[tuple[torch.nn.Module, int]]:
        """Return the modules that are alive, each with its number."""
        found = [(alive(), number) for alive, number in list(self._numbers.values())]
        return [(module, number) for module, number in found if module is not None]

    def _known(self, module: torch.nn.Module) -> int | None:
        alive, number = self._numbers.get(id(module), (None, None))
        return number if alive is not None and alive() is module else None


def _roots(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from (
        (name, value)
        for name, value in namespace.items()
        if issubclass(type(value), torch.nn.Module) and not name.startswith("_")
    )


def _held(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that variables have as attributes, such as a trainer's."""
    for name, value in list(namespace.items()):
        if not name.startswith("_") and not issubclass(type(value), (type, torch.nn.Module)):
            yield from ((f"{name}.{attribute}", module) for attribute, module in _roots(attributes_of(value)))

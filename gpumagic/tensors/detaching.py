"""The line that lets go of what autograd graphs keep, by giving every name of the graphs' results a detached tensor.

A line is only given where it does so: a tensor in a tuple cannot be replaced, and one that an output keeps besides
its name goes on keeping its graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic.heap.kinds import subclasses
from gpumagic.heap.paths import Names, Path, is_typed, spell
from gpumagic.tensors.held_report import is_code

MOST = 3
"""Statements in a line."""


class Detaching:
    """Finds the lines.

    Args:
        namespace: the notebook's variables.
        names: those of the tensors.
    """

    def __init__(self, namespace: Mapping[str, object], names: Names) -> None:
        self._namespace, self._names = namespace, names
        self._lists: dict[int, str | None] = {}
        """By the `id` of the way to a list, the statement that detaches all of its items, where it can."""

    def line(self, roots: Iterable[int]) -> str | None:
        """Return the line after which none of the tensors with these `id`s keeps its graph, or None."""
        statements = {self._statement(way): None for root in roots for way in self._names.ways(root)}
        found = [each for each in statements if each is not None]
        return "; ".join(found) if len(found) == len(statements) <= MOST and found else None

    def _statement(self, way: Path) -> str | None:
        if way.style == "[" and way.parent is not None and way.parent.kind is list:
            whole = self._of_list(way.parent)
            if whole is not None:
                return whole
        name = spell(way, self._names.best)
        return f"{name} = {name}.detach()" if _can_be_assigned(way) and is_code(f"{name} = 0") else None

    def _of_list(self, way: Path) -> str | None:
        if id(way) not in self._lists:
            name = spell(way, self._names.best)
            alike = _are_tensors(_reached(way, self._namespace)) and is_code(f"{name}[:] = 0")
            self._lists[id(way)] = f"{name}[:] = [each.detach() for each in {name}]" if alike else None
        return self._lists[id(way)]


def _can_be_assigned(way: Path) -> bool:
    owner = None if way.parent is None else way.parent.kind
    if owner is not None and issubclass(owner, tuple):
        return False
    return way.style in ("name", "[", "state") or (way.style == "." and is_typed(str(way.key)))


def _reached(way: Path, namespace: Mapping[str, object]) -> Any:
    """Return what a way leads to through plain lists and dicts; None through anything else."""
    first, *steps = way.steps()
    value: Any = namespace.get(first.key)
    for step in steps:
        if step.style != "[" or type(value) not in (list, dict):
            return None
        value = value[step.key]
    return value


def _are_tensors(value: Any) -> bool:
    import torch

    kinds = subclasses(torch.Tensor)
    return type(value) is list and len(value) > 1 and all(type(each) in kinds for each in value)

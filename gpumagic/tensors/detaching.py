"""The line that makes tensors release their autograd graphs, where there is one.

A tensor in a tuple cannot be replaced, and one that an output keeps besides its name still keeps its graph.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping

from gpumagic.heap.branches import class_attribute
from gpumagic.heap.kinds import is_node, subclasses
from gpumagic.heap.paths import MAX_PATHS, Names, Path

_MAX_STATEMENTS = 3
"""Statements in the line that releases a graph."""


class DetachCommands:
    """Finds the line that makes tensors release their autograd graphs: it rebinds every name of theirs.

    Args:
        names: the tensors' names.
        objects: what the names were found in, by `id`.
    """

    def __init__(self, names: Names, objects: Mapping[int, object]) -> None:
        import torch

        self._names, self._objects = names, objects
        self._tensors = subclasses(torch.Tensor)
        self._lists: dict[int, str | None] = {}
        """By the `id` of a list: the statement that detaches all of its items, if there is one."""

    def line(self, roots: Iterable[int]) -> str | None:
        """Return the line after which none of the tensors with these `id`s keeps its graph, or None."""
        paths = [self._names.paths(root) for root in roots]
        if any(len(each) >= MAX_PATHS for each in paths):  # there may be more
            return None
        statements = {self._statement(path): None for each in paths for path in each}
        found = [each for each in statements if each is not None]
        return "; ".join(found) if len(found) == len(statements) <= _MAX_STATEMENTS and found else None

    def _statement(self, path: Path) -> str | None:
        if path.style == "[" and path.parent is not None and path.parent.kind is list:
            whole = self._of_list(path.parent)
            if whole is not None:
                return whole
        name = self._names.code(path)
        if name is None or _is_of_node(path):
            return f"del {name}" if name is not None and path.style == "name" else None
        return f"{name} = {name}.detach()" if _can_be_assigned(path) else None

    def _of_list(self, path: Path) -> str | None:
        if path.target not in self._lists:
            name, items = self._names.code(path), self._objects.get(path.target)
            is_of_tensors = (
                type(items) is list and len(items) > 1 and all(type(each) in self._tensors for each in items)
            )
            has_line = name is not None and is_of_tensors
            self._lists[path.target] = f"{name}[:] = [each.detach() for each in {name}]" if has_line else None
        return self._lists[path.target]


def _is_of_node(path: Path) -> bool:
    return path.kind is not None and is_node(path.kind)


def _can_be_assigned(path: Path) -> bool:
    """Return whether what a path leads to can be replaced there: not in a tuple, a frozen dataclass..."""
    owner = None if path.parent is None else path.parent.kind
    if owner is None:
        return path.style == "name"
    setter = class_attribute(owner, "__setitem__" if path.style == "[" else "__setattr__")
    in_c = (types.WrapperDescriptorType, types.MethodDescriptorType)
    return path.style in ("[", ".") and not issubclass(owner, tuple) and type(setter) in in_c

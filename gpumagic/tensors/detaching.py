"""The line that makes tensors release their autograd graphs."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping

from gpumagic.heap.branches import MAX_PATHS, Names, Path, class_attribute
from gpumagic.heap.kinds import is_node, subclasses

_MAX_STATEMENTS = 3
"""Statements in the line that releases a graph."""


class DetachCommands:
    """Finds the line that makes tensors release their autograd graphs: it rebinds every name of theirs.

    A tensor in a tuple cannot be replaced, and one that an output keeps besides its name still keeps its graph.

    Args:
        names: the tensors' names.
        objects: what the names were found in, by `id`.
    """

    def __init__(self, names: Names, objects: Mapping[int, object]) -> None:
        import torch

        self._names = names
        self._objects = objects
        self._tensors = subclasses(torch.Tensor)
        self._lists: dict[int, str | None] = {}
        """By the `id` of a list: the statement that detaches all of its items, if there is one."""

    def line(self, roots: Iterable[int]) -> str | None:
        """Return the line after which none of the tensors with these `id`s keeps its graph, or None."""
        statements: dict[str, None] = {}
        for root in roots:
            paths = self._names.paths_to.get(root, ())
            if len(paths) >= MAX_PATHS:  # there may be more
                return None
            for path in paths:
                statement = self._statement(path)
                if statement is None:
                    return None
                statements[statement] = None
        if not statements or len(statements) > _MAX_STATEMENTS:
            return None
        return "; ".join(statements)

    def _statement(self, path: Path) -> str | None:
        """Return the statement that makes what a path leads to release its graph."""
        owner = path.parent
        if path.style == "[" and owner is not None and owner.kind is list:
            whole = self._of_list(owner)
            if whole is not None:
                return whole
        name = self._names.code(path)
        if name is None:
            return None
        if path.kind is not None and is_node(path.kind):
            return f"del {name}" if path.style == "name" else None
        if not _can_be_assigned(path):
            return None
        return f"{name} = {name}.detach()"

    def _of_list(self, path: Path) -> str | None:
        """Return the statement that detaches all items of a list, if it has nothing but tensors."""
        if path.target not in self._lists:
            statement = None
            name = self._names.code(path)
            items = self._objects.get(path.target)
            if name is not None and self._are_tensors(items):
                statement = f"{name}[:] = [each.detach() for each in {name}]"
            self._lists[path.target] = statement
        return self._lists[path.target]

    def _are_tensors(self, items: object) -> bool:
        if type(items) is not list or len(items) < 2:
            return False
        return all(type(item) in self._tensors for item in items)


def _can_be_assigned(path: Path) -> bool:
    """Return whether what a path leads to can be replaced there: not in a tuple, a frozen dataclass..."""
    if path.parent is None or path.parent.kind is None:
        return path.style == "name"
    owner = path.parent.kind
    if path.style not in ("[", ".") or issubclass(owner, tuple):
        return False
    name = "__setitem__" if path.style == "[" else "__setattr__"
    setter = class_attribute(owner, name)
    return type(setter) in (types.WrapperDescriptorType, types.MethodDescriptorType)

"""What tensors are for: parameters, buffers, optimizer state, gradients, and what autograd graphs keep for backward.

Modules and optimizers are read by what they store: an overridden `parameters()`, property or `__iter__` is not called.

Reading ``p.grad`` makes a Python object that lives as long as the gradient, and from then on the gradient is
one more live tensor of the gc. TorchScript's interpreter can read the field and return a detached alias instead: the
alias dies, the gradient stays as invisible as before, and no hook, no function and no kernel of the user runs.

A node of a graph shows handles of what it saved (``_raw_saved_*``). A handle gives its tensor, or what a pack hook
made of it, without running an unpack hook or recomputing a checkpoint; an older torch has no such handles. One trace
is left: a saved tensor that Python had not seen gets its Python object, which lives as long as the tensor does. The
scan counts such objects as the graph's, before and after.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from gpumagic._compat import torch_private
from gpumagic.heap.branches import (
    Fields,
    attributes,
    attributes_of,
    class_attribute,
    dict_of,
    fields_of,
)
from gpumagic.heap.storages import local_of

if TYPE_CHECKING:
    import torch


def modules_in(module: object) -> Iterator[tuple[str, Any]]:
    """Yield a module and all inside it with their paths, each once, as `named_modules` of torch would."""
    waiting = [("", module)]
    seen: set[int] = set()
    while waiting:
        path, inner = waiting.pop()
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        yield path, inner
        for name, child in reversed(registered(inner, torch_private.MODULES)):
            path_of_child = f"{path}.{name}" if path else name
            waiting.append((path_of_child, child))


def registered(module: object, kind: str) -> list[tuple[str, Any]]:
    """Return what a module has by name in one of its dicts, of which `torch_private.REGISTERED` has the names."""
    import torch

    if not issubclass(type(module), torch.nn.Module):
        return []
    # Read as torch's own class has it: no property of a subclass is called, nor are the attributes of a class searched.
    own = vars(torch.nn.Module)["__dict__"].__get__(module)
    stored: Any = own.get(kind)
    if isinstance(stored, dict):
        entries = list(dict.items(stored))
    elif (
        dict_of(type(stored)).get("__module__") == torch_private.SCRIPT_MODULE
    ):  # of C++'s
        entries = list(stored.items())
    else:
        entries = []
    return [(name, member) for name, member in entries if member is not None]


_WRAPPED = ("optimizer", "_optimizer")
"""What the optimizers of accelerate and Lightning call the one that they wrap."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the parameters: the one inside, where this is a wrapper such as accelerate's."""
    import torch

    stored = attributes_of(optimizer)
    if "param_groups" in stored:
        return optimizer
    for name in _WRAPPED:
        inner = stored.get(name)
        if issubclass(type(inner), torch.optim.Optimizer):
            return unwrapped(inner)
    return optimizer


def parameter_groups(optimizer: object) -> list[dict[str, Any]]:
    """Return an optimizer's groups of parameters."""
    groups = attributes_of(optimizer).get("param_groups")
    if not isinstance(groups, list):
        return []
    return [group for group in groups if isinstance(group, dict)]


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


def kinds_of(owners: Iterable[object]) -> dict[int, str]:
    """Return the kind of each tensor that a module or an optimizer among ``owners`` holds, by the tensor's `id`."""
    import torch

    kinds: dict[int, str] = {}
    fields: dict[type, Fields | None] = {}
    for owner in owners:
        owner_type = type(owner)
        if owner_type not in fields:
            fields[owner_type] = fields_of(owner_type)
        own = dict(attributes(owner, fields[owner_type]))
        if issubclass(owner_type, torch.nn.Module):
            for parameter in _values(own.get(torch_private.PARAMETERS)):
                kinds[id(parameter)] = "parameter"
            for buffer in _values(own.get(torch_private.BUFFERS)):
                kinds[id(buffer)] = "buffer"
        else:
            for state in _values(own.get("state")):
                for value in _values(state):
                    kinds.setdefault(id(value), "optimizer state")
    return kinds


def node_types() -> set[type]:
    """Return the types of the nodes of autograd graphs: torch's, each of C's own, and those of custom functions."""
    import torch

    own = {kind for kind in type.__subclasses__(object) if is_node(kind)}
    return own | subclasses(torch.autograd.function.BackwardCFunction)


def is_node(kind: type) -> bool:
    """Return whether a type is of a node of autograd's graphs."""
    return type(class_attribute(kind, "next_functions")) is types.GetSetDescriptorType


def _values(mapping: Any) -> list[Any]:
    if not isinstance(mapping, dict):
        return []
    return list(dict.values(mapping))


# A leaf without a gradient is its own result.
_PEEK = """
graph(%leaf : Tensor):
  %gradient : Tensor = prim::grad(%leaf)
  %there : bool = prim::AutogradAnyNonZero(%gradient)
  %found : Tensor = prim::If(%there)
    block0():
      %alias : Tensor = aten::detach(%gradient)
      -> (%alias)
    block1():
      -> (%leaf)
  return (%found)
"""


def leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that can have a gradient of their own; call it `undisturbed`."""
    return [tensor for tensor in _in_graphs(tensors) if tensor.is_leaf]


def non_leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that an operation made which autograd recorded; call it `undisturbed`."""
    return [tensor for tensor in _in_graphs(tensors) if not tensor.is_leaf]


def _in_graphs(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that require a gradient and can be asked for it."""
    # A comprehension: there may be a hundred thousand tensors.
    return [
        tensor
        for tensor in tensors
        if _shows_its_graph(tensor) and tensor.requires_grad
    ]


def _shows_its_graph(tensor: Any) -> bool:
    """Return whether a tensor is torch's own, so that it can be asked for its graph and runs no code of the user's."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        or local_of(tensor) is not tensor
    )


def peek_gradients(
    leaves: Sequence[torch.Tensor],
) -> list[tuple[int, torch.Tensor]] | None:
    """Return ``(position, alias of its gradient)`` for the leaves that have one, or None if this torch cannot tell."""
    found: list[tuple[int, torch.Tensor]] = []
    try:
        interpret = torch_private.INTERPRET_GRAPH.get()
        with torch_private.DISABLE_TORCH_DISPATCH.get()():
            for position, leaf in enumerate(leaves):
                if local_of(leaf) is leaf:
                    gradient = interpret(_peek_graph(), (leaf,))
                else:  # the gradient of a DTensor is an object of Python's already, which reading it does not make
                    gradient = leaf.grad
                if gradient is not None and gradient is not leaf:
                    found.append((position, gradient))
    except Exception:
        # A torch without this interpreter: only the gradients that Python has seen are listed then.
        return None
    return found


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of the gradients of some tensors; call it `undisturbed`."""
    found = peek_gradients(leaves(tensors)) or []
    return [alias for _, alias in found]


@cache
def _peek_graph() -> Any:
    return torch_private.PARSE_IR.get()(_PEEK)


MAX_NODES = 100_000
"""Nodes read, of all graphs together: about 0.3 s."""
_HIDING_NODES = frozenset({"CopySlices", "CppFunction"})
"""Nodes that save tensors and show none: of an assignment to a view, of an extension in C++."""


_Node: TypeAlias = tuple[Any, list[Any], list[Any]]


class Graphs:
    """Walks graphs; a node that several share is read once."""

    def __init__(self, limit: int = MAX_NODES) -> None:
        self._left = limit
        self._nodes: dict[int, _Node] = {}
        """By the `id` of a node: itself, so that the `id` stays its own, what it saved, and the next nodes."""
        self._handles: dict[type, list[str]] = {}
        self._fields: dict[type, Fields | None] = {}
        self.hiding: set[str] = set()
        """The nodes met that do not show what they saved."""
        self.are_readable = True
        self.gave_up = False

    def walk(self, *nodes: Any) -> list[Any] | None:
        """Return what some tensors' ``grad_fn`` keep: what their nodes saved, and the leaves they lead to.

        It is None if this torch cannot tell, or if there is too much of it.
        """
        kept: list[Any] = []
        seen = set(map(id, nodes))
        waiting = [*nodes]
        while waiting:
            if self._left <= 0:
                self.gave_up = True
                return None
            self._left -= 1
            node = waiting.pop()
            if id(node) not in self._nodes:
                self._nodes[id(node)] = self._read(node)
            _, saved, following = self._nodes[id(node)]
            kept += saved
            for next_node in following:
                if id(next_node) not in seen:
                    seen.add(id(next_node))
                    waiting.append(next_node)
        return kept if self.are_readable else None

    def release(self) -> None:
        """Release every node."""
        self._nodes.clear()

    def _read(self, node: Any) -> _Node:
        """Return a node, what it saved, and the nodes that it leads to."""
        kind = type(node)
        saved: list[Any] = []
        for handle in self._handles_of(node):
            saved += self._kept_by(handle)
        if kind.__name__ in _HIDING_NODES:
            self.hiding.add(kind.__name__)
        if kind.__name__ == "AccumulateGrad":
            saved.append(node.variable)
        if kind not in self._fields:
            self._fields[kind] = fields_of(kind)
        for _, value in attributes(
            node, self._fields[kind]
        ):  # what a Function keeps in its ctx
            saved += _tensors_in(value)
        following = [
            next_node for next_node, _ in node.next_functions if next_node is not None
        ]
        return node, saved, following

    def _handles_of(self, node: Any) -> Iterator[Any]:
        kind = type(node)
        if kind not in self._handles:
            self._handles[kind] = [
                name for name in dir(kind) if name.startswith(torch_private.SAVED)
            ]
        for name in self._handles[kind]:
            handle: Any = ()
            with contextlib.suppress(Exception):  # freed by backward
                handle = getattr(node, name)
            if type(handle) in (tuple, list):
                yield from handle
            else:
                yield handle

    def _kept_by(self, handle: Any) -> list[Any]:
        """Return the tensors that a handle of a node has."""
        try:
            return _tensors_in(handle.data)
        except AttributeError:
            self.are_readable = False
        except Exception:  # freed by backward
            pass
        return []


def _tensors_in(value: Any, depth: int = 2) -> list[Any]:
    import torch

    if issubclass(type(value), torch.Tensor):
        return [value]
    if not depth or type(value) not in (tuple, list, dict):
        return []
    items = dict.values(value) if type(value) is dict else value
    found: list[Any] = []
    for item in list(items):  # another thread may add to them meanwhile
        found += _tensors_in(item, depth - 1)
    return found

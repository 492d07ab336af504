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
from typing import TYPE_CHECKING, Any

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
    waiting, seen = [("", module)], set()
    while waiting:
        path, each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        below = registered(each, "_modules")
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in reversed(below)]


def registered(module: object, kind: str) -> list[tuple[str, Any]]:
    """Return what a module has under ``"_modules"``, ``"_parameters"`` or ``"_buffers"``, by name."""
    import torch

    if not issubclass(type(module), torch.nn.Module):
        return []
    # Read as torch's own class has it: no property of a subclass is called, nor are the attributes of a class searched.
    found: Any = vars(torch.nn.Module)["__dict__"].__get__(module).get(kind)
    if isinstance(found, dict):
        entries = list(dict.items(found))
    elif dict_of(type(found)).get("__module__") == "torch.jit._script":  # a dictionary of C++'s
        entries = list(found.items())
    else:
        entries = []
    return [(name, each) for name, each in entries if each is not None]


_WRAPPED = ("optimizer", "_optimizer")
"""What the optimizers of accelerate and Lightning call the one that they wrap."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the parameters: the one inside, where this is a wrapper such as accelerate's."""
    import torch

    stored = attributes_of(optimizer)
    inner = [
        stored[name]
        for name in _WRAPPED
        if issubclass(type(stored.get(name)), torch.optim.Optimizer)
    ]
    return unwrapped(inner[0]) if inner and "param_groups" not in stored else optimizer


def parameter_groups(optimizer: object) -> list[dict[str, Any]]:
    """Return an optimizer's groups of parameters."""
    groups = attributes_of(optimizer).get("param_groups")
    return (
        [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    )


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


def node_types() -> set[type]:
    """Return the types of the nodes of autograd graphs: torch's, each of C's own, and those of custom functions."""
    import torch

    own = {kind for kind in type.__subclasses__(object) if is_node(kind)}
    functions: Any = torch._C._FunctionBase
    return own | subclasses(functions)


def is_node(kind: type) -> bool:
    """Return whether a type is of a node of autograd's graphs."""
    return type(class_attribute(kind, "next_functions")) is types.GetSetDescriptorType


def _values(mapping: Any) -> list[Any]:
    return list(dict.values(mapping)) if isinstance(mapping, dict) else []


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
    return [
        each for each in tensors if _shows_its_graph(each) and each.requires_grad and each.is_leaf
    ]


def non_leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that an operation made which autograd recorded; call it `undisturbed`."""
    return [
        each
        for each in tensors
        if _shows_its_graph(each) and each.requires_grad and not each.is_leaf
    ]


def _shows_its_graph(tensor: Any) -> bool:
    """Return whether a tensor is torch's own, so that it can be asked for its graph and runs no code of the user's."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or local_of(tensor) is not tensor


def peek_gradients(leaves: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]] | None:
    """Return ``(position, alias of its gradient)`` for the leaves that have one, or None if this torch cannot tell."""
    import torch

    found: list[tuple[int, torch.Tensor]] = []
    try:
        with torch._C._DisableTorchDispatch():
            for i, leaf in enumerate(leaves):
                if local_of(leaf) is leaf:
                    gradient = torch._C._jit_interpret_graph(_peek_graph(), (leaf,))
                else:  # the gradient of a DTensor is an object of Python's already, which reading it does not make
                    gradient = leaf.grad
                if gradient is not None and gradient is not leaf:
                    found.append((i, gradient))
    except (
        Exception
    ):  # a torch without this interpreter; only the gradients that Python has seen are listed then
        return None
    return found


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of the gradients of some tensors; call it `undisturbed`."""
    return [alias for _, alias in peek_gradients(leaves(tensors)) or ()]


@cache
def _peek_graph() -> Any:
    import torch

    return torch._C.parse_ir(_PEEK)


MAX_NODES = 100_000
"""Nodes read, of all graphs together: about 0.3 s."""
_SAVED = "_raw_saved_"
_HIDING_NODES = frozenset({"CopySlices", "CppFunction"})
"""Nodes that save tensors and show none: of an assignment to a view, of an extension in C++."""


class Graphs:
    """Walks graphs; a node that several share is read once."""

    def __init__(self, limit: int = MAX_NODES) -> None:
        self._left = limit
        self._nodes: dict[int, tuple[Any, list[Any], list[Any]]] = {}
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
        found: list[Any] = []
        seen, waiting = set(map(id, nodes)), [*nodes]
        while waiting:
            if self._left <= 0:
                self.gave_up = True
                return None
            self._left -= 1
            node = waiting.pop()
            _, saved, following = self._nodes.get(id(node)) or self._read(node)
            found += saved
            for each in following:
                if id(each) not in seen:
                    seen.add(id(each))
                    waiting.append(each)
        return found if self.are_readable else None

    def release(self) -> None:
        """Release every node."""
        self._nodes.clear()

    def _read(self, node: Any) -> tuple[Any, list[Any], list[Any]]:
        saved = [tensor for handle in self._handles_of(node) for tensor in self._kept_by(handle)]
        kind = type(node)
        if kind.__name__ in _HIDING_NODES:
            self.hiding.add(kind.__name__)
        if kind.__name__ == "AccumulateGrad":
            saved.append(node.variable)
        if kind not in self._fields:
            self._fields[kind] = fields_of(kind)
        for _, value in attributes(node, self._fields[kind]):  # what a Function keeps in its ctx
            saved += _tensors_in(value)
        entry = self._nodes[id(node)] = (
            node,
            saved,
            [each for each, _ in node.next_functions if each is not None],
        )
        return entry

    def _handles_of(self, node: Any) -> Iterator[Any]:
        kind = type(node)
        if kind not in self._handles:
            self._handles[kind] = [name for name in dir(kind) if name.startswith(_SAVED)]
        for name in self._handles[kind]:
            handle: Any = ()
            with contextlib.suppress(Exception):  # freed by backward
                handle = getattr(node, name)
            yield from handle if type(handle) in (tuple, list) else (handle,)

    def _kept_by(self, handle: Any) -> Iterable[Any]:
        try:
            return _tensors_in(handle.data)
        except AttributeError:
            self.are_readable = False
        except Exception:  # freed by backward
            pass
        return ()


def _tensors_in(value: Any, depth: int = 2) -> list[Any]:
    import torch

    if issubclass(type(value), torch.Tensor):
        return [value]
    if depth and type(value) in (tuple, list, dict):
        items = dict.values(value) if type(value) is dict else value
        return [tensor for item in items for tensor in _tensors_in(item, depth - 1)]
    return []

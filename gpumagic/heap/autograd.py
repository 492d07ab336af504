"""What autograd keeps: the gradients of leaves, and what graphs keep for backward, found without unpacking anything.

Reading ``p.grad`` makes a Python object that lives as long as the gradient, and from then on the gradient is
one more live tensor of the gc. The interpreter of TorchScript can read the field and return a detached alias:
the alias dies, the gradient is as unseen as before, and no hook, no function and no kernel of the user runs.

A node shows the handles of what it saved (``_raw_saved_*``). A handle tells its tensor, or what a pack hook made of
it, without an unpack hook being run or a checkpoint computed again; an older torch has no such handles, and then
nothing is said. One trace is left: a saved tensor that Python had not seen gets its Python object, which lives as
long as the tensor does. The census counts such objects as the graph's, before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from gpumagic.heap.object_fields import Fields, attributes, fields_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


# A leaf without a gradient stands for itself in the result.
_PEEK = """
graph(%leaves : Tensor[]):
  %go : bool = prim::Constant[value=1]()
  %length : int = aten::len(%leaves)
  %found : Tensor[] = prim::ListConstruct()
  prim::Loop(%length, %go)
    block0(%i : int):
      %leaf : Tensor = aten::__getitem__(%leaves, %i)
      %gradient : Tensor = prim::grad(%leaf)
      %there : bool = prim::AutogradAnyNonZero(%gradient)
      prim::If(%there)
        block0():
          %alias : Tensor = aten::detach(%gradient)
          %one : Tensor[] = aten::append(%found, %alias)
          -> ()
        block1():
          %other : Tensor[] = aten::append(%found, %leaf)
          -> ()
      -> (%go)
  return (%found)
"""


def leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that can have a gradient of their own; call it undisturbed."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    return [each for each in tensors if type(each) in plain and each.requires_grad and each.is_leaf]


def results(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that an operation made which autograd recorded; call it undisturbed."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    return [each for each in tensors if type(each) in plain and each.requires_grad and not each.is_leaf]


def peek(leaves: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]] | None:
    """Return ``(position, alias of its gradient)`` for the leaves that have one, or None if this torch cannot tell."""
    import torch

    if not leaves:
        return []
    try:
        with torch._C._DisableTorchDispatch():
            found = torch._C._jit_interpret_graph(_graph(), (list(leaves),))
    except Exception:  # a torch without this interpreter; only the gradients that Python has seen are listed then
        return None
    return [(i, alias) for i, alias in enumerate(found) if alias is not leaves[i]]


@cache
def _graph() -> Any:
    import torch

    return torch._C.parse_ir(_PEEK)


MAX_NODES = 100_000
"""Nodes looked at, of all graphs together: about 0.3 s."""
_SAVED = "_raw_saved_"
_HIDES = frozenset({"CopySlices", "CppFunction"})
"""Nodes that save tensors and show none: of an assignment to a view, of an extension in C++."""


@dataclass(slots=True)
class Graph:
    """What hangs on one tensor's `grad_fn`."""

    tensors: list[Any] = field(default_factory=list)
    """What its nodes saved, and the leaves it leads to."""
    is_whole: bool = True
    """Whether every node showed what it saved."""


class Graphs:
    """Walks graphs; a node that several share is read once."""

    def __init__(self, limit: int = MAX_NODES) -> None:
        self._left = limit
        self._nodes: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        """By the `id` of a node: itself, which keeps the `id` its own, what it saved, and the nodes after it."""
        self._handles: dict[type, list[str]] = {}
        self._fields: dict[type, Fields | None] = {}
        self.hiding: set[str] = set()
        """The nodes met that do not show what they saved."""
        self.are_readable = True
        self.gave_up = False

    def of(self, node: Any) -> Graph | None:
        """Return what a tensor's ``grad_fn`` keeps, or None if this torch cannot tell or there is too much of it."""
        found, seen, waiting = Graph(), {id(node)}, [node]
        while waiting:
            if self._left <= 0:
                self.gave_up = True
                return None
            self._left -= 1
            node = waiting.pop()
            _, saved, following = self._nodes.get(id(node)) or self._read(node)
            found.tensors += saved
            found.is_whole &= type(node).__name__ not in _HIDES
            for each in following:
                if id(each) not in seen:
                    seen.add(id(each))
                    waiting.append(each)
        return found if self.are_readable else None

    def release(self) -> None:
        """Let go of every node."""
        self._nodes.clear()

    def _read(self, node: Any) -> tuple[Any, list[Any], list[Any]]:
        saved = [tensor for handle in self._handles_of(node) for tensor in self._kept_by(handle)]
        kind = type(node)
        if kind.__name__ in _HIDES:
            self.hiding.add(kind.__name__)
        if kind.__name__ == "AccumulateGrad":
            saved.append(node.variable)
        if kind not in self._fields:
            self._fields[kind] = fields_of(kind)
        for _, value in attributes(node, self._fields[kind]):  # what a Function keeps in its ctx
            saved += _tensors_in(value)
        entry = self._nodes[id(node)] = (node, saved, [each for each, _ in node.next_functions if each is not None])
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

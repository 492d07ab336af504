"""The gradients of leaves, also those that Python has never seen, without letting Python see them.

Reading ``p.grad`` makes a Python object that lives as long as the gradient, and from then on the gradient is
one more live tensor of the gc. The interpreter of TorchScript can read the field and return a detached alias:
the alias dies, the gradient is as unseen as before, and no hook, no function and no kernel of the user runs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

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

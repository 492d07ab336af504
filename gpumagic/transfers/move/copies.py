"""Copies of tensors on another device, and in-place changes of the modules, leaf tensors and optimizers that use them.

Every change is recorded before it is made, so that `Changes.undo` can revert it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpumagic.heap import branches, modules
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.transfers.move.contents import Contents, rebuilt

_ALIGNMENT = 16  # bytes; a multiple of every element's size


@dataclass(frozen=True)
class CopyGroup:
    """Tensors that are copied together because their memory overlaps."""

    tensors: tuple[Any, ...]
    source: str
    start: int
    nbytes: int
    whole: bool
    """Whether it is one tensor, copied as `Tensor.to` does."""


@dataclass
class Copies:
    """The copies made so far."""

    new: dict[int, Any] = field(default_factory=dict)
    """``{id of a tensor: its copy}``."""
    seconds: dict[int, float] = field(default_factory=dict)
    """``{id of a group's first tensor: seconds}``."""

    def make(self, groups: Iterable[CopyGroup], device: str) -> None:
        """Copy each group to a device; on an error, the copies made before it stay in `new`."""
        import torch

        with torch.no_grad():
            for group in groups:
                start = time.perf_counter()
                made = _copied(group, device)
                self.seconds[id(group.tensors[0])] = time.perf_counter() - start
                self.new.update((id(old), new) for old, new in zip(group.tensors, made, strict=True))


def group_by_memory(tensors: Iterable[Any]) -> list[CopyGroup]:
    """Return the tensors in groups: those with overlapping memory together, every other one alone."""
    by_storage: dict[int, list[tuple[int, int, Any]]] = {}
    groups = []
    for tensor in tensors:
        if _is_plain(tensor):
            start = tensor.storage_offset() * tensor.element_size()
            reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            end = start + (reach + 1) * tensor.element_size()
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((start, end, tensor))
        else:
            groups.append(CopyGroup((tensor,), str(tensor.device), 0, _nbytes(tensor), whole=True))
    for spans in by_storage.values():
        groups += _overlapping(sorted(spans, key=lambda span: span[:2]))
    return groups


def _overlapping(spans: list[tuple[int, int, Any]]) -> Iterable[CopyGroup]:
    """Yield groups of overlapping spans of one storage; the spans are sorted by their start."""
    together: list[tuple[int, int, Any]] = []
    reached = 0
    for start, end, tensor in spans:
        if together and start >= reached:
            yield _make_group(together)
            together = []
        together.append((start, end, tensor))
        reached = max(reached, end)
    yield _make_group(together)


def _make_group(together: list[tuple[int, int, Any]]) -> CopyGroup:
    tensors = tuple(tensor for _, _, tensor in together)
    start = together[0][0] // _ALIGNMENT * _ALIGNMENT
    length = max(end for _, end, _ in together) - start
    own = _nbytes(tensors[0])
    # An expanded tensor is larger than its memory, so only the memory is copied.
    whole = len(tensors) == 1 and own <= length
    return CopyGroup(tensors, str(tensors[0].device), start, own if whole else length, whole)


def _copied(group: CopyGroup, device: str) -> list[Any]:
    import torch

    first = group.tensors[0]
    if group.whole:
        # A tensor that a graph made stays in the graph, as with `x = x.to(...)`.
        with torch.set_grad_enabled(first.grad_fn is not None):
            return [first.to(device)]
    span = torch.empty(0, dtype=torch.uint8, device=first.device)
    span.set_(first.untyped_storage(), group.start, (group.nbytes,), (1,))
    there = span.to(device).untyped_storage()
    return [_view(tensor, there, group.start, device) for tensor in group.tensors]


def _view(tensor: Any, storage: Any, start: int, device: str) -> Any:
    import torch

    offset = tensor.storage_offset() - start // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, offset, tensor.size(), tensor.stride())


def _is_plain(tensor: Any) -> bool:
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.grad_fn is None
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
    )


def _nbytes(tensor: Any) -> int:
    from torch.nn.parameter import is_lazy

    return 0 if is_lazy(tensor) else int(tensor.numel() * tensor.element_size())


def parameter_slots(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the parameters and buffers of a module and its submodules: the dict that has it, the key, the tensor."""
    for _, part in modules.modules_in(module):
        own = branches.attributes_of(part)
        for kept in (own.get("_parameters"), own.get("_buffers")):
            if isinstance(kept, dict):
                items = list(dict.items(kept))
                yield from ((kept, key, tensor) for key, tensor in items if tensor is not None)


def tensors_of(module: Any) -> list[Any]:
    """Return a module's parameters, their gradients and its buffers."""
    found = [tensor for _, _, tensor in parameter_slots(module)]
    return found + [gradient for tensor in found for gradient in gradient_of(tensor)]


def gradient_of(tensor: Any) -> list[Any]:
    """Return the gradient of a leaf, if it has one."""
    with undisturbed():
        gradient = plain(tensor, "grad") if plain(tensor, "is_leaf") else None
    return [] if gradient is None else [gradient]


def state_to_move(optimizer: Any, parameters: Collection[int]) -> list[Any]:
    """Return an optimizer's state tensors for the parameters of these ids.

    A step counter stays on the host unless the optimizer says otherwise, as in `Optimizer.load_state_dict`.
    """
    found = Contents()
    kept = branches.attributes_of(optimizer).get("state")
    states = {id(each): state for each, state in dict.items(kept)} if isinstance(kept, dict) else {}
    for group in modules.parameter_groups(optimizer):
        for parameter in group["params"]:
            state = states.get(id(parameter)) if id(parameter) in parameters else None
            for key, value in (state or {}).items():
                if key != "step" or group.get("capturable") or group.get("fused"):
                    found.add(value)
    return found.tensors


class Changes:
    """Changes to modules, leaf tensors and optimizers, and how to undo them."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._final: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []

    def replacement(self, tensor: Any) -> Any:
        """Return what replaces a tensor: the tensor itself where it stayed the same object or did not move."""
        if id(tensor) in self._final:
            return self._final[id(tensor)]
        return self._copies.get(id(tensor), tensor)

    def on_undo(self, act: Callable[[], object]) -> None:
        """Add something to do on `undo`."""
        self._undo.append(act)

    def undo(self) -> None:
        """Undo everything, the last change first."""
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()
        self._final.clear()

    def move_module(self, module: Any, device: str) -> None:
        """Put the copies into a module by its own `_apply` and, where its class overrides it, its own `to`."""
        import torch

        slots = list(parameter_slots(module))
        self._undo.append(lambda: module._apply(lambda tensor: tensor))  # an RNN keeps a list of its weights
        for kept, key, tensor in slots:
            self._remember(tensor)
            self._undo.append(partial(kept.__setitem__, key, tensor))
        module._apply(lambda tensor: self._copies.get(id(tensor), tensor))
        for kept, key, tensor in slots:  # a tied weight stays one even if torch had to make new parameters
            kept[key] = self._final.setdefault(id(tensor), kept[key])
        if type(module).to is not torch.nn.Module.to:
            module.to(device)

    def move_leaf(self, leaf: Any) -> None:
        """Put the copy into a leaf that requires gradients, or make a new leaf where torch cannot."""
        import torch

        new = self._copies.get(id(leaf))
        if new is None or id(leaf) in self._final:
            return  # it is there already, or belongs to a module
        gradient = None if leaf.grad is None else self.replacement(leaf.grad)
        if torch._has_compatible_shallow_copy_type(leaf, new):
            self._remember(leaf)
            leaf.grad = None
            leaf.data = new
            leaf.grad = gradient
            self._final[id(leaf)] = leaf
            return
        made = torch.nn.Parameter(new) if isinstance(leaf, torch.nn.Parameter) else new.requires_grad_()
        made.grad = gradient
        self._final[id(leaf)] = made

    def move_optimizer(self, optimizer: Any) -> None:
        """Replace an optimizer's parameters and state by their copies."""
        state = dict(optimizer.state)
        self._undo += [partial(optimizer.state.update, state), optimizer.state.clear]
        done: dict[int, Any] = {}
        new = {self.replacement(key): rebuilt(value, self.replacement, done) for key, value in state.items()}
        for parameters in [group["params"] for group in optimizer.param_groups]:
            self._undo.append(partial(parameters.__setitem__, slice(None), list(parameters)))
            parameters[:] = [self.replacement(parameter) for parameter in parameters]
        optimizer.state.clear()
        optimizer.state.update(new)

    def _remember(self, tensor: Any) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        before = tensor.data, None if gradient is None else gradient.data

        def restore() -> None:
            tensor.grad = None
            tensor.data = before[0]
            if gradient is not None:
                gradient.data = before[1]
                tensor.grad = gradient

        self._undo.append(restore)

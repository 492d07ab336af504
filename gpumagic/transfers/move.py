"""`--move`: move named variables to the device before the cell runs, as torch moves each.

Names, contents and room are checked first; then modules go by their own `to`, tensors and optimizers' state by
`Tensor.to`, and the names are bound last. So a missing name or too little memory leaves the notebook as it was.
Containers that torch's pytree knows (lists, tuples, dicts) are not changed: new ones are made around what moved, so
that other references keep the old one.
"""

from __future__ import annotations

import operator
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple

from gpumagic import notebook
from gpumagic._compat import torch_private
from gpumagic.errors import GpuMagicError, OptionError, nearest
from gpumagic.heap import branches, kinds
from gpumagic.heap.storages import nbytes_of
from gpumagic.memory.devices import room
from gpumagic.report.units import size
from gpumagic.transfers.placed import kind_of, tensors_in
from gpumagic.transfers.report import MOVE
from gpumagic.transfers.sites import CallSites


def check_names(names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Raise what `relocate` raises for a name that is missing or holds nothing that could move, and move nothing."""
    for name in names:
        _parts(name, namespace)


def relocate(
    names: Iterable[str],
    namespace: MutableMapping[str, Any],
    device: str,
    sites: CallSites,
) -> None:
    """Move variables to a device.

    A tensor's name is bound to its copy; a module stays the object it is and its optimizers, found in the namespace,
    follow with their state; lists, tuples and dicts are rebuilt around what moved. Two names of one object stay two
    names of one; a view becomes a tensor of its own, as by `Tensor.to`.

    Args:
        names: variables of the namespace.
        namespace: where they are looked up and bound.
        device: a full torch name, such as ``"cuda:1"``.
        sites: of the run that counts the copies: it is told which variable is being moved.

    Raises:
        OptionError: a name is missing, or holds nothing that could move. Nothing has changed then.
        GpuMagicError: it does not fit, or something cannot be moved; the message says what has been moved, if anything.
    """
    names = list(dict.fromkeys(names))
    if device == "meta" and names:
        raise OptionError(
            f"{MOVE}: meta tensors have no values, so moving {', '.join(names)} there would lose them"
        )
    parts = []
    for name in names:
        parts += [(name, part) for part in _parts(name, namespace)]
    optimizers = _optimizers([part for _, part in parts], namespace)
    _check_room([*(part for _, part in parts), *optimizers.values()], names, device)
    move = _Move(device)
    failure = None
    try:
        move.run(names, parts, optimizers, namespace, sites)
    except (
        Exception
    ) as error:  # from torch, a module or an optimizer: our error has its text
        failure = str(error).partition("\n")[0] or type(error).__name__
    finally:
        sites.moving = None
        move.release()  # an interrupt's traceback keeps this frame
    # Raised in there, it would keep that error, its frames and their tensors.
    if failure is not None:
        moved = ", ".join(dict.fromkeys(move.moved_modules))
        done_by_now = f"{moved} had been moved" if moved else "nothing was moved"
        what = f"{', '.join(names)} cannot go to {device}"
        raise GpuMagicError(f"{MOVE}: {what}, and {done_by_now}: {failure}")


# ---- What there is to move


def _parts(name: str, namespace: Mapping[str, Any]) -> list[Any]:
    """Return the tensors, modules and optimizers that a variable holds, each once.

    Raises:
        OptionError: it is missing or holds none, or a container in it holds itself.
    """
    if name not in namespace:
        near = nearest(name, notebook.names_of_users(namespace))
        hint = (
            f"did you mean {near}?"
            if near
            else "write names of variables, such as --move model,x"
        )
        raise OptionError(f"{MOVE}: there is no variable {name!r}; {hint}")
    import torch

    value = namespace[name]
    try:
        leaves, _ = _flat(value)
    except RecursionError:
        raise OptionError(
            f"{MOVE}: {name!r} cannot be moved: it holds itself"
        ) from None
    movable = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    # type(), not isinstance(): a proxy's __class__ may evaluate or raise
    parts = {id(leaf): leaf for leaf in leaves if issubclass(type(leaf), movable)}
    if parts:
        return list(parts.values())
    kind = branches.name_of_type(type(value))
    hint = "it looks into lists, tuples and dicts only"
    if branches.class_attribute(type(value), "to") is not None:
        hint = f"it has a .to() of its own: {name} = {name}.to(...)"
    raise OptionError(
        f"{MOVE}: {name!r} ({kind}) holds no tensor, module or optimizer that could move; {hint}"
    )


def _as_module(part: Any) -> Any:
    """Return a module, or the parameters of an optimizer as one: torch moves them alike."""
    import torch

    if not issubclass(type(part), torch.optim.Optimizer):
        return part
    parameters = []
    for tensor in _parameters_of(part):
        if isinstance(tensor, torch.nn.Parameter):
            parameters.append(tensor)
    return torch.nn.ParameterList(parameters)


def _optimizers(parts: list[Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers among the parts, and those of variables that work on what moves, by name."""
    import torch

    moving: set[int] = set()
    for part in parts:
        moving.update(map(id, _tensors_of(part)))
    candidates = []
    for name, value in list(namespace.items()):
        if not name.startswith("_"):
            candidates.append((name, value))
    candidates += [("optimizer", part) for part in parts]
    found: dict[int, tuple[str, Any]] = {}
    for name, value in candidates:
        if issubclass(type(value), torch.optim.Optimizer):
            optimizer = kinds.unwrapped(value)
            if not moving.isdisjoint(map(id, _parameters_of(optimizer))):
                found.setdefault(id(optimizer), (name, optimizer))
    return dict(found.values())


def _parameters_of(optimizer: Any) -> list[Any]:
    parameters: list[Any] = []
    for group in kinds.parameter_groups(kinds.unwrapped(optimizer)):
        parameters += group["params"]
    return parameters


def _tensors_of(part: Any) -> Iterator[Any]:
    """Yield a tensor, or those of a module or an optimizer, with their gradients."""
    for tensor in tensors_in(part, kind_of(part)):
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


class _Slot(NamedTuple):
    """A place where a tensor is kept."""

    kept: dict[str, Any]
    key: str
    value: Any


def _slots_of(module: Any) -> Iterator[_Slot]:
    """Yield where a module and its submodules keep their parameters and buffers."""
    for _, part in kinds.modules_in(module):
        own = branches.attributes_of(part)
        for kind in (torch_private.PARAMETERS, torch_private.BUFFERS):
            kept = own.get(kind)
            if isinstance(kept, dict):
                for key, tensor in list(dict.items(kept)):
                    if tensor is not None:
                        yield _Slot(kept, key, tensor)


def _state_of(optimizer: Any) -> Iterator[_Slot]:
    """Yield where an optimizer keeps of its state what goes with its parameters.

    A step counter stays on the host unless the optimizer says otherwise, as in `Optimizer.load_state_dict`.
    """
    for group in kinds.parameter_groups(optimizer):
        has_steps_there = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if key != "step" or has_steps_there:
                    yield _Slot(state, key, value)


def _check_room(parts: Iterable[Any], names: list[str], device: str) -> None:
    """Raise if the device has no room for what is not there yet."""
    free = room(device)
    if free is None:
        return
    nbytes = {}
    for part in parts:
        for tensor in _tensors_of(part):
            if str(tensor.device) != device:
                nbytes[id(tensor)] = nbytes_of(tensor)
    needed = sum(nbytes.values())
    if needed > free:
        verb = "needs" if len(names) == 1 else "need"
        need = f"{', '.join(names)} {verb} {size(needed)}"
        raise GpuMagicError(
            f"{MOVE}: {need} on {device}, which has {size(free)} free; nothing was moved"
        )


# ---- The move


class _Move:
    """The move of some variables to a device, as far as it has come."""

    def __init__(self, device: str) -> None:
        self.moved_modules: list[str] = []
        """The names of those."""
        self._device = device
        self._copies: dict[int, tuple[Any, Any]] = {}
        """By the `id` of a tensor: itself, so that no other gets that, and what is there in its place."""
        self._values: dict[int, Any] = {}
        """By the `id` of a variable's value: what it is bound to."""

    def run(
        self,
        names: Iterable[str],
        parts: Sequence[tuple[str, Any]],
        optimizers: Mapping[str, Any],
        namespace: MutableMapping[str, Any],
        sites: CallSites,
    ) -> None:
        """Move parts of variables, and optimizers with their state; bind the names last."""
        import torch

        modules = []
        of_modules: set[int] = set()
        for name, part in parts:
            if not issubclass(type(part), torch.Tensor):
                module = _as_module(part)
                modules.append((name, module))
                of_modules.update(map(id, _tensors_of(module)))
        for name, part in parts:
            sites.moving = name
            if id(part) not in of_modules:
                self._moved(
                    part
                )  # where it runs out of memory for them, nothing has changed
        # Those that may refuse, as quantized ones do, come first.
        for name, module in sorted(modules, key=_moves_as_torch_does):
            sites.moving = name
            self._move_module(module)
            self.moved_modules.append(name)
        for name in names:
            sites.moving = name
            value = namespace[name]
            if id(value) not in self._values:
                self._values[id(value)] = _rebuilt(value, self._moved)
        for name, optimizer in optimizers.items():
            sites.moving = name
            self._move_optimizer(optimizer)
        namespace.update({name: self._values[id(namespace[name])] for name in names})

    def release(self) -> None:
        """Release every object."""
        self._copies.clear()
        self._values.clear()

    def _moved(self, part: Any) -> Any:
        """Return the copy of a tensor; all else stays the object it is."""
        import torch

        if not issubclass(type(part), torch.Tensor):
            return part
        if id(part) not in self._copies:
            self._copies[id(part)] = part, self._copy(part)
        _, copy = self._copies[id(part)]
        return copy

    def _copy(self, tensor: Any) -> Any:
        import torch

        if str(tensor.device) == self._device:
            return tensor
        # A tensor that a graph made stays in the graph, as with `x = x.to(...)`; a leaf has a leaf for a copy.
        with torch.set_grad_enabled(tensor.grad_fn is not None):
            copy = tensor.to(self._device)
        if not tensor.is_leaf or not tensor.requires_grad:
            return copy
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy)
        else:
            copy.requires_grad_()
        if tensor.grad is not None:
            copy.grad = self._moved(tensor.grad)
        return copy

    def _move_module(self, module: Any) -> None:
        """Move a module by its own `to`."""
        slots = list(_slots_of(module))
        module.to(self._device)
        for slot in slots:
            # A tied weight stays one where torch makes new parameters, as on PrivateUse1.
            there = slot.value, slot.kept[slot.key]
            _, slot.kept[slot.key] = self._copies.setdefault(id(slot.value), there)

    def _move_optimizer(self, optimizer: Any) -> None:
        """Give an optimizer its parameters, and move their state, in its own dictionaries."""
        for slot in list(_state_of(optimizer)):
            slot.kept[slot.key] = _rebuilt(slot.value, self._moved)
        for group in optimizer.param_groups:
            parameters = [self._moved(parameter) for parameter in group["params"]]
            for old, new in zip(group["params"], parameters, strict=True):
                if new is not old and old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
            group["params"][:] = parameters


def _moves_as_torch_does(named: tuple[str, Any]) -> bool:
    import torch

    _, module = named
    return type(module).to is torch.nn.Module.to


def _flat(value: Any) -> tuple[list[Any], Any]:
    """Return what torch finds in containers, and their shape; a packed sequence has a `to` of its own."""
    from torch.nn.utils.rnn import PackedSequence

    flatten = torch_private.containers().flatten
    return flatten(value, lambda part: type(part) is PackedSequence)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with what is in it changed; itself if nothing differs."""
    leaves, shape = _flat(value)
    changed = [change(leaf) for leaf in leaves]
    if all(map(operator.is_, changed, leaves)):
        return value
    return torch_private.containers().unflatten(changed, shape)

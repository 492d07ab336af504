"""`--move`: move named variables to the device before the cell runs, as torch moves each.

Names, contents and room are checked first; then modules go by their own `to`, tensors and optimizers' state by
`Tensor.to`, and the names are bound last. So a missing name or too little memory leaves the notebook as it was.
Containers that torch's pytree knows (lists, tuples, dicts) are not changed: new ones are made around what moved, so
that other references keep the old one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from gpumagic import notebook
from gpumagic._compat import torch_private
from gpumagic.errors import GpuMagicError, OptionError, nearest
from gpumagic.heap import branches, kinds
from gpumagic.heap.storages import nbytes_of
from gpumagic.memory.devices import room
from gpumagic.report.units import size
from gpumagic.transfers.log import kind_of, tensors_in
from gpumagic.transfers.report import MOVE
from gpumagic.transfers.sites import CallSites


def check_names(names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Raise what `relocate` raises for a name that is missing or holds nothing that could move, and move nothing."""
    for name in names:
        _parts(name, namespace)


def relocate(
    names: Iterable[str], namespace: MutableMapping[str, Any], device: str, sites: CallSites
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
    import torch

    names = list(dict.fromkeys(names))
    if device == "meta" and names:
        raise OptionError(
            f"{MOVE}: meta tensors have no values, so moving {', '.join(names)} there would lose them"
        )
    parts = [(name, part) for name in names for part in _parts(name, namespace)]
    optimizers = _optimizers([part for _, part in parts], namespace)
    _check_room([*(part for _, part in parts), *optimizers.values()], names, device)
    moves, failure, values = _Moves(device), None, dict[int, Any]()
    try:
        whole = [
            (name, _as_module(part))
            for name, part in parts
            if not issubclass(type(part), torch.Tensor)
        ]
        of_modules = {id(each) for _, module in whole for each in _tensors_of(module)}
        for name, part in parts:
            sites.moving = name
            if id(part) not in of_modules:
                moves.moved(part)  # where it runs out of memory for them, nothing has changed
        # Those that may refuse, as quantized ones do, come first.
        for name, module in sorted(whole, key=lambda each: type(each[1]).to is torch.nn.Module.to):
            sites.moving = name
            moves.move_module(module)
            moves.modules.append(name)
        for name in names:
            sites.moving, value = name, namespace[name]
            if id(value) not in values:
                values[id(value)] = _rebuilt(value, moves.moved)
        for name, optimizer in optimizers.items():
            sites.moving = name
            moves.move_optimizer(optimizer)
        namespace.update({name: values[id(namespace[name])] for name in names})
    except Exception as error:  # from torch, a module or an optimizer: our error has its text
        failure = str(error).partition("\n")[0] or type(error).__name__
    finally:
        sites.moving = None
        moves.copies.clear()  # an interrupt's traceback keeps this frame
        values.clear()
    if (
        failure is not None
    ):  # out here: raised inside, it would keep that error, its frames and their tensors
        done_by_now = (
            f"{', '.join(dict.fromkeys(moves.modules))} had been moved"
            if moves.modules
            else "nothing was moved"
        )
        raise GpuMagicError(
            f"{MOVE}: {', '.join(names)} cannot go to {device}, and {done_by_now}: {failure}"
        )


# ---- What there is to move


def _parts(name: str, namespace: Mapping[str, Any]) -> list[Any]:
    """Return the tensors, modules and optimizers that a variable holds, each once.

    Raises:
        OptionError: it is missing or holds none, or a container in it holds itself.
    """
    if name not in namespace:
        near = nearest(name, notebook.names_of_users(namespace))
        hint = (
            f"did you mean {near}?" if near else "write names of variables, such as --move model,x"
        )
        raise OptionError(f"{MOVE}: there is no variable {name!r}; {hint}")
    import torch

    value = namespace[name]
    try:
        leaves = _flat(value)[0]
    except RecursionError:
        raise OptionError(f"{MOVE}: {name!r} cannot be moved: it holds itself") from None
    movable = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    # type(), not isinstance(): a proxy's __class__ may evaluate or raise
    found = {id(each): each for each in leaves if issubclass(type(each), movable)}
    if not found:
        kind = branches.name_of_type(type(value))
        hint = "it looks into lists, tuples and dicts only"
        if branches.class_attribute(type(value), "to") is not None:
            hint = f"it has a .to() of its own: {name} = {name}.to(...)"
        raise OptionError(
            f"{MOVE}: {name!r} ({kind}) holds no tensor, module or optimizer that could move; {hint}"
        )
    return list(found.values())


def _as_module(part: Any) -> Any:
    """Return a module, or the parameters of an optimizer as one: torch moves them alike."""
    import torch

    if not issubclass(type(part), torch.optim.Optimizer):
        return part
    return torch.nn.ParameterList(
        [each for each in _parameters_of(part) if isinstance(each, torch.nn.Parameter)]
    )


def _optimizers(parts: list[Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers among the parts, and those of variables that work on what moves, by name."""
    import torch

    moving = {id(each) for part in parts for each in _tensors_of(part)}
    named = [(name, each) for name, each in list(namespace.items()) if not name.startswith("_")]
    found: dict[int, tuple[str, Any]] = {}
    for name, value in [*named, *(("optimizer", each) for each in parts)]:
        if issubclass(type(value), torch.optim.Optimizer):
            optimizer = kinds.unwrapped(value)
            if any(id(each) in moving for each in _parameters_of(optimizer)):
                found.setdefault(id(optimizer), (name, optimizer))
    return dict(found.values())


def _parameters_of(optimizer: Any) -> list[Any]:
    return [
        each
        for group in kinds.parameter_groups(kinds.unwrapped(optimizer))
        for each in group["params"]
    ]


def _tensors_of(part: Any) -> Iterator[Any]:
    """Yield a tensor, or those of a module or an optimizer, with their gradients."""
    for each in tensors_in(part, kind_of(part)):
        yield each
        if each.is_leaf and each.grad is not None:
            yield each.grad


def _slots_of(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the parameters and buffers of a module and its submodules: the dict that has it, the key, the tensor."""
    for _, part in kinds.modules_in(module):
        own = branches.attributes_of(part)
        for kept in (own.get(torch_private.PARAMETERS), own.get(torch_private.BUFFERS)):
            if isinstance(kept, dict):
                yield from (
                    (kept, key, tensor)
                    for key, tensor in list(dict.items(kept))
                    if tensor is not None
                )


def _state_of(optimizer: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what of an optimizer's state goes with its parameters: the dict that has it, the key, the value.

    A step counter stays on the host unless the optimizer says otherwise, as in `Optimizer.load_state_dict`.
    """
    for group in kinds.parameter_groups(optimizer):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if key != "step" or group.get("capturable") or group.get("fused"):
                    yield state, key, value


def _check_room(parts: Iterable[Any], names: list[str], device: str) -> None:
    found = {id(each): each for part in parts for each in _tensors_of(part)}
    nbytes, free = (
        sum(nbytes_of(each) for each in found.values() if str(each.device) != device),
        room(device),
    )
    if free is not None and nbytes > free:
        need = f"{', '.join(names)} need{'s' if len(names) == 1 else ''} {size(nbytes)}"
        raise GpuMagicError(
            f"{MOVE}: {need} on {device}, which has {size(free)} free; nothing was moved"
        )


# ---- The move


class _Moves:
    """What has been moved so far."""

    def __init__(self, device: str) -> None:
        self.copies: dict[int, tuple[Any, Any]] = {}
        """By the `id` of a tensor: itself, so that no other gets that, and what is there in its place."""
        self.modules: list[str] = []
        """Their names."""
        self._device = device

    def moved(self, part: Any) -> Any:
        """Return the copy of a tensor; all else stays the object it is."""
        import torch

        if not issubclass(type(part), torch.Tensor):
            return part
        if id(part) not in self.copies:
            self.copies[id(part)] = part, self._copy(part)
        return self.copies[id(part)][1]

    def _copy(self, tensor: Any) -> Any:
        import torch

        if str(tensor.device) == self._device:
            return tensor
        # A tensor that a graph made stays in the graph, as with `x = x.to(...)`; a leaf has a leaf for a copy.
        with torch.set_grad_enabled(tensor.grad_fn is not None):
            made = tensor.to(self._device)
        if tensor.is_leaf and tensor.requires_grad:
            made = (
                torch.nn.Parameter(made)
                if isinstance(tensor, torch.nn.Parameter)
                else made.requires_grad_()
            )
            made.grad = None if tensor.grad is None else self.moved(tensor.grad)
        return made

    def move_module(self, module: Any) -> None:
        """Move a module by its own `to`."""
        slots = list(_slots_of(module))
        module.to(self._device)
        for kept, key, old in slots:
            # A tied weight stays one where torch makes new parameters, as on PrivateUse1.
            kept[key] = self.copies.setdefault(id(old), (old, kept[key]))[1]

    def move_optimizer(self, optimizer: Any) -> None:
        """Give an optimizer its parameters, and move their state, in its own dictionaries."""
        for kept, key, value in list(_state_of(optimizer)):
            kept[key] = _rebuilt(value, self.moved)
        for group in optimizer.param_groups:
            parameters = [self.moved(each) for each in group["params"]]
            for old, new in zip(group["params"], parameters, strict=True):
                if new is not old and old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
            group["params"][:] = parameters


def _flat(value: Any) -> tuple[list[Any], Any]:
    """Return what torch finds in containers, and their shape; a packed sequence has a `to` of its own."""
    from torch.nn.utils.rnn import PackedSequence

    flatten = torch_private.containers().flatten
    found: tuple[list[Any], Any] = flatten(value, lambda each: type(each) is PackedSequence)
    return found


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with what is in it changed; itself if nothing differs."""
    leaves, shape = _flat(value)
    changed = [change(each) for each in leaves]
    if all(map(operator.is_, changed, leaves)):
        return value
    return torch_private.containers().unflatten(changed, shape)

"""`--move`: move named variables to the device before the cell runs, all of them or none.

Everything is copied first; only then names, modules and optimizers get the copies, and if one of them raises, all of
it is undone. So a missing name, a module that cannot be moved, or too little memory leaves the notebook as it was.

`contents`: the tensors, modules and optimizers in a variable. `copies`: copying, and in-place changes with undo.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpumagic.errors import GpuMagicError, OptionError, nearest
from gpumagic.heap import branches, modules
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory.devices import room
from gpumagic.notebook import session
from gpumagic.report.units import size
from gpumagic.transfers.log import direction
from gpumagic.transfers.move.contents import Contents, rebuilt
from gpumagic.transfers.move.copies import (
    Changes,
    Copies,
    CopyGroup,
    gradient_of,
    group_by_memory,
    state_to_move,
    tensors_of,
)
from gpumagic.transfers.report import TransferRow


def check_names(names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Raise what `relocate` raises for a name that is missing or holds nothing that could move, and move nothing."""
    for name in names:
        load(name, namespace)


def relocate(names: Iterable[str], namespace: MutableMapping[str, Any], device: str) -> tuple[TransferRow, ...]:
    """Move variables to a device and return what moved, one row per variable and source device.

    A tensor's name is bound to its copy; a module stays the object it is and its optimizers, found in the namespace,
    follow with their state; lists, tuples, dicts and dataclasses are rebuilt around what moved.

    Args:
        names: variables of the namespace.
        namespace: where they are looked up and bound.
        device: a full torch name, such as ``"cuda:1"``.

    Raises:
        OptionError: a name is missing, or holds nothing that could move.
        GpuMagicError: it does not fit, or something cannot be moved. Nothing has changed then.
    """
    names = list(dict.fromkeys(names))
    if device == "meta" and names:
        raise OptionError(f"{CAUSE}: meta tensors have no values, so moving {', '.join(names)} there would lose them")
    combined, found = load_all(names, namespace, device)
    groups = group_by_memory(tensor for variable in found for tensor in variable.tensors)
    check_room(names, sum(group.nbytes for group in groups), device)
    failure, copies = None, Copies()
    try:
        copies.make(groups, device)
        _replace(names, namespace, combined, copies, device)
    except Exception as error:  # from torch, a module or an optimizer: our error has its text
        failure = str(error).partition("\n")[0] or type(error).__name__
    finally:
        copies.new.clear()  # an interrupt's traceback keeps this frame
    if failure is not None:  # out here: raised inside, it would keep that error, its frames and their tensors
        raise GpuMagicError(f"{CAUSE}: {', '.join(names)} cannot go to {device}, and nothing was moved: {failure}")
    return _rows(found, groups, copies, device)


def _replace(
    names: list[str], namespace: MutableMapping[str, Any], combined: Contents, copies: Copies, device: str
) -> None:
    """Put the copies into modules, leaves, optimizers and names; on an error or an interrupt, undo all of it."""
    changes = Changes(copies.new)
    try:
        for module in combined.modules:
            changes.move_module(module, device)
        for leaf in combined.leaves():
            changes.move_leaf(leaf)
        for optimizer in combined.optimizers:
            changes.move_optimizer(optimizer)
        done: dict[int, Any] = {}
        new = {name: rebuilt(namespace[name], changes.replacement, done) for name in names}
        for name in names:
            changes.on_undo(partial(namespace.__setitem__, name, namespace[name]))
            namespace[name] = new[name]
    except BaseException:
        changes.undo()
        raise


def _rows(found: list[MovedVariable], groups: list[CopyGroup], copies: Copies, device: str) -> tuple[TransferRow, ...]:
    owner = {id(tensor): number for number, variable in enumerate(found) for tensor in variable.tensors}
    sums: dict[tuple[str, str], tuple[int, int, float]] = {}
    for group in groups:
        if group.nbytes:
            key = found[min(owner[id(tensor)] for tensor in group.tensors)].name, group.source
            count, nbytes, seconds = sums.get(key, (0, 0, 0.0))
            sums[key] = count + 1, nbytes + group.nbytes, seconds + copies.seconds[id(group.tensors[0])]
    return tuple(
        TransferRow(direction(source, device), source, device, *figures, line=None, code=None, name=name, cause=CAUSE)
        for (name, source), figures in sums.items()
    )


def check_room(names: Sequence[str], nbytes: int, device: str) -> None:
    """Raise `GpuMagicError` if a device has fewer free bytes, as far as that is known."""
    free = room(device)
    if free is not None and nbytes > free:
        need = f"{', '.join(names)} need{'s' if len(names) == 1 else ''} {size(nbytes)}"
        raise GpuMagicError(f"{CAUSE}: {need} on {device}, which has {size(free)} free; nothing was moved")


CAUSE = "--move"


@dataclass
class MovedVariable:
    """A variable, what it holds, and the tensors that it adds to the move."""

    name: str
    contents: Contents = field(default_factory=Contents)
    tensors: list[Any] = field(default_factory=list)


def load_all(names: list[str], namespace: Mapping[str, Any], device: str) -> tuple[Contents, list[MovedVariable]]:
    """Return what the names hold together, and each with the tensors it adds that are not on the device yet."""
    combined, taken = Contents(), set[int]()
    variables = [load(name, namespace) for name in names]
    for variable in variables:
        combined.add(namespace[variable.name])
        variable.tensors = _not_there(_own_tensors(variable.contents), taken, device)
    moving = {id(each) for each in _own_tensors(combined)}
    for name, optimizer in _followers(combined, moving, namespace):
        kept = state_to_move(optimizer, moving)
        variables.append(MovedVariable(name, tensors=_not_there(kept, taken, device)))
        if all(optimizer is not each for each in combined.optimizers):
            combined.optimizers.append(optimizer)
    return combined, variables


def load(name: str, namespace: Mapping[str, Any]) -> MovedVariable:
    """Return a variable and what it holds; raise `OptionError` if it is missing or holds nothing with a device."""
    if name not in namespace:
        near = nearest(name, session.names_of_users(namespace))
        hint = f"did you mean {near}?" if near else "write names of variables, such as --move model,x"
        raise OptionError(f"{CAUSE}: there is no variable {name!r}; {hint}")
    found = MovedVariable(name)
    if not found.contents.add(namespace[name]):
        kind = branches.name_of_type(type(namespace[name]))
        hint = "; torch.from_numpy makes it a tensor" if kind == "ndarray" else ""
        if branches.class_attribute(type(namespace[name]), "to") is not None:
            hint = f"; it has a .to() of its own: {name} = {name}.to(...)"
        raise OptionError(f"{CAUSE}: {name!r} ({kind}) holds no tensor, module or optimizer that could move{hint}")
    return found


def _own_tensors(contents: Contents) -> list[Any]:
    found = [tensor for module in contents.modules for tensor in tensors_of(module)]
    for tensor in (*contents.tensors, *contents.parameters()):
        found += [tensor, *gradient_of(tensor)]
    return found


def _not_there(tensors: Iterable[Any], taken: set[int], device: str) -> list[Any]:
    found = []
    with undisturbed():
        for tensor in tensors:
            if str(plain(tensor, "device")) != device and id(tensor) not in taken:
                taken.add(id(tensor))
                found.append(tensor)
    return found


def _followers(combined: Contents, moving: set[int], namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the optimizers that are named or whose parameters move, each with a name."""
    import torch

    found: dict[int, tuple[str, Any]] = {}
    for name, value in list(namespace.items()):
        if issubclass(type(value), torch.optim.Optimizer) and not name.startswith("_"):
            optimizer = modules.unwrapped(value)
            works_on = {id(each) for group in modules.parameter_groups(optimizer) for each in group["params"]}
            if works_on & moving:
                found.setdefault(id(optimizer), (name, optimizer))
    for optimizer in combined.optimizers:
        found.setdefault(id(optimizer), ("optimizer", optimizer))
    return list(found.values())

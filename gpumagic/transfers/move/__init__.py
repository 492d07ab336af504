"""`--move`: named variables go to the device before the cell runs, all of them or none.

Everything is copied first; only then names, modules and optimizers are given the copies, and if one of them refuses,
what was given is taken back. So a name that is missing, a module that cannot be moved, or too little memory leaves the
notebook as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

from gpumagic.errors import GpuMagicError, OptionError
from gpumagic.transfers.log import direction
from gpumagic.transfers.move import loads, room
from gpumagic.transfers.move.contents import Contents, rebuilt
from gpumagic.transfers.move.copies import Copies, Parcel, packed
from gpumagic.transfers.move.loads import CAUSE, Load
from gpumagic.transfers.move.owners import Changes
from gpumagic.transfers.report import TransferRow


def check(names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Raise what `relocate` raises for a name that is not there or holds nothing that could move, and move nothing."""
    for name in names:
        loads.look_up(name, namespace)


def relocate(names: Iterable[str], namespace: MutableMapping[str, Any], device: str) -> tuple[TransferRow, ...]:
    """Move variables to a device and return what moved, one row for each variable and place it came from.

    A tensor's name is bound to its copy; a module stays the object it is and its optimizers, found in the namespace,
    follow with their state; lists, tuples, dicts and dataclasses are made anew around what moved.

    Args:
        names: variables of the namespace.
        namespace: where they are looked up and bound.
        device: a full torch name, such as ``"cuda:1"``.

    Raises:
        OptionError: a name that is not there, or holds nothing that could move.
        GpuMagicError: it does not fit, or something refuses to move. Nothing has changed then.
    """
    names = list(dict.fromkeys(names))
    if device == "meta" and names:
        raise OptionError(f"{CAUSE}: meta tensors have no values, so moving {', '.join(names)} there would lose them")
    whole, found = loads.of(names, namespace, device)
    parcels = packed(tensor for load in found for tensor in load.tensors)
    room.check(names, sum(parcel.nbytes for parcel in parcels), device)
    failure, copies = None, Copies()
    try:
        copies.make(parcels, device)
        _hand_over(names, namespace, whole, copies, device)
    except Exception as error:  # torch's, a module's or an optimizer's: what it says goes into ours
        failure = str(error).partition("\n")[0] or type(error).__name__
    finally:
        copies.new.clear()  # an interrupt's traceback keeps this frame
    if failure is not None:  # out here: raised inside, our error would keep that one, its frames and their tensors
        raise GpuMagicError(f"{CAUSE}: {', '.join(names)} cannot go to {device}, and nothing was moved: {failure}")
    return _rows(found, parcels, copies, device)


def _hand_over(
    names: list[str], namespace: MutableMapping[str, Any], whole: Contents, copies: Copies, device: str
) -> None:
    """Give modules, leaves, optimizers and names their copies; on an error or an interrupt, take all of it back."""
    changes = Changes(copies.new)
    try:
        for module in whole.modules:
            changes.move_module(module, device)
        for leaf in whole.leaves():
            changes.move_leaf(leaf)
        for optimizer in whole.optimizers:
            changes.move_optimizer(optimizer)
        done: dict[int, Any] = {}
        new = {name: rebuilt(namespace[name], changes.successor, done) for name in names}
        for name in names:
            changes.on_undo(partial(namespace.__setitem__, name, namespace[name]))
            namespace[name] = new[name]
    except BaseException:
        changes.undo()
        raise


def _rows(found: list[Load], parcels: list[Parcel], copies: Copies, device: str) -> tuple[TransferRow, ...]:
    owner = {id(tensor): number for number, load in enumerate(found) for tensor in load.tensors}
    sums: dict[tuple[str, str], tuple[int, int, float]] = {}
    for parcel in parcels:
        if parcel.nbytes:
            key = found[min(owner[id(tensor)] for tensor in parcel.tensors)].name, parcel.source
            count, nbytes, seconds = sums.get(key, (0, 0, 0.0))
            sums[key] = count + 1, nbytes + parcel.nbytes, seconds + copies.seconds[id(parcel.tensors[0])]
    return tuple(
        TransferRow(direction(source, device), source, device, *figures, line=None, code=None, name=name, cause=CAUSE)
        for (name, source), figures in sums.items()
    )

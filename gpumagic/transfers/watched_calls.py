"""Which of torch's functions create, move or read tensors, and the handler of each.

A handler stands in for one call: it gives the function the default device if it takes one, calls it, and counts
(`placing`, `moving`, `reading`, `indexing`). How calls come to the handlers is not its business: `entry_points` puts
them in place of the functions, `device_mode` brings them in by a function mode. Imports torch at its top, so it is
itself imported only when a cell is run on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors

from gpumagic.transfers import indexing, moving, placing, reading
from gpumagic.transfers.recorder import Function, Handler, Recorder


@dataclass(frozen=True)
class Watched:
    """A function that is watched, and where it is looked up."""

    owner: Any
    name: str
    function: Function
    handler: Handler

    @property
    def is_reading(self) -> bool:
        """Return whether it does nothing worth counting to a tensor on the host."""
        return self.handler in _READING


@cache
def functions() -> tuple[Watched, ...]:
    """Return the watched functions of torch's modules."""
    owners = (torch, torch.fft, torch.nested)
    constructors = [_placed(owners, each, placing.construct) for each in _device_constructors() - _FROM_HOST]
    return (
        *constructors,
        *(_placed(owners, each, placing.construct_from_host) for each in _FROM_HOST),
        *_found(torch, _CREATORS, placing.create),
        *_found(torch, ("is_nonzero", "allclose"), reading.item),
        *_found(torch, ("equal",), reading.equal),
        *_found(torch, _SYNCS, reading.sync),
        *_found(torch.autograd, ("grad",), _suspend),
    )


@cache
def methods() -> tuple[Watched, ...]:
    """Return the watched methods of tensors."""
    tensor, backend = torch.Tensor, torch._C._get_privateuse1_backend_name()
    return (
        *_found(tensor, _METHOD_CREATORS, placing.create),
        *_found(tensor, ("new_tensor",), placing.new_tensor),
        *_found(tensor, ("to", "cuda", "cpu", "xpu", "type", backend), moving.move),
        *_found(tensor, ("copy_",), moving.copy),
        *_found(tensor, _ITEMS, reading.item),
        *_found(tensor, ("tolist",), reading.tolist),
        *_found(tensor, ("numpy",), reading.numpy),
        *_found(tensor, ("equal",), reading.equal),
        *_found(tensor, ("__repr__",), reading.print_),
        *_found(tensor, ("__format__",), reading.format_),
        *_found(tensor, _SYNCS, reading.sync),
        *_found(tensor, ("__getitem__",), indexing.get),
        *_found(tensor, ("__setitem__",), indexing.put),
        *_found(tensor, ("index_put_", "index_put"), indexing.put_at),
        *_found(tensor, ("backward",), _suspend),
    )


@cache
def handlers() -> dict[Function, Handler]:
    """Return the handler of each watched function."""
    return {each.function: each.handler for each in (*functions(), *methods())}


_READING = (
    reading.item, reading.tolist, reading.numpy, reading.equal, reading.print_, reading.format_, reading.sync
)  # fmt: skip
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_CREATORS = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "normal")
_METHOD_CREATORS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
_ITEMS = ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "allclose")
_SYNCS = ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere")


def _placed(owners: tuple[Any, ...], function: Function, handler: Handler) -> Watched:
    name = function.__name__
    owner = next(each for each in owners if getattr(each, _PUBLIC.get(name, name), None) is function)
    return Watched(owner, _PUBLIC.get(name, name), function, handler)


_PUBLIC = {"fft_fftfreq": "fftfreq", "fft_rfftfreq": "rfftfreq"}


def _found(owner: Any, names: tuple[str, ...], handler: Handler) -> list[Watched]:
    return [Watched(owner, name, getattr(owner, name), handler) for name in names if hasattr(owner, name)]


def _suspend(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call what runs the user's own code without torch's device context in force, but with an eye on its moves."""
    __tracebackhide__ = True
    outer = recorder.is_busy, recorder.is_suspended
    recorder.is_busy, recorder.is_suspended = False, True
    try:
        return func(*args, **kwargs)  # under the mode, torch has taken that away, and what it calls is not seen
    finally:
        recorder.is_busy, recorder.is_suspended = outer

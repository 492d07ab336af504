"""The few small values on the device of the dry run that are known all the same, and what is assumed for the others.

What comes from the host, or is computed from nothing but such values, is kept as a small tensor on the CPU: lengths
that a loop reads back, a gradient scaler's scale. Where the host asks for any other value it gets an assumed one,
and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumagic.dryrun.stage.calls import Call
from gpumagic.dryrun.stage.guesses import Guesses
from gpumagic.dryrun.stage.storages import key_of

LARGEST = 4096
"""Bytes of a storage whose contents are kept."""

_FILLS = frozenset({"aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_"})
_LEAVES_FINITE = "aten::_amp_foreach_non_finite_check_and_unscale_"
_ABSORBING = {"bitwise_or": True, "logical_or": True, "bitwise_and": False, "logical_and": False}
"""What an operand must be throughout for the other one not to matter."""
_RANDOM = torch.Tag.nondeterministic_seeded


class Contents:
    """Small values by storage.

    Args:
        device_type: the name of the device of the dry run.
        nbytes_of: tells the bytes of a tensor of the dry run's whole storage.
        guesses: what the host gets of what is not known.
        assume: called with a sentence for each other thing that is assumed.
    """

    def __init__(
        self,
        device_type: str,
        nbytes_of: Callable[[torch.Tensor], int],
        guesses: Guesses,
        assume: Callable[[str], None],
    ) -> None:
        self.guesses = guesses
        self._type = device_type
        self._nbytes_of = nbytes_of
        self.suppose = assume
        self._known: dict[int, torch.Tensor] = {}

    def forget(self, key: int) -> None:
        """Drop what was known of a storage."""
        self._known.pop(key, None)

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return what `.item()` returns."""
        value = self.of(tensor)
        if value is not None:
            return value.item()
        return self.guesses.scalar(tensor.dtype)

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return what `torch.equal` returns."""
        if one.shape != other.shape:
            return False
        values = self.of(one), self.of(other)
        if values[0] is None or values[1] is None:
            return self.guesses.truth()
        return bool(torch.equal(values[0], values[1]))

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's contents on the CPU, over memory that is the contents' own; None if they are not known."""
        if tensor.device.type != self._type:
            return tensor if tensor.device.type == "cpu" else None
        raw = self._known.get(key_of(tensor))
        if raw is None:
            return None
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note a copy to the device."""
        value = self.of(source) if self._nbytes_of(target) <= LARGEST else None
        self._write(target, value)

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Fill a tensor on the host with what the device's holds."""
        value = self.of(source)
        if value is None:
            self.guesses.fill(target)
        else:
            target.copy_(value)

    @staticmethod
    def is_absorbing(op: Any) -> bool:
        """Return whether what an operator does may follow from one operand alone, or is not to be followed."""
        return op._name == _LEAVES_FINITE or _absorbs(op) is not None

    @staticmethod
    def is_repeatable(op: Any) -> bool:
        """Return whether an operator computes the same from the same values."""
        return _RANDOM not in op.tags

    @staticmethod
    def is_overwritten(call: Call, argument: Any, tensor: torch.Tensor, nbytes: int) -> bool:
        """Return whether nothing of the tensor's storage is left of what was there."""
        if not argument.is_write or not (argument.kwarg_only or call.op._name in _FILLS):
            return False
        return bool(tensor.numel() * tensor.itemsize >= nbytes)

    def may_follow(self, reads: list[int] | None, writes: list[int]) -> bool:
        """Return whether a call's result may be known; where not, what it writes to is forgotten.

        Args:
            reads: the storages that must be known for that; None where it never is.
            writes: the storages that are written to.
        """
        known = self._known
        if reads is not None and all(key in known for key in reads):
            return True
        if known:
            for key in writes:
                known.pop(key, None)
        return False

    def follow(self, call: Call, made: Any) -> None:
        """Note what an operator did, where all that it read is known; else forget what it wrote to."""
        if call.op._name == _LEAVES_FINITE:
            self.suppose("gradients are taken to be finite, so that a gradient scaler steps")
            return
        written = [tensor for argument, tensor in call.tensors() if argument.is_write and call.is_here(tensor)]
        results = [each for each in _flat(made) if isinstance(each, torch.Tensor) and call.is_here(each)]
        small = all(self._nbytes_of(each) <= LARGEST for each in (*results, *written))
        if not (small and (self._repeat(call, results) or self._absorb(call, results))):
            for tensor in written:
                self.forget(key_of(tensor))

    def _repeat(self, call: Call, results: list[torch.Tensor]) -> bool:
        """Run the operator on what is known; return whether all it needed was."""
        if _RANDOM in call.op.tags:
            return False
        twins: dict[int, torch.Tensor] = {}
        for argument, tensor in call.tensors():
            value = self.of(tensor)
            if value is None and self.is_overwritten(call, argument, tensor, self._nbytes_of(tensor)):
                value = self._blank(tensor)
            if value is None:
                return False
            twins[id(tensor)] = value
        try:
            returned = call.op(*_swapped(call.args, twins), **_swapped(call.kwargs, twins))
        except Exception:  # a kernel the CPU lacks: its result stays unknown
            return False
        for tensor, value in zip(results, _flat(returned), strict=False):
            if isinstance(value, torch.Tensor) and key_of(tensor) not in self._known:
                self._write(tensor, value)
        return True

    def _absorb(self, call: Call, results: list[torch.Tensor]) -> bool:
        """Note what follows from one operand alone, such as truths from an "or" with truths; return whether it does.

        A generator of text ends when the longest length is reached, whatever the unknown tokens say.
        """
        wanted = _absorbs(call.op)
        if wanted is None or any(each.dtype != torch.bool and wanted for each in results):
            return False
        read = [
            self.of(tensor) for argument, tensor in call.tensors() if not argument.is_write or argument.name == "self"
        ]
        if not any(value is not None and bool((value == wanted).all()) for value in read):
            return False
        for tensor in results:
            self._write(tensor, torch.full(tensor.shape, wanted, dtype=tensor.dtype, device="cpu"))
        return True

    def selected(self, mask: torch.Tensor) -> int:
        """Return how many elements a mask selects; all of them where it is not known."""
        value = self.of(mask)
        if value is not None:
            return int(value.count_nonzero())
        return self.guesses.selected(mask.numel())

    def _write(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None:
            self.forget(key_of(target))
            return
        place = self.of(target)
        if place is None and target.numel() * target.itemsize >= self._nbytes_of(target):
            place = self._blank(target)
        if place is not None:
            place.copy_(value)

    def _blank(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self._known[key_of(tensor)] = torch.zeros(self._nbytes_of(tensor), dtype=torch.uint8, device="cpu")
        return self.of(tensor)


def _absorbs(op: Any) -> bool | None:
    return _ABSORBING.get(op._name.removeprefix("aten::").partition(".")[0].rstrip("_"))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [each for item in value for each in _flat(item)]
    return [value]


def _swapped(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return twins.get(id(value), value)
    if isinstance(value, list | tuple):
        return [_swapped(each, twins) for each in value]
    if isinstance(value, dict):
        return {name: _swapped(each, twins) for name, each in value.items() if name != "generator"}
    return torch.device("cpu") if isinstance(value, torch.device) else value

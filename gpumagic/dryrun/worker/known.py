"""The contents of small tensors on the device, as far as the host put them there.

Lengths that a loop reads back, a scale, the mask of a generator of text that ends at its longest length: an operator
whose operands are known is run again on the CPU, over copies of them or over the device's own memory. Whatever else an
operator writes to is forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.dryrun.worker.modules import tensors_in
from gpumagic.dryrun.worker.shown import is_plain

LARGEST = 1 << 14
"""Bytes of a storage up to which its contents are kept."""
_OVERWRITES = frozenset({"fill_", "zero_", "copy_"})
"""Operators of which what was in their first operand does not matter."""
_SHAPES = frozenset({
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
})  # fmt: skip
"""Operators that take from their first operand no more than what it looks like."""
_MAKE_ROOM = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
SIZED = frozenset({
    "where", "argwhere", "nonzero_numpy", "repeat_interleave", "tensor_split", "narrow", "allclose", "is_nonzero",
    "_nested_tensor_from_mask_left_aligned", "_choose_qparams_per_tensor",
})  # fmt: skip
"""Operators that return as much, or something else, as values say, or are composed of such, and that have no tag."""
_FROM_HOST = "lift_fresh"
"""What `torch.tensor` calls last, when the contents are there."""
_LEAVES_FINITE = "_amp_foreach_non_finite_check_and_unscale_"
_ABSORBING = {
    "bitwise_or": True, "logical_or": True, "__or__": True, "__ior__": True,
    "bitwise_and": False, "logical_and": False, "__and__": False, "__iand__": False,
}  # fmt: skip
"""What an operand must be throughout for the other one not to matter."""


@dataclass(frozen=True)
class _Traits:
    """What an operator does with contents.

    Attributes:
        is_view: whether its result may be its operand's memory.
        computes: whether its result follows from its operands.
        written: the numbers and names of the arguments that it writes to.
        overwritten: those of which what was there does not matter.
        absorbing: see `_ABSORBING`.
    """

    name: str
    is_view: bool
    computes: bool
    written: frozenset[int | str]
    overwritten: frozenset[int | str]
    absorbing: bool | None


@functools.cache
def _traits(op: Any) -> _Traits:
    name = op._schema.name.removeprefix("aten::")
    aliased = [each for each in op._schema.arguments if each.alias_info is not None]
    numbers = {each.name: number for number, each in enumerate(op._schema.arguments)}
    written = {each.name for each in aliased if each.is_write}
    if "norm" in name:  # their schemas do not say that they write to these
        written |= numbers.keys() & {"running_mean", "running_var"}
    free = {each for each in written if op._schema.arguments[numbers[each]].kwarg_only}
    if name in _OVERWRITES | _SHAPES:
        free.add(op._schema.arguments[0].name)
    return _Traits(
        name=name,
        is_view=bool(aliased) and not written and name != _FROM_HOST,
        computes=torch.Tag.nondeterministic_seeded not in op.tags and name not in _MAKE_ROOM,
        written=frozenset({*written, *(numbers[each] for each in written)}),
        overwritten=frozenset({*free, *(numbers[each] for each in free)}),
        absorbing=_ABSORBING.get(name, _ABSORBING.get(name.rstrip("_"))),
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


class Known:
    """Small contents by storage.

    Args:
        device_type: the name of the device of the dry run.
        key_of: tells the storage of a tensor on it; 0 for none.
        memory_of: returns the bytes of a tensor's whole storage, as a tensor on the CPU that is kept.
        nbytes_of: tells the bytes of a tensor's whole storage.
    """

    def __init__(
        self,
        device_type: str,
        key_of: Callable[[torch.Tensor], int],
        memory_of: Callable[[torch.Tensor], torch.Tensor],
        nbytes_of: Callable[[torch.Tensor], int] = _nbytes,
    ) -> None:
        self._type = device_type
        self._key_of = key_of
        self._memory_of = memory_of
        self._nbytes_of = nbytes_of
        self._kept: dict[int, torch.Tensor] = {}

    def forget(self, key: int) -> None:
        """Drop what was known of a storage."""
        self._kept.pop(key, None)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's contents on the CPU, over the memory that they are kept in; None if they are not known."""
        if tensor.device.type != self._type:
            return tensor if tensor.device.type == "cpu" else None
        if tensor.layout is not torch.strided or not is_plain(tensor):
            return None
        raw = self._kept.get(self._key_of(tensor))
        if raw is None or raw.numel() != self._nbytes_of(tensor):
            return None
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def write(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        """Note what a tensor holds from now on; None if that is not known."""
        place = None if value is None else self.of(target)
        is_whole = is_plain(target) and target.numel() * target.itemsize >= self._nbytes_of(target)
        if value is not None and place is None and is_whole:
            self._kept[self._key_of(target)] = self._memory_of(target)
            place = self.of(target)
        if value is None or place is None:
            self.forget(self._key_of(target))
        else:
            place.copy_(value)

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Note what an operator did, where all that it read is known; else forget what it wrote to.

        Args:
            op: the operator, an overload of it.
            args: its positional arguments.
            kwargs: its keyword arguments.
            made: what it returned.
        """
        traits = _traits(op)
        results = [each for each in tensors_in(made) if self.is_here(each)]
        if traits.is_view:
            given = {self._key_of(each) for each in tensors_in((args, kwargs)) if self.is_here(each)}
            results = [each for each in results if self._key_of(each) not in given]
            if not results:
                return
        if op.namespace == "c10d":
            self._share(traits.name, args)
            return
        if traits.name == _FROM_HOST:
            self._read_in(results)
            return
        if traits.name == _LEAVES_FINITE:
            return  # gradients are taken to be finite
        is_small = results and all(each.numel() * each.itemsize <= LARGEST for each in results)
        if (
            is_small
            and traits.computes
            and (self._repeat(op, traits, args, kwargs, results) or self._absorb(traits, args, results))
        ):
            return
        if self._kept:
            for each in results:
                self.forget(self._key_of(each))
            for each in self._written(traits, args, kwargs):
                self.forget(self._key_of(each))

    def _share(self, name: str, args: tuple[Any, ...]) -> None:
        """Note what a collective did, of which all ranks are taken to send the same; sums of that are not known."""
        if name.endswith("::broadcast_"):
            return
        given = next(filter(self.is_here, tensors_in(args[1])), None) if "allgather" in name else None
        value = None if given is None else self.of(given)
        for each in filter(self.is_here, tensors_in(args[0])):
            is_whole = value is not None and value.numel() and not each.numel() % value.numel()
            made = value.flatten().repeat(each.numel() // value.numel()) if is_whole and value is not None else None
            self.write(each, None if made is None else made.view(each.shape))

    def may_follow(self, op: Any, keys: list[int]) -> bool:
        """Return whether an operator on tensors of some storages may change what is known."""
        traits = _traits(op)
        is_free = traits.absorbing is not None or bool(traits.overwritten)
        return is_free or not keys or any(key in self._kept for key in keys)

    def _read_in(self, tensors: list[torch.Tensor]) -> None:
        """Note that what lies in the memory of some tensors is what the host put there."""
        for each in tensors:
            if self._nbytes_of(each) <= LARGEST and (key := self._key_of(each)):
                self._kept[key] = self._memory_of(each)

    def _repeat(
        self, op: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> bool:
        """Run the operator on what is known; return whether all it needed was."""
        twins: dict[int, torch.Tensor] = {}
        for name, value in (*enumerate(args), *kwargs.items()):
            for tensor in tensors_in(value):
                twin = self.of(tensor)
                if name in traits.overwritten and twin is None:
                    twin = torch.empty_like(tensor, device="cpu")
                elif name in traits.written and twin is not None:
                    twin = twin.clone()  # it is written to once, below
                if twin is None:
                    return False
                twins[id(tensor)] = twin
        try:
            returned = op(*_swapped(args, twins), **_swapped(kwargs, twins))
        except Exception:  # a kernel the CPU lacks: its result stays unknown
            return False
        for tensor, value in zip(results, tensors_in(returned), strict=False):
            self.write(tensor, value)
        for tensor in self._written(traits, args, kwargs):
            self.write(tensor, twins[id(tensor)])
        return True

    def _absorb(self, traits: _Traits, args: tuple[Any, ...], results: list[torch.Tensor]) -> bool:
        """Note what follows from one operand alone, such as truths from an "or" with truths; return whether it does.

        A generator of text ends when the longest length is reached, whatever the unknown tokens say.
        """
        wanted = traits.absorbing
        if wanted is None or (wanted and any(each.dtype != torch.bool for each in results)):
            return False
        if not any(self._is_all(each, wanted) for each in args):
            return False
        for tensor in results:
            self.write(tensor, torch.full(tensor.shape, wanted, dtype=tensor.dtype, device="cpu"))
        return True

    def _is_all(self, value: Any, wanted: bool) -> bool:
        """Return whether an operand is known, and the same throughout."""
        known = self.of(value) if isinstance(value, torch.Tensor) else value
        return known is not None and bool(
            (known == wanted).all() if isinstance(known, torch.Tensor) else known == wanted
        )

    def _written(self, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        if traits.written:
            for name, value in (*enumerate(args), *kwargs.items()):
                if name in traits.written:
                    yield from filter(self.is_here, tensors_in(value))

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device of the dry run."""
        return tensor.device.type == self._type and tensor.layout is torch.strided


def _swapped(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return twins.get(id(value), value)
    if isinstance(value, list | tuple):
        return [_swapped(each, twins) for each in value]
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name not in {"generator", "pin_memory"}}
        return {name: _swapped(each, twins) for name, each in kept.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value

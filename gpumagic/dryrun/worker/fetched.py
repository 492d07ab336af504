"""Tensors on the host that were copied from a device of which no dry run knows the values.

Predictions that are collected, saved or shown decide nothing. So such a tensor is filled with something and is
remembered, as is whatever is computed from it; a number of it is a noted one (see `noted`), and a truth is decided as
one of those is. Otherwise something is decided where its numbers go to numpy, or say how large something is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpumagic.dryrun.worker.guesses import Read
from gpumagic.dryrun.worker.shown import HostStorages, Shown, before_looks, is_plain
from gpumagic.heap.running_module import tensors_in

if TYPE_CHECKING:
    from gpumagic.dryrun.worker.guesses import Guesses
    from gpumagic.dryrun.worker.known import Known

_SIZED = frozenset({"where", "argwhere", "nonzero_numpy", "repeat_interleave", "tensor_split", "narrow", "allclose"})
"""Operators composed of others of which one returns as much, or something else, as values say."""
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Fetched:
    """Those of one run.

    Args:
        guesses: is told where something is decided by one.
        shown: shows the operators, once there is one.
        known: what is known of the device's values, if that is followed.
    """

    def __init__(self, guesses: Guesses, shown: Shown, known: Known | None) -> None:
        self._guesses = guesses
        self._shown = shown
        self._known = known
        self._all = HostStorages[Read]()
        self.of = self._all.of

    def install(self) -> None:
        """Remember what is copied to the host for the rest of the process."""
        self._guesses.remember, self._guesses.fetched = self.add, self.of
        self._shown.to(self._follow)
        before_looks(self._look)
        tensor: Any = torch.Tensor
        is_true = tensor.__bool__

        def decided(tensor: torch.Tensor) -> bool:
            read = self.of(tensor)
            if read is None:
                return bool(is_true(tensor))
            with self._guesses.ignoring():
                outcome = bool(is_true(tensor))
            return self._guesses.decide(read, outcome)

        tensor.__bool__ = decided

    def add(self, tensor: torch.Tensor, read: Read) -> None:
        """Remember a tensor.

        Args:
            tensor: it.
            read: what is told of it where something is decided.
        """
        self._shown.begin()
        if self.of(tensor) is None:
            self._all.add(tensor.untyped_storage(), read)

    def _look(self, tensor: torch.Tensor) -> None:
        read = self.of(tensor)
        if read is not None:
            self._guesses.lose(read, is_all=True)

    def _follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        if not self._all:
            return
        read = next((found for each in tensors_in((args, kwargs)) if (found := self.of(each)) is not None), None)
        if read is None:
            return
        results = list(tensors_in(made))
        name = op._schema.name.removeprefix("aten::")
        if not (results and name not in _SIZED and not any(tag in op.tags for tag in _TAGS)):
            self._guesses.lose(read, is_all=True)
        if op._schema.is_mutable:
            results += tensors_in(args[:1])
        for each in results:
            if each.is_cpu and each.layout is torch.strided and is_plain(each):
                self.add(each, read)
            elif self._known is not None and self._known.is_here(each):
                self._known.write(each, None)

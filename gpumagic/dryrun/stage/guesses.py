"""What the host reads from a device that computes nothing: a number, a truth value, how many elements a mask selects.

Values that the host has copied to the device are there; what a kernel would have written is not. So zeros are taken to
be unknown, and each of `GUESSES` puts something else in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumagic.dryrun.stage.contents import GUESSES
from gpumagic.dryrun.stage.ledger import Place


class Guesses:
    """The values of one run.

    Args:
        guess: which of `GUESSES` the host gets; those of odd number select nothing, the others everything.
        assume: called with a sentence for each thing that is assumed.
        where: tells where the cell stands.
    """

    def __init__(self, guess: int, assume: Callable[[str], None], where: Callable[[], Place]) -> None:
        self.reads: dict[tuple[int | None, str, str], None] = {}
        """The line, its code, and what the host read there that is not known: truth, number, size or contents."""
        self._where = where
        self._first = guess == 0
        self._number, self._whole, self._truth = GUESSES[guess]
        self._selects_all = guess % 2 == 0
        self._assume = assume
        self._library: Any = None

    def install(self) -> None:
        """Answer for the rest of the process."""
        self._library = torch.library.Library("aten", "IMPL")
        for name, answer in {
            "_local_scalar_dense": self._scalar,
            "equal": self._equal,
            "nonzero": self._nonzero,
            "_unique2": self._unique,
            "unique_consecutive": self._unique_consecutive,
        }.items():
            self._library.impl(name, answer, "CUDA", allow_override=True)
        torch.amp.GradScaler._maybe_opt_step = self._step
        for name in ("cpu", "tolist", "to"):
            setattr(torch.Tensor, name, self._fetching(getattr(torch.Tensor, name)))

    def _scalar(self, tensor: torch.Tensor) -> Any:
        there = torch.empty((), dtype=tensor.dtype).copy_(tensor.reshape(()))
        if self._first and bool(there != 0):
            return there.item()  # the host put it there
        if tensor.dtype == torch.bool:
            return self._take(self._truth, "truth", "a truth value")
        if tensor.is_floating_point() or tensor.is_complex():
            number = self._take(self._number, "number", "a number")
            return complex(number) if tensor.is_complex() else number
        return self._take(self._whole, "number", "a whole number")

    def fill(self, host: torch.Tensor) -> None:
        """Put something into a tensor of the host's whose contents are not known."""
        self._read("contents")
        if not self._first:
            host.fill_(min(self._number, torch.finfo(host.dtype).max) if host.is_floating_point() else self._whole)

    def _step(self, optimizer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        self._assume("gradients are taken to be finite, so that a gradient scaler steps")
        return optimizer.step(*args, **kwargs)

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.shape != other.shape:
            return False
        self._read("truth")
        self._assume(f"tensors compared on the device are taken {'not ' if self._truth else ''}to be equal")
        return not self._truth

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.new_empty((self._selected(mask.numel()), mask.dim()), dtype=torch.int64)

    def _unique(
        self, tensor: torch.Tensor, _sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
    ) -> tuple[torch.Tensor, ...]:
        return self._uniques(tensor, return_inverse, return_counts)

    def _unique_consecutive(
        self, tensor: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        if dim is None:
            return self._uniques(tensor, return_inverse, return_counts)
        shape = list(tensor.shape)
        shape[dim] = self._selected(shape[dim])
        counts = tensor.new_empty(shape[dim] if return_counts else 0, dtype=torch.int64)
        inverse = tensor.new_empty(tensor.shape[dim] if return_inverse else 0, dtype=torch.int64)
        return tensor.new_empty(shape), inverse, counts

    def _uniques(self, tensor: torch.Tensor, inverse: bool, counts: bool) -> tuple[torch.Tensor, ...]:
        found = max(1, self._selected(tensor.numel())) if tensor.numel() else 0
        return (
            tensor.new_empty(found),
            tensor.new_empty(tensor.shape if inverse else 0, dtype=torch.int64),
            tensor.new_empty(found if counts else 0, dtype=torch.int64),
        )

    def _selected(self, most: int) -> int:
        self._read("size")
        self._assume(f"a mask on the device is taken to select {'everything' if self._selects_all else 'nothing'}")
        return most if self._selects_all else 0

    def _take(self, value: Any, kind: str, what: str) -> Any:
        self._read(kind)
        self._assume(f"{what} read from the device is taken to be {value}")
        return value

    def _read(self, kind: str) -> None:
        place = self._where()
        self.reads.setdefault((place.line, place.code, kind))

    def _fetching(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that copies to the host, so that what comes from a device is known to be unknown."""

        def fetched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            made = fetch(tensor, *args, **kwargs)
            if tensor.device.type == "cuda" and not (isinstance(made, torch.Tensor) and made.device.type != "cpu"):
                made = self._unknown(made)
            return made

        return fetched

    def _unknown(self, made: Any) -> Any:
        self._read("contents")
        what = "what the fake device holds, mostly zeros" if self._first else f"{self._number} or {self._whole}"
        self._assume(f"values copied from the device to the host are taken to be {what}")
        if not self._first and isinstance(made, torch.Tensor):
            fraction = made.is_floating_point()
            made = torch.full_like(made, min(self._number, torch.finfo(made.dtype).max) if fraction else self._whole)
        return made

"""What is on the device of the dry run where the host asks: what is known of small tensors, else what is guessed."""

from __future__ import annotations

from typing import Any

import torch

from gpumagic.dryrun.worker.fake.calls import Call
from gpumagic.dryrun.worker.fake.storages import Storages, key_of
from gpumagic.dryrun.worker.guesses import Guesses
from gpumagic.dryrun.worker.known import LARGEST, Known


class Contents:
    """The answers of one run.

    Args:
        device_type: the name of the device of the dry run.
        storages: knows the size of each.
        guesses: what the host gets of what is not known.
    """

    def __init__(self, device_type: str, storages: Storages, guesses: Guesses) -> None:
        def memory_of(tensor: torch.Tensor) -> torch.Tensor:
            return torch.zeros(storages.nbytes_of(tensor), dtype=torch.uint8, device="cpu")

        self.known = Known(device_type, key_of, memory_of, storages.nbytes_of)
        self.guesses = guesses
        self._nbytes_of = storages.nbytes_of

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return what `.item()` returns."""
        value = self.known.of(tensor)
        return self.guesses.scalar(tensor.dtype) if value is None else value.item()

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return what `torch.equal` returns."""
        if one.shape != other.shape:
            return False
        values = self.known.of(one), self.known.of(other)
        if values[0] is None or values[1] is None:
            return self.guesses.truth()
        return bool(torch.equal(values[0], values[1]))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note a copy to the device."""
        self.known.write(target, self.known.of(source) if self._nbytes_of(target) <= LARGEST else None)

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Fill a tensor on the host with what the device's holds."""
        value = self.known.of(source)
        if value is None:
            self.guesses.fill(target)
        else:
            target.copy_(value)

    def selected(self, mask: torch.Tensor) -> int:
        """Return how many elements a mask selects."""
        value = self.known.of(mask)
        return self.guesses.selected(mask.numel()) if value is None else int(value.count_nonzero())

    # ---- Results that are as large as values say

    def indices(self, call: Call, here: torch.device) -> list[torch.Tensor | None]:
        """Return the indices as the device's kernel gets them: on the device, masks turned into positions."""
        moved: list[torch.Tensor | None] = []
        for index in next(value for argument, value in call.named() if argument.name == "indices"):
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                moved.append(index if index is None else index.to(here))
                continue
            count = self.selected(index)
            moved += [torch.empty(count, dtype=torch.int64, device=here) for _ in range(index.dim())]
        return moved

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `nonzero` returns."""
        value = self.known.of(tensor)
        if value is not None:
            return value.nonzero().to(tensor.device)
        count = self.selected(tensor)
        # CUDA's and the CPU's kernels both lay the positions out by dimension.
        return torch.empty(tensor.dim(), count, dtype=torch.int64, device=tensor.device).t()

    def masked(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what `masked_select` returns."""
        whole = torch.broadcast_tensors(mask, tensor)[0]
        return torch.empty(self.selected(whole), dtype=tensor.dtype, device=tensor.device)

    def unique(self, tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Return what `unique` returns."""
        found = max(1, self.guesses.selected(tensor.numel())) if tensor.numel() else 0
        flat = torch.empty(found, dtype=tensor.dtype, device=tensor.device)
        index = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
        return flat, index, torch.empty(found, dtype=torch.int64, device=tensor.device)

"""The notebook's blocks in the dry run's own allocator: as many, as large, and with the same gaps between them.

Each segment is asked for whole and given back to the cache. Its blocks are then asked for in their order: the cache has
no other room, so they fall into place, gaps included. The gaps are given back at the end, when every storage of the
notebook has taken the block that it has there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.memory.allocator import SMALL
from gpumagic.memory.segments import Segment

_give_back = torch.cuda.caching_allocator_delete


class Layout:
    """The blocks of one device.

    Args:
        device: its index.
        segments: what the notebook's allocator has there.
    """

    def __init__(self, device: int, segments: Sequence[Segment]) -> None:
        self._device = device
        self._owned: dict[int, tuple[int, int]] = {}  # by the address that the notebook has: that here, and its stream
        self._small_gaps: list[int] = []
        self._gaps: list[int] = []
        for segment in segments:
            self._lay_out(segment)

    def _lay_out(self, segment: Segment) -> None:
        stream = parts.make_stream(f"cuda:{self._device}", segment.stream, 0)
        whole = sum(block.size for block in segment.blocks)
        pieces = [SMALL] * (whole // SMALL) if segment.is_small else [whole]
        for address in [self._take(size, stream) for size in pieces]:
            _give_back(address)
        for block in segment.blocks:
            # A free block of a small segment may be larger than what such a segment serves at once.
            sizes = [block.size]
            while segment.is_small and sizes[-1] > SMALL:
                sizes[-1:] = [SMALL, sizes[-1] - SMALL]
            addresses = [self._take(size, stream) for size in sizes]
            if block.is_free:
                (self._small_gaps if segment.is_small else self._gaps).extend(addresses)
            else:
                self._owned[block.address] = addresses[0], segment.stream

    def claim(self, part: parts.StoragePart) -> contextlib.AbstractContextManager[object]:
        """Make room where a storage of the notebook lies; return the stream that it is made on."""
        return self._let_go(part.address) if part.address in self._owned else contextlib.nullcontext()

    def settle(self, workspaces: Sequence[tuple[int, int]] = ()) -> None:
        """Give back the gaps, and let cuBLAS take the blocks that it has in the notebook.

        Args:
            workspaces: where those lie in the notebook, and their bytes.
        """
        there = sorted((each for each in workspaces if each[0] in self._owned), key=lambda each: -each[1])
        retaken: dict[int, list[int]] = {}  # by stream, of which each has its own; those of threads that are gone stay
        for address, _ in there:
            taken = retaken.setdefault(self._owned[address][1], [])
            taken += [address] if len(taken) < len(_TAKE) else []
        takers = [(stream, take) for stream, taken in sorted(retaken.items()) for take in _TAKE[: len(taken)]]
        addresses = [address for _, taken in sorted(retaken.items()) for address in taken]
        with torch.cuda.device(self._device):
            for address in addresses[:1]:
                with self._let_go(address):
                    takers.pop(0)[1]()  # asks for nothing else, and no gap is open yet: it takes the block again
            for gap in self._small_gaps:
                _give_back(gap)
            for address in addresses[1:]:
                self._let_go(address)
            for stream, take in takers:
                with self._on(stream):
                    take()
        for gap in self._gaps:
            _give_back(gap)

    def _let_go(self, address: int) -> contextlib.AbstractContextManager[object]:
        """Give a block back; return the stream whose next request it serves."""
        here, stream = self._owned.pop(address)
        _give_back(here)
        return self._on(stream)

    def _on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        if not stream:
            return contextlib.nullcontext()
        on: contextlib.AbstractContextManager[object] = torch.cuda.stream(
            parts.make_stream(f"cuda:{self._device}", stream, 0)
        )
        return on

    def _take(self, size: int, stream: Any) -> int:
        return int(torch.cuda.caching_allocator_alloc(size, self._device, stream))


def _multiply_backward() -> None:
    """Let the thread that runs backward passes take its workspace."""
    one = torch.ones(1, 1, device="cuda", requires_grad=True)
    (one @ one).backward()


_TAKE: tuple[Callable[[], object], ...] = (torch.cuda.current_blas_handle, _multiply_backward)
"""What makes torch take a workspace: one for the cell's thread, one for that of backward passes."""

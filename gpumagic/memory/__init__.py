"""Devices, the torch allocators' statistics and segments, and the host's memory.

Start with `allocator`, which every feature reads; `ledger` has the life of every block over a cell.

    devices.py     names of devices as people write them, and the memory that can still be had of each and of the host
    cgroups.py     the limits of the control groups that this process is in
    allocator.py   statistics of each device's allocator, read without initialising a backend
    ledger.py      the life of every block: the account of a peak, by line, part and module; what parts are called
    presets.py     GPUs by name, such as T4
    segments.py    the allocator's segments and blocks, from `memory_snapshot`; how large a workspace of cuBLAS is
"""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """A device's name taken apart; `str` puts it together again."""

    backend: str
    index: int  # type: ignore[assignment]  # it hides tuple.index, which nobody calls on a device
    """0 where the name has none."""

    @classmethod
    def parse(cls, name: str) -> Device:
        """Return ``Device("cuda", 1)`` for ``"cuda:1"``; the name must be one that torch takes."""
        backend, _, index = name.partition(":")
        return cls(backend, int(index or 0))

    def __str__(self) -> str:
        return (
            self.backend
            if self.backend in ("cpu", "meta")
            else f"{self.backend}:{self.index}"
        )

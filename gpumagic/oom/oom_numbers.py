"""The numbers in an out-of-memory text, in the fifteen ways they have been written, with their traps.

Texts round to two decimals, print the device's index as a raw byte (torch 2.2 and 2.3, pytorch#126766) and
print 16 EiB where the driver knew nothing (microsoft/WSL#11050). A number here is a fallback for
what the allocator cannot be asked any more, and the size of the request, which stands nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4, "p": 1024**5}
_SIZE = r"(\d[\d,]*(?:\.\d+)?)\s*([KMGTP]i?B|bytes?|B)\b"


@dataclass(frozen=True, slots=True)
class Numbers:
    """What an error's text says, in bytes; None where it says nothing credible."""

    requested: int | None = None
    exact: bool = False
    """False where the text rounded the request to two decimals."""
    index: int | None = None
    """The device's index."""
    capacity: int | None = None
    """Of the device; where the text names only a cap below it (MPS, CuPy), that cap."""
    free: int | None = None
    allocated: int | None = None
    """In torch's live tensors, at the instant of the failure."""
    unallocated: int | None = None
    """Reserved by torch but unallocated: what fragmentation could have cost."""
    private_pools: int | None = None
    """In the pools that CUDA graphs keep for themselves."""


_REQUESTED = (
    rf"[Tt]ried to allocate\s+{_SIZE}",
    rf"Requested\s*:\s*{_SIZE}",
    r"Requested size: (\d[\d,]*)(?:\s*([KMGTP]i?B|bytes?|B)\b)?",
    rf"[Oo]ut of memory (?:while trying to allocate|allocating) {_SIZE}",
    rf"Failed to allocate request for [^(]*\({_SIZE}\)",
    rf"Failed to allocate request for {_SIZE}",
    rf"Unable to allocate {_SIZE}",
    rf"calloc (?:async )?{_SIZE}",
    rf"unable to (?:mmap|write|resize) {_SIZE}",
    rf"allocate (?:about )?{_SIZE}",
)
_CAPACITY = (rf"total capac?i?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"Device limit\s*:\s*{_SIZE}")
_FREE = (
    rf"of which {_SIZE} is free",
    rf"{_SIZE} free[;)]",
    rf"Free \(according to CUDA\)\s*:\s*{_SIZE}",
)
_ALLOCATED = (
    rf"MPS allocated: {_SIZE}",
    rf"allocated so far: {_SIZE}",
)
_IN_TENSORS = (rf"Of the allocated memory {_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated")
_UNALLOCATED = (rf"{_SIZE} is reserved by PyTorch but unallocated",)
_PRIVATE = (rf"with {_SIZE} allocated in private pools",)
_OTHERS = (rf"other allocations: {_SIZE}",)
_LIMIT = (rf"max allowed: {_SIZE}", rf"limit set to: {_SIZE}")


def read(text: str) -> Numbers:
    """Return the numbers of one error's text; what exceeds twice the capacity is a sentinel and left out."""
    requested = _find(_REQUESTED, text)
    capacity, limit = _first(_CAPACITY, text), _first(_LIMIT, text)
    free, allocated = _first(_FREE, text), _first(_ALLOCATED, text)
    if capacity is None and limit is not None:  # MPS and CuPy name the cap that counts, not the device's size
        capacity = limit
        free = None if allocated is None else max(0, limit - allocated - (_first(_OTHERS, text) or 0))
    return Numbers(
        requested=_bytes(requested),
        exact=requested is not None and _unit(requested) == 1,
        index=_index(text),
        capacity=capacity,
        free=_credible(free, capacity),
        allocated=_credible(_first(_IN_TENSORS, text), capacity),
        unallocated=_credible(_first(_UNALLOCATED, text), capacity),
        private_pools=_credible(_first(_PRIVATE, text), capacity),
    )


def _find(patterns: tuple[str, ...], text: str) -> re.Match[str] | None:
    return next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    return _bytes(_find(patterns, text))


def _bytes(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    number = float(match.groups()[-2].replace(",", ""))
    return int(number * _unit(match))


def _unit(match: re.Match[str]) -> int:
    letter = (match.groups()[-1] or "b")[0].lower()
    return _UNITS[letter]


def _index(text: str) -> int | None:
    match = re.search(r"(?:GPU|on device|device ordinal|device:GPU:)\s?(\d+)\b", text)
    if match is not None:
        return int(match[1])
    raw = re.search(r"GPU ([\x00-\x1f]) has a total", text)  # torch 2.2 and 2.3 print the number as a character
    return ord(raw[1]) if raw is not None else None


def _credible(value: int | None, capacity: int | None) -> int | None:
    if value is None or (capacity is not None and value > 2 * capacity) or value >= 2**60:
        return None
    return value

"""Storages -> blocks of memory: which of them lie over the same bytes, what they occupy, what is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from gpumagic.heap.storages import Ledger, Look, Storage

_ADDRESS = attrgetter("address")


def groups(ledger: Ledger) -> list[list[Storage]]:
    """Return the storages by block of memory: alone, or with what overlaps it, or as parts of a sparse tensor.

    Two `torch.from_numpy` of one array are two storages over the same bytes (also dlpack and CUDA arrays).
    """
    leader: dict[Storage, Storage] = {}

    def lead(storage: Storage) -> Storage:
        while (above := leader.get(storage, storage)) is not storage:
            storage = above
        return storage

    for parts in [*ledger.joined, *_overlapping(ledger)]:
        for part in parts[1:]:
            if lead(part) is not lead(parts[0]):
                leader[lead(part)] = lead(parts[0])
    if not leader:
        return [[storage] for storage in ledger.storages.values()]
    members: dict[Storage, list[Storage]] = {}
    for storage in ledger.storages.values():
        members.setdefault(lead(storage), []).append(storage)
    return list(members.values())


def occupied(block: Sequence[Storage], granule: int) -> int | None:
    """Return the bytes that a block takes from its allocator, which hands out multiples of ``granule``."""
    if len(block) == 1:
        nbytes = block[0].nbytes
        return nbytes if granule == 1 or nbytes is None else -(-nbytes // granule) * granule
    spans = []
    for storage in block:
        if storage.nbytes is None:
            return None
        spans.append((storage.address, storage.address + -(-storage.nbytes // granule) * granule))
    return _union(spans)


def looked_at(block: Sequence[Storage], looks: Sequence[Look]) -> int | None:
    """Return the bytes of a block that some tensors look at; None where their strides cannot tell."""
    storage = block[0]
    if len(block) > 1 or storage.nbytes is None:
        return None
    if len(looks) == 1:
        return looks[0].nbytes
    return min(_union([(look.start, look.end) for look in looks]), sum(look.nbytes for look in looks))


def _union(spans: Sequence[tuple[int, int]]) -> int:
    if len(spans) == 1:
        return spans[0][1] - spans[0][0]
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _overlapping(ledger: Ledger) -> Iterator[list[Storage]]:
    placed: dict[str, list[Storage]] = {}
    for storage in ledger.storages.values():
        if storage.address and storage.nbytes:
            placed.setdefault(storage.device, []).append(storage)
    for alike in placed.values():
        alike.sort(key=_ADDRESS)
        reached, furthest = 0, alike[0]
        for storage in alike:
            if storage.address < reached:
                yield [furthest, storage]
            end = storage.address + (storage.nbytes or 0)
            if end > reached:
                reached, furthest = end, storage

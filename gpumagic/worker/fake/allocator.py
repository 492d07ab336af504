"""Where a caching allocator would put each block: segments, best fit, splitting, merging, giving up; and their ledger.

Runs in the worker's process. The figures and rules are those of torch's `c10/cuda/CUDACachingAllocator.cpp`. simgpu's
differ in one rule: it cuts every block to size, where CUDA leaves a remainder below 1 MiB with a large block and counts
it as allocated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import Enum

from gpumagic.memory.allocator import (
    MIN_BLOCK,
    SEGMENT_ROUNDING,
    SMALL,
    rounded,
    segment_size,
)
from gpumagic.memory.ledger import Account, Ledger, Life, Peak
from gpumagic.memory.segments import Segment


class Pool(Enum):
    """What a segment's free blocks serve."""

    SMALL = "requests up to 1 MiB"
    LARGE = "larger requests"
    CLOSED = "those of another stream"


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment, linked with its neighbours in it."""

    address: int
    size: int
    pool: Pool
    previous: Block | None = None
    next: Block | None = None
    cached: bool = False
    """Whether it is free."""


Entry = tuple[int, int, Block]
"""A free block, by its size and its address, which no two blocks share."""


@dataclass
class Allocator:
    """One device's allocator.

    Args:
        capacity: bytes it may reserve; None for a device without end.
        cuts_to_size: whether a large block's small remainder is split off too, as simgpu does and CUDA does not.
    """

    capacity: int | None
    cuts_to_size: bool
    reserved: int = 0
    peak_reserved: int = 0
    failed: bool = False
    """Whether a request was refused; from then on nothing is, so that the whole need can be seen."""
    _next_address: int = SEGMENT_ROUNDING
    _cached: dict[Pool, list[Entry]] = field(
        default_factory=lambda: {pool: [] for pool in Pool}
    )
    """The free blocks of each pool, the smallest first."""

    def take(self, requested: int) -> Block:
        """Return a block for a request of at least one byte: the smallest free one that is large enough."""
        size = rounded(max(1, requested))
        pool = Pool.SMALL if size <= SMALL else Pool.LARGE
        cached = self._cached[pool]
        smallest = bisect_left(cached, (size, 0))
        if smallest < len(cached):
            _, _, block = cached.pop(smallest)
        else:
            block = self._new_segment(size, pool)
        block.cached = False
        self._split(block, size)
        return block

    def lay_out(self, segment: Segment) -> dict[int, Block]:
        """Take over a segment as it stands on the real device, before segments are made here, which lie beyond it.

        Return those of its blocks that storages own, by the addresses that these tell.
        """
        if not segment.is_open:
            pool = Pool.CLOSED
        else:
            pool = Pool.SMALL if segment.is_small else Pool.LARGE
        address = segment.address
        previous: Block | None = None
        owned: dict[int, Block] = {}
        for real in segment.blocks:
            block = Block(address, real.size, pool, previous)
            if previous is not None:
                previous.next = block
            previous = block
            if real.is_free:
                self._cache(block)
            elif real.is_owned:
                owned[real.address] = block
            address += real.size
        self.reserved += address - segment.address
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address = max(self._next_address, address)
        return owned

    def give_back(self, block: Block) -> None:
        """Put a block, merged with its free neighbours, among the free ones."""
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.cached:
                self._merge(block, neighbour)
        self._cache(block)

    def release_cached(self) -> None:
        """Give every segment without a live block back to the device."""
        for pool, cached in self._cached.items():
            kept = []
            for entry in cached:
                size, _, block = entry
                is_whole_segment = block.previous is None and block.next is None
                if is_whole_segment:
                    self.reserved -= size
                else:
                    kept.append(entry)
            self._cached[pool] = kept

    def _new_segment(self, size: int, pool: Pool) -> Block:
        """Return a new segment as one block; note where the device has no room for it."""
        nbytes = segment_size(size)
        if self.capacity is not None and not self.failed:
            if self.reserved + nbytes > self.capacity:
                self.release_cached()
            self.failed = self.reserved + nbytes > self.capacity
        block = Block(self._next_address, nbytes, pool)
        self._next_address += nbytes
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cut a block to a size; what is left of it is free."""
        remainder = block.size - size
        if remainder < MIN_BLOCK:
            return
        if remainder <= SMALL and block.pool is Pool.LARGE and not self.cuts_to_size:
            return
        rest = Block(block.address + size, remainder, block.pool, block, block.next)
        if rest.next is not None:
            rest.next.previous = rest
        block.next = rest
        block.size = size
        self._cache(rest)

    def _merge(self, block: Block, neighbour: Block) -> None:
        """Add a free neighbour to a block."""
        cached = self._cached[neighbour.pool]
        del cached[bisect_left(cached, (neighbour.size, neighbour.address))]
        if neighbour is block.previous:
            block.address = neighbour.address
            block.previous = neighbour.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
        block.size += neighbour.size

    def _cache(self, block: Block) -> None:
        block.cached = True
        insort(self._cached[block.pool], (block.size, block.address, block))


_MAKE_ROOM = frozenset({"empty.memory_format", "empty_strided"})
"""Operators that torch calls to allocate what the kernel that follows will fill."""


@dataclass(kw_only=True)
class FakeAccount(Account):
    """One device: its allocator, and what is in use."""

    allocator: Allocator
    preexisting: dict[int, Block] = field(default_factory=dict)
    """Blocks in use before the cell that no storage has claimed yet, by the addresses that storages tell."""
    traffic: int = 0
    """Bytes that were allocated in all."""


@dataclass
class FakeLedger(Ledger):
    """The lives of all storages, by their keys."""

    accounts: list[FakeAccount]
    address: int = 0
    """Where the storage that is made next lies on the real device."""
    _unnamed: list[Life] = field(default_factory=list)
    """What was allocated for a kernel that has not begun yet."""
    _given: dict[int, Block] = field(default_factory=dict)
    """The block of each storage."""

    def begin_operator(self, operator: str) -> None:
        """Note which operator runs now, also as the one that asked for the blocks that were just made for it."""
        if self.unpacking:
            return
        self.operators += 1
        self.operator = operator
        if self._unnamed and operator not in _MAKE_ROOM:
            for life in self._unnamed:
                life.operator = operator
            self._unnamed.clear()

    def take(self, key: int, device: int, nbytes: int) -> None:
        """Account for a new storage of at least one byte."""
        account = self.accounts[device]
        had_failed = account.allocator.failed
        block: Block | None = None
        if self.unpacking:
            block = account.preexisting.pop(self.address, None)
        else:
            self.place = self.where()
        if block is None:
            block = account.allocator.take(nbytes)
        self._given[key] = block
        account.traffic += block.size
        life = self.begin(key, device, block.size)
        if self.operator in _MAKE_ROOM:
            self._unnamed.append(life)
        if account.allocator.failed and not had_failed:
            account.failure = Peak(account.allocated, self.time, life)

    def give_back(self, key: int) -> None:
        """Account for the end of a storage."""
        account = self.accounts[self.blocks[key].device]
        self.end(key)
        account.allocator.give_back(self._given.pop(key))

    def hold(self, device: int) -> None:
        """Account for what was in use before and no storage has claimed: nothing that the cell does can free it."""
        preexisting = self.accounts[device].preexisting
        nbytes = sum(block.size for block in preexisting.values())
        preexisting.clear()
        if nbytes:
            self.begin(-1 - device, device, nbytes)

    def empty_caches(self) -> None:
        """Give every segment without a live block back to its device."""
        self.settle()
        for account in self.accounts:
            account.allocator.release_cached()

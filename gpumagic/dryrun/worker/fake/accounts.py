"""The ledger of a dry run on fake tensors: each request goes to an allocator that is only computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpumagic.dryrun.worker.fake.allocator import Allocator, Block, Pool
from gpumagic.memory.ledger import FROM_HOST, Account, Ledger, Life, Peak
from gpumagic.memory.segments import Segment

_MAKE_ROOM = frozenset({"empty.memory_format", "empty_strided"})
"""What torch calls before the kernel that the room is for."""


@dataclass(kw_only=True)
class FakeAccount(Account):
    """One device: its allocator, and what is in use."""

    allocator: Allocator
    lying: dict[int, Block] = field(default_factory=dict)
    """Blocks that were in use before, by the address that storages there tell, until a storage claims them."""

    def lay_out(self, segments: Iterable[Segment]) -> None:
        """Begin where the real device's allocator stands."""
        for segment in segments:
            pool = (Pool.SMALL if segment.is_small else Pool.LARGE) if segment.is_open else Pool.CLOSED
            blocks = self.allocator.lay_out(
                segment.address, pool, [(each.size, each.is_free) for each in segment.blocks]
            )
            lying = zip(segment.blocks, blocks, strict=True)
            self.lying |= {told.address: block for told, block in lying if told.is_owned}


@dataclass
class FakeLedger(Ledger):
    """The lives of all storages, by their numbers."""

    accounts: list[FakeAccount]
    address: int = 0
    """Where the storage lies on the real device that is made next."""
    _unnamed: list[Life] = field(default_factory=list)
    _given: dict[int, Block] = field(default_factory=dict)

    def begin_operator(self, operator: str) -> None:
        """Note which operator runs now; the blocks that were just made for it get its name."""
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
        failed = account.allocator.failed
        address = 0
        if self.unpacking:
            address = self.address
        else:
            self.place = self.where()
        claimed = account.lying.pop(address) if address in account.lying else None
        block = self._given[key] = claimed or account.allocator.take(nbytes)
        life = self.begin(key, device, block.size)
        if self.operator in _MAKE_ROOM:
            self._unnamed.append(life)
        if account.allocator.failed and not failed:
            account.failure = Peak(account.allocated, self.time, life)

    def give_back(self, key: int) -> None:
        """Account for the end of a storage."""
        account = self.accounts[self.blocks[key].device]
        self.end(key)
        account.allocator.give_back(self._given.pop(key))

    def hold(self, device: int) -> None:
        """Account for what was in use before and no storage has claimed: nothing of the cell's can end it."""
        lying = self.accounts[device].lying
        nbytes = sum(block.size for block in lying.values())
        lying.clear()
        if nbytes:
            self.keep(device, nbytes)

    def empty_caches(self) -> None:
        """Give every segment without a live block back to its device."""
        self.settle()
        for account in self.accounts:
            account.allocator.release_cached()

    def came_from_host(self, key: int) -> None:
        """Say that a live storage holds what was copied from the host."""
        life = self.blocks.get(key)
        if life is not None and life.operator in _MAKE_ROOM | {"_copy_from"}:
            life.operator = FROM_HOST

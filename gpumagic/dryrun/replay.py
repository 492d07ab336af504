"""What a cell would reserve with another value of a number: the requests of two rehearsals, scaled and made again.

What is allocated grows by a law, but what is reserved depends on how the blocks fall into segments. The same cell asks
for the same blocks in the same order whatever its batch; each one's size is on a line through what it was in the two
rehearsals. So the allocator alone is run again, which takes milliseconds. What comes of it is a guess like another:
it is rehearsed before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun.stage.arena import Arena, Block
from gpumagic.dryrun.stage.ledger import EMPTIES, STARTS, Account
from gpumagic.dryrun.targets import Target

STEP = 0.015
"""How far down each further guess is, as a share."""
MOST_STEPS = 100
Requests = list[tuple[int, ...]]
"""``(number, device, bytes, address)`` where a block is asked for, ``(number,)`` where it is given back; `STARTS`..."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the allocators were asked in one rehearsal."""

    target: Target
    room: list[int | None]
    """What each device's may reserve."""
    requests: Requests


class Recordings:
    """The rehearsals of one cell with different values."""

    def __init__(self) -> None:
        self._known: dict[int, Recording] = {}

    def note(self, value: int, target: Target) -> Callable[[dict[str, Any]], object]:
        """Return what keeps the account of a rehearsal with a value."""

        def keep(told: dict[str, Any]) -> None:
            requests = [tuple(each) for each in told["requests"]]
            self._known[value] = Recording(target, told["room"], requests)

        return keep

    def largest(self, one: int, other: int, too_many: int, margin: int) -> int | None:
        """Return the largest value, to within a margin, with which no request would be refused; None if unknown.

        Args:
            one: a value that was rehearsed.
            other: another.
            too_many: a value that is taken not to.
            margin: how near.
        """
        first, second = self._known.get(one), self._known.get(other)
        if first is None or second is None or not _are_alike(first.requests, second.requests):
            return None

        def passes(value: int) -> bool:
            return _passes(second, _scaled(first.requests, second.requests, (value - one) / (other - one)))

        high, low = too_many, 0
        for value in _downwards(too_many):  # from above: blocks can fall so that more fits where less does not
            if passes(value):
                low = value
                break
            high = value
        while high - low > margin:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(middle) else (low, middle)
        return low


def _downwards(high: int) -> Iterator[int]:
    """Yield ever smaller values, down to about a fifth; below, the largest is sought by halves."""
    for _ in range(MOST_STEPS):
        high = min(high - 1, int(high * (1 - STEP)))
        if high > 0:
            yield high


def _are_alike(one: Requests, other: Requests) -> bool:
    return (
        bool(one)
        and len(one) == len(other)
        and all(mine[:2] == yours[:2] and len(mine) == len(yours) for mine, yours in zip(one, other, strict=True))
    )


def _scaled(one: Requests, other: Requests, share: float) -> Requests:
    return [
        mine if len(mine) == 1 else (*mine[:2], max(1, round(mine[2] + share * (yours[2] - mine[2]))), mine[3])
        for mine, yours in zip(one, other, strict=True)
    ]


def _passes(recording: Recording, requests: Requests) -> bool:
    """Return whether the allocators grant all of these requests, from where the real ones stand."""
    accounts = [Account(Arena(None, recording.target.cuts_to_size)) for _ in recording.room]
    for account, segments in zip(accounts, recording.target.segments, strict=True):
        account.lay_out(segments or ())
    taken: dict[int, tuple[Account, Block]] = {}
    for request in requests:
        if request == STARTS:
            for account, room in zip(accounts, recording.room, strict=True):
                account.arena.capacity = room
        elif request == EMPTIES:
            for account in accounts:
                account.arena.release_cached()
        elif len(request) == 1:
            account, block = taken.pop(request[0])
            account.arena.give_back(block)
        else:
            number, device, nbytes, address = request
            taken[number] = accounts[device], accounts[device].take(nbytes, address)
            if accounts[device].arena.failed:
                return False
    return True

"""What the host is told where it reads something that no dry run computes: a loss, whether it fell, how many match.

A number is handed out as a `noted.Noted`, and what it decides is noted here. Where something is decided by it the
cell is run again, and at that place another outcome is taken, or another number; the report names each with its line.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun.wire import (
    EVERY,
    HOST,
    Decision,
    Key,
    Kind,
    Number,
    Scenario,
    When,
)

if TYPE_CHECKING:
    import torch


class Read:  # no dataclass, or `dataclasses.asdict` would take a `noted.Noted` apart
    """A number that was read from a device.

    Attributes:
        number: what it is taken to be.
        key: where it was read.
        may_be_known: whether a run that follows values may know it.
    """

    __slots__ = ("key", "may_be_known", "number")

    def __init__(self, number: Any, key: Key, may_be_known: bool) -> None:
        self.number = number
        self.key = key
        self.may_be_known = may_be_known


THREAD = "a thread"
"""What reads is a thread in which no line of the notebook runs."""
NOBODY = Key(None, "nobody")
"""What reads is not the cell, or only shows it."""

MOST_FILLED = 64 << 20
"""Bytes of what of the host was not sent that are filled with something."""
FILLING = (0x3F, 0x47, 0xBF)
"""Bytes that make a fraction around one, a large one and a negative one in every format."""
NUMBERS: dict[Number, tuple[str, Callable[[int], float]]] = {
    Number.USUAL: ("be 1", lambda _: 1.0),
    # It stays positive however often it is read.
    Number.FALLING: ("fall, from 0.06", lambda turn: float((turn + 2) ** -4)),
    Number.LARGE: ("rise, from 1,000,000", lambda turn: 1e6 + 1e4 * min(turn, 100)),
    Number.LARGER: ("rise, from 3,000,000", lambda turn: 3e6 + 1e4 * min(turn, 100)),
    Number.LAST: ("be -1", lambda _: -1.0),
}
"""What a number may be, by how often it was read before; whole numbers are rounded."""
_TURNS: dict[When, Callable[[int], bool]] = {
    When.ALWAYS: lambda _: True,
    When.BUT_ONCE: lambda turn: turn != 1,
    When.ONCE: lambda turn: turn == 0,
    When.A_FEW: lambda turn: turn < 3,
}
"""Which times that a loop comes to a place it goes another way there."""


class UnknownValues:
    """What the host is told in one run where it reads values that are not known, and what those decide.

    Args:
        scenario: how what is not known goes in this run.
        assume: called with a sentence for each thing that is assumed.
        where: tells which expression of the cell runs; None for a read that is not the cell's.
    """

    def __init__(
        self,
        scenario: Scenario,
        assume: Callable[[str], None],
        where: Callable[[], Key | None],
    ) -> None:
        self.decides: dict[tuple[Key, Kind], tuple[bool, bool] | None] = {}
        """Where values decide and how: a truth with its first outcome and its last."""
        self.has_noted = False
        """Whether numbers were handed out that note what they decide."""
        self.begin_again: Callable[[], object] = lambda: None
        """Ends a run in which something is decided by what a run that follows values may know."""
        self.host: Any
        """The run's `host.Host`: takes a large tensor that was copied from a device, and remembers others."""
        self._overrides = {
            (place, kind): outcome for place, kind, outcome in scenario.overrides
        }
        self._is_overridden_at = _TURNS[scenario.when]
        self.notes = scenario.notes
        self._assume = assume
        self._where = where
        self._turns: Counter[tuple[Key, str]] = Counter()
        self._thread = threading.local()

    # ---- What becomes of what is read

    def is_noted(self, dtype: torch.dtype) -> bool:
        """Return whether numbers of a type are handed out noted."""
        return self.notes and not dtype.is_complex and str(dtype) != "torch.bool"

    def is_read_by_notebook(self) -> bool:
        """Return whether the notebook's own code is what reads now."""
        key = self._where()
        return key is not None and not key.library

    @contextlib.contextmanager
    def noting(self) -> Iterator[list[Read]]:
        """Return what is read inside and is not known: its numbers will be noted."""
        reads: list[Read] = []
        with self._taking(reads.append):
            yield reads

    def looking(self) -> AbstractContextManager[None]:
        """Let what is copied from a device inside go where nothing is noted."""
        return self._taking(functools.partial(self.lose, is_all=True))

    @contextlib.contextmanager
    def _taking(self, take: Callable[[Read], None]) -> Iterator[None]:
        """Give what is read inside to a function, if it is not taken further out."""
        before = self._takes
        self._thread.takes = before or take
        try:
            yield
        finally:
            self._thread.takes = before

    @property
    def _takes(self) -> Callable[[Read], None] | None:
        return getattr(self._thread, "takes", None)

    def decide(self, read: Read, outcome: bool, kind: Kind = Kind.TRUTH) -> bool:
        """Return the outcome of a comparison with what was read, or of its truth.

        Args:
            read: what decides.
            outcome: what it would be.
            kind: of what decides, `Kind.TRUTH` or `Kind.ORDER`.
        """
        place, turn = self._turn(kind)
        if place is NOBODY:
            return outcome
        self._begin_again_if(read.may_be_known)
        is_flipped = self._is_overridden(place, kind, turn)
        if is_flipped:
            outcome = bool(self._overrides[place, kind])
        first, _ = self.decides.get((place, kind)) or (outcome, outcome)
        self.decides[place, kind] = (first, outcome)
        if is_flipped or type(read.number) is bool:
            self._say(place, f"is taken to be {outcome}")
        else:
            self._say_number(read.key)
        return outcome

    def lose(self, read: Read, *, is_all: bool = False) -> None:
        """Note that a number went where nothing is noted.

        Args:
            read: it.
            is_all: whether it stands for all the numbers of a tensor.
        """
        if self._where() is not None:
            self._begin_again_if(read.may_be_known)
            self.decides.setdefault((read.key, Kind.NUMBER))
            self._say_number(read.key, ", throughout" if is_all else "")

    def _begin_again_if(self, may_be_known: bool) -> None:
        """End the run where what decides may be known to one that follows values."""
        if may_be_known:
            self.begin_again()

    def _is_overridden(self, place: Key, kind: Kind, turn: int) -> bool:
        """Return whether this run takes another outcome at a place than is usual, at a turn of a loop."""
        return (place, kind) in self._overrides and self._is_overridden_at(turn)

    # ---- Answers

    def fill_blanks(self, blanks: Collection[Any]) -> None:
        """Put other values than zeros where contents of the host are missing, in a run that looks whether they matter.

        Args:
            blanks: memory that reads as zeros.
        """
        if not blanks:
            return
        self.decides[HOST, Kind.NUMBER] = None
        if (HOST, Kind.NUMBER) not in self._overrides:
            return
        for memory in blanks:
            part = min(len(memory), MOST_FILLED) // len(FILLING)
            for place, byte in enumerate(FILLING):
                memory[place * part : (place + 1) * part] = bytes([byte]) * part

    def scalar(self, dtype: torch.dtype, *, may_be_known: bool) -> Any:
        """Return what is read from a tensor of one element."""
        if str(dtype) == "torch.bool":
            return self.truth(may_be_known=may_be_known)
        key, turn = self._turn(Kind.NUMBER)
        number = self._number_at(key, turn)
        if key is not NOBODY:
            take = self._takes or self.lose
            take(Read(number, key, may_be_known))
        if dtype.is_complex:
            return complex(number)
        return number if dtype.is_floating_point else round(number)

    def truth(self, *, may_be_known: bool) -> bool:
        """Return whether something is true."""
        return self.decide(Read(False, NOBODY, may_be_known), False)

    def selected(self, most: int, *, may_be_known: bool) -> int:
        """Return how many elements a mask selects, or how many are unique."""
        key, turn = self._turn(Kind.SELECTION)
        selects_nothing = self._is_overridden(key, Kind.SELECTION, turn)
        if key is not NOBODY:
            self._begin_again_if(may_be_known)
            self.decides.setdefault((key, Kind.SELECTION))
            self._say(
                key,
                f"is taken to select {'nothing' if selects_nothing else 'everything'}",
            )
        return 0 if selects_nothing else most

    def fill(self, host: torch.Tensor, *, may_be_known: bool = False) -> bool:
        """Put something into a tensor of the host that was to hold what a device has; return whether it is the cell's.

        Else it is only shown, and what is decided by it later is not noted.
        """
        import torch

        if self._takes is None and self.host.skip_copy(host):
            return True
        key, turn = self._turn("contents")
        number = self._number_at(key, turn)
        if host.dtype == torch.bool:
            number = self._is_overridden(key, Kind.NUMBER, turn)
        elif host.dtype.is_floating_point:
            number = min(number, torch.finfo(host.dtype).max)
        elif not host.dtype.is_complex:
            number = min(round(number), torch.iinfo(host.dtype).max)
        host.fill_(number)
        if key is not NOBODY:
            take = self._takes or functools.partial(self.host.remember, host)
            take(Read(number, key, may_be_known))
        return key is not NOBODY

    def _turn(self, kind: str) -> tuple[Key, int]:
        """Return the expression that reads or decides, and how often it did before."""
        key = self._where()
        if key is None:
            return NOBODY, 0
        turn = self._turns[key, kind]
        self._turns[key, kind] += 1
        return key, turn

    def _number_of(self, key: Key) -> Number:
        """Return what a number that is read somewhere is, at the turns at which it is overridden."""
        every = self._overrides.get((EVERY, Kind.NUMBER), Number.USUAL)
        return Number(self._overrides.get((key, Kind.NUMBER), every))

    def _number_at(self, key: Key, turn: int) -> float:
        number = self._number_of(key) if self._is_overridden_at(turn) else Number.USUAL
        _, value_at = NUMBERS[number]
        return value_at(turn)

    def decisions(self) -> tuple[Decision, ...]:
        """Return what was decided by values that are not known, as an outcome has it."""
        decisions: list[Decision] = []
        for (place, kind), outcomes in self.decides.items():
            decisions.append(Decision(place, kind, outcomes))
        return tuple(decisions)

    def most_turns(self) -> int:
        """Return how often the same expression has read or decided at most, of those that decide."""
        places = {place for place, _ in self.decides}
        turns = [count for (place, _), count in self._turns.items() if place in places]
        return max(turns, default=0)

    def _say_number(self, key: Key, more: str = "") -> None:
        words, _ = NUMBERS[self._number_of(key)]
        self._say(key, f"is taken to {words}{more}")

    def _say(self, key: Key, what: str) -> None:
        line, code, _ = key
        if key is NOBODY:
            return
        if code == THREAD and all(place != key for place, _ in self.decides):
            return
        if line is None:
            self._assume(f"what {code} reads {what}")
        else:
            self._assume(f"line {line}: `{code}` {what}")

"""What the host is told where it reads something that no dry run computes: a loss, whether it fell, how many match.

One answer would hide what depends on it, so a cell that reads is run in several scenarios. In each the numbers, the
truth values and the sizes go another way, and the report names every answer with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Key = tuple["int | None", str]
"""A line of the cell, and the expression that reads."""


HOST: Key = (None, "")
"""Contents of the host that were not sent: which expression reads them is not known."""
THREAD: Key = (None, "a thread")
"""What reads is a thread in which no line of the notebook runs."""


def _falling(turn: int) -> float:
    """Return a number that stays positive however often it is read."""
    return float((turn + 2) ** -4)


def _rising(turn: int) -> float:
    """Return a number that passes 100 after some reads, and of which `math.exp` has room."""
    return 700.0 * (turn + 1) / (turn + 50)


def _changing(turn: int) -> float:
    return (600.0 if turn % 2 else -600.0) * (turn + 1) / (turn + 600)


MOST_FILLED = 64 << 20
"""Bytes of what of the host was not sent that are filled with something."""
MOST_FETCHED = 16 << 20
"""Bytes of a copy from a device that is filled with something."""
ROOM, LEAST_COUNTED = 256 << 20, 1 << 20
"""Bytes of all such copies together, those that are not small."""
FILLING = (0x3F, 0x47, 0xBF)
"""Bytes that make a fraction around one, a large one and a negative one in every format."""
NUMBERS: dict[str, Callable[[int], float]] = {
    "be 1": lambda _: 1.0,
    "fall, from 0.06": _falling,
    "rise, from 14": _rising,
    "change its sign, from -1": _changing,
    "be 1000000": lambda _: 1e6,
    "be 3000000": lambda _: 3e6,
}
"""A number by how often it was read before; whole numbers are rounded."""
TRUTHS: dict[str, Callable[[int], bool]] = {
    "be False": lambda _: False,
    "be True": lambda _: True,
    "be True and False in turn": lambda turn: turn % 2 == 0,
    "be False and True in turn": lambda turn: turn % 2 == 1,
    "be True once, then False": lambda turn: turn == 0,
    "be False once, then True": lambda turn: turn > 0,
}


@dataclass(frozen=True)
class Scenario:
    """How what is read goes in a run; the words are those of `NUMBERS` and `TRUTHS`."""

    number: str
    truth: str
    selects_all: bool

    def seen(self, kinds: Collection[str]) -> tuple[object, ...]:
        """Return what of it is seen by code that reads these kinds."""
        return (
            self.number if {"number", "contents", "size"}.intersection(kinds) else None,
            self.truth if {"truth", "contents"}.intersection(kinds) else None,
            self.selects_all if "size" in kinds else None,
            self == SCENARIOS[0] if "host" in kinds else None,
        )


_numbers, _truths = list(NUMBERS), list(TRUTHS)
SCENARIOS = (
    Scenario(_numbers[0], _truths[0], selects_all=True),
    Scenario(_numbers[1], _truths[1], selects_all=False),
    Scenario(_numbers[2], _truths[2], selects_all=True),
    Scenario(_numbers[3], _truths[3], selects_all=False),
    Scenario(_numbers[0], _truths[4], selects_all=False),
    Scenario(_numbers[1], _truths[5], selects_all=True),
    Scenario(_numbers[4], _truths[0], selects_all=True),
    Scenario(_numbers[5], _truths[0], selects_all=True),
)
LARGE, LARGER = 6, 7
"""Courses that differ in the size of the numbers alone: what grows from one to the other has a number for its size."""


def distinct(kinds: Collection[str]) -> list[int]:
    """Return the scenarios that differ for code that reads these kinds; `LARGER` is none of them."""
    found: dict[tuple[object, ...], int] = {}
    for scenario, each in enumerate(SCENARIOS[:LARGER]):
        found.setdefault(each.seen(kinds), scenario)
    return list(found.values())


class Guesses:
    """The answers of one run.

    Args:
        scenario: which of `SCENARIOS`.
        others: for some of the expressions that read, another one.
        assume: called with a sentence for each thing that is assumed.
        where: tells which expression of the cell runs; None for a read that is not the cell's.
    """

    def __init__(
        self, scenario: int, others: Mapping[Key, int], assume: Callable[[str], None], where: Callable[[], Key | None]
    ) -> None:
        self.reads: dict[tuple[int | None, str, str], None] = {}
        """The line, the expression, and what it read that is not known: truth, number, size, contents or host."""
        self._course = scenario
        self._others = others
        self._assume = assume
        self._where = where
        self._room = ROOM
        self.leave: Callable[[torch.Tensor], bool] = lambda _: False
        """Takes a tensor that was copied from a device, to fill it when it is looked at; False where it does not."""
        self._turns: dict[tuple[Key, str], int] = {}

    def fill_blanks(self, blanks: Collection[Any]) -> None:
        """Put other values than zeros where contents of the host are missing, in a run that looks whether they matter.

        Args:
            blanks: memory that reads as zeros.
        """
        if blanks:
            self.reads[None, "", "host"] = None
        for memory in blanks if self._course else ():
            part = min(len(memory), MOST_FILLED) // len(FILLING)
            for place, byte in enumerate(FILLING):
                memory[place * part : (place + 1) * part] = bytes([byte]) * part

    def scalar(self, dtype: torch.dtype) -> Any:
        """Return what is read from a tensor of one element."""
        if str(dtype) == "torch.bool":
            return self.truth()
        key, turn, scenario = self._read("number")
        self._say(key, f"is taken to {scenario.number}")
        number = NUMBERS[scenario.number](turn)
        if dtype.is_complex:
            return complex(number)
        return number if dtype.is_floating_point else round(number)

    def truth(self) -> bool:
        """Return whether something is true."""
        key, turn, scenario = self._read("truth")
        self._say(key, f"is taken to {scenario.truth}")
        return TRUTHS[scenario.truth](turn)

    def selected(self, most: int) -> int:
        """Return how many elements a mask selects, or how many are unique."""
        key, _, scenario = self._read("size")
        self._say(key, f"is taken to select {'everything' if scenario.selects_all else 'nothing'}")
        return most if scenario.selects_all else 0

    def fill(self, host: torch.Tensor) -> None:
        """Put something into a tensor of the host that was to hold what a device has."""
        import torch

        if self.leave(host):
            return
        key, turn, scenario = self._read("contents")
        if host.nbytes > min(MOST_FETCHED, self._room):
            host = host[:0]  # it stays zeros, which take no memory
        self._room -= host.nbytes if host.nbytes >= LEAST_COUNTED else 0
        if host.dtype == torch.bool:
            self._say(key, f"is taken to {scenario.truth}, throughout")
            host.fill_(TRUTHS[scenario.truth](turn))
            return
        self._say(key, f"is taken to {scenario.number}, throughout")
        number = NUMBERS[scenario.number](turn)
        if host.dtype.is_floating_point:
            number = min(number, torch.finfo(host.dtype).max)
        elif not host.dtype.is_complex:
            limits = torch.iinfo(host.dtype)
            number = max(limits.min, min(round(number), limits.max))
        host.fill_(number)

    def _read(self, kind: str) -> tuple[Key, int, Scenario]:
        """Note a read; return its expression, how often it was read before, and its scenario."""
        key = self._where()
        if key is None:
            return THREAD, 0, SCENARIOS[0]
        self.reads.setdefault((*key, kind))
        turn = self._turns.get((key, kind), 0)
        self._turns[key, kind] = turn + 1
        return key, turn, SCENARIOS[self._others.get(key, self._course)]

    def _say(self, key: Key, what: str) -> None:
        if all(read[:2] != key for read in self.reads):
            return
        line, code = key
        self._assume(f"what {code} reads {what}" if line is None else f"line {line}: `{code}` {what}")

"""What the host is told where it reads something that no dry run computes: a loss, whether it fell, how many match.

A number is handed out as `noted.Numbers` does, and what it decides is noted here. Where something is decided by it the
cell is run in another scenario, too: the numbers, the truth values and the sizes go another way, what was compared has
its other outcome, and the report names every answer with its line.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Key = tuple["int | None", str]
"""A line of the cell, and the expression that reads."""


class Read:
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


HOST: Key = (None, "")
"""Contents of the host that were not sent: which expression reads them is not known."""
THREAD: Key = (None, "a thread")
"""What reads is a thread in which no line of the notebook runs."""
NOBODY: Key = (None, "nobody")
"""What reads is not the cell, or only shows it."""


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
    "fall, from 0.06": lambda turn: float((turn + 2) ** -4),  # it stays positive however often it is read
    "rise, from 14": lambda turn: 700.0 * (turn + 1) / (turn + 50),  # past 100, and `math.exp` has room for it
    "change its sign, from -1": lambda turn: (600.0 if turn % 2 else -600.0) * (turn + 1) / (turn + 600),
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
            self.number if {"number", "contents", "size", "index", "comparison"}.intersection(kinds) else None,
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
"""Scenarios that differ in how large numbers are alone: what grows from one to the other has a number for its size."""


def distinct(kinds: Collection[str]) -> list[int]:
    """Return the scenarios that differ for code that reads these kinds; `LARGER` is none of them."""
    found: dict[tuple[object, ...], int] = {}
    for scenario, each in enumerate(SCENARIOS[:LARGER]):
        found.setdefault(each.seen(kinds), scenario)
    return list(found.values())


@dataclass
class _Reading:
    """A read whose number is noted; `key` stays None where the number is known after all."""

    key: Key | None = None
    may_be_known: bool = False


class _Thread(threading.local):
    """What a thread does at the moment."""

    reading: _Reading | None = None
    ignores = False


class Guesses:
    """The answers of one run.

    Args:
        course: its `guess`, which of `SCENARIOS`; `others`, for some of the expressions that read another one;
            `opposite`, the outcome of some comparisons; `spares`, at which turn all of that does not hold; `noting`,
            whether fractions and whole numbers are noted.
        assume: called with a sentence for each thing that is assumed.
        where: tells which expression of the cell runs; None for a read that is not the cell's.
    """

    def __init__(
        self, course: Mapping[str, Any], assume: Callable[[str], None], where: Callable[[], Key | None]
    ) -> None:
        self.reads: dict[tuple[int | None, str, str], None] = {}
        """The line, the expression, and what it read that is not known and decides: truth, comparison, number, size,
        index, contents or host."""
        self.compared: dict[Key, set[bool]] = {}
        """The outcomes of each comparison of noted numbers."""
        self.noted = 0
        """How many numbers were handed out that note what they decide."""
        self.begin_again: Callable[[], object] = lambda: None
        """Ends a run in which something is decided by what a run that follows values may know."""
        self.leave: Callable[[torch.Tensor], bool] = lambda _: False
        """Takes a tensor that was copied from a device, to fill it when it is looked at; False where it does not."""
        self.remember: Callable[[torch.Tensor, Read], object] = lambda *_: None
        """Remembers what was copied from a device."""
        self.fetched: Callable[[torch.Tensor], Read | None] = lambda _: None
        """Returns what is remembered of a tensor."""
        self.keeps: Callable[[], bool] = lambda: False
        """Tells whether what is copied at the moment is not looked at by what copies it."""
        self._course = course["guess"]
        self._others: dict[Key, int] = dict(course["others"])
        self._opposite: dict[Key, bool] = dict(course["opposite"])
        self._spares: int | None = course["spares"]
        self._kinds = course["noting"]
        self._assume = assume
        self._where = where
        self._room = ROOM
        self._turns: dict[tuple[Key, str], int] = {}
        self._thread = _Thread()
        self._shown: deque[tuple[str, Read]] = deque(maxlen=64)

    # ---- Numbers that note what they decide

    def is_noted(self, dtype: torch.dtype) -> bool:
        """Return whether numbers of a type are handed out noted."""
        if dtype.is_floating_point:
            return "float" in self._kinds
        return "int" in self._kinds and not dtype.is_complex and str(dtype) != "torch.bool"

    @contextlib.contextmanager
    def noting(self) -> Iterator[_Reading]:
        """Give the read inside numbers that will be noted."""
        before, self._thread.reading = self._thread.reading, _Reading()
        try:
            yield self._thread.reading
        finally:
            self._thread.reading = before

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Let what is read inside decide nothing: it is shown."""
        before, self._thread.ignores = self._thread.ignores, True
        try:
            yield
        finally:
            self._thread.ignores = before

    @property
    def is_ignoring(self) -> bool:
        """Whether what is read at the moment is only shown."""
        return self._thread.ignores

    def expects(self, dtype: torch.dtype) -> bool:
        """Return whether a read needs no knowledge of values for now, since it will be noted or decides nothing."""
        return self._thread.ignores or (self._thread.reading is not None and self.is_noted(dtype))

    def decide(self, number: Read, outcome: bool) -> bool:
        """Return the outcome of a comparison."""
        place = self._where()
        if place is None or self._thread.ignores:
            return outcome
        if number.may_be_known:
            self.begin_again()
        self.reads.setdefault((*number.key, "comparison"))
        turn = self._turns.get((place, "comparison"), 0)
        self._turns[place, "comparison"] = turn + 1
        if turn != self._spares:
            outcome = self._opposite.get(place, outcome)
            self.compared.setdefault(place, set()).add(outcome)
        if place in self._opposite:
            self._say(place, f"is taken to be {outcome}")
        else:
            self._say(number.key, f"is taken to {self._scenario(number.key).number}")
        return outcome

    def lose(self, number: Read, kind: str) -> None:
        """Note that a number went where nothing is noted."""
        if self._thread.ignores:
            return
        if number.may_be_known:
            self.begin_again()
        self.reads.setdefault((*number.key, kind))
        self._say(
            number.key, f"is taken to {self._scenario(number.key).number}" + ", throughout" * (kind == "contents")
        )

    def shown(self, text: str, number: Read) -> str:
        """Return a number's text, and know it again where the notebook makes a number of it."""
        self._shown.append((text, number))
        return text

    def read_back(self, text: str) -> Read | None:
        """Return the number that was shown as a text lately."""
        stripped = text.strip()
        return next((number for shown, number in self._shown if shown.strip() == stripped), None)

    # ---- Answers

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

    def scalar(self, dtype: torch.dtype, *, may_be_known: bool = False) -> Any:
        """Return what is read from a tensor of one element."""
        if str(dtype) == "torch.bool":
            return self.truth()
        _, turn, scenario = self._read("number", dtype, may_be_known=may_be_known)
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

    def fill(self, host: torch.Tensor, *, may_be_known: bool = False) -> None:
        """Put something into a tensor of the host that was to hold what a device has."""
        import torch

        if self.leave(host):
            return
        key, turn, scenario = self._turn("contents")
        whole = host
        if host.nbytes > min(MOST_FETCHED, self._room):
            host = host[:0]  # it stays zeros, which take no memory
        self._room -= host.nbytes if host.nbytes >= LEAST_COUNTED else 0
        number = NUMBERS[scenario.number](turn)
        if host.dtype == torch.bool:
            number = TRUTHS[scenario.truth](turn)
        elif host.dtype.is_floating_point:
            number = min(number, torch.finfo(host.dtype).max)
        elif not host.dtype.is_complex:
            limits = torch.iinfo(host.dtype)
            number = max(limits.min, min(round(number), limits.max))
        host.fill_(number)
        reading = self._thread.reading
        if key is NOBODY:
            return
        if reading is not None and self.is_noted(host.dtype):
            self._note(reading, key, may_be_known=may_be_known)
        elif self.keeps():
            self.remember(whole, Read(number, key, may_be_known))
        else:
            self.lose(Read(number, key, may_be_known), "contents")

    def _note(self, reading: _Reading, key: Key, *, may_be_known: bool) -> None:
        self.noted += 1
        reading.key, reading.may_be_known = key, may_be_known

    def _turn(self, kind: str) -> tuple[Key, int, Scenario]:
        """Return the expression that reads, how often it was read before, and its scenario."""
        key = self._where()
        if key is None or self._thread.ignores:
            return NOBODY, 0, SCENARIOS[0]
        turn = self._turns.get((key, kind), 0)
        self._turns[key, kind] = turn + 1
        return key, turn, SCENARIOS[0] if turn == self._spares else self._scenario(key)

    def _read(
        self, kind: str, dtype: torch.dtype | None = None, *, may_be_known: bool = False
    ) -> tuple[Key, int, Scenario]:
        """Note a read; return its expression, how often it was read before, and its scenario."""
        key, turn, scenario = self._turn(kind)
        reading = self._thread.reading
        if key is NOBODY:
            return key, turn, scenario
        if reading is not None and dtype is not None and self.is_noted(dtype):
            self._note(reading, key, may_be_known=may_be_known)
            return key, turn, scenario
        self.reads.setdefault((*key, kind))
        if dtype is not None and str(dtype) != "torch.bool":
            self._say(key, f"is taken to {scenario.number}")
        return key, turn, scenario

    def _scenario(self, key: Key) -> Scenario:
        return SCENARIOS[self._others.get(key, self._course)]

    def told(self) -> dict[str, Any]:
        """Return what an outcome says of the reads, as plain data."""
        return {
            "reads": list(self.reads), "noted": self.noted,
            "compared": [(*place, sorted(outcomes)) for place, outcomes in self.compared.items()],
            "most_turns": max((turns for (_, kind), turns in self._turns.items() if kind != "number"), default=0),
        }  # fmt: skip

    def _say(self, key: Key, what: str) -> None:
        if self._thread.ignores or key is NOBODY or (key == THREAD and all(read[:2] != key for read in self.reads)):
            return
        line, code = key
        self._assume(f"what {code} reads {what}" if line is None else f"line {line}: `{code}` {what}")

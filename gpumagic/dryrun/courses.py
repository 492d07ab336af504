"""Runs with other values in place of those that the host reads from the device and that a dry run does not know.

A loss that is printed changes nothing; a number that decides a branch, or sizes a tensor, does. So a cell that reads is
run in every course of `stage.guesses`, and what needs most counts. Where the courses disagree on whether it fits, the
verdict is open, and the line is sought on which it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun import client, engine
from gpumagic.dryrun.stage.guesses import HOST, LARGE, LARGER, Key, distinct
from gpumagic.report.units import size

_ALIKE = 0.01
_MOST_LINES = 8
"""Expressions that read of which each is tried alone, to see which one matters."""
_PATIENCE = 5.0
"""Seconds that mixed courses may take together."""

Account = dict[str, Any]
Order = dict[str, Any]


def run(order: Order) -> Account:
    """Return the account of a dry run, in all courses if it reads what is not known.

    Args:
        order: what `dryrun.run` sends.
    """
    start = time.monotonic()
    told = _need(order, _ask(order, [{}])[0])
    if "ended" not in told and told["reads"] and not told["is_open"]:
        told = _Courses(order, told).worst()
    return {**told, "seconds": time.monotonic() - start}


def _ask(order: Order, variants: Sequence[Order]) -> list[Account]:
    """Return the accounts of variants of an order; where values have to be followed they are."""
    accounts = client.ask(order, variants)
    again = [number for number, each in enumerate(accounts) if each.get("starts_again")]
    followed = client.ask(order, [{**variants[number], "follows": True} for number in again]) if again else []
    for number, account in zip(again, followed, strict=True):
        accounts[number] = {**account, "follows": True}
    return accounts


def _need(order: Order, told: Account) -> Account:
    """Return an account, of a run that ran out of memory on CUDA with what it needs where there is enough."""
    if order["engine"] == engine.FAKE or not _fails(told):
        return told
    unlimited = {"capacities": [None] * len(order["capacities"]), "follows": told.get("follows", order["follows"])}
    more = _ask(order, [unlimited])[0]
    if "ended" in more:
        return told
    for device, failed in zip(more["devices"], told["devices"], strict=True):
        device |= {"failed": failed["failed"], "failure": failed["failure"]}
    return {**more, "follows": unlimited["follows"]}


@dataclass(frozen=True)
class _Course:
    """A course that was run.

    Attributes:
        guess: its number in `COURSES`.
        others: the expressions that went another course.
        told: its account.
    """

    guess: int
    others: dict[Key, int]
    told: Account

    @property
    def fits(self) -> bool | None:
        """Whether it was seen to fit; None if it was not seen to its end."""
        if "ended" in self.told or self.told["is_open"]:
            return None
        return not _fails(self.told)

    @property
    def tells(self) -> bool:
        """Whether it tells anything: an error is what the made-up values caused."""
        return "ended" in self.told or self.told["error"] is None

    @property
    def peak(self) -> int:
        return max((device["peak"] for device in self.told.get("devices", ())), default=0)


class _Courses:
    """The courses of one cell.

    Args:
        order: what the first account answers.
        told: that account.
    """

    def __init__(self, order: Order, told: Account) -> None:
        self._order = {**order, "follows": told.get("follows", False)}
        self._limit = min(order["time_limit"], 2 + 3 * told["seconds"])
        self._first = _Course(0, {}, told)
        self._all = [self._first]

    def worst(self) -> Account:
        """Return the account of the course that needs most, with what depends on the values."""
        kinds = {kind for _, _, kind in self._first.told["reads"]}
        self._run([(guess, {}) for guess in distinct(kinds) if guess])
        self._run(list(self._mixed()))
        telling = [each for each in self._all if each.tells]
        if not telling:
            return self._first.told
        grows = self._grows(telling)
        counted = [each for each in telling if each.guess != LARGE or not grows] or telling
        if all(each.fits is None for each in counted):
            return self._first.told
        most = max(counted, key=lambda each: (each.fits is not None, each.fits is False, each.peak, -each.guess))
        if most is not self._first and (most.fits is not False or self._first.fits is not False):
            told = self._whole(most)
        else:
            told = self._first.told
        return self._judged(told, telling, grows)

    def _run(self, courses: list[tuple[int, dict[Key, int]]]) -> list[_Course]:
        variants = [
            {"guess": guess, "others": others, "is_brief": True, "time_limit": self._limit}
            for guess, others in courses
        ]  # fmt: skip
        made = [_Course(*course, told) for course, told in zip(courses, _ask(self._order, variants), strict=True)]
        self._all += made
        return made

    def _mixed(self) -> Iterator[tuple[int, dict[Key, int]]]:
        """Yield courses in which some expressions go one way and some the other, so that any two differ in one."""
        keys = self._keys(self._all)
        digits = max(0, len(keys) - 1).bit_length()
        if 2 * digits * self._first.told["seconds"] > _PATIENCE:
            return
        for digit in range(digits):
            for value in (0, 1):
                yield 0, {key: 1 for number, key in enumerate(keys) if number >> digit & 1 == value}

    @staticmethod
    def _keys(courses: Iterable[_Course]) -> list[Key]:
        """Return the expressions that read in any of some courses."""
        found = {(line, code): None for each in courses for line, code, _ in each.told.get("reads", ())}
        return sorted(found, key=lambda key: (key[0] or 0, key[1]))

    def _grows(self, telling: list[_Course]) -> bool:
        """Return whether the larger a number is that is read, the more is needed: it sizes something."""
        large = next((each for each in telling if each.guess == LARGE), None)
        others = [each.peak for each in telling if each is not large]
        if large is None or not large.fits or not others or large.peak <= max(others) * (1 + _ALIKE):
            return False
        larger = self._run([(LARGER, {})])[0]
        return not larger.tells or not larger.fits or larger.peak > large.peak * (1 + _ALIKE)

    def _whole(self, course: _Course) -> Account:
        """Return a course's account with its history."""
        order = {**self._order, "guess": course.guess, "others": course.others}
        told = _need(order, _ask(order, [{}])[0])
        return course.told if "ended" in told else told

    def _judged(self, told: Account, telling: list[_Course], grows: bool) -> Account:
        """Return an account that says what depends on the values."""
        peaks = [each.peak for each in telling if each.fits]
        varies = bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)
        # Of a branch one side or the other is run. What the host holds may select anything between.
        is_bounded = not grows and not (varies and HOST in self._keys(telling))
        if is_bounded and len({each.fits for each in telling}) == 1:
            if varies:
                less = f"with other values in place of those that are read it needs as little as {size(min(peaks))}"
                told["assumed"].append(less)
            return {**told, "varies": varies, "hangs": False}
        for device in told["devices"]:
            device["failed"] = False  # with other values it may fit
        reason, keys = self._reason(telling, is_bounded)
        told["unknown"].insert(0, reason)
        return {**told, "varies": True, "hangs": True, "open_on": keys}

    def _reason(self, telling: list[_Course], is_bounded: bool) -> tuple[str, list[Key]]:
        """Return on what the verdict hangs, and the expressions that read it."""
        base = next(each for each in telling if each.fits is not None)
        other = next((each for each in telling if each.fits is not base.fits), base)
        why = "with some it fits, with others not"
        if other.fits is None:
            why = f"with others {other.told.get('ended') or 'the dry run did not come to its end'}"
        elif not is_bounded:
            base, other = (choose(telling, key=lambda each: each.peak) for choose in (min, max))
            why = f"it needs {size(base.peak)} or {size(other.peak)}, as they are"
        keys = self._responsible(base, other)
        hosts = [key for key in keys if key == HOST]
        lines = ", ".join(f"line {line} (`{code}`)" if line else code for line, code in keys if code)
        on = ["values on the device"] * (len(keys) > len(hosts))
        on += ["what large tensors and arrays on the CPU hold"] * len(hosts)
        sentence = f"what the cell needs depends on {' and '.join(on)}{f', read in {lines}' if lines else ''}: {why}"
        return sentence, [key for key in keys if key != HOST]

    def _responsible(self, base: _Course, other: _Course) -> list[Key]:
        """Return the expression that alone makes the difference between two courses, or else all that read."""
        keys = self._keys([base, other])
        if not 1 < len(keys) <= _MOST_LINES or other.fits is None or other.others or base.others:
            return keys
        alone = self._run([(base.guess, {key: other.guess}) for key in keys])
        found = [key for key, each in zip(keys, alone, strict=True) if each.tells and _is_like(each, other, base)]
        return found[:1] or keys


def _is_like(one: _Course, like: _Course, unlike: _Course) -> bool:
    """Return whether a course went as one of two others did."""
    if like.fits is not unlike.fits:
        return one.fits is like.fits
    return abs(one.peak - like.peak) < abs(one.peak - unlike.peak)


def _fails(account: Account) -> bool:
    return any(device["failed"] for device in account.get("devices", ()))

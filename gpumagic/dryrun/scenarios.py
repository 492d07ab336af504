"""Runs with other values in place of those that the host reads from the device and that a dry run does not know.

A loss that is printed changes nothing; a number that decides a branch, or sizes a tensor, does. So a cell that reads is
run in every scenario of `stage.guesses`, and what needs most counts. Where the scenarios disagree on whether it fits,
the verdict is open, and the line that it depends on is sought.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun import client, targets
from gpumagic.dryrun.worker.guesses import HOST, LARGE, LARGER, Key, distinct
from gpumagic.report.units import size

_ALIKE = 0.01
_MOST_LINES = 8
"""Expressions that read of which each is tried alone, to see which one matters."""
_PATIENCE = 5.0
"""Seconds that mixed scenarios may take together."""

Outcome = dict[str, Any]
Request = dict[str, Any]


def run(request: Request, only: int | None = None) -> Outcome:
    """Return the outcome of a dry run, in all scenarios if it reads what is not known.

    Args:
        request: what `dryrun.run` sends.
        only: the number of a scenario of which the figures alone are wanted.
    """
    start = time.monotonic()
    if only is not None:
        request = {**request, "guess": only, "is_brief": True}
        return {**_need(request, _ask(request, [{}])[0]), "seconds": time.monotonic() - start}
    outcome = _need(request, _ask(request, [{}])[0])
    if "ended" not in outcome and outcome["reads"] and not outcome["is_open"]:
        outcome = _Scenarios(request, outcome).worst()
    return {**outcome, "seconds": time.monotonic() - start}


def _ask(request: Request, variants: Sequence[Request]) -> list[Outcome]:
    """Return the outcomes of variants of a request; where values have to be followed they are."""
    requests = [{**request, **each} for each in variants]
    plain = [number for number, each in enumerate(requests) if not each["follows"]]
    outcomes: dict[int, Outcome] = dict(
        zip(plain, client.ask(request, [variants[each] for each in plain]), strict=True)
    )
    follow = [number for number in range(len(requests)) if outcomes.get(number, _AGAIN).get("starts_again")]
    outcomes |= zip(follow, _follow(request, [variants[each] for each in follow]), strict=True)
    return [outcomes[number] for number in range(len(requests))]


_AGAIN: Outcome = {"starts_again": True}


def _follow(request: Request, variants: Sequence[Request]) -> list[Outcome]:
    """Return the outcomes of variants, of plain runs that are told what runs that followed the values knew."""
    outcomes = client.ask(request, [{**each, "follows": True} for each in variants])
    # What fails may do so by the little that following takes: the answers are those of a run that has room.
    answered = {number: each["answers"] for number, each in enumerate(outcomes) if _is_over(each)}
    failed = [number for number in answered if _fails(outcomes[number])]
    room = {"capacities": [None] * len(request["capacities"]), "is_brief": True, "follows": True}
    for number, each in zip(failed, client.ask(request, [{**variants[each], **room} for each in failed]), strict=True):
        answered[number] = each["answers"] if _is_over(each) else None
    again = [number for number, answers in answered.items() if answers is not None]
    plain = [{**variants[each], "follows": False, "answers": answered[each]} for each in again]
    for number, outcome in zip(again, client.ask(request, plain), strict=True):
        if "ended" not in outcome and "starts_again" not in outcome:
            outcomes[number] = outcome
    return [{**each, "follows": True} for each in outcomes]


def _is_over(outcome: Outcome) -> bool:
    """Return whether a run came to an end and told of it."""
    return "ended" not in outcome and not outcome["is_open"]


def _need(request: Request, outcome: Outcome) -> Outcome:
    """Return an outcome, of a run that ran out of memory on CUDA with what it needs where there is enough."""
    if request["engine"] == targets.FAKE or not _fails(outcome):
        return outcome
    unlimited = {
        "capacities": [None] * len(request["capacities"]),
        "follows": outcome.get("follows", request["follows"]),
    }
    more = _ask(request, [unlimited])[0]
    if "ended" in more:
        return outcome
    for device, failed in zip(more["devices"], outcome["devices"], strict=True):
        device |= {"failed": failed["failed"], "failure": failed["failure"]}
    return {**more, "follows": unlimited["follows"]}


@dataclass(frozen=True)
class _Scenario:
    """A scenario that was run.

    Attributes:
        guess: its number in `COURSES`.
        others: the expressions that went another scenario.
        outcome: its outcome.
    """

    guess: int
    others: dict[Key, int]
    outcome: Outcome

    @property
    def fits(self) -> bool | None:
        """Whether it was seen to fit; None if it was not seen to its end."""
        if "ended" in self.outcome or self.outcome["is_open"]:
            return None
        return not _fails(self.outcome)

    @property
    def is_conclusive(self) -> bool:
        """Whether it tells anything: an error is what the made-up values caused."""
        return "ended" in self.outcome or self.outcome["error"] is None

    @property
    def peak(self) -> int:
        return max((device["peak"] for device in self.outcome.get("devices", ())), default=0)


class _Scenarios:
    """The scenarios of one cell.

    Args:
        request: what the first outcome answers.
        outcome: that outcome.
    """

    def __init__(self, request: Request, outcome: Outcome) -> None:
        self._request = {**request, "follows": outcome.get("follows", False)}
        self._limit = min(request["time_limit"], 5 + 5 * outcome["seconds"])
        self._first = _Scenario(0, {}, outcome)
        self._all = [self._first]

    def worst(self) -> Outcome:
        """Return the outcome of the scenario that needs most, with what depends on the values."""
        kinds = {kind for _, _, kind in self._first.outcome["reads"]}
        self._run([(guess, {}) for guess in distinct(kinds) if guess])
        self._run(list(self._mixed()))
        conclusive = [each for each in self._all if each.is_conclusive]
        if not conclusive:
            return self._first.outcome
        grows = self._grows(conclusive)
        counted = [each for each in conclusive if each.guess != LARGE or not grows] or conclusive
        if all(each.fits is None for each in counted):
            return self._first.outcome
        most = max(counted, key=lambda each: (each.fits is not None, each.fits is False, each.peak, -each.guess))
        if most is not self._first and (most.fits is not False or self._first.fits is not False):
            outcome = self._whole(most)
        else:
            outcome = self._first.outcome
        return self._judged(outcome, most, conclusive, grows)

    def _run(self, scenarios: list[tuple[int, dict[Key, int]]]) -> list[_Scenario]:
        variants = [
            {"guess": guess, "others": others, "is_brief": True, "time_limit": self._limit}
            for guess, others in scenarios
        ]  # fmt: skip
        made = [
            _Scenario(*scenario, outcome)
            for scenario, outcome in zip(scenarios, _ask(self._request, variants), strict=True)
        ]
        self._all += made
        return made

    def _mixed(self) -> Iterator[tuple[int, dict[Key, int]]]:
        """Yield scenarios in which some expressions go one way and some the other, so that any two differ in one."""
        keys = self._keys(self._all)
        digits = max(0, len(keys) - 1).bit_length()
        if 2 * digits * self._first.outcome["seconds"] > _PATIENCE:
            return
        for digit in range(digits):
            for value in (0, 1):
                yield 0, {key: 1 for number, key in enumerate(keys) if number >> digit & 1 == value}

    @staticmethod
    def _keys(scenarios: Iterable[_Scenario]) -> list[Key]:
        """Return the expressions that read in any of some scenarios."""
        found = {(line, code): None for each in scenarios for line, code, _ in each.outcome.get("reads", ())}
        return sorted(found, key=lambda key: (key[0] or 0, key[1]))

    def _grows(self, conclusive: list[_Scenario]) -> bool:
        """Return whether the larger a number is that is read, the more is needed: it sizes something."""
        large = next((each for each in conclusive if each.guess == LARGE), None)
        others = [each.peak for each in conclusive if each is not large]
        if large is None or not large.fits or not others or large.peak <= max(others) * (1 + _ALIKE):
            return False
        larger = self._run([(LARGER, {})])[0]
        return not larger.is_conclusive or not larger.fits or larger.peak > large.peak * (1 + _ALIKE)

    def _whole(self, scenario: _Scenario) -> Outcome:
        """Return a scenario's outcome with its history."""
        request = {**self._request, "guess": scenario.guess, "others": scenario.others}
        outcome = _need(request, _ask(request, [{}])[0])
        return scenario.outcome if "ended" in outcome else outcome

    def _judged(self, outcome: Outcome, most: _Scenario, conclusive: list[_Scenario], grows: bool) -> Outcome:
        """Return an outcome that says what depends on the values."""
        peaks = [each.peak for each in conclusive if each.fits]
        varies = bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)
        # Of a branch one side or the other is run. What the host holds may select anything between.
        is_bounded = not grows and not (varies and HOST in self._keys(conclusive))
        if is_bounded and len({each.fits for each in conclusive}) == 1:
            if varies:
                less = f"with other values in place of those that are read it needs as little as {size(min(peaks))}"
                outcome["assumed"].append(less)
            return {**outcome, "varies": varies, "depends": False, "most": None if most.others else most.guess}
        for device in outcome["devices"]:
            device["failed"] = False  # with other values it may fit
        base = next(each for each in conclusive if each.fits is not None)
        other = next((each for each in conclusive if each.fits is not base.fits), base)
        ends = other.fits is not None
        if ends and not is_bounded:
            base, other = (choose(conclusive, key=lambda each: each.peak) for choose in (min, max))
        reason, keys = self._reason(base, other)
        outcome["unknown"].insert(0, reason)
        return {**outcome, "varies": True, "depends": True, "open_on": keys, "is_open": not ends}

    def _reason(self, base: _Scenario, other: _Scenario) -> tuple[str, list[Key]]:
        """Return what the verdict depends on where two scenarios differ, and the expressions that read it."""
        keys = self._responsible(base, other)
        what = "what the cell needs depends on"
        why = f"it needs {size(base.peak)} or {size(other.peak)}"
        if other.fits is None:
            what = "what the cell needs may depend on"
            why = f"with others {other.outcome.get('ended') or 'the dry run did not come to its end'}"
        elif other.fits is not base.fits:
            why = "with some it fits, with others not"
        hosts = [key for key in keys if key == HOST]
        lines = ", ".join(f"line {line} (`{code}`)" if line else code for line, code in keys if code)
        on = ["values on the device"] * (len(keys) > len(hosts))
        on += ["what large tensors and arrays on the CPU hold"] * len(hosts)
        sentence = f"{what} {' and '.join(on)}{f', read in {lines}' if lines else ''}: {why}"
        return sentence, [key for key in keys if key != HOST]

    def _responsible(self, base: _Scenario, other: _Scenario) -> list[Key]:
        """Return the expression that alone makes the difference between two scenarios, or else all that read."""
        keys = self._keys([base, other])
        if not 1 < len(keys) <= _MOST_LINES or other.fits is None or other.others or base.others:
            return keys
        alone = self._run([(base.guess, {key: other.guess}) for key in keys])
        found = [
            key for key, each in zip(keys, alone, strict=True) if each.is_conclusive and _is_like(each, other, base)
        ]
        return found[:1] or keys


def _is_like(one: _Scenario, like: _Scenario, unlike: _Scenario) -> bool:
    """Return whether a scenario went as one of two others did."""
    if like.fits is not unlike.fits:
        return one.fits is like.fits
    return abs(one.peak - like.peak) < abs(one.peak - unlike.peak)


def _fails(outcome: Outcome) -> bool:
    return any(device["failed"] for device in outcome.get("devices", ()))

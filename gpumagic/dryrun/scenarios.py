"""The runs of one dry run: more than one where something is decided by values that no dry run knows.

A number or a tensor that the host reads from the device is made up, and notes whether it decides anything: a
comparison, a truth, a size. A loss that is printed does not, and one run tells all. Else, in this order:

1. Where a value that decides may be one that the host put on the device, the run ends at once (`starts_again`), and is
   made again with values followed (`worker.known`). Its figures are those of any other run.
2. In a second run each place that decides goes the other way, but for one turn of a loop, so that what either outcome
   leaves behind is there together: a truth has its other outcome, a mask selects nothing, a number that went where
   nothing is noted falls. Where something may be sized by such a number, a third one takes it large.
3. Runs whose memory went the same way end it. Otherwise places that went one way only go the other in a further run,
   and of the notebook's own any mixture is run, as many as `_MOST_RUNS` and `_PATIENCE` allow.
4. What needs most counts. Where the runs disagree on whether it fits, the verdict is open, and names the lines.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun import client, targets
from gpumagic.dryrun.worker.guesses import A_FEW, ALWAYS, BUT_ONCE, HOST, LARGE, LARGER, NUMBER, ONCE, SELECTION, Key
from gpumagic.report.units import size

_ALIKE = 0.01
_NEGLIGIBLE = 0.001
"""The share of its peak by which what two runs allocate in all may differ: the way by which a trainer sums its loss."""
_PATIENCE = 5.0
"""Seconds that mixtures may take."""
_MOST_RUNS = 12
"""The runs of which the one that needs most is chosen."""
_MASKS: Key = (None, "masks", "")
_LIBRARIES: Key = (None, "libraries", "")
"""Stand for all masks and for all that libraries decide, which go one way together in mixtures."""

Outcome = dict[str, Any]
Request = dict[str, Any]
Scenario = dict[str, Any]
"""How what is read goes in a run: see `worker.guesses.Guesses`; and whether values are followed."""
USUAL: Scenario = {"numbers": 0, "turned": [], "when": ALWAYS, "notes": True, "follows": False}


def run(request: Request, only: Scenario | None = None) -> Outcome:
    """Return the outcome of a dry run, in further scenarios if something is decided by what is not known.

    Args:
        request: what `dryrun.run` sends.
        only: the one scenario of which the figures alone are wanted.
    """
    start = time.monotonic()
    scenarios = _Scenarios({**request, **(only or USUAL), "is_brief": only is not None})
    outcome = scenarios.first()
    if "ended" not in outcome and not outcome["is_open"]:
        if only is not None:
            outcome["most"] = scenarios.scenario if outcome["decides"] or only["numbers"] else None
        elif outcome["decides"]:
            outcome = scenarios.worst(outcome)
    seconds = time.monotonic() - start
    return {**outcome, "runs": scenarios.count, "seconds": seconds, "worked": scenarios.worked}


@dataclass(frozen=True)
class _Run:
    """A scenario that was run: how what is read goes in it, and its outcome."""

    scenario: Scenario
    outcome: Outcome

    @property
    def decides(self) -> list[tuple[Key, str, tuple[bool, bool] | None]]:
        """Each place that decides, the kind of what decides, a truth's first and last outcome."""
        return [(tuple(place), kind, outcomes) for place, kind, outcomes in self.outcome.get("decides", ())]

    @property
    def is_conclusive(self) -> bool:
        """Whether it tells anything: an error is what the made-up values caused."""
        return "ended" in self.outcome or self.outcome["error"] is None

    @property
    def fits(self) -> bool | None:
        """Whether it was seen to fit; None if it was not seen to its end."""
        return None if "ended" in self.outcome or self.outcome["is_open"] else not _fails(self.outcome)

    @property
    def peak(self) -> int:
        return max((device["peak"] for device in self.outcome.get("devices", ())), default=0)

    def did_the_same(self, other: _Run) -> bool:
        """Return whether its memory went as in another run: all that is counted of it is the same, or nearly."""
        return all(
            all(one[name] == another[name] for name in ("peak", "reserved", "after"))
            and abs(one["traffic"] - another["traffic"]) <= _NEGLIGIBLE * one["peak"]
            for one, another in zip(self.outcome.get("devices", ()), other.outcome.get("devices", ()), strict=False)
        )


class _Scenarios:
    """The scenarios of one cell, of which the first run's request is given."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._all: list[_Run] = []
        self.count = 0
        """How many runs were sent."""
        self.worked = 0.0
        """Seconds of a core that they have taken."""

    @property
    def scenario(self) -> Scenario:
        """That of the request."""
        return {name: self._request[name] for name in USUAL}

    # ---- Runs

    def first(self) -> Outcome:
        """Return the outcome of the first run; where it fails by a number that is none, of one with plain numbers."""
        outcome = self._whole(self.scenario)
        error = outcome.get("error") or {"kind": "", "text": ""}
        is_refused = error["kind"] == "TypeError" or "Noted" in error["text"] or "INTERNAL ASSERT" in error["text"]
        if is_refused and outcome["noted"]:  # it may come from a number that is none: `worker.noted`
            self._request["notes"] = False
            outcome = self._whole(self.scenario)
        return outcome

    def _ask(self, variants: Sequence[Request]) -> list[Outcome]:
        """Return the outcomes of variants of the request; where one needs values to be followed, of runs that do."""
        outcomes = client.ask(self._request, variants)
        self.count += len(variants)
        self.worked += sum(each.get("seconds", 0.0) for each in outcomes)
        again = [number for number, each in enumerate(outcomes) if each.get("starts_again")]
        if again:
            self._request["follows"] = True
            followed = self._ask([{**variants[each], "follows": True} for each in again])
            for number, outcome in zip(again, followed, strict=True):
                outcomes[number] = outcome
        return outcomes

    def _whole(self, scenario: Scenario) -> Outcome:
        """Return an outcome, of a run that ran out of memory on CUDA with what it needs where there is enough."""
        outcome = self._ask([scenario])[0]
        if self._request["engine"] == targets.FAKE or not _fails(outcome):
            return outcome
        unlimited = {"capacities": [None] * len(self._request["capacities"]), "follows": self._request["follows"]}
        more = self._ask([{**scenario, **unlimited}])[0]
        if "ended" in more:
            return outcome
        for device, failed in zip(more["devices"], outcome["devices"], strict=True):
            device |= {"failed": failed["failed"], "failure": failed["failure"]}
        return more

    def _run(self, scenarios: Iterable[Scenario]) -> bool:
        """Run scenarios that were not run yet, as many as there may be; return whether there was one."""
        known = [run.scenario for run in self._all]
        new = [each for each in scenarios if each not in known][: _MOST_RUNS - len(known)]
        self._all += self._brief(new)
        return bool(new)

    def _brief(self, scenarios: Sequence[Scenario]) -> list[_Run]:
        limit = min(self._request["time_limit"], 5 + 5 * self._all[0].outcome["seconds"])
        outcomes = self._ask([{**each, "is_brief": True, "time_limit": limit} for each in scenarios])
        return [_Run(*each) for each in zip(scenarios, outcomes, strict=True)]

    # ---- Which are run

    def worst(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the scenario that needs most, with what depends on the values.

        Args:
            outcome: that of the first run.
        """
        first = _Run(self.scenario, outcome)
        self._all = [first]
        kinds = {kind for _, kind, _ in first.decides}
        is_loop = outcome["most_turns"] > 1 and kinds != {SELECTION}
        sizes = [{**first.scenario, "numbers": LARGE}] if NUMBER in kinds else []
        self._run([self._turned(self._places(), BUT_ONCE if is_loop else ALWAYS), *sizes])
        while not any(each.is_conclusive for each in self._all) and self._run([self._turned(self._places(), ALWAYS)]):
            pass  # of the checks that a library makes, each comes only where those before it hold
        self._leave_out_endless()
        is_sure = self._agree() or kinds == {SELECTION} or self._run_mixed()
        conclusive = [each for each in self._all if each.is_conclusive]
        if not conclusive:  # it fails for certain, if it always does so alike
            if len({(each.outcome["error"]["line"], each.outcome["error"]["kind"]) for each in self._all}) > 1:
                outcome["error"]["depends"] = _named(self._places())
            return outcome
        numbers = {place for each in conclusive for place, kind, _ in each.decides if kind == NUMBER}
        is_sure = is_sure and numbers.isdisjoint(_one_way(conclusive))  # else every other number made it fail
        grows = self._grows(conclusive)
        counted = [each for each in conclusive if each.scenario["numbers"] != LARGE or not grows] or conclusive
        if all(each.fits is None for each in counted):
            return outcome
        most = max(counted, key=lambda run: (run.fits is not None, run.fits is False, run.peak, run is first))
        if most is not first and (most.fits is not False or first.fits is not False):
            whole = self._whole(most.scenario)
            outcome = most.outcome if "ended" in whole else whole
        return self._judged(outcome, most, conclusive, grows, is_sure)

    def _leave_out_endless(self) -> None:
        """Leave out endless loops, such as drawing until all is in bounds, where a few turns need as much as many."""
        endless = [each for each in self._all[1:] if each.fits is None and each.peak]
        if endless:
            self._run([self._turned(self._places(), A_FEW)])
            few = self._all[-1]
            if few.is_conclusive and few.fits is not None:
                most = few.peak * (1 + _ALIKE)
                self._all = [each for each in self._all if each not in endless or each.peak > most]

    def _places(self) -> list[Key]:
        return _sorted({place for each in self._all for place, *_ in each.decides})

    def _turned(self, places: Iterable[Key], when: str) -> Scenario:
        """Return the scenario in which some places, or those that one stands for, go the other way at some turns."""
        wanted = set(places)
        turned: dict[Key, bool | None] = {}  # of a truth not the last outcome in the first run that came there
        for place, kind, outcomes in (each for one in self._all for each in one.decides):
            if {place, _group(place, kind)} & wanted and turned.get(place) is None:
                turned[place] = None if outcomes is None else not outcomes[1]
        return {**self.scenario, "turned": list(turned.items()), "when": when}

    def _agree(self) -> bool:
        """Return whether what was run tells that the values do not matter."""
        conclusive = [each for each in self._all if each.is_conclusive]
        fits = {each.fits for each in conclusive}
        if len(fits) != 1 or None in fits or _one_way(conclusive):
            return False
        is_one = len(self._places()) == 1
        if len(conclusive) > 1 and all(each.did_the_same(conclusive[0]) for each in conclusive):
            return len(conclusive) == len(self._all) or is_one
        peaks = [each.peak for each in conclusive]
        return is_one and max(peaks) <= min(peaks) * (1 + _ALIKE)

    def _run_mixed(self) -> bool:
        """Run scenarios in which some places go one way and some the other, also those that only these come to.

        Return whether every mixture was run.
        """
        self._run([self._turned(_one_way(self._all), ALWAYS)])
        seen: list[Key] = []
        while (groups := _sorted({_group(*each[:2]) for run in self._all for each in run.decides})) != seen:
            seen = groups
            in_loop = any(each.outcome.get("most_turns", 0) > 1 for each in self._all[1:])
            seconds = self._all[0].outcome["seconds"] * len(groups)
            if groups == [_LIBRARIES] or seconds > _PATIENCE or len(self._all) == _MOST_RUNS:
                return False
            sizes = range(1, len(groups) + 1) if in_loop or len(groups) > 1 else ()
            parts = itertools.chain.from_iterable(itertools.combinations(groups, number) for number in sizes)
            is_constant = any(each and each[0] == each[1] for _, _, each in self._all[0].decides)
            once = [self._turned(groups, ONCE)] if in_loop and is_constant else []
            self._run([*once, *(self._turned(each, ALWAYS) for each in itertools.islice(parts, _MOST_RUNS))])
        return len(self._all) < _MOST_RUNS and _LIBRARIES not in groups

    def _grows(self, conclusive: list[_Run]) -> bool:
        """Return whether the larger a number is that is read, the more is needed: it sizes something."""
        large = next((each for each in conclusive if each.scenario["numbers"] == LARGE), None)
        others = [each.peak for each in conclusive if each is not large]
        if large is None or not large.fits or not others or large.peak <= max(others) * (1 + _ALIKE):
            return False
        larger = self._brief([{**self.scenario, "numbers": LARGER}])[0]
        return not larger.is_conclusive or not larger.fits or larger.peak > large.peak * (1 + _ALIKE)

    # ---- What they tell

    def _judged(self, outcome: Outcome, most: _Run, conclusive: list[_Run], grows: bool, is_sure: bool) -> Outcome:
        """Return an outcome that says what depends on the values."""
        peaks = [each.peak for each in conclusive if each.fits]
        varies = bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)
        # Of a branch one side or the other is run. What the host holds may select anything between.
        is_bounded = not grows and not (varies and HOST in self._places())
        if is_bounded and len({each.fits for each in conclusive}) == 1:
            if varies:
                less = f"with other values in place of those that are read it needs as little as {size(min(peaks))}"
                outcome["assumed"].append(less)
            return {**outcome, "varies": varies or not is_sure, "depends": False, "most": most.scenario}
        for device in outcome["devices"]:
            device["failed"] = False  # with other values it may fit
        base = next(each for each in conclusive if each.fits is not None)
        other = next((each for each in conclusive if each.fits is not base.fits), base)
        ends = other.fits is not None
        if ends and not is_bounded:
            base, other = (choose(conclusive, key=lambda each: each.peak) for choose in (min, max))
        keys = _sorted({key for key, _, _ in (*base.decides, *other.decides)})
        outcome["unknown"].insert(0, _reason(base, other, keys))
        open_on = list(dict.fromkeys(key[:2] for key in keys if key != HOST))
        return {**outcome, "varies": True, "depends": True, "open_on": open_on, "is_open": not ends}


def _group(place: Key, kind: str) -> Key:
    """Return what a place goes one way with in mixtures: itself, if it is the notebook's own."""
    return _MASKS if kind == SELECTION else _LIBRARIES if place[2] else place


def _one_way(runs: Iterable[_Run]) -> list[Key]:
    """Return the places that decide and went one way only, also those that only some scenarios came to."""
    ways: dict[Key, set[bool]] = {}
    for each in runs:
        turned = {place for place, _ in each.scenario["turned"]}
        for place, _, outcomes in each.decides:
            is_other = place in turned or each.scenario["numbers"] > 0
            ways.setdefault(place, set()).update([is_other] if outcomes is None else outcomes)
    return _sorted(place for place, each in ways.items() if len(each) < 2)


def _reason(base: _Run, other: _Run, keys: list[Key]) -> str:
    """Return what the verdict depends on where two scenarios differ that read some expressions."""
    what, why = "depends on", f"it needs {size(base.peak)} or {size(other.peak)}"
    if other.fits is None:
        what = "may depend on"
        why = f"with others {other.outcome.get('ended') or 'the dry run did not come to its end'}"
    elif other.fits is not base.fits:
        why = "with some it fits, with others not"
    on = ["values on the device"] if any(key != HOST for key in keys) else []
    on += ["what large tensors and arrays on the CPU hold"] if HOST in keys else []
    named = _named(keys)
    return f"what the cell needs {what} {' and '.join(on)}{f', read in {named}' if named else ''}: {why}"


def _sorted(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key[0] or 0, *key[1:]))


def _named(keys: Iterable[Key]) -> str:
    return ", ".join(dict.fromkeys(f"line {line} (`{code}`)" if line else code for line, code, _ in keys if code))


def _fails(outcome: Outcome) -> bool:
    return any(device["failed"] for device in outcome.get("devices", ()))

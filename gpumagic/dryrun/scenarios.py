"""The runs of one dry run: more than one where something is decided by values that no dry run knows.

A number or a tensor that the host reads from the device is made up, and notes whether it decides anything: a
comparison, a truth, a size. A loss that is printed does not, and one run tells all. Else, in this order:

1. Where a value that decides may be one that the host put on the device, the run ends at once (`starts_again`), and is
   made again with values followed (`worker.known`). Its figures are those of any other run.
2. In a second run each place that decides goes the other way, but for one turn of a loop, so that what either outcome
   leaves behind is there together: a truth has its other outcome, a mask selects nothing, a number that went where
   nothing is noted falls. Where something may be sized by such a number, a third one takes it large.
3. Runs whose memory went the same way end it, but for a few more where that takes no time. Otherwise the search goes
   on from the run that needs most: each place that it came to goes the other way, and what needs more is combined,
   until every mixture was run, or `_MOST_RUNS` or `_PATIENCE` ends it.
4. What needs most counts. Where the runs disagree on whether it fits, the verdict is open, and names the lines; also
   where not every mixture was run, and those that were differ by more than the room that is left.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun import client, targets, wire
from gpumagic.dryrun.wire import ALWAYS, FALLING, HOST, LARGE, NUMBER, SELECTION, TRUTH, Key
from gpumagic.report.units import size

_ALIKE = 0.01
_NEGLIGIBLE = 0.001
"""The share of its peak by which what two runs allocate in all may differ: the way by which a trainer sums its loss."""
_PATIENCE, _BRIEFLY = 5.0, 0.3
"""Seconds that mixtures may take: where the runs before differ, and where they do not."""
_MOST_RUNS, _FEW_RUNS = 24, 8
"""The runs of which the one that needs most is chosen: where they differ, and where the first ones do not."""
_LIBRARIES: Key = (None, "libraries", "")
"""Stands for all that libraries decide, which goes one way together in mixtures."""

Outcome = dict[str, Any]
Request = dict[str, Any]
Scenario = dict[str, Any]
"""How what is read goes in a run: see `worker.wire.Guesses`; and whether values are followed."""
USUAL: Scenario = {"ways": [], "when": ALWAYS, "notes": True, "follows": False}


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
            outcome["most"] = scenarios.scenario if outcome["decides"] else None
        elif outcome["decides"]:
            outcome = scenarios.worst(outcome)
    seconds = time.monotonic() - start
    return {**outcome, "runs": scenarios.count, "seconds": seconds, "worked": scenarios.worked}


@dataclass(frozen=True, eq=False)
class _Run:
    """A scenario that was run: how what is read goes in it, and its outcome."""

    scenario: Scenario
    outcome: Outcome

    @property
    def decides(self) -> list[tuple[Key, str, tuple[bool, bool] | None]]:
        """Each place that decides, the kind of what decides, a truth's first and last outcome."""
        return [
            (tuple(place), kind, outcomes)
            for place, kind, outcomes in self.outcome.get("decides", ())
        ]

    @property
    def groups(self) -> list[Key]:
        """What goes one way together in mixtures: each of the notebook's own places, and all those of libraries."""
        return list(dict.fromkeys(map(_group, (place for place, *_ in self.decides))))

    @property
    def is_conclusive(self) -> bool:
        """Whether it tells anything: an error is what the made-up values caused."""
        return "ended" in self.outcome or self.outcome["error"] is None

    @property
    def fits(self) -> bool | None:
        """Whether it was seen to fit; None if it was not seen to its end."""
        return (
            None if "ended" in self.outcome or self.outcome["is_open"] else not _fails(self.outcome)
        )

    @property
    def peak(self) -> int:
        return max((device["peak"] for device in self.outcome.get("devices", ())), default=0)

    @property
    def is_beyond_a_list(self) -> bool:
        """Whether a number was too large an index."""
        error = self.outcome.get("error") or {"text": ""}
        return str(error["text"]).endswith("index out of range")

    def did_the_same(self, other: _Run) -> bool:
        """Return whether its memory went as in another run: all that is counted of it is the same, or nearly."""
        return all(
            all(one[name] == another[name] for name in ("peak", "reserved", "after"))
            and abs(one["traffic"] - another["traffic"]) <= _NEGLIGIBLE * one["peak"]
            for one, another in zip(
                self.outcome.get("devices", ()), other.outcome.get("devices", ()), strict=False
            )
        )

    @property
    def ways(self) -> dict[tuple[Key, str], int]:
        """What goes another way in it than usual."""
        return dict(self.scenario["ways"])

    def turned(self, groups: Collection[Key], when: str | None = None) -> Scenario:
        """Return the scenario in which what some groups decide goes the other way, or as usual where it did already.

        Args:
            groups: some of `groups`, or single places.
            when: at which turns of a loop; as in this run where it is not given.
        """
        ways = self.ways
        for place, kind, outcomes in self.decides:
            if {place, _group(place)} & set(groups) and ways.pop((place, kind), None) is None:
                ways[place, kind] = FALLING if outcomes is None else not outcomes[1]
        return _scenario(self.scenario, ways, when or self.scenario["when"])

    def sized(self, number: int) -> Scenario:
        """Return the scenario in which all numbers are one, if some may size something; else its own."""
        if all((place, kind) in self.ways for place, kind, _ in self.decides if kind == NUMBER):
            return self.scenario
        return _scenario(self.scenario, {(wire.EVERY, NUMBER): number, **self.ways}, ALWAYS)


def _scenario(like: Scenario, ways: Mapping[tuple[Key, str], int], when: str) -> Scenario:
    return {**like, "ways": sorted(ways.items(), key=str), "when": when if ways else ALWAYS}


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
        is_refused = (
            error["kind"] == "TypeError"
            or "Noted" in error["text"]
            or "INTERNAL ASSERT" in error["text"]
        )
        if (
            is_refused and outcome["noted"]
        ):  # it may come from a number that is none: `worker.noted`
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
        unlimited = {
            "capacities": [None] * len(self._request["capacities"]),
            "follows": self._request["follows"],
        }
        more = self._ask([{**scenario, **unlimited}])[0]
        if "ended" in more:
            return outcome
        for device, failed in zip(more["devices"], outcome["devices"], strict=True):
            device |= {"failed": failed["failed"], "failure": failed["failure"]}
        return more

    def _run(self, scenarios: Iterable[Scenario]) -> list[_Run]:
        """Run scenarios that were not run yet, as many as there may be, and return those runs."""
        known = [run.scenario for run in self._all]
        new = [each for each in scenarios if each not in known][: _MOST_RUNS - len(known)]
        limit = min(self._request["time_limit"], 5 + 5 * self._all[0].outcome["seconds"])
        outcomes = self._ask([{**each, "is_brief": True, "time_limit": limit} for each in new])
        runs = [_Run(*each) for each in zip(new, outcomes, strict=True)]
        self._all += runs
        return runs

    # ---- Which are run

    def worst(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the scenario that needs most, with what depends on the values.

        Args:
            outcome: that of the first run.
        """
        first = _Run(self.scenario, outcome)
        self._all = [first]
        is_of_masks = {kind for _, kind, _ in first.decides} == {
            SELECTION
        }  # the more they select, the more is needed
        is_loop = outcome["most_turns"] > 1 and not is_of_masks
        is_constant = any(
            outcomes is None or outcomes[0] == outcomes[1] for _, _, outcomes in first.decides
        )
        when = (
            wire.BUT_ONCE if is_loop and is_constant else ALWAYS
        )  # else the first run had either outcome
        self._run([first.turned(first.groups, when), first.sized(LARGE)])
        last = self._all[1:2]
        while last and not any(each.is_conclusive for each in self._all):
            # Of the checks that a library makes, each comes only where those before it hold.
            new = [place for place, kind, _ in last[0].decides if (place, kind) not in last[0].ways]
            last = self._run([last[0].turned(new, ALWAYS)] if new else [])
        self._run(
            each.sized(LARGE) for each in self._all[1:2]
        )  # numbers that only the other outcome comes to
        if any(each.is_beyond_a_list for each in self._all):
            self._run([first.sized(wire.LAST)])
        self._leave_out_endless()
        is_alike = self._agree()
        is_all = is_of_masks or (is_alike and len(self._groups()) == 1) or self._search(is_loop)
        conclusive = [each for each in self._all if each.is_conclusive]
        if not conclusive:  # it fails for certain, if it always does so alike
            ends = {
                (each.outcome["error"]["line"], each.outcome["error"]["kind"]) for each in self._all
            }
            if len(ends) > 1 or _one_way(self._all):
                outcome["error"]["depends"] = _named(self._places())
            return outcome
        grows = self._grows(conclusive)
        counted = [
            each for each in conclusive if LARGE not in each.ways.values() or not grows
        ] or conclusive
        if all(each.fits is None for each in counted):
            return outcome
        most = max(
            counted,
            key=lambda run: (run.fits is not None, run.fits is False, run.peak, run is first),
        )
        if most is not first and (most.fits is not False or first.fits is not False):
            whole = self._whole(most.scenario)
            outcome = most.outcome if "ended" in whole else whole
        kinds = {kind for run in self._all for _, kind, _ in run.decides}
        is_certain = (
            is_all and kinds <= {TRUTH} and (is_alike or not is_loop)
        )  # each outcome of all was run
        is_bounded = not grows and (is_all or self._has_room(conclusive))
        return self._judged(outcome, most, conclusive, is_bounded=is_bounded, is_certain=is_certain)

    def _leave_out_endless(self) -> None:
        """Leave out endless loops, such as drawing until all is in bounds, where a few turns need as much as many."""
        endless = [each for each in self._all[1:] if each.fits is None and each.peak]
        for few in self._run([self._all[0].turned(self._groups(), wire.A_FEW)] if endless else []):
            if few.is_conclusive and few.fits is not None:
                flat = [each for each in endless if each.peak <= few.peak * (1 + _ALIKE)]
                self._all = [each for each in self._all if each not in flat]

    def _places(self) -> list[Key]:
        return _sorted({place for each in self._all for place, *_ in each.decides})

    def _groups(self) -> set[Key]:
        return set(map(_group, self._places()))

    def _agree(self) -> bool:
        """Return whether what was run tells that the values do not matter."""
        conclusive = [each for each in self._all if each.is_conclusive]
        if not self._are_alike() or _one_way(conclusive):
            return False
        is_one = len(self._places()) == 1
        did_the_same = len(conclusive) > 1 and all(
            each.did_the_same(conclusive[0]) for each in conclusive
        )
        return is_one or (did_the_same and len(conclusive) == len(self._all))

    def _are_alike(self) -> bool:
        """Return whether the runs that tell anything need about the same."""
        conclusive = [each for each in self._all if each.is_conclusive]
        peaks, fits = [each.peak for each in conclusive], {each.fits for each in conclusive}
        return len(fits) == 1 and None not in fits and max(peaks) <= min(peaks) * (1 + _ALIKE)

    def _search(self, is_loop: bool) -> bool:
        """Run mixtures of outcomes, from the run that needs most on; return whether every one was run."""
        first, groups = self._all[0], self._groups()
        if self._agree() and (is_loop or len(groups) > 3 or groups == {_LIBRARIES}):
            return False
        if groups == {_LIBRARIES}:  # whose mixtures are not run
            self._run([first.turned(_one_way(self._all), ALWAYS)])
            return False
        self._run(first.turned(first.groups, each) for each in (ALWAYS, wire.ONCE) if is_loop)
        seen: list[_Run] = []
        while rest := [each for each in self._all if each not in seen]:
            is_alike, fits = (
                self._are_alike(),
                {each.fits for each in self._all if each.is_conclusive},
            )
            most, patience = (_FEW_RUNS, _BRIEFLY) if is_alike else (_MOST_RUNS, _PATIENCE)
            seconds = sum(each.outcome.get("seconds", 0) for each in self._all)
            is_seen = (
                is_alike and is_loop and not _one_way(self._all)
            )  # of a loop's turns not all mixtures can be run
            if len(self._all) >= most or seconds > patience or is_seen or {True, False} <= fits:
                return False
            best = max(rest, key=lambda run: (run.fits is False, run.peak))
            seen.append(best)
            turned = [best.turned([group]) for group in best.groups]
            self._run(turned)
            grown = [each.scenario for each in self._all if each.peak > best.peak]
            more = [
                group
                for group, scenario in zip(best.groups, turned, strict=True)
                if scenario in grown
            ]
            self._run([best.turned(more)] if len(more) > 1 else [])
        return True

    def _grows(self, conclusive: list[_Run]) -> bool:
        """Return whether the larger a number is that is read, the more is needed: it sizes something."""
        large = [each for each in conclusive if LARGE in each.ways.values()]
        others = [each.peak for each in conclusive if each not in large]
        most = max((each for each in large if each.fits), key=lambda each: each.peak, default=None)
        if most is None or not others or most.peak <= max(others) * (1 + _ALIKE):
            return False
        ways = [(each, wire.LARGER if way == LARGE else way) for each, way in most.ways.items()]
        (larger,) = self._ask([{**most.scenario, "ways": ways, "is_brief": True}])
        run = _Run(most.scenario, larger)
        return not run.is_conclusive or not run.fits or run.peak > most.peak * (1 + _ALIKE)

    def _has_room(self, runs: list[_Run]) -> bool:
        """Return whether mixtures that were not run would fit, too, if they needed more by what the others differ."""
        for device, capacity in enumerate(self._request["capacities"]):
            peaks = [each.outcome["devices"][device]["peak"] for each in runs if each.fits]
            if capacity is not None and peaks and 2 * max(peaks) - min(peaks) > capacity:
                return False
        return True

    # ---- What they tell

    def _judged(
        self,
        outcome: Outcome,
        most: _Run,
        conclusive: list[_Run],
        *,
        is_bounded: bool,
        is_certain: bool,
    ) -> Outcome:
        """Return an outcome that says what depends on the values."""
        peaks = [each.peak for each in conclusive if each.fits]
        varies = bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)
        # Of a branch one side or the other is run. What the host holds may select anything between.
        is_bounded = is_bounded and not (varies and HOST in self._places())
        if is_bounded and len({each.fits for each in conclusive}) == 1:
            if varies:
                less = f"with other values in place of those that are read it needs as little as {size(min(peaks))}"
                outcome["assumed"].append(less)
            return {
                **outcome,
                "varies": varies or not is_certain,
                "depends": False,
                "most": most.scenario,
            }
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


def _group(place: Key) -> Key:
    """Return what a place goes one way with in mixtures: itself, if it is the notebook's own."""
    return _LIBRARIES if place[2] else place


def _one_way(runs: Iterable[_Run]) -> list[Key]:
    """Return the places that decide and went one way only, also those that only some scenarios came to."""
    ways: dict[Key, set[bool]] = {}
    for each in runs:
        for place, kind, outcomes in each.decides:
            is_other = not {(place, kind), (wire.EVERY, NUMBER)}.isdisjoint(each.ways)
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
    return ", ".join(
        dict.fromkeys(f"line {line} (`{code}`)" if line else code for line, code, _ in keys if code)
    )


def _fails(outcome: Outcome) -> bool:
    return any(device["failed"] for device in outcome.get("devices", ()))

"""The runs of one dry run: more than one where something is decided by values that no dry run knows.

A number or a tensor that the host reads from the device is made up, and notes whether it decides anything: a
comparison, a truth, a size. A loss that is printed does not, and one run tells all. Else, in this order:

1. Where a value that decides may be one that the host put on the device, the run ends at once (`starts_again`), and is
   made again with values followed (`worker.known`). Its figures are those of any other run.
2. In a second run each place that decides goes the other way, but for one turn of a loop, so that what either outcome
   leaves behind is there together: a truth has its other outcome, a mask selects nothing, a number that went where
   nothing is noted falls. Where something may be sized by such a number, a third one takes it large.
3. Runs whose memory went the same way end it, and so does it that only masks decide. Otherwise some places go the
   other way and some do not, until nothing new decides.
4. What needs most counts. Where the runs disagree on whether it fits, the verdict is open, and names the lines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun import client, targets
from gpumagic.dryrun.worker.guesses import ALWAYS, BUT_ONCE, HOST, LARGE, LARGER, ONCE, SELECTION, TRUTH, Key
from gpumagic.report.units import size

_ALIKE = 0.01
_NEGLIGIBLE = 0.001
"""The share of its peak by which what two runs allocate in all may differ: the way by which a trainer sums its loss."""
_PATIENCE = 5.0
"""Seconds that runs may take in which places go different ways, as many as there are places."""
_FEW, _MOST_RUNS = 3, 12
"""Places of which every mixture is run; runs after which no other mixtures are begun."""
_NOTING: tuple[tuple[str, ...], ...] = (("float", "int"), ("float",), ())
"""Which numbers note what they decide; where code takes none such, fewer do."""
_SELECTIONS: Key = (None, "selections", "")
"""Stands for all masks, which go one way together."""

Outcome = dict[str, Any]
Request = dict[str, Any]
Course = dict[str, Any]
"""How what is read goes in a run: see `worker.guesses.Guesses`."""
USUAL: Course = {"numbers": 0, "others": (), "outcomes": (), "when": ALWAYS, "noting": _NOTING[0]}


def run(request: Request, only: Course | None = None) -> Outcome:
    """Return the outcome of a dry run, in further scenarios if something is decided by what is not known.

    Args:
        request: what `dryrun.run` sends.
        only: the one course of which the figures alone are wanted.
    """
    start = time.monotonic()
    runs = _Runs({**request, **(only or USUAL), "is_brief": only is not None})
    outcome = runs.first()
    if "ended" not in outcome and not outcome["is_open"]:
        decides = bool(outcome["decides"])
        if only is not None:
            outcome["most"] = runs.course if decides or only["numbers"] else None
        if decides and only is None:
            outcome = _Scenarios(runs, outcome).worst()
    return {**outcome, "runs": runs.count, "seconds": time.monotonic() - start}


_FOLLOWED: dict[str | None, None] = {}
"""Cells that read back what the host put there: the next run of one follows values from the start."""
_REMEMBERED = 100


class _Runs:
    """Sends the runs of one cell to the worker.

    Args:
        request: of the first run.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0

    @property
    def course(self) -> Course:
        """That of the request."""
        return {name: self.request[name] for name in USUAL}

    def first(self) -> Outcome:
        """Return the outcome of the first run; where it fails by a number that is none, of one with plain numbers."""
        at = _NOTING.index(tuple(self.request["noting"]))
        text = re.sub(r"\d+", "0", self.request["source"] or "")  # with other numbers it reads the same
        self.request["follows"] = self.request["engine"] == targets.CUDA and text in _FOLLOWED
        for noting in _NOTING[at:]:
            self.request["noting"] = noting
            outcome = self.whole({})
            error = outcome.get("error") or {"kind": "", "text": ""}
            is_refused = error["kind"] == "TypeError" or "Noted" in error["text"] or "INTERNAL ASSERT" in error["text"]
            if not (is_refused and outcome["noted"]):  # else it may come from a number that is none: `worker.noted`
                break
        if text and self.request["follows"]:
            _FOLLOWED[text] = None
            _FOLLOWED.pop(next(iter(_FOLLOWED)) if len(_FOLLOWED) > _REMEMBERED else None, None)
        return outcome

    def ask(self, variants: Sequence[Request]) -> list[Outcome]:
        """Return the outcomes of variants of the request; where one needs values to be followed, of runs that do."""
        outcomes = self._send(variants)
        again = [number for number, each in enumerate(outcomes) if each.get("starts_again")]
        if again:
            self.request["follows"] = True
            for number, outcome in zip(again, self._send([variants[each] for each in again]), strict=True):
                outcomes[number] = outcome
        return outcomes

    def whole(self, variant: Request) -> Outcome:
        """Return an outcome, of a run that ran out of memory on CUDA with what it needs where there is enough."""
        outcome = self.ask([variant])[0]
        if self.request["engine"] == targets.FAKE or not _fails(outcome):
            return outcome
        more = self.ask([{**variant, "capacities": [None] * len(self.request["capacities"])}])[0]
        if "ended" in more:
            return outcome
        for device, failed in zip(more["devices"], outcome["devices"], strict=True):
            device |= {"failed": failed["failed"], "failure": failed["failure"]}
        return more

    def _send(self, variants: Sequence[Request]) -> list[Outcome]:
        self.count += len(variants)
        return client.ask(self.request, variants)


_FIGURES = "peak", "reserved", "after"


@dataclass(frozen=True)
class _Scenario:
    """A scenario that was run.

    Attributes:
        course: how what is read goes in it.
        outcome: its outcome.
    """

    course: Course
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

    def did_the_same(self, other: _Scenario) -> bool:
        """Return whether its memory went as in another run: all that is counted of it is the same, or nearly."""
        return all(
            [one[name] for name in _FIGURES] == [another[name] for name in _FIGURES]
            and abs(one["traffic"] - another["traffic"]) <= _NEGLIGIBLE * one["peak"]
            for one, another in zip(self.outcome.get("devices", ()), other.outcome.get("devices", ()), strict=False)
        )


class _Scenarios:
    """The scenarios of one cell.

    Args:
        runs: sends them.
        outcome: that of the first.
    """

    def __init__(self, runs: _Runs, outcome: Outcome) -> None:
        self._runs = runs
        self._limit = min(runs.request["time_limit"], 5 + 5 * outcome["seconds"])
        self._first = _Scenario(runs.course, outcome)
        self._all = [self._first]

    def worst(self) -> Outcome:
        """Return the outcome of the scenario that needs most, with what depends on the values."""
        only_masks = self._kinds() == {SELECTION}
        is_once = self._first.outcome["most_turns"] > 1 and not only_masks
        sizes = [{**self._first.course, "numbers": LARGE}] if self._kinds() - {TRUTH, SELECTION} else []
        self._run([self._turned(self._places(), BUT_ONCE if is_once else ALWAYS), *sizes])
        if not (self._agree() or only_masks):
            self._run_mixed()
        conclusive = [each for each in self._all if each.is_conclusive]
        if not conclusive:
            return self._failed()
        grows = self._grows(conclusive)
        counted = [each for each in conclusive if each.course["numbers"] != LARGE or not grows] or conclusive
        if all(each.fits is None for each in counted):
            return self._first.outcome
        most = max(counted, key=lambda run: (run.fits is not None, run.fits is False, run.peak, run is self._first))
        outcome = self._first.outcome
        if most is not self._first and (most.fits is not False or self._first.fits is not False):
            whole = self._runs.whole(most.course)
            outcome = most.outcome if "ended" in whole else whole
        return self._judged(outcome, most, conclusive, grows)

    def _kinds(self) -> set[str]:
        return {kind for _, kind, _ in _decides(self._all)}

    def _turned(self, places: Iterable[Key], when: str) -> Course:
        """Return the course in which some places go the other way.

        Args:
            places: which.
            when: at which turns of a loop.
        """
        turned = set(places)
        found: dict[Key, bool] = {}  # the last outcome of each truth, in the first run that came there
        others: dict[Key, None] = {}
        for place, kind, outcomes in _decides(self._all):
            if outcomes is not None and place in turned:
                found.setdefault(place, not outcomes[1])
            elif outcomes is None and (_SELECTIONS if kind == SELECTION else place) in turned:
                others.setdefault(place)
        return {**self._first.course, "others": list(others), "outcomes": list(found.items()), "when": when}

    def _agree(self) -> bool:
        """Return whether what was run tells that the values do not matter."""
        conclusive = [each for each in self._all if each.is_conclusive]
        fits = {each.fits for each in conclusive}
        if len(fits) != 1 or None in fits or any(_places([each]) != self._places() for each in conclusive):
            return False  # also where a branch that one took decides by more
        if len(conclusive) > 1 and all(each.did_the_same(conclusive[0]) for each in conclusive):
            return len(conclusive) == len(self._all) or len(self._places()) == 1
        peaks = [each.peak for each in conclusive]
        return len(self._places()) == 1 and max(peaks) <= min(peaks) * (1 + _ALIKE)

    def _run(self, courses: Sequence[Course]) -> None:
        new = [each for each in courses if all(each != run.course for run in self._all)]
        variants = [{**each, "is_brief": True, "time_limit": self._limit} for each in new]
        self._all += [_Scenario(*each) for each in zip(new, self._runs.ask(variants), strict=True)]

    def _run_mixed(self) -> None:
        """Run scenarios in which some places go one way and some the other, also those that only these come to."""
        seen: list[Key] = []
        while len(self._places()) > len(seen) and len(self._all) < _MOST_RUNS:
            seen = self._places()
            if len(seen) * self._first.outcome["seconds"] > _PATIENCE:
                return
            in_loop = any(each.outcome.get("most_turns", 0) > 1 for each in self._all[1:])
            courses = [self._turned(each, ALWAYS) for each in _parts(seen)] if in_loop or len(seen) > 1 else []
            if in_loop and any(each and each[0] == each[1] for _, _, each in _decides([self._first])):
                courses.append(self._turned(seen, ONCE))
            self._run(courses)

    def _places(self) -> list[Key]:
        return _places(self._all)

    def _grows(self, conclusive: list[_Scenario]) -> bool:
        """Return whether the larger a number is that is read, the more is needed: it sizes something."""
        large = next((each for each in conclusive if each.course["numbers"] == LARGE), None)
        others = [each.peak for each in conclusive if each is not large]
        if large is None or not large.fits or not others or large.peak <= max(others) * (1 + _ALIKE):
            return False
        self._run([{**self._first.course, "numbers": LARGER}])
        larger = self._all[-1]
        return not larger.is_conclusive or not larger.fits or larger.peak > large.peak * (1 + _ALIKE)

    def _failed(self) -> Outcome:
        """Return the outcome where each scenario fails: for certain, if all do so alike."""
        error: dict[str, Any] = self._first.outcome["error"]
        told = [each.outcome["error"] for each in self._all if "error" in each.outcome]
        if any((each["line"], each["kind"]) != (error["line"], error["kind"]) for each in told):
            error["depends"] = _named(_places(self._all))
        return self._first.outcome

    def _judged(self, outcome: Outcome, most: _Scenario, conclusive: list[_Scenario], grows: bool) -> Outcome:
        """Return an outcome that says what depends on the values."""
        peaks = [each.peak for each in conclusive if each.fits]
        varies = bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)
        # Of a branch one side or the other is run. What the host holds may select anything between.
        is_bounded = not grows and not (varies and HOST in self._places())
        if is_bounded and len({each.fits for each in conclusive}) == 1:
            if varies:
                less = f"with other values in place of those that are read it needs as little as {size(min(peaks))}"
                outcome["assumed"].append(less)
            return {**outcome, "varies": varies, "depends": False, "most": most.course}
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

    def _reason(self, base: _Scenario, other: _Scenario) -> tuple[str, list[tuple[Any, str]]]:
        """Return what the verdict depends on where two scenarios differ, and the expressions that read it."""
        keys = _sorted({key for key, _, _ in _decides([base, other])})
        what = "what the cell needs depends on"
        why = f"it needs {size(base.peak)} or {size(other.peak)}"
        if other.fits is None:
            what = "what the cell needs may depend on"
            why = f"with others {other.outcome.get('ended') or 'the dry run did not come to its end'}"
        elif other.fits is not base.fits:
            why = "with some it fits, with others not"
        hosts = [key for key in keys if key == HOST]
        named = _named(keys)
        on = ["values on the device"] * (len(keys) > len(hosts))
        on += ["what large tensors and arrays on the CPU hold"] * len(hosts)
        sentence = f"{what} {' and '.join(on)}{f', read in {named}' if named else ''}: {why}"
        return sentence, list(dict.fromkeys(key[:2] for key in keys if key != HOST))


def _decides(scenarios: Iterable[_Scenario]) -> Iterator[tuple[Key, str, tuple[bool, bool] | None]]:
    """Yield each place that decides in some scenarios, the kind of what decides, a truth's first and last outcome."""
    for each in scenarios:
        for place, kind, outcomes in each.outcome.get("decides", ()):
            yield tuple(place), kind, outcomes


def _places(scenarios: Iterable[_Scenario]) -> list[Key]:
    """Return the places that decide in some scenarios, of masks one for all."""
    return _sorted({_SELECTIONS if kind == SELECTION else place for place, kind, _ in _decides(scenarios)})


def _parts(keys: Sequence[Key]) -> list[set[Key]]:
    """Return which keys to turn over: any of a few; of many some, so that any two differ in one."""
    if len(keys) <= _FEW:
        return [{key for number, key in enumerate(keys) if bits >> number & 1} for bits in range(1, 1 << len(keys))]
    digits = [[number >> digit & 1 for number in range(len(keys))] for digit in range((len(keys) - 1).bit_length())]
    return [{key for key, bit in zip(keys, each, strict=True) if bit is value} for each in digits for value in (0, 1)]


def _sorted(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key[0] or 0, *key[1:]))


def _named(keys: Iterable[Key]) -> str:
    return ", ".join(dict.fromkeys(f"line {line} (`{code}`)" if line else code for line, code, _ in keys if code))


def _fails(outcome: Outcome) -> bool:
    return any(device["failed"] for device in outcome.get("devices", ()))

"""The runs of one dry run: more than one where something is decided by values that no dry run knows.

A number or a tensor that the host reads from the device is made up, and notes whether it decides anything: a
comparison, a truth, a size. A loss that is printed does not, and one run tells all. Else, in this order:

1. Where a value that decides may be one that the host put on the device, the run ends at once (`Ending.NEEDS_VALUES`),
   and is made again with values followed (`worker.known`). Its figures are those of any other run.
2. In a second run each expression that decides goes the other way, but for one turn of a loop, so that what either
   outcome leaves behind is there together: a truth has its other outcome, a mask selects nothing, a number that went
   where nothing is noted falls. Where something may be sized by such a number, a third one takes it large.
3. Runs whose memory went the same way end it, but for a few more where that takes no time. Otherwise the search goes
   on from the run that needs most: each expression that decided in it goes the other way, and what needs more is
   combined, until every mixture was run, or `_MOST_RUNS` or `_PATIENCE` ends it.
4. What needs most counts. Where the runs disagree on whether it fits, the verdict is open, and names the lines; also
   where not every mixture was run, and those that were differ by more than the room that is left.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumagic.dryrun import client, targets
from gpumagic.dryrun.wire import (
    EVERY,
    HOST,
    USUAL,
    Decision,
    Ended,
    Ending,
    Key,
    Kind,
    Number,
    Outcome,
    Override,
    Request,
    Scenario,
    When,
)
from gpumagic.report.units import size

_ALIKE = 0.01
"""The share by which peaks may differ that count as the same."""
_NEGLIGIBLE = 0.001
"""The share of its peak by which what two runs allocate in all may differ: the way by which a trainer sums its loss."""
_PATIENCE, _BRIEFLY = 5.0, 0.3
"""Seconds that mixtures may take: where the runs before differ, and where they do not."""
_MOST_RUNS, _FEW_RUNS = 24, 8
"""The runs of which the one that needs most is chosen: where they differ, and where the first ones do not."""
_MOST_GROUPS = 3
"""Groups of which mixtures are run also where the first runs agree."""
_LIBRARIES = Key(None, "libraries")
"""Stands for all that libraries decide, which is flipped together in mixtures."""
_HOST_CONTENTS = "what large tensors and arrays on the CPU hold"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What all runs of one dry run come to."""

    reply: Outcome | Ended
    """That of the run that needs most."""
    scenario: Scenario | None = None
    """Its scenario, where all runs agree on the verdict; None where no value decides."""
    varies: bool = False
    """Whether the verdict or the peak may be another one with other values."""
    depends: bool = False
    """Whether the verdict is open, since it depends on values."""
    open_on: tuple[tuple[int | None, str], ...] = ()
    """The line and the code of each expression on whose value it depends."""
    failure_depends_on: str | None = None
    """The expressions on whose values it depends how the cell fails, in words."""
    runs: int = 1
    seconds: float = 0.0
    """How long all of it took."""
    worked: float = 0.0
    """Seconds of a core that the runs have taken."""


def run(request: Request, only: Scenario | None = None) -> Result:
    """Return what a dry run comes to, from further scenarios too if something is decided by what is not known.

    Args:
        request: what to run, in the usual scenario.
        only: the one scenario of which the figures alone are wanted.
    """
    start = time.monotonic()
    scenarios = _Scenarios(replace(request, scenario=only or USUAL, is_brief=only is not None))
    reply = scenarios.run_first()
    if isinstance(reply, Ended) or reply.is_cut_short or not reply.decisions:
        result = Result(reply=reply)
    elif only is None:
        result = scenarios.explore(reply)
    else:
        result = Result(reply=reply, scenario=scenarios.usual)
    seconds = time.monotonic() - start
    return replace(result, runs=scenarios.count, seconds=seconds, worked=scenarios.worked)


@dataclass(frozen=True, eq=False)
class _Run:
    """A scenario that was run, and what came of it."""

    scenario: Scenario
    reply: Outcome | Ended

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was decided in it by values that are not known."""
        return () if isinstance(self.reply, Ended) else self.reply.decisions

    @property
    def groups(self) -> list[Key]:
        """What is flipped together in mixtures: each of the notebook's own expressions, and all of libraries."""
        return list(dict.fromkeys(_flip_group(decision.place) for decision in self.decisions))

    @property
    def is_conclusive(self) -> bool:
        """Whether it tells anything: a failure is what the made-up values caused."""
        return isinstance(self.reply, Ended) or self.reply.failure is None

    @property
    def fits(self) -> bool | None:
        """Whether it was seen to fit; None if it was not seen to its end."""
        if isinstance(self.reply, Ended) or self.reply.is_cut_short:
            return None
        return not self.reply.is_out_of_memory

    @property
    def peak(self) -> int:
        """The highest of its devices' peaks."""
        if isinstance(self.reply, Ended):
            return 0
        return max((device.peak for device in self.reply.devices), default=0)

    @property
    def is_beyond_list(self) -> bool:
        """Whether a number was too large an index."""
        failure = self.reply.failure if isinstance(self.reply, Outcome) else None
        return failure is not None and failure.is_beyond_list

    @property
    def overrides(self) -> dict[tuple[Key, Kind], int]:
        """What goes another way in it than usual."""
        return {(place, kind): outcome for place, kind, outcome in self.scenario.overrides}

    def did_the_same(self, other: _Run) -> bool:
        """Return whether its memory went as in another run: all that is counted of it is the same, or nearly."""
        if isinstance(self.reply, Ended) or isinstance(other.reply, Ended):
            return True
        for one, another in zip(self.reply.devices, other.reply.devices, strict=True):
            if (one.peak, one.reserved, one.after) != (
                another.peak,
                another.reserved,
                another.after,
            ):
                return False
            if abs(one.traffic - another.traffic) > _NEGLIGIBLE * one.peak:
                return False
        return True

    def with_flipped(self, places: Collection[Key], when: When | None = None) -> Scenario:
        """Return the scenario in which some decisions go the other way, or as usual where they did already.

        Args:
            places: some of `groups`, or single expressions.
            when: at which turns of a loop; as in this run where it is not given.
        """
        overrides = self.overrides
        for decision in self.decisions:
            key = decision.place, decision.kind
            if decision.place not in places and _flip_group(decision.place) not in places:
                continue
            if key in overrides:
                del overrides[key]
            elif decision.outcomes is None:
                overrides[key] = Number.FALLING
            else:
                overrides[key] = not decision.outcomes[1]
        return _with_overrides(self.scenario, overrides, when or self.scenario.when)

    def with_all_numbers(self, number: Number) -> Scenario:
        """Return the scenario in which all numbers are of one sort, if some may size something; else its own."""
        overrides = self.overrides
        numbers = [decision for decision in self.decisions if decision.kind is Kind.NUMBER]
        if all((decision.place, decision.kind) in overrides for decision in numbers):
            return self.scenario
        overrides.setdefault((EVERY, Kind.NUMBER), number)
        return _with_overrides(self.scenario, overrides, When.ALWAYS)


def _with_overrides(
    scenario: Scenario, overrides: Mapping[tuple[Key, Kind], int], when: When
) -> Scenario:
    """Return a scenario with other overrides, in an order by which equal scenarios are found equal."""
    ordered = [Override(*key, outcome) for key, outcome in overrides.items()]
    ordered.sort(key=str)
    return replace(scenario, overrides=tuple(ordered), when=when if overrides else When.ALWAYS)


class _Scenarios:
    """The scenarios of one cell.

    Args:
        request: that of the first run.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._runs: list[_Run] = []
        """What was run, the first run first, without what counts as endless."""
        self.count = 0
        """How many runs were asked for."""
        self.worked = 0.0
        """Seconds of a core that they have taken."""

    @property
    def usual(self) -> Scenario:
        """The scenario of the first run."""
        return self._request.scenario

    # ---- Runs

    def run_first(self) -> Outcome | Ended:
        """Return what comes of the first run; where it fails by a number that is none, of one with plain numbers."""
        reply = self._run_whole(self.usual)
        if isinstance(reply, Ended) or reply.failure is None:
            return reply
        if reply.failure.may_be_of_noted and reply.has_noted:
            self._request = replace(self._request, scenario=replace(self.usual, notes=False))
            return self._run_whole(self.usual)
        return reply

    def _ask(self, requests: Sequence[Request]) -> list[Outcome | Ended]:
        """Return the replies to requests; where one needs values to be followed, the reply to one that follows them."""
        replies = client.ask(requests)
        self.count += len(requests)
        self.worked += sum(reply.seconds for reply in replies)
        again = [number for number, reply in enumerate(replies) if _needs_values(reply)]
        again = [number for number in again if not requests[number].scenario.follows]
        if again:
            self._request = _following(self._request)
            followed = self._ask([_following(requests[number]) for number in again])
            for number, reply in zip(again, followed, strict=True):
                replies[number] = reply
        return replies

    def _run_whole(self, scenario: Scenario) -> Outcome | Ended:
        """Return what comes of a scenario; of a run on CUDA that is out of memory, with what it would need."""
        request = replace(self._request, scenario=scenario)
        (reply,) = self._ask([request])
        if isinstance(reply, Ended) or not reply.is_out_of_memory:
            return reply
        if request.devices.engine == targets.FAKE:  # which goes on where there is no more
            return reply
        scenario = replace(scenario, follows=self.usual.follows)
        unlimited = replace(request, scenario=scenario, devices=request.devices.unlimited())
        (whole,) = self._ask([unlimited])
        if isinstance(whole, Ended):
            return reply
        devices = [
            replace(device, failed=limited.failed, refused=limited.refused)
            for device, limited in zip(whole.devices, reply.devices, strict=True)
        ]
        return replace(whole, devices=tuple(devices))

    def _run(self, scenarios: Iterable[Scenario]) -> list[_Run]:
        """Run scenarios that were not run yet, as many as there may be, for their figures; return those runs."""
        known = [run.scenario for run in self._runs]
        new = [scenario for scenario in scenarios if scenario not in known]
        del new[_MOST_RUNS - len(known) :]
        limit = min(self._request.time_limit, 5 + 5 * self._runs[0].reply.seconds)
        brief = replace(self._request, is_brief=True, time_limit=limit)
        replies = self._ask([replace(brief, scenario=scenario) for scenario in new])
        runs = [_Run(scenario, reply) for scenario, reply in zip(new, replies, strict=True)]
        self._runs += runs
        return runs

    # ---- Which are run

    def explore(self, outcome: Outcome) -> Result:
        """Run further scenarios, and return what they come to.

        Args:
            outcome: that of the first run.
        """
        first = _Run(self.usual, outcome)
        self._runs = [first]
        # The more masks select, the more is needed, and in the first run they select everything.
        is_of_masks = {decision.kind for decision in first.decisions} == {Kind.SELECTION}
        is_loop = outcome.most_turns > 1 and not is_of_masks
        self._run_other_way(first, is_loop=is_loop)
        self._leave_out_endless()
        is_settled = self._agree()
        is_all = is_of_masks or (is_settled and len(self._groups()) == 1)
        if not is_all:
            is_all = self._search(is_loop=is_loop)
        # Each outcome of all was run.
        is_certain = is_all and (is_settled or not is_loop) and self._kinds() <= {Kind.TRUTH}
        return self._judge(outcome, is_all=is_all, is_certain=is_certain)

    def _run_other_way(self, first: _Run, *, is_loop: bool) -> None:
        """Run the scenario in which all decisions go the other way, and those in which all numbers are large."""
        when = When.ALWAYS
        if is_loop and any(
            map(_is_constant, first.decisions)
        ):  # else the first run had either outcome
            when = When.BUT_ONCE
        self._run([first.with_flipped(first.groups, when), first.with_all_numbers(Number.LARGE)])
        latest = self._runs[1:2]
        while latest and not self._conclusive():
            # Of the checks that a library makes, each comes only where those before it hold.
            (last,) = latest
            new = [
                place for place, kind, _ in last.decisions if (place, kind) not in last.overrides
            ]
            latest = self._run([last.with_flipped(new, When.ALWAYS)]) if new else []
        for flipped in self._runs[1:2]:  # numbers that only the other outcome comes to
            self._run([flipped.with_all_numbers(Number.LARGE)])
        if any(run.is_beyond_list for run in self._runs):
            self._run([first.with_all_numbers(Number.LAST)])

    def _leave_out_endless(self) -> None:
        """Leave out endless loops, such as drawing until all is in bounds, where a few turns need as much as many."""
        endless = [run for run in self._runs[1:] if run.fits is None and run.peak]
        if not endless:
            return
        for few in self._run([self._runs[0].with_flipped(self._groups(), When.A_FEW)]):
            if few.is_conclusive and few.fits is not None:
                flat = [run for run in endless if run.peak <= few.peak * (1 + _ALIKE)]
                self._runs = [run for run in self._runs if run not in flat]

    def _search(self, *, is_loop: bool) -> bool:
        """Run mixtures of outcomes, from the run that needs most on; return whether every one was run."""
        first, groups, is_settled = self._runs[0], self._groups(), self._agree()
        if groups == {_LIBRARIES}:  # whose mixtures are not run
            if not is_settled:
                self._run([first.with_flipped(_one_way(self._runs), When.ALWAYS)])
            return False
        if is_settled and (is_loop or len(groups) > _MOST_GROUPS):
            return False
        if is_loop:
            self._run([first.with_flipped(first.groups, when) for when in (When.ALWAYS, When.ONCE)])
        mixed: list[_Run] = []
        while len(mixed) < len(self._runs):
            if self._is_searched_enough(is_loop=is_loop):
                return False
            rest = [run for run in self._runs if run not in mixed]
            best = max(rest, key=lambda run: (run.fits is False, run.peak))
            mixed.append(best)
            self._run_mixtures(best)
        return True

    def _is_searched_enough(self, *, is_loop: bool) -> bool:
        """Return whether no further mixtures are worth their time."""
        is_alike = self._peaks_agree()
        if is_alike and is_loop and not _one_way(self._runs):
            return True  # of a loop's turns not all mixtures can be run
        if {True, False} <= {run.fits for run in self._conclusive()}:
            return True
        most, patience = (_FEW_RUNS, _BRIEFLY) if is_alike else (_MOST_RUNS, _PATIENCE)
        return len(self._runs) >= most or sum(run.reply.seconds for run in self._runs) > patience

    def _run_mixtures(self, base: _Run) -> None:
        """Flip each group of a run alone, and then those together by which more was needed."""
        flipped = {group: base.with_flipped([group]) for group in base.groups}
        self._run(flipped.values())
        grown = [run.scenario for run in self._runs if run.peak > base.peak]
        more = [group for group, scenario in flipped.items() if scenario in grown]
        if len(more) > 1:
            self._run([base.with_flipped(more)])

    # ---- What they have in common

    def _conclusive(self) -> list[_Run]:
        return [run for run in self._runs if run.is_conclusive]

    def _places(self) -> list[Key]:
        return _sorted({decision.place for run in self._runs for decision in run.decisions})

    def _groups(self) -> set[Key]:
        return {_flip_group(place) for place in self._places()}

    def _kinds(self) -> set[Kind]:
        return {decision.kind for run in self._runs for decision in run.decisions}

    def _agree(self) -> bool:
        """Return whether what was run tells that the values do not matter."""
        conclusive = self._conclusive()
        if not self._peaks_agree() or _one_way(conclusive):
            return False
        if len(self._places()) == 1:
            return True
        if len(conclusive) == 1 or len(conclusive) < len(self._runs):
            return False
        return all(run.did_the_same(conclusive[0]) for run in conclusive)

    def _peaks_agree(self) -> bool:
        """Return whether the runs that tell anything need about the same."""
        conclusive = self._conclusive()
        verdicts = {run.fits for run in conclusive}
        if len(verdicts) != 1 or None in verdicts:
            return False
        peaks = [run.peak for run in conclusive]
        return max(peaks) <= min(peaks) * (1 + _ALIKE)

    def _grows(self, conclusive: list[_Run]) -> bool:
        """Return whether the larger a number is that is read, the more is needed: it sizes something."""
        others = [run.peak for run in conclusive if not _has_large(run)]
        large = [run for run in conclusive if _has_large(run) and run.fits]
        if not others or not large:
            return False
        most = max(large, key=lambda run: run.peak)
        if most.peak <= max(others) * (1 + _ALIKE):
            return False
        overrides = most.overrides
        for key, outcome in overrides.items():
            if outcome == Number.LARGE:
                overrides[key] = Number.LARGER
        scenario = _with_overrides(most.scenario, overrides, most.scenario.when)
        (reply,) = self._ask([replace(self._request, scenario=scenario, is_brief=True)])
        larger = _Run(scenario, reply)
        return not larger.is_conclusive or not larger.fits or larger.peak > most.peak * (1 + _ALIKE)

    def _has_room(self, conclusive: list[_Run]) -> bool:
        """Return whether mixtures that were not run would fit, too, if they needed more by what the others differ."""
        outcomes = [run.reply for run in conclusive if run.fits and isinstance(run.reply, Outcome)]
        for device, capacity in enumerate(self._request.devices.capacities):
            peaks = [outcome.devices[device].peak for outcome in outcomes]
            if capacity is not None and peaks and 2 * max(peaks) - min(peaks) > capacity:
                return False
        return True

    # ---- What they come to

    def _judge(self, outcome: Outcome, *, is_all: bool, is_certain: bool) -> Result:
        """Return the outcome that counts, with what depends on the values.

        Args:
            outcome: that of the first run.
            is_all: whether every mixture was run.
            is_certain: whether what was run holds with any values.
        """
        conclusive = self._conclusive()
        if not conclusive:
            return Result(reply=outcome, failure_depends_on=self._failure_depends_on())
        grows = self._grows(conclusive)
        counted = conclusive
        if grows:
            counted = [run for run in conclusive if not _has_large(run)] or conclusive
        if all(run.fits is None for run in counted):
            return Result(reply=outcome)
        first = self._runs[0]
        most = max(
            counted,
            key=lambda run: (run.fits is not None, run.fits is False, run.peak, run is first),
        )
        if most is not first and (most.fits is not False or first.fits is not False):
            outcome = self._whole_of(most)
        peaks = [run.peak for run in conclusive if run.fits]
        varies = bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)
        is_bounded = not grows and (is_all or self._has_room(conclusive))
        if varies and HOST in self._places():
            is_bounded = False  # of a branch one side or the other is run; a mask may select anything between
        if not is_bounded or len({run.fits for run in conclusive}) > 1:
            return self._open(outcome, conclusive, is_bounded=is_bounded)
        if varies:
            less = f"with other values in place of those that are read it needs as little as {size(min(peaks))}"
            outcome = replace(outcome, assumed=(*outcome.assumed, less))
        return Result(reply=outcome, scenario=most.scenario, varies=varies or not is_certain)

    def _failure_depends_on(self) -> str | None:
        """Return on what it depends how the cell fails; None where it always does so alike, and so for certain."""
        failures = [run.reply.failure for run in self._runs if isinstance(run.reply, Outcome)]
        ends = {(failure.line, failure.kind) for failure in failures if failure is not None}
        if len(ends) == 1 and not _one_way(self._runs):
            return None
        return _named(self._places()) or _HOST_CONTENTS

    def _whole_of(self, run: _Run) -> Outcome:
        """Return the outcome of a run with its history by line, which was made for its figures alone."""
        whole = self._run_whole(run.scenario)
        if isinstance(whole, Ended):
            assert isinstance(run.reply, Outcome), "a run without figures needs nothing"
            return run.reply
        return whole

    def _open(self, outcome: Outcome, conclusive: list[_Run], *, is_bounded: bool) -> Result:
        """Return an outcome whose verdict is open, with the expressions on which it depends."""
        base = next(run for run in conclusive if run.fits is not None)
        other = next((run for run in conclusive if run.fits is not base.fits), base)
        has_ended = other.fits is not None
        if has_ended and not is_bounded:
            base = min(conclusive, key=lambda run: run.peak)
            other = max(conclusive, key=lambda run: run.peak)
        keys = _sorted({decision.place for decision in (*base.decisions, *other.decisions)})
        outcome = replace(
            outcome,
            devices=tuple([replace(device, failed=False) for device in outcome.devices]),
            unknown=(_dependence(base, other, keys), *outcome.unknown),
            is_cut_short=not has_ended,
        )
        open_on = dict.fromkeys((key.line, key.code) for key in keys if key != HOST)
        return Result(reply=outcome, varies=True, depends=True, open_on=tuple(open_on))


def _flip_group(place: Key) -> Key:
    """Return the group whose outcomes are flipped together: the expression itself, if it is the notebook's own."""
    return _LIBRARIES if place.library else place


def _is_constant(decision: Decision) -> bool:
    """Return whether a decision had the same outcome each time."""
    return decision.outcomes is None or decision.outcomes[0] == decision.outcomes[1]


def _has_large(run: _Run) -> bool:
    return Number.LARGE in run.overrides.values()


def _needs_values(reply: Outcome | Ended) -> bool:
    return isinstance(reply, Ended) and reply.reason is Ending.NEEDS_VALUES


def _following(request: Request) -> Request:
    """Return a request with the values of the device followed."""
    return replace(request, scenario=replace(request.scenario, follows=True))


def _one_way(runs: Iterable[_Run]) -> list[Key]:
    """Return the expressions that decided and always went one way, those included that only some runs came to."""
    seen: dict[Key, set[bool]] = {}
    for run in runs:
        overrides = run.overrides
        for place, kind, outcomes in run.decisions:
            if outcomes is None:
                is_other = (place, kind) in overrides or (EVERY, Kind.NUMBER) in overrides
                seen.setdefault(place, set()).add(is_other)
            else:
                seen.setdefault(place, set()).update(outcomes)
    return _sorted(place for place, outcomes in seen.items() if len(outcomes) < 2)


def _dependence(base: _Run, other: _Run, keys: list[Key]) -> str:
    """Return what the verdict depends on where two runs differ that read some expressions."""
    what, why = "depends on", f"it needs {size(base.peak)} or {size(other.peak)}"
    if other.fits is None:
        ended = other.reply.sentence if isinstance(other.reply, Ended) else ""
        what, why = "may depend on", f"with others {ended or 'the dry run did not come to its end'}"
    elif other.fits is not base.fits:
        why = "with some it fits, with others not"
    read = []
    if any(key != HOST for key in keys):
        read.append("values on the device")
    if HOST in keys:
        read.append(_HOST_CONTENTS)
    named = _named(keys)
    where = f", read in {named}" if named else ""
    return f"what the cell needs {what} {' and '.join(read)}{where}: {why}"


def _sorted(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key.line or 0, key.code, key.library))


def _named(keys: Iterable[Key]) -> str:
    """Return the expressions with their lines, each once, in a sentence."""
    named: dict[str, None] = {}
    for key in keys:
        if key.code:
            named.setdefault(f"line {key.line} (`{key.code}`)" if key.line else key.code)
    return ", ".join(named)

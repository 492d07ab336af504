"""Runs of a cell in scenarios of the values that no dry run knows, and what several of them have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumagic.dryrun import client, targets
from gpumagic.dryrun.wire import (
    EVERY,
    Decision,
    DeviceOutcome,
    Ended,
    Ending,
    Failure,
    Key,
    Kind,
    Number,
    Outcome,
    Override,
    Request,
    Scenario,
    When,
)

ALIKE = 1.01
"""The factor up to which peaks count as the same."""
_NEGLIGIBLE = 0.001
"""The share of its peak by which what two runs allocate in all may differ: the way by which a trainer sums its loss."""
LIBRARIES = Key(None, "libraries")
"""Stands for all that libraries decide, which is flipped together in mixtures."""


@dataclass(frozen=True, eq=False)
class Run:
    """A scenario that was run, and what came of it."""

    scenario: Scenario
    reply: Outcome | Ended

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was decided in it by values that are not known."""
        return () if isinstance(self.reply, Ended) else self.reply.decisions

    @property
    def devices(self) -> tuple[DeviceOutcome, ...]:
        """What it took of each device; nothing where it has no figures."""
        return () if isinstance(self.reply, Ended) else self.reply.devices

    @property
    def failure(self) -> Failure | None:
        """How the cell failed in it."""
        return None if isinstance(self.reply, Ended) else self.reply.failure

    @property
    def groups(self) -> list[Key]:
        """What is flipped together in mixtures: each of the notebook's own expressions, and all of libraries."""
        groups = [flip_group(decision.place) for decision in self.decisions]
        return list(dict.fromkeys(groups))

    @property
    def is_conclusive(self) -> bool:
        """Whether it tells anything: a failure is what the made-up values caused."""
        return self.failure is None

    @property
    def fits(self) -> bool | None:
        """Whether it was seen to fit; None if it was not seen to its end."""
        if isinstance(self.reply, Ended) or self.reply.is_cut_short:
            return None
        return not self.reply.is_out_of_memory

    @property
    def peak(self) -> int:
        """The highest of its devices' peaks."""
        return max((device.peak for device in self.devices), default=0)

    @property
    def is_beyond_list(self) -> bool:
        """Whether a number was too large an index."""
        return self.failure is not None and self.failure.is_beyond_list

    @property
    def overrides(self) -> dict[tuple[Key, Kind], int]:
        """What goes another way in it than usual."""
        overrides = {}
        for place, kind, outcome in self.scenario.overrides:
            overrides[place, kind] = outcome
        return overrides

    @property
    def has_large(self) -> bool:
        """Whether a number is large in it."""
        return Number.LARGE in self.overrides.values()

    def did_the_same(self, other: Run) -> bool:
        """Return whether its memory went as in another run: all that is counted of it is the same, or nearly."""
        if isinstance(self.reply, Ended) or isinstance(other.reply, Ended):
            return True
        for one, another in zip(self.devices, other.devices, strict=True):
            if one.peak != another.peak or one.reserved != another.reserved:
                return False
            if one.after != another.after:
                return False
            if abs(one.traffic - another.traffic) > _NEGLIGIBLE * one.peak:
                return False
        return True

    # ---- Scenarios that are made of its decisions

    def with_flipped(
        self, places: Collection[Key], when: When | None = None
    ) -> Scenario:
        """Return the scenario in which some decisions go the other way, or as usual where they did already.

        Args:
            places: some of `groups`, or single expressions.
            when: at which turns of a loop; as in this run where it is not given.
        """
        overrides = self.overrides
        for place, kind, outcomes in self.decisions:
            if place not in places and flip_group(place) not in places:
                continue
            if (place, kind) in overrides:
                del overrides[place, kind]
            elif outcomes is None:
                overrides[place, kind] = Number.FALLING
            else:
                _, last = outcomes
                overrides[place, kind] = not last
        return with_overrides(self.scenario, overrides, when or self.scenario.when)

    def with_all_numbers(self, number: Number) -> Scenario:
        """Return the scenario in which all numbers are of one sort, if some may size something; else its own."""
        overrides = self.overrides
        is_any_open = False
        for place, kind, _ in self.decisions:
            if kind is Kind.NUMBER and (place, kind) not in overrides:
                is_any_open = True
        if not is_any_open:
            return self.scenario
        overrides.setdefault((EVERY, Kind.NUMBER), number)
        return with_overrides(self.scenario, overrides, When.ALWAYS)

    def with_larger(self) -> Scenario:
        """Return its scenario with larger numbers in place of large ones."""
        overrides = self.overrides
        for key, outcome in self.overrides.items():
            if outcome == Number.LARGE:
                overrides[key] = Number.LARGER
        return with_overrides(self.scenario, overrides, self.scenario.when)


def with_overrides(
    scenario: Scenario, overrides: Mapping[tuple[Key, Kind], int], when: When
) -> Scenario:
    """Return a scenario with other overrides, in an order by which equal scenarios are found equal."""
    ordered = []
    for (place, kind), outcome in overrides.items():
        ordered.append(Override(place, kind, outcome))
    ordered.sort(key=str)
    if not ordered:
        when = When.ALWAYS
    return replace(scenario, overrides=tuple(ordered), when=when)


def flip_group(place: Key) -> Key:
    """Return the group whose outcomes are flipped together: the expression itself, if it is the notebook's own."""
    return LIBRARIES if place.library else place


def one_way(runs: Iterable[Run]) -> list[Key]:
    """Return the expressions that decided and always went one way, those included that only some runs came to."""
    seen: dict[Key, set[bool]] = {}
    for run in runs:
        overrides = run.overrides
        are_numbers_other = (EVERY, Kind.NUMBER) in overrides
        for place, kind, outcomes in run.decisions:
            went = seen.setdefault(place, set())
            if outcomes is None:
                went.add(are_numbers_other or (place, kind) in overrides)
            else:
                went.update(outcomes)
    return in_order(place for place, went in seen.items() if len(went) == 1)


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Return expressions by their lines."""
    return sorted(keys, key=lambda key: (key.line or 0, key.code, key.library))


# ---- Several of them


class Runs:
    """The runs of one cell, the first run first."""

    def __init__(self, first: Run) -> None:
        self.all = [first]

    @property
    def first(self) -> Run:
        """The run in the usual scenario."""
        return self.all[0]

    @property
    def flipped(self) -> Run | None:
        """The run in which everything goes the other way, if there is one yet."""
        return self.all[1] if len(self.all) > 1 else None

    @property
    def conclusive(self) -> list[Run]:
        """Those that tell anything."""
        return [run for run in self.all if run.is_conclusive]

    @property
    def seconds(self) -> float:
        """Seconds of a core that they have taken."""
        return sum(run.reply.seconds for run in self.all)

    @property
    def places(self) -> list[Key]:
        """The expressions that decide in any of them."""
        places: set[Key] = set()
        for run in self.all:
            places.update(decision.place for decision in run.decisions)
        return in_order(places)

    @property
    def groups(self) -> set[Key]:
        """The groups of these expressions: see `flip_group`."""
        return {flip_group(place) for place in self.places}

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of what decides in any of them."""
        kinds: set[Kind] = set()
        for run in self.all:
            kinds.update(decision.kind for decision in run.decisions)
        return kinds

    @property
    def verdicts(self) -> set[bool | None]:
        """What those that tell anything say of whether the cell fits."""
        return {run.fits for run in self.conclusive}

    def agree(self) -> bool:
        """Return whether they tell that the values do not matter."""
        conclusive = self.conclusive
        if not self.peaks_agree() or one_way(conclusive):
            return False
        if len(self.places) == 1:
            return True
        if len(conclusive) == 1 or len(conclusive) < len(self.all):
            return False
        return all(run.did_the_same(conclusive[0]) for run in conclusive)

    def peaks_agree(self) -> bool:
        """Return whether those that tell anything need about the same."""
        verdicts = self.verdicts
        if len(verdicts) != 1 or None in verdicts:
            return False
        peaks = [run.peak for run in self.conclusive]
        return max(peaks) <= min(peaks) * ALIKE


class Asking:
    """Asks the worker for runs of one cell.

    Args:
        request: that of the first run.

    Attributes:
        count: how many runs were asked for.
        worked: seconds of a core that they have taken.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0
        self.worked = 0.0

    @property
    def usual(self) -> Scenario:
        """The scenario of the first run."""
        return self.request.scenario

    def run_first(self) -> Outcome | Ended:
        """Return what comes of the first run; where it fails by a number that is none, of one with plain numbers."""
        reply = self.run_whole(self.usual)
        if isinstance(reply, Ended) or reply.failure is None:
            return reply
        if reply.failure.may_be_of_noted and reply.has_noted:
            self.request = replace(
                self.request, scenario=replace(self.usual, notes=False)
            )
            return self.run_whole(self.usual)
        return reply

    def run_whole(self, scenario: Scenario) -> Outcome | Ended:
        """Return what comes of a scenario; of a run on CUDA that is out of memory, with what it would need."""
        request = replace(self.request, scenario=scenario)
        (reply,) = self._ask([request])
        if isinstance(reply, Ended) or not reply.is_out_of_memory:
            return reply
        if (
            request.devices.engine == targets.FAKE
        ):  # which goes on where there is no more
            return reply
        scenario = replace(scenario, follows=self.usual.follows)
        request = replace(
            request, scenario=scenario, devices=request.devices.unlimited()
        )
        (whole,) = self._ask([request])
        if isinstance(whole, Ended):
            return reply
        devices = [
            replace(device, failed=limited.failed, refused=limited.refused)
            for device, limited in zip(whole.devices, reply.devices, strict=True)
        ]
        return replace(whole, devices=tuple(devices))

    def run_brief(
        self, scenarios: Sequence[Scenario], time_limit: float | None = None
    ) -> list[Run]:
        """Return runs of some scenarios for their figures alone, side by side where there are cores."""
        brief = replace(
            self.request,
            is_brief=True,
            time_limit=time_limit or self.request.time_limit,
        )
        replies = self._ask(
            [replace(brief, scenario=scenario) for scenario in scenarios]
        )
        return [Run(*pair) for pair in zip(scenarios, replies, strict=True)]

    def _ask(self, requests: Sequence[Request]) -> list[Outcome | Ended]:
        """Return the replies to requests; where one needs values to be followed, the reply to one that follows them."""
        replies = client.ask(requests)
        self.count += len(requests)
        self.worked += sum(reply.seconds for reply in replies)
        again = []
        for number, reply in enumerate(replies):
            if _needs_values(reply) and not requests[number].scenario.follows:
                again.append(number)
        if again:
            self.request = _following(self.request)
            followed = self._ask([_following(requests[number]) for number in again])
            for number, reply in zip(again, followed, strict=True):
                replies[number] = reply
        return replies


def _needs_values(reply: Outcome | Ended) -> bool:
    return isinstance(reply, Ended) and reply.reason is Ending.NEEDS_VALUES


def _following(request: Request) -> Request:
    """Return a request with the values of the device followed."""
    return replace(request, scenario=replace(request.scenario, follows=True))

"""What the runs of one dry run come to: which of them counts, and whether the verdict depends on values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpumagic.dryrun.scenarios import ALIKE, Asking, Run, Runs, in_order, one_way
from gpumagic.dryrun.wire import HOST, Ended, Key, Outcome, Request, Scenario
from gpumagic.report.units import size

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


def judge(
    asking: Asking, runs: Runs, outcome: Outcome, *, is_all: bool, is_certain: bool
) -> Result:
    """Return the outcome that counts, with what depends on the values.

    Args:
        asking: makes further runs.
        runs: those that were made.
        outcome: that of the first run.
        is_all: whether every mixture was run.
        is_certain: whether what was run holds with any values.
    """
    conclusive = runs.conclusive
    if not conclusive:
        return Result(reply=outcome, failure_depends_on=_failure_depends_on(runs))
    grows = _grows(asking, conclusive)
    counted = conclusive
    if grows:
        counted = [run for run in conclusive if not run.has_large] or conclusive
    if all(run.fits is None for run in counted):
        return Result(reply=outcome)
    first = runs.first
    most = _fullest(counted, first)
    both_fail = most.fits is False and first.fits is False
    if most is not first and not both_fail:
        outcome = _whole_of(asking, most)
    fitting = [run for run in conclusive if run.fits]
    least = min((run.peak for run in fitting), default=0)
    varies = any(run.peak > least * ALIKE for run in fitting)
    is_bounded = not grows and (is_all or _has_room(asking.request, fitting))
    if varies and HOST in runs.places:
        # Of a branch one side or the other is run; what the host holds may select anything between.
        is_bounded = False
    if not is_bounded or len(runs.verdicts) > 1:
        return _open(outcome, conclusive, is_bounded=is_bounded)
    if varies:
        less = f"with other values in place of those that are read it needs as little as {size(least)}"
        outcome = replace(outcome, assumed=(*outcome.assumed, less))
    return Result(
        reply=outcome, scenario=most.scenario, varies=varies or not is_certain
    )


def _fullest(runs: list[Run], first: Run) -> Run:
    """Return the run that needs most, one that does not fit before others, the first one of those that are alike."""
    orders = {None: 0, True: 1, False: 2}
    return max(runs, key=lambda run: (orders[run.fits], run.peak, run is first))


def _failure_depends_on(runs: Runs) -> str | None:
    """Return on what it depends how the cell fails; None where it always does so alike, and so for certain."""
    ends = set()
    for run in runs.all:
        failure = run.failure
        if failure is not None:
            ends.add((failure.line, failure.kind))
    if len(ends) == 1 and not one_way(runs.all):
        return None
    return _named(runs.places) or _HOST_CONTENTS


def _whole_of(asking: Asking, run: Run) -> Outcome:
    """Return the outcome of a run with its history by line, which was made for its figures alone."""
    whole = asking.run_whole(run.scenario)
    if isinstance(whole, Ended):
        assert isinstance(run.reply, Outcome), "a run without figures needs nothing"
        return run.reply
    return whole


def _grows(asking: Asking, conclusive: list[Run]) -> bool:
    """Return whether the larger a number is that is read, the more is needed: it sizes something."""
    others = [run for run in conclusive if not run.has_large]
    large = [run for run in conclusive if run.has_large and run.fits]
    if not others or not large:
        return False
    most = max(large, key=_peak)
    if most.peak <= max(others, key=_peak).peak * ALIKE:
        return False
    (larger,) = asking.run_brief([most.with_larger()])
    is_seen = larger.is_conclusive and larger.fits
    return not is_seen or larger.peak > most.peak * ALIKE


def _peak(run: Run) -> int:
    return run.peak


def _has_room(request: Request, fitting: list[Run]) -> bool:
    """Return whether mixtures that were not run would fit, too, if they needed more by what those differ that fit."""
    if not fitting:
        return True
    for device, capacity in enumerate(request.devices.capacities):
        peaks = [run.devices[device].peak for run in fitting]
        most = max(peaks)
        difference = most - min(peaks)
        if capacity is not None and most + difference > capacity:
            return False
    return True


def _open(outcome: Outcome, conclusive: list[Run], *, is_bounded: bool) -> Result:
    """Return an outcome whose verdict is open, with the expressions on which it depends."""
    base, other = _that_differ(conclusive)
    has_ended = other.fits is not None
    if has_ended and not is_bounded:
        base = min(conclusive, key=_peak)
        other = max(conclusive, key=_peak)
    decisions = (*base.decisions, *other.decisions)
    keys = in_order({decision.place for decision in decisions})
    devices = [replace(device, failed=False) for device in outcome.devices]
    outcome = replace(
        outcome,
        devices=tuple(devices),
        unknown=(_dependence(base, other, keys), *outcome.unknown),
        is_cut_short=not has_ended,
    )
    open_on: dict[tuple[int | None, str], None] = {}
    for key in keys:
        if key != HOST:
            open_on[key.line, key.code] = None
    return Result(reply=outcome, varies=True, depends=True, open_on=tuple(open_on))


def _that_differ(conclusive: list[Run]) -> tuple[Run, Run]:
    """Return the first run that was seen to its end, and the first with another verdict; twice that one if none has."""
    base = next(run for run in conclusive if run.fits is not None)
    for run in conclusive:
        if run.fits is not base.fits:
            return base, run
    return base, base


def _dependence(base: Run, other: Run, keys: list[Key]) -> str:
    """Return what the verdict depends on where two runs differ that read some expressions."""
    what = "may depend on" if other.fits is None else "depends on"
    if isinstance(other.reply, Ended) and other.reply.sentence:
        why = f"with others {other.reply.sentence}"
    elif other.fits is None:
        why = "with others the dry run did not come to its end"
    elif other.fits is not base.fits:
        why = "with some it fits, with others not"
    else:
        why = f"it needs {size(base.peak)} or {size(other.peak)}"
    read = []
    if any(key != HOST for key in keys):
        read.append("values on the device")
    if HOST in keys:
        read.append(_HOST_CONTENTS)
    values = " and ".join(read)
    named = _named(keys)
    if named:
        values += f", read in {named}"
    return f"what the cell needs {what} {values}: {why}"


def _named(keys: Iterable[Key]) -> str:
    """Return the expressions with their lines, each once, in a sentence."""
    named: dict[str, None] = {}
    for line, code, _ in keys:
        if code and line:
            named[f"line {line} (`{code}`)"] = None
        elif code:
            named[code] = None
    return ", ".join(named)

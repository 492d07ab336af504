"""The largest value with which a cell fits: a line through two dry runs, checked by a third.

What is allocated grows along a line, but what is reserved depends on how the blocks fall into segments. The same cell
asks for the same blocks in the same order whatever its batch, and each one's size is on a line through what it was in
the two dry runs. So the allocator alone is replayed with scaled sizes, which takes milliseconds. Its result is a guess
like any other: it is run before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun.report import DryRunReport, Fit
from gpumagic.dryrun.stage.arena import Arena, Block
from gpumagic.dryrun.stage.ledger import EMPTIES, STARTS, Account
from gpumagic.dryrun.targets import Target
from gpumagic.source import settings

if TYPE_CHECKING:
    from gpumagic.dryrun.script import Script
    from gpumagic.dryrun.targets import Target


Foresee = Callable[[int, int, int, int], "int | None"]
PRECISION = 0.015
"""How near the largest value is sought, as a share of it."""
MOST_RUNS = 12
_LARGEST = 1 << 40
_FAR = 16
_STARTS = (1, 16, 256)
"""Where the law is looked for, times the present value: with small ones the peak may lie where it has no part."""


def fit(
    what: str | Callable[[], object],
    name: str,
    namespace: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    capacity: int | str | None = None,
) -> Fit:
    """Return the largest whole number for a variable with which code would fit, without running it.

    Args:
        what: code as a notebook's cell has it, or a callable without arguments.
        name: a variable that is a whole number in the namespace, or that the code sets to one.
        namespace: the names that the code sees; the caller's globals by default.
        device: as for `gpumagic.dry_run`.
        capacity: as for `gpumagic.dry_run`.

    Raises:
        OptionError: neither the code nor the namespace has a whole number of that name.
    """
    import sys

    from gpumagic.dryrun import targets
    from gpumagic.dryrun.script import script_of
    from gpumagic.options import parse_size

    names = sys._getframe(1).f_globals if namespace is None else namespace
    script = script_of(what)
    size = parse_size(capacity) if isinstance(capacity, str) else capacity
    return of_script(script, name, names, targets.choose(device, size))


def of_script(
    script: Script, name: str, namespace: Mapping[str, Any], target: Target, tell: Callable[[str], object] = str
) -> Fit:
    """Return the largest value of a number that a cell writes, or that the notebook has, with which it fits.

    Args:
        script: the cell.
        name: the number's.
        namespace: the notebook's.
        target: the devices.
        tell: called with what is dry-run next.

    Raises:
        OptionError: there is no such number.
    """
    from gpumagic.dryrun import run

    names = dict(namespace)
    if script.source is None:
        knob = settings.find_in_arguments(name, names, "fit")
    else:
        knob = settings.find_in_cell(script.source, name, names, "--fit")

    recordings = Recordings()

    def dry_run(value: int) -> DryRunReport:
        tell(f"{name} = {value}")
        text, values = knob.with_value(value)
        changed = script if text is None else replace(script, source=text)
        return run.dry_run(changed, namespace, target, values=values, note=recordings.note(value, target))

    return search(dry_run, name, knob.value, recordings.largest)


def search(dry_run: Callable[[int], DryRunReport], name: str, now: int, foresee: Foresee = lambda *_: None) -> Fit:
    """Return the largest value that fits.

    Args:
        dry_run: dry-runs with a value.
        name: the variable.
        now: its value.
        foresee: guesses the largest value from two that were run, one that is too large, and how near to come.
    """
    tried: dict[int, DryRunReport] = {}

    def ask(value: int) -> DryRunReport:
        if value not in tried:
            tried[value] = dry_run(value)
        return tried[value]

    first, second, at, reason = _first_two(ask, now)
    base, each = _law(first, second, at)
    if reason or each <= 0:
        reason = reason or f"{name} changes nothing of the peak"
        return _fit(name, now, None, tried, base, each, reason)
    guess = int((_room(first) - base) / each)
    low, high = _bracket(tried)
    guess = foreseen = foresee(at, 2 * at, min(guess + 1, high or guess + 1), max(1, _margin(guess) // 4)) or guess
    while len(tried) < MOST_RUNS and (high is None or high - low > _margin(low)):
        guess = max(low + 1, min(guess, _LARGEST if high is None else high - 1))
        reason = _why_not(ask(guess))
        if reason:
            break
        if low and _is_flat(tried[low], tried[guess]) and _is_flat(tried[low], ask(_FAR * guess)):
            return _fit(name, now, guess, tried, base, each, f"beyond {low} it changes nothing of the peak")
        low, high = _bracket(tried)
        guess = low + _margin(low) if low == foreseen else _next(tried, low, high)
    largest = low or None
    return _fit(name, now, largest, tried, base, each, "" if largest else reason or "not even 1 fits")


def _first_two(ask: Callable[[int], DryRunReport], now: int) -> tuple[DryRunReport, DryRunReport, int, str]:
    """Return two dry runs that tell the law, the value of the first, half of the second's; and why they do not."""
    for start in _STARTS:
        at = start * now
        first = second = ask(at)
        reason = _why_not(first)
        if not reason:
            second = ask(2 * at)
            reason = _why_not(second)
        if reason or _law(first, second, at)[1] > 0:
            break
    return first, second, at, reason


def _is_flat(one: DryRunReport, other: DryRunReport) -> bool:
    """Return whether both fit, with the same peak: the value does not matter between them, or not yet."""
    return bool(one.fits and other.fits) and one.peak == other.peak


def _margin(value: int) -> int:
    return max(1, int(value * PRECISION))


def _next(tried: dict[int, DryRunReport], low: int, high: int | None) -> int:
    """Return what to try next: a step up from what fits, a longer one down each time from what does not.

    The law is of what is allocated. Segments are larger, and by how much is known only from a run of about that size.
    """
    if high is None:
        return low + _margin(low)
    failures = sum(not report.fits for report in tried.values())
    lower = high - _margin(high) * 2 ** (failures - 1)
    reserved = next(each.reserved for each in tried[high].devices if each.device == tried[high].device)
    scaled = int(high * _room(tried[high]) / reserved) if reserved else high
    guess = min(lower, scaled)
    return guess if low < guess else (low + high) // 2


def _bracket(tried: dict[int, DryRunReport]) -> tuple[int, int | None]:
    """Return the largest value that fits, 0 for none, and the smallest that does not."""
    fitting = [value for value, report in tried.items() if report.fits]
    failing = [value for value, report in tried.items() if not report.fits]
    return max(fitting, default=0), min(failing, default=None)


def _law(first: DryRunReport, second: DryRunReport, now: int) -> tuple[int, float]:
    device = first.device or ""
    one, two = first.peak.get(device, 0), second.peak.get(device, 0)
    each = (two - one) / now
    return int(one - each * now), each


def _room(report: DryRunReport) -> float:
    device = next(each for each in report.devices if each.device == report.device)
    return (report.capacity or 0) - device.extra[1]


def _why_not(report: DryRunReport) -> str:
    """Return why nothing can be learnt from a dry run, or nothing."""
    if report.error is not None:
        return report.error
    if report.capacity is None:
        return "the device's memory is not known; say what it has with --capacity"
    refused = any(each.failure_line is not None for each in report.devices)
    return next(iter(report.unknown), report.verdict) if report.fits is None and not refused else ""


def _fit(
    name: str, now: int, largest: int | None, tried: dict[int, DryRunReport], base: int, each: float, reason: str
) -> Fit:
    report = tried[largest] if largest else tried[now]
    return Fit(
        name=name, value=now, largest=largest, peak=report.peak.get(report.device or "") if largest else None,
        capacity=report.capacity, base=base, each=each,
        tried=tuple((value, max(each.peak.values(), default=0), each.fits) for value, each in sorted(tried.items())),
        reason=reason, assumed=report.assumed,
    )  # fmt: skip


STEP = 0.015
"""How far down each further guess is, as a share."""
MOST_STEPS = 100
Requests = list[tuple[int, ...]]
"""``(number, device, bytes, address)`` where a block is asked for, ``(number,)`` where it is given back; `STARTS`..."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the allocators were asked in one dry run."""

    target: Target
    room: list[int | None]
    """What each device's may reserve."""
    requests: Requests


class Recordings:
    """The dry runs of one cell with different values."""

    def __init__(self) -> None:
        self._known: dict[int, Recording] = {}

    def note(self, value: int, target: Target) -> Callable[[dict[str, Any]], object]:
        """Return what keeps the account of a dry run with a value."""

        def keep(told: dict[str, Any]) -> None:
            requests = [tuple(each) for each in told["requests"]]
            self._known[value] = Recording(target, told["room"], requests)

        return keep

    def largest(self, one: int, other: int, too_many: int, margin: int) -> int | None:
        """Return the largest value, to within a margin, with which no request would be refused; None if unknown.

        Args:
            one: a value that was run.
            other: another.
            too_many: a value that is taken not to.
            margin: how near.
        """
        first, second = self._known.get(one), self._known.get(other)
        if first is None or second is None or not _are_alike(first.requests, second.requests):
            return None

        def passes(value: int) -> bool:
            return _passes(second, _scaled(first.requests, second.requests, (value - one) / (other - one)))

        high, low = too_many, 0
        for value in _downwards(too_many):  # from above: blocks can fall so that more fits where less does not
            if passes(value):
                low = value
                break
            high = value
        while high - low > margin:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(middle) else (low, middle)
        return low


def _downwards(high: int) -> Iterator[int]:
    """Yield ever smaller values, down to about a fifth; below, the largest is sought by halves."""
    for _ in range(MOST_STEPS):
        high = min(high - 1, int(high * (1 - STEP)))
        if high > 0:
            yield high


def _are_alike(one: Requests, other: Requests) -> bool:
    return (
        bool(one)
        and len(one) == len(other)
        and all(mine[:2] == yours[:2] and len(mine) == len(yours) for mine, yours in zip(one, other, strict=True))
    )


def _scaled(one: Requests, other: Requests, share: float) -> Requests:
    return [
        mine if len(mine) == 1 else (*mine[:2], max(1, round(mine[2] + share * (yours[2] - mine[2]))), mine[3])
        for mine, yours in zip(one, other, strict=True)
    ]


def _passes(recording: Recording, requests: Requests) -> bool:
    """Return whether the allocators grant all of these requests, from where the real ones stand."""
    accounts = [Account(Arena(None, recording.target.cuts_to_size)) for _ in recording.room]
    for account, segments in zip(accounts, recording.target.segments, strict=True):
        account.lay_out(segments or ())
    taken: dict[int, tuple[Account, Block]] = {}
    for request in requests:
        if request == STARTS:
            for account, room in zip(accounts, recording.room, strict=True):
                account.arena.capacity = room
        elif request == EMPTIES:
            for account in accounts:
                account.arena.release_cached()
        elif len(request) == 1:
            account, block = taken.pop(request[0])
            account.arena.give_back(block)
        else:
            number, device, nbytes, address = request
            taken[number] = accounts[device], accounts[device].take(nbytes, address)
            if accounts[device].arena.failed:
                return False
    return True

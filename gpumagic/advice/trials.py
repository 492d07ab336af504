"""Tries advice: makes its edit in the cell's text, and runs the cell dry from where the release left the notebook."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumagic.advice.facts import Facts
from gpumagic.advice.records import Advice, EditTrial, Need
from gpumagic.advice.rules.proposal import Choice, cleared, passes
from gpumagic.dryrun import client, effects, fitting, run, targets
from gpumagic.dryrun.report import DeviceNeed, DryRunReport, peak_of, shortcoming
from gpumagic.dryrun.script import script_of
from gpumagic.errors import DryRunUnavailable, GpuMagicError
from gpumagic.notebook import interrupts
from gpumagic.options import Ranks
from gpumagic.source import frames
from gpumagic.source.text import apply_changes

FIRST = 30.0
"""Seconds that the first dry run may take, which may have to start the worker."""

SHARE, SHARE_OF_FITTING = 0.5, 0.75
"""The share of the time left that one search may take, and may take once it has found a number that fits."""

MOST_LOST = 3
"""How many times the seconds for advice may go by besides, while other processes have the cores."""

_FIXED = ("parameters", "gradients", "optimizer state")
"""Parts of a dry run's peak that no smaller batch makes smaller."""

DEAR = 2.0
"""Seconds of a dry run from which on few are made."""

_PLACE = re.compile(r"line \d+ \((`.*?`)\)")
_XDEL = re.compile(r"(?m)^%xdel (\w+)$")
_UNBIND = r"""_value = \1
for _names in (Out, globals()):
    for _name in [each for each in _names if _names[each] is _value]:
        del _names[_name]"""
"""What `%xdel` does of which a dry run can tell: it unbinds every name of a value, those of the output cache too."""
_IN_PIECES = "what is free lies in pieces that are too small"
_ONDEVICE = re.compile(r"\A%%ondevice (\w+)(:(\d+))?\n")


class Chosen(NamedTuple):
    """A suggestion with the number that was chosen for it, and what came of it."""

    advice: Advice
    trial: EditTrial
    is_finished: bool = False
    """Whether it is what the choice's `finish` made of it."""
    is_exhausted: bool = False
    """Whether the number helps nobody: not even the smallest fits, or only one that is too small."""


def start_worker(device: str) -> None:
    """Start the process that makes dry runs, which imports torch while a failure is looked into."""
    with contextlib.suppress(Exception):  # the first dry run says why not
        client.start(targets.with_engine(targets.choose(device, None, None, None)).engine)


class _CutShort(DryRunUnavailable):
    """Raised where a search has no time for its next dry run."""


class Trials:
    """The dry runs of one failed cell.

    Args:
        facts: of the failure.
        namespace: the notebook's variables.
        seconds: how long all of them after the first may take, where nothing else runs on this machine.
        elsewhere: the device that the run was sent to that failed.

    Attributes:
        reason: why nothing more is tried; empty while something can be.
        took: seconds of the latest dry run, counted likewise.
        exhausted: a sentence of each number of which not even 1 fits.
    """

    def __init__(
        self, facts: Facts, namespace: Mapping[str, object], seconds: float, elsewhere: str = ""
    ) -> None:
        self.reason = "" if seconds > 0 else "dry runs of advice are turned off"
        self.exhausted: list[str] = []
        self.took = 0.0
        self._facts, self._namespace, self._seconds, self._elsewhere = (
            facts,
            namespace,
            seconds,
            elsewhere,
        )
        self._device = facts.event.device or ""
        self._until: float | None = None
        self._lost = 0.0  # seconds that other processes took
        self._slowness = 1.0  # how many times as long the latest run took for them
        self._reports: dict[object, DryRunReport] = {}
        self._need: Need | None = None
        self._as_is: DryRunReport | None = None

    def need(self) -> Need | None:
        """Return what the cell needs as it is; None where a dry run does not tell, with `reason` set."""
        if self.reason:
            return None
        try:
            report = self._run(())
        except (
            Exception,
            KeyboardInterrupt,
        ) as error:  # the report matters more than what a dry run could add
            self.reason = self._why_not(error)
            return None
        self._as_is, found = report, self._of_device(report)
        told = next((each for each in report.effects if each.startswith(effects.OF_OTHERS)), None)
        if told is not None:  # by C code or a process of its own, which only the kernel sees
            self.reason = f"the cell {told} and is not run again unasked"
        if report.error is not None or found is None or found.capacity is None:
            self.reason = report.error or "the memory of the device is not known"
            return None
        held = self._facts.event.before.allocated if self._facts.event.before is not None else 0
        unused = max(0, held - sum(each.nbytes for each in self._facts.notebook.inputs_on_device))
        parts = report.breakdown if report.device == self._device else {}
        self._need = Need(
            found.peak,
            found.capacity,
            report.fits,
            report.certain,
            needed_alone=found.peak - min(found.before, unused),
            static=sum(parts.get(part, 0) for part in _FIXED),
            depends_on=" and ".join(f"line {line}" for line, _ in report.open_on),
            parts=parts,
        )
        return self._need

    def of(self, *edits: Advice) -> EditTrial:
        """Return what came of the cell with these edits made."""
        if self.reason:
            return self._untried()
        try:
            return self._trial(self._run(edits))
        except (Exception, KeyboardInterrupt) as error:  # edits that overlap, too
            why = self._why_not(error)
            return self._untried() if self.reason else EditTrial(reason=why)

    def choose(
        self,
        choice: Choice,
        *others: Advice,
        at: int | None = None,
        known: Callable[[Chosen], object] = lambda _: None,
    ) -> Chosen:
        """Return a suggestion with the largest number that was found to fit beside `others`, else with the smallest.

        Args:
            choice: the suggestion; what its `finish` makes of a number is tried before the number alone.
            others: what is followed besides.
            at: the number to begin with; by default one that fits if all memory goes with it.
            known: called with what `finish` makes of the first number that fits.
        """
        runs, cut = dict[int, DryRunReport](), ""
        if at is None:  # what fits if all memory goes with it
            room = self._need.available / self._need.needed if self._need is not None else 0
            at = max(1, min(choice.now - 1, int(room * choice.now)))
        is_finished = (
            self._as_is is not None and choice.finish is not None and choice.finish(at) is not None
        )
        first = 1 << (at.bit_length() - 1)
        if is_finished:
            cut = self._search(choice, others, runs, at, known)
            is_finished = any(report.fits for report in runs.values())
            first = (
                first if is_finished or any(report.error for report in runs.values()) else min(runs)
            )
        if not is_finished:
            runs.clear()
            cut = self._search(choice, others, runs, first)
        smaller = [value for value in runs if value < choice.now]
        is_none = not cut and 1 in runs and runs[1].fits is False
        if is_none and choice.is_setting:
            self.exhausted.append(f"No {choice.name} fits alone, not even 1.")
        if not smaller:
            return Chosen(choice.make(choice.guess), self._untried())
        came = {value: self._trial(runs[value]) for value in smaller}
        passed = [value for value in smaller if came[value].fits]
        # Where it is open whether any fits, the most extreme is no better than what a reader would take.
        is_open = [
            value for value, each in came.items() if each.fits is None and each.needs is not None
        ]
        within = [
            value for value in is_open if (came[value].needs or 0) <= (came[value].available or 0)
        ]
        usual = sorted(is_open, key=lambda value: abs(value - choice.guess))[:1]
        best = max(passed or within or usual or [min(smaller)])
        is_extreme = is_none or best < choice.least or (came[best].fits is False and not cut)
        advice = _made(choice, best, is_finished=is_finished)
        advice = replace(advice, evidence=advice.evidence + cut)
        return Chosen(advice, came[best], is_finished, is_exhausted=not passed and is_extreme)

    def _search(
        self,
        choice: Choice,
        others: Sequence[Advice],
        runs: dict[int, DryRunReport],
        first: int,
        known: Callable[[Chosen], object] | None = None,
    ) -> str:
        """Fill in dry runs until the largest number that fits is among them; return what cut it short, if anything.

        Smaller numbers than the `first` are tried until one fits; where none does nothing else is. With `known` the
        dry runs are of what the choice's `finish` makes of a number.
        """
        began, left, is_finished = self._now(), self._left_seconds(), known is not None
        runs |= (
            {} if self._as_is is None else {choice.now: self._as_is}
        )  # with others it does not fit either

        def dry_run(value: int) -> DryRunReport:
            """Dry-run with a value that a reader would take, which serves for all of those that come to the same."""
            number = (
                value if value == choice.now else _usual(choice, value, is_finished=is_finished)
            )
            if number not in runs:
                fits = any(report.fits for report in runs.values())
                until = began + (SHARE_OF_FITTING if fits or others else SHARE) * left
                if runs and self._now() >= until:
                    raise _CutShort
                advice = _made(choice, number, is_finished=is_finished)
                runs[number] = report = self._run((advice, *others), until if runs else None)
                if known is not None and not fits and report.fits and report.certain and not others:
                    known(Chosen(advice, self._trial(report), is_finished=True))
                if (
                    not fits
                    and number < choice.now in runs
                    and self._is_hopeless(runs, number, choice.now)
                ):
                    raise DryRunUnavailable(f"{choice.name} changes too little")
            return runs[number]

        try:
            report = dry_run(max(1, first))
            for step in range(3 if choice.is_setting and not is_finished else 1):
                if report.fits is False and report.error is None:
                    report = dry_run(self._below(runs) if step < 2 else 1)
            if report.error is None and (report.fits or (report.fits is None and not is_finished)):
                fitting.search(dry_run, choice.name, choice.now, known=runs)
        except (Exception, KeyboardInterrupt) as error:  # what was found by then counts
            self._why_not(error)
            is_cut_short = isinstance(error, _CutShort) or self.reason
            return (
                f"; the search was cut short, more may fit: {choice.goes_on}"
                if is_cut_short
                else ""
            )
        return ""

    def _below(self, runs: Mapping[int, DryRunReport]) -> int:
        """Return the number to try after some that do not fit: well below where a line through their peaks leads.

        It goes down in steps: a small number may take many times the passes, and what stands beside it shows before.
        """
        number, *larger = sorted(runs)
        peaks = [peak_of(runs[each]) for each in (number, *larger[:1])]
        slope = (peaks[-1] - peaks[0]) / (larger[0] - number) if larger else 0
        over = peaks[0] - (runs[number].capacity or 0)
        crossing = number - over / slope if slope > 0 else 0
        return max(1, min(number // 4, int(crossing * 3 / 4)) if crossing >= 1 else number // 8)

    def _run(self, edits: Sequence[Advice], until: float | None = None) -> DryRunReport:
        """Return the dry run of the cell with edits made; it is given up when the time is up, or before that `until`.

        Raises:
            GpuMagicError: it cannot be dry-run, or there is no time left.
            ValueError: the edits are not of this text, or overlap.
        """
        if self.reason or self._left_seconds() <= 0:
            raise DryRunUnavailable(self.reason or "there is no time")
        gpu = next((each.gpu for each in edits if each.gpu), None)
        number, names = (
            next((each.ranks for each in edits if each.ranks), None),
            dict(self._namespace),
        )
        ranks = None if number is None else Ranks(number, number)
        if ranks is not None:  # other processes, which have nothing of what the failed cell left
            names = {
                name: value
                for name, value in names.items()
                if name not in self._facts.notebook.left_by_failed_run
            }
        before, cell = self._code(edits)
        script, target = (
            script_of("\n".join([*before, cell])),
            targets.choose(self._device, None, gpu, ranks),
        )
        key = script.source, gpu, number
        if key not in self._reports:
            left = (
                self._left_seconds()
                if until is None
                else min(self._left_seconds(), until - self._now())
            )
            began = self._now()
            with interrupts.ending():
                report = run.dry_run(
                    script, names, target, time_limit=max(0.1, left * self._slowness)
                )
            self._reports[key] = _of_the_cell(report, len(before))
            if self._until is None:  # the worker's start does not count
                self._until = self._now() + self._seconds
            elif report.worked:
                self._slowness = min(1.0 + MOST_LOST, max(1.0, report.seconds / report.worked))
                lost = self._lost + max(0.0, report.seconds - report.worked)
                self._lost = min(lost, MOST_LOST * self._seconds)
            self.took = self._now() - began
        return self._reports[key]

    def _code(self, edits: Sequence[Advice]) -> tuple[list[str], str]:
        """Return the lines that are run first by a user who follows the advice, other cells included, and the cell."""
        changes = [change for each in edits for change in each.changes]
        cells = {each.cell for each in changes} - {""}
        others = [
            apply_changes(changes, text.source, text.cell)
            for text in self._facts.frames.texts
            if text.cell in cells
        ]
        said = "\n".join(dict.fromkeys(each.first for each in edits if each.first))
        is_here = not any(each.ranks for each in edits)
        first = _XDEL.sub(_UNBIND, cleared(said, self._facts) or "") if is_here else said
        magic = (
            f"%%ondevice {self._elsewhere}" if self._elsewhere else ""
        )  # in the place of %%oomguard
        cell = _ONDEVICE.sub(
            _on_device, magic + apply_changes(changes, self._facts.frames.source or "")
        )
        return [line for each in (*others, first) for line in each.splitlines()], cell

    def _trial(self, report: DryRunReport) -> EditTrial:
        found, deciding = self._of_device(report), report.device or self._device
        if report.error is not None:
            return EditTrial(reason=report.error, ending=report.ending)
        needed = self._need.needed if self._need is not None else None
        saves = None
        if found is not None and needed is not None and (report.fits or deciding == found.device):
            saves = max(0, needed - found.peak)
        fits, needs = report.fits, report.peak.get(deciding)
        if fits is None and not report.complete and not report.open_on:
            return EditTrial(reason=shortcoming(report))
        why = _PLACE.sub(
            r"\1", shortcoming(report)
        )  # its line is that of the edited text, which nobody sees
        reason = why if fits is None else "; ".join(report.assumed) if not report.certain else ""
        if fits is False and needs is not None and needs <= (report.capacity or 0):
            reason = _IN_PIECES
        return EditTrial(fits, report.certain, needs, report.capacity, saves, reason)

    def _is_hopeless(self, runs: Mapping[int, DryRunReport], number: int, now: int) -> bool:
        """Return whether a number saves so little that even none of it would leave half of what is missing.

        What a peak saves by the step becomes less, never more, where something else begins to need most.
        """
        peaks = {
            value: found.peak
            for value, each in runs.items()
            if (found := self._of_device(each)) is not None
        }
        missing = self._need.missing if self._need is not None else 0
        if runs[number].fits or number not in peaks or missing <= 0:
            return False
        if any(
            peak <= peaks[number] < peaks[now]
            for value, peak in peaks.items()
            if number < value < now
        ):
            return True  # something else needs most
        if peaks[number] > peaks[now] and 4 * number > now:
            return False  # parts, nearly all of it, beside what they are put together to
        return (peaks[now] - peaks[number]) * now / (now - number) < missing / 2

    def _of_device(self, report: DryRunReport) -> DeviceNeed | None:
        device = self._device if report.world is None else report.device
        return next((each for each in report.devices if each.device == device), None)

    def _untried(self) -> EditTrial:
        """Return why this was not tried; where nothing is, the report says it once."""
        return EditTrial(reason=self.reason if self._need is not None else "")

    def _now(self) -> float:
        """Return the time by a clock that stands still while other processes have the cores."""
        return time.monotonic() - self._lost

    def _left_seconds(self) -> float:
        return FIRST if self._until is None else self._until - self._now()

    def _why_not(self, error: BaseException) -> str:
        """Return why there is no dry run; none follows Ctrl-C, a fault of our own, or the end of the time."""
        if isinstance(error, KeyboardInterrupt):
            self.reason = "interrupted"
        elif not isinstance(
            error, (GpuMagicError, ValueError, SyntaxError)
        ):  # those are of an edit
            self.reason = frames.summary_line(error)
        elif self._left_seconds() <= 0:
            self.reason = f"there was no time: dry runs of advice may take {self._seconds:g} s"
        return self.reason or str(error)


def _usual(choice: Choice, value: int, *, is_finished: bool) -> int:
    """Return the number that a reader would take in the place of a value."""
    if is_finished:
        return choice.now // passes(choice.now, value)
    number = near_size(value) if choice.is_rounded else value
    return number if choice.is_setting else max(number, choice.least)


def _made(choice: Choice, number: int, *, is_finished: bool) -> Advice:
    finished = choice.finish(number) if is_finished and choice.finish is not None else None
    return finished or choice.make(number)


def _of_the_cell(report: DryRunReport, above: int) -> DryRunReport:
    """Return a dry run without what stood on a device only until the lines `above` the cell had released it.

    What these lines make themselves counts: whoever follows the advice needs that as well.
    """
    devices, breakdown = [], report.breakdown
    for each in report.devices:
        if above and each.peak == each.before:
            points = [point for point in report.timeline if point.device == each.device]
            later = list(itertools.dropwhile(lambda point: (point.line or 0) <= above, points))
            begins = points[len(points) - len(later) - 1].allocated
            rows = (
                row.peak for row in report.lines if row.device == each.device and row.line > above
            )
            each = each._replace(peak=max((begins, *rows, *(point.allocated for point in later))))  # noqa: PLW2901
            if each.device == report.device:
                breakdown = next(
                    (point.parts for point in later if point.allocated == each.peak), {}
                )
        devices.append(each)
    peaks = {each.device: each.peak for each in devices}
    return replace(report, devices=tuple(devices), peak=peaks, breakdown=breakdown)


def near_size(number: int) -> int:
    """Return a round number at most a hundredth below: what is known to fit needs no further caution."""
    multiple = 1 << number.bit_length()
    while number // multiple * multiple < 0.99 * number:
        multiple //= 2
    return number // multiple * multiple


def _on_device(found: re.Match[str]) -> str:
    """Return what `%%ondevice` comes to where nothing has to be watched."""
    backend, place = found[1], f"{found[1]}{found[2] or ''}"
    current = f"torch.cuda.set_device({found[3] or 0}); " if backend == "cuda" else ""
    return f"import torch; {current}torch.set_default_device({place!r})\n"

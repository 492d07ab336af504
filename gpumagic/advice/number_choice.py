"""The number in a suggestion: dry runs find the largest with which the cell fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumagic.advice.records import Advice, EditTrial
from gpumagic.advice.rules.proposal import Choice, passes
from gpumagic.advice.trials import Trials
from gpumagic.dryrun import fitting
from gpumagic.dryrun.number_search import PeakLine, next_lower
from gpumagic.dryrun.report import DryRunReport
from gpumagic.errors import DryRunUnavailable

SHARE, SHARE_OF_FITTING = 0.5, 0.75
"""The share of the time left that one search may take, and may take once it has found a number that fits."""


class Chosen(NamedTuple):
    """A suggestion with the number that was chosen for it, and what came of it."""

    advice: Advice
    trial: EditTrial
    is_finished: bool = False
    """Whether it is what the choice's `finish` made of it."""
    is_exhausted: bool = False
    """Whether the number helps nobody: not even the smallest fits, or only one that is too small."""


def choose_number(
    trials: Trials,
    choice: Choice,
    *others: Advice,
    at: int | None = None,
    known: Callable[[Chosen], object] | None = None,
) -> Chosen:
    """Return a suggestion with the largest number that was found to fit beside `others`, else with the smallest.

    Args:
        trials: make the dry runs.
        choice: the suggestion; what its `finish` makes of a number is tried before the number alone.
        others: what is followed besides.
        at: the number to begin with; by default one that fits if all memory goes with it.
        known: called with what `finish` makes of the first number that fits.
    """
    if trials.as_is is None or trials.cell_need is None or trials.stop is not None:
        return Chosen(choice.make(choice.guess), trials.untried())
    if at is None:
        room = trials.cell_need.available / trials.cell_need.needed
        at = max(1, min(choice.now - 1, int(room * choice.now)))
    first = 1 << (at.bit_length() - 1)
    if choice.finish is not None and choice.finish(at) is not None:
        finished = _NumberSearch(
            trials, choice, others, trials.as_is, finishes=True, known=known
        )
        finished.search(at)
        if finished.has_fitting:
            return finished.chosen()
        if not finished.has_error:
            first = min(finished.runs)
    plain = _NumberSearch(trials, choice, others, trials.as_is)
    plain.search(first)
    if plain.shows_that_none_fits and choice.is_setting:
        trials.exhausted.append(f"No {choice.name} fits alone, not even 1.")
    return plain.chosen()


class _CutShort(DryRunUnavailable):
    """Raised where a search has no time for its next dry run."""


class _NumberSearch:
    """The search for the largest number of a choice with which the cell fits.

    Args:
        trials: make the dry runs.
        choice: the suggestion with a number.
        others: what is followed besides.
        as_is: the dry run of the cell as it is, which stands for the number that it has now.
        finishes: whether the dry runs are of what the choice's `finish` makes of a number.
        known: called with the first suggestion that fits.

    Attributes:
        runs: the dry runs by their numbers.
        cut_short: the end of a sentence that says that more may fit, where the search was cut short; else empty.
    """

    def __init__(
        self,
        trials: Trials,
        choice: Choice,
        others: Sequence[Advice],
        as_is: DryRunReport,
        *,
        finishes: bool = False,
        known: Callable[[Chosen], object] | None = None,
    ) -> None:
        self.runs = {choice.now: as_is}  # with others it does not fit either
        self.cut_short = ""
        self._trials = trials
        self._choice = choice
        self._others = others
        self._finishes = finishes
        self._known = known
        self._began = trials.runs.now()
        self._seconds = trials.runs.seconds_left()

    @property
    def has_fitting(self) -> bool:
        """Whether the cell fits with one of the numbers."""
        return any(report.fits for report in self.runs.values())

    @property
    def has_error(self) -> bool:
        """Whether the cell fails otherwise with one of them."""
        return any(report.error for report in self.runs.values())

    @property
    def shows_that_none_fits(self) -> bool:
        """Whether the cell does not even fit with 1."""
        return not self.cut_short and 1 in self.runs and self.runs[1].fits is False

    def search(self, first: int) -> None:
        """Fill in dry runs until the largest number that fits is among them, or until something ends the search.

        Smaller numbers than the `first` are tried until one fits; where none does nothing else is.
        """
        trials = self._trials
        choice = self._choice
        if trials.stop is not None:
            self._note_cut()
            return
        steps_down = 3 if choice.is_setting and not self._finishes else 1
        try:
            report = self._run_with(max(1, first))
            for step in range(steps_down):
                if report.fits is False and report.error is None:
                    report = self._run_with(next_lower(self.runs) if step < 2 else 1)
            may_fit = report.fits or (report.fits is None and not self._finishes)
            if may_fit and report.error is None:
                fitting.search(self._run_with, choice.name, choice.now, known=self.runs)
        except (Exception, KeyboardInterrupt) as error:  # what was found by then counts
            trials.why_not(error)
            if isinstance(error, _CutShort) or trials.stop is not None:
                self._note_cut()

    def chosen(self) -> Chosen:
        """Return the suggestion with the best number that was run."""
        choice = self._choice
        trials: dict[int, EditTrial] = {}
        for number, report in self.runs.items():
            if number < choice.now:
                trials[number] = self._trials.trial_of(report)
        if not trials:
            return Chosen(choice.make(choice.guess), self._trials.untried())
        best = self._best(trials)
        trial = trials[best]
        fails = trial.fits is False and not self.cut_short
        is_extreme = fails or best < choice.least or self.shows_that_none_fits
        advice = self._advice(best)
        return Chosen(
            replace(advice, evidence=advice.evidence + self.cut_short),
            trial,
            self._finishes,
            is_exhausted=is_extreme and not trial.fits,
        )

    def _best(self, trials: Mapping[int, EditTrial]) -> int:
        """Return the largest number that fits; else of those of which it is open one that may; else the smallest."""
        fitting_numbers = [number for number, trial in trials.items() if trial.fits]
        if fitting_numbers:
            return max(fitting_numbers)
        may_fit = []
        is_open = []
        for number, trial in trials.items():
            if trial.fits is None and trial.needs is not None:
                is_open.append(number)
                if trial.needs <= (trial.available or 0):
                    may_fit.append(number)
        if may_fit:
            return max(may_fit)
        if is_open:
            # The most extreme is no better than what a reader would take.
            return min(is_open, key=lambda number: abs(number - self._choice.guess))
        return min(trials)

    def _run_with(self, value: int) -> DryRunReport:
        """Return the dry run with the number that a reader would take for a value; several values come to the same.

        Raises:
            DryRunUnavailable: there is no time, or the number saves too little for any to fit.
        """
        choice = self._choice
        number = value if value == choice.now else self._round_for_readers(value)
        if number in self.runs:
            return self.runs[number]
        had_fitting = self.has_fitting
        share = SHARE_OF_FITTING if had_fitting or self._others else SHARE
        until = self._began + share * self._seconds
        runs = self._trials.runs
        if runs.now() >= until:
            raise _CutShort
        advice = self._advice(number)
        report = runs.run((advice, *self._others), until)
        self.runs[number] = report
        if had_fitting:
            return report
        if (
            report.fits
            and report.certain
            and self._known is not None
            and not self._others
        ):
            self._known(Chosen(advice, self._trials.trial_of(report), is_finished=True))
        if number < choice.now and self._saves_too_little(number):
            raise DryRunUnavailable(f"{choice.name} changes too little")
        return report

    def _saves_too_little(self, number: int) -> bool:
        """Return whether a number saves so little that even none of it would leave half of what is missing.

        What a peak saves by the step becomes less, never more, where something else begins to need most.
        """
        need = self._trials.cell_need
        peaks = self._peaks()
        if (
            self.runs[number].fits
            or number not in peaks
            or need is None
            or not need.missing
        ):
            return False
        now = self._choice.now
        peak = peaks[number]
        peak_now = peaks[now]
        between = [peaks[value] for value in peaks if number < value < now]
        if peak < peak_now and between and min(between) <= peak:
            return True  # something else needs most
        if peak > peak_now and 4 * number > now:
            return (
                False  # parts, nearly all of it, beside what they are put together to
            )
        line = PeakLine.through((number, peak), (now, peak_now))
        return peak_now - line.peak_at(0) < need.missing / 2

    def _peaks(self) -> dict[int, int]:
        """Return the peaks on the device that failed, by number."""
        peaks: dict[int, int] = {}
        for number, report in self.runs.items():
            device = self._trials.failed_device(report)
            if device is not None:
                peaks[number] = device.peak
        return peaks

    def _round_for_readers(self, value: int) -> int:
        """Return the number that a reader would take in the place of a value."""
        choice = self._choice
        if self._finishes:
            return choice.now // passes(choice.now, value)
        number = near_size(value) if choice.is_rounded else value
        return number if choice.is_setting else max(number, choice.least)

    def _advice(self, number: int) -> Advice:
        finish = self._choice.finish
        finished = finish(number) if self._finishes and finish is not None else None
        return finished or self._choice.make(number)

    def _note_cut(self) -> None:
        goes_on = self._choice.goes_on
        self.cut_short = f"; the search was cut short, more may fit: {goes_on}"


def near_size(number: int) -> int:
    """Return a round number at most a hundredth below: what is known to fit needs no further caution."""
    multiple = 1 << number.bit_length()
    while number // multiple * multiple < 0.99 * number:
        multiple //= 2
    return number // multiple * multiple

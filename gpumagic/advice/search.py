"""What is advised after a failure: what the rules propose, tried by dry runs, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

from gpumagic.advice.facts import Facts
from gpumagic.advice.number_choice import Chosen, choose_number
from gpumagic.advice.records import FREE, ON_THE_CPU, Advice, EditTrial, Need
from gpumagic.advice.rules import (
    batch,
    collected,
    expressions,
    kept,
    limits,
    loops,
    parts,
    rows,
    training,
)
from gpumagic.advice.rules.proposal import Choice, cleared
from gpumagic.advice.sets import cheapest_set
from gpumagic.advice.suggestion import DRASTIC, MONEY, Suggestion
from gpumagic.advice.trials import Trials
from gpumagic.dryrun.wire import Ending
from gpumagic.report import progress
from gpumagic.source.text import Change

Proposal = Advice | Choice
Rule = Callable[[Facts], Iterable[Proposal]]

TIERS: tuple[tuple[Rule, ...], ...] = (
    # What nobody meant: to undo it costs nothing.
    (
        limits.size_bug,
        limits.squeeze,
        kept.leftovers,
        kept.rebound,
        kept.earlier_graphs,
        kept.graph_in_eval_mode,
        collected.graphs,
        kept.graph_without_training,
        kept.frozen_model,
        kept.retained_graph,
        kept.read_no_more,
        limits.on_the_host,
        limits.fraction,
    ),
    # The same result, with less memory or in another place.
    (
        expressions.rewritten,
        expressions.expand,
        collected.results,
        collected.comprehension,
        collected.data_taken_in_parts,
        kept.previous_pass,
        kept.attention_weights,
        training.single,
        limits.expandable_segments,
        limits.compact,
        limits.workers,
        training.one_by_one,
        limits.other_device,
        parts.smaller_parts,
        training.settings,
        rows.by_rows,
        batch.mapped,
    ),
    # Memory against time or precision.
    (
        batch.accumulate,
        batch.smaller,
        loops.batch,
        batch.unnamed,
        training.checkpoint,
        training.mixed,
        training.smaller_parameters,
    ),
    (),  # a number of the tier before that changes the result
    # Another model, another optimizer, more devices.
    (training.leaner, training.on_the_host, batch.numbers, limits.divided),
    (limits.on_the_cpu, limits.larger),
)
"""The rules in the order of what their suggestions cost: see the tiers' names in `suggestion`."""

OF_ACTIVATIONS = frozenset(
    {
        training.checkpoint,
        training.mixed,
        batch.accumulate,
        batch.smaller,
        batch.unnamed,
        parts.smaller_parts,
        rows.by_rows,
        batch.mapped,
        loops.batch,
        training.on_the_host,
    }
)
"""What cannot help where parameters, gradients and optimizer state alone are more than there is; beside another
optimizer, where parameters and gradients are."""

AT_MOST: Mapping[Rule, Callable[[Need], int]] = {
    training.mixed: lambda need: (need.needed - need.static) // 2,
    training.one_by_one: lambda need: need.parts.get("temporaries", 0),
}
"""What rules can save at most, where their suggestions do not say what they free."""

CRUMB = 0.1
"""What gives back less than this share of what another suggestion does stands below it."""

LEAST_SHARE = 0.1
"""The share of what is missing that a suggestion has to save to be worth a word."""


AGAIN = "Run the cell again"


def advise(facts: Facts, trials: Trials) -> tuple[Advice, ...]:
    """Return what is advised, the best first.

    What fits by its dry run comes first, the cheapest of it above; then what was tried, by what it saves; last what
    could not be tried. Where nothing fits alone, the cheapest set that does comes first.

    Args:
        facts: of the failure, with what the cell needs where a dry run told.
        trials: tries them.
    """
    need = facts.need
    if need is not None and need.fits and need.certain:
        return (_run_again(facts, need),)
    here = []
    elsewhere = []
    for suggestion in _suggestions(facts):
        if suggestion.tier == MONEY:
            elsewhere.append(suggestion)
        else:
            here.append(suggestion)
    tried = _Tries(facts, trials).try_all(here)
    if not any(suggestion.fits_here for suggestion in tried):
        together = cheapest_set(facts, tried, trials)
        if together is not None:
            tried.append(together)
    something_fits = any(suggestion.fits_here for suggestion in tried)
    if not something_fits:
        tried += _Tries(facts, trials).try_all(elsewhere)
    shown = []
    for suggestion in tried:
        is_cheap_and_tried = (
            suggestion.tier < DRASTIC and suggestion.trial.needs is not None
        )
        if something_fits and not suggestion.fits_here and not is_cheap_and_tried:
            continue
        if _is_worth_showing(suggestion, facts):
            shown.append(suggestion)
    most = max(
        (suggestion.worth for suggestion in shown if suggestion.tier < DRASTIC),
        default=0,
    )
    shown.sort(key=lambda suggestion: _rank(suggestion, most))
    return tuple(suggestion.to_advice(facts) for suggestion in shown)


def _run_again(facts: Facts, need: Need) -> Advice:
    """Return the only advice where the cell fits as it is, since the release."""
    first = cleared(None, facts)
    return Advice(
        title=AGAIN,
        frees=None,
        covers=True,
        edit=first,
        evidence="from where the failure has left the device, a dry run of the whole cell fits",
        cost=str(FREE),
        is_free=True,
        trial=EditTrial(
            fits=True, certain=True, needs=need.needed, available=need.available
        ),
        first=first,
    )


def _suggestions(facts: Facts) -> Iterator[Suggestion]:
    """Yield what the rules suggest, but what cannot help since there is not even room for what it does not lower."""
    need = facts.need
    no_optimizer_helps = _static_memory_exceeds(need, ignoring=("optimizer state",))
    for tier, rules in enumerate(TIERS):
        for place, rule in enumerate(rules):
            if rule in OF_ACTIVATIONS and no_optimizer_helps:
                continue
            for proposal in rule(facts):
                yield _as_suggestion(proposal, tier, place, rule, need)


def _as_suggestion(
    proposal: Proposal, tier: int, place: int, rule: Rule, need: Need | None
) -> Suggestion:
    """Return a suggestion before it is tried, with what it can save at most in mind."""
    too_little = rule in OF_ACTIVATIONS and _static_memory_exceeds(need)
    if isinstance(proposal, Choice):
        guess = proposal.make(proposal.guess)
        return Suggestion(tier, place, guess, proposal, too_little)
    if need is not None:
        most = AT_MOST[rule](need) if rule in AT_MOST else proposal.frees
        if most is not None and most < need.missing:
            too_little = True
    return Suggestion(tier, place, proposal, is_too_little=too_little)


def _static_memory_exceeds(need: Need | None, ignoring: Sequence[str] = ()) -> bool:
    """Return whether there is not even room for parameters, gradients and optimizer state, but for some of them."""
    if need is None:
        return False
    ignored = sum(need.parts.get(part, 0) for part in ignoring)
    return need.static - ignored > need.available


class _Tries:
    """The tries of suggestions, each alone.

    Args:
        facts: of the failure.
        trials: makes the dry runs.
    """

    def __init__(self, facts: Facts, trials: Trials) -> None:
        self._facts = facts
        self._trials = trials
        self._tried: list[Suggestion] = []
        self._edits = set[tuple[tuple[Change, ...], str | None]]()
        self._has_shown = False

    def try_all(self, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
        """Return what came of suggestions: of those that may fit alone first, of others where none of these does."""
        with progress.counted(len(suggestions), "trying") as tell:
            for suggestion in sorted(suggestions, key=_is_for_later):
                best = self._best()
                if best is not None and best.tier <= suggestion.tier:
                    self._show(best)  # nothing that is tried from here on costs less
                if self._is_enough(suggestion):
                    break
                if self._is_repeated(suggestion):
                    continue
                tell(suggestion.advice.title)
                tried = self._try(suggestion, is_brief=best is not None)
                if tried.advice.gpu and tried.trial.fits is False:
                    continue  # the next is larger
                self._tried.append(tried)
        return self._tried

    def _best(self) -> Suggestion | None:
        """Return the cheapest suggestion that certainly fits so far."""
        fitting = [
            tried for tried in self._tried if tried.fits_here and tried.trial.certain
        ]
        return min(fitting, key=lambda tried: (tried.tier, tried.place), default=None)

    def _show(self, suggestion: Suggestion) -> None:
        if not self._has_shown:
            self._has_shown = True
            suggestion.show_early(self._facts)

    def _is_enough(self, coming: Suggestion) -> bool:
        """Return whether nobody needs what is to be tried next: another method, a larger GPU, what helps a little."""
        fitting = [
            tried
            for tried in self._tried
            if tried.trial.fits and not tried.is_exhausted
        ]
        if fitting and self._trials.stop_if_slow():
            return True
        if coming.tier < DRASTIC and not coming.is_too_little:
            return False
        return any(tried.tier < DRASTIC for tried in fitting)

    def _is_repeated(self, coming: Suggestion) -> bool:
        """Return whether two rules come to the same, or a smaller GPU will do."""
        if coming.choice is not None:
            return False
        advice = coming.advice
        edit = (advice.changes, advice.first)
        if coming.has_code and edit in self._edits:
            return True
        if advice.gpu and any(tried.advice.gpu for tried in self._tried):
            return True
        self._edits.add(edit)
        return False

    def _try(self, suggestion: Suggestion, *, is_brief: bool) -> Suggestion:
        """Return a suggestion with what came of it; of a number, in brief, what came of the guess if that fits."""
        if suggestion.choice is None:
            if not suggestion.has_code and not suggestion.advice.gpu:
                return suggestion
            return replace(suggestion, trial=self._trials.of(suggestion.advice))
        if is_brief:
            trial = self._trials.of(suggestion.advice)
            if trial.fits:
                return suggestion.with_number(Chosen(suggestion.advice, trial))
        return self._search_number(suggestion, suggestion.choice)

    def _search_number(self, suggestion: Suggestion, choice: Choice) -> Suggestion:
        """Return a suggestion with the number that was found.

        What makes the same result with it is shown before the largest number is known.
        """

        def show_early(chosen: Chosen) -> None:
            self._show(suggestion.with_number(chosen))

        return suggestion.with_number(
            choose_number(self._trials, choice, known=show_early)
        )


def _is_for_later(suggestion: Suggestion) -> tuple[bool, bool]:
    """Order suggestions: what changes the method is tried last, and before it what cannot fit alone."""
    return suggestion.tier >= DRASTIC, suggestion.is_too_little


def _is_worth_showing(suggestion: Suggestion, facts: Facts) -> bool:
    """Return whether a suggestion works, may work, or saves a fair share of what is missing."""
    trial = suggestion.trial
    if suggestion.is_exhausted:
        return False
    if suggestion.advice.title == ON_THE_CPU and not trial.fits:
        return False  # a larger device is no worse
    if facts.need is None:
        return True
    if trial.fits is False:
        return (
            suggestion.saves > 0
            and suggestion.saves >= LEAST_SHARE * facts.need.missing
        )
    if trial.fits is None and trial.needs is not None and not suggestion.saves:
        return False
    return trial.ending is not Ending.CELL_FAILS  # as of an edit that breaks the cell


class _Group(IntEnum):
    """What came of suggestions, in the order in which they are shown."""

    FITS = 0
    SHOULD_FIT = 1
    OPEN = 2
    LARGER_GPU = 3
    DOES_NOT_FIT = 4
    UNTRIED = 5
    WITHOUT_CODE = 6


def _rank(suggestion: Suggestion, most: int) -> tuple[_Group, int, int, int]:
    """Order suggestions by their groups, and within these by what they cost.

    Args:
        suggestion: one of them.
        most: the largest number of bytes that any is worth; crumbs never stand above a leak.
    """
    trial = suggestion.trial
    tier = suggestion.tier
    place = suggestion.place
    if trial.fits:
        return _Group.FITS if trial.certain else _Group.SHOULD_FIT, tier, 0, place
    if tier == MONEY:
        return _Group.LARGER_GPU, 0, 0, place
    if trial.needs is not None:
        group = _Group.OPEN if trial.fits is None else _Group.DOES_NOT_FIT
        return group, tier >= DRASTIC, -suggestion.saves, place
    group = _Group.UNTRIED if suggestion.has_code else _Group.WITHOUT_CODE
    is_crumb = 0 < suggestion.worth < CRUMB * most
    return group, is_crumb, tier, place

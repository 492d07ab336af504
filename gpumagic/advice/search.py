"""What is advised after a failure: what the rules propose, tried by dry runs, the best first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumagic.advice.facts import Facts
from gpumagic.advice.number_choice import Chosen, choose_number
from gpumagic.advice.records import ON_THE_CPU, Advice, EditTrial, Need
from gpumagic.advice.rules import (
    batch,
    collected,
    expressions,
    kept,
    limits,
    loops,
    parts,
    training,
)
from gpumagic.advice.rules.proposal import Choice, cleared
from gpumagic.advice.trials import Trials
from gpumagic.advice.view import known_early
from gpumagic.dryrun.wire import Ending
from gpumagic.report import progress
from gpumagic.source import text as texts
from gpumagic.source.text import apply_changes

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
        collected.listed,
        collected.stays,
        kept.previous_pass,
        kept.attention_weights,
        training.single,
        limits.expandable_segments,
        limits.compact,
        limits.workers,
        training.one_by_one,
        limits.other_device,
        parts.smaller,
        training.settings,
        parts.by_rows,
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
"""The rules in the order of what their suggestions cost."""

OTHER_RESULT, DRASTIC, MONEY = 3, 4, 5
"""The tiers of a number that changes the result, of what changes the method, and of money."""

OF_ACTIVATIONS = frozenset(
    {
        training.checkpoint,
        training.mixed,
        batch.accumulate,
        batch.smaller,
        batch.unnamed,
        parts.smaller,
        parts.by_rows,
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


@dataclass(frozen=True)
class _Suggestion:
    """What a rule suggests, and what came of it once it was tried."""

    tier: int
    place: int
    """In the order of the tier's rules."""
    advice: Advice
    choice: Choice | None = None
    """Where it has a number to be found; `advice` then has that one, or a guess before."""
    is_too_little: bool = False
    """Whether it cannot fit alone."""
    trial: EditTrial = field(default_factory=EditTrial)
    is_exhausted: bool = False

    @property
    def fits_here(self) -> bool:
        return bool(self.trial.fits) and self.tier < MONEY and not self.is_exhausted

    @property
    def saves(self) -> int:
        return self.trial.saves or 0

    @property
    def worth(self) -> int:
        """The bytes that it saves, or gives back where it was not tried."""
        return self.saves or self.advice.frees or 0


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
        why = "from where the failure has left the device, a dry run of the whole cell fits"
        first, trial = cleared(None, facts), EditTrial(True, True, need.needed, need.available)
        return (Advice(AGAIN, None, True, first, why, cost="none", trial=trial, first=first),)
    proposals = [
        _suggested(need, tier, place, rule, each)
        for tier, rules in enumerate(TIERS)
        for place, rule in enumerate(rules)
        if not (rule in OF_ACTIVATIONS and _is_short_of(need, "optimizer state"))
        for each in rule(facts)
    ]
    found = _try_all(facts, [each for each in proposals if each.tier < MONEY], trials)
    if not any(each.fits_here for each in found):
        together = _cheapest_set(facts, found, trials)
        found += [] if together is None else [together]
    if not any(each.fits_here for each in found):
        found += _try_all(facts, [each for each in proposals if each.tier == MONEY], trials)
    if any(each.fits_here for each in found):
        found = [
            each
            for each in found
            if each.fits_here or (each.tier < DRASTIC and each.trial.needs is not None)
        ]
    worth = [each for each in found if _is_worth_a_word(each, facts) and not each.is_exhausted]
    most = max((each.worth for each in worth if each.tier < DRASTIC), default=0)
    return tuple(
        _finished(facts, each) for each in sorted(worth, key=lambda each: _rank(each, most))
    )


def _suggested(need: Need | None, tier: int, place: int, rule: Rule, each: Proposal) -> _Suggestion:
    """Return a suggestion before it is tried, with what it can save at most in mind."""
    too_little = rule in OF_ACTIVATIONS and _is_short_of(need)
    if isinstance(each, Choice):
        return _Suggestion(tier, place, each.make(each.guess), each, too_little)
    most = AT_MOST[rule](need) if need is not None and rule in AT_MOST else each.frees
    too_little |= need is not None and most is not None and most < need.missing
    return _Suggestion(tier, place, each, is_too_little=too_little)


def _is_short_of(need: Need | None, *without: str) -> bool:
    """Return whether there is not even room for parameters, gradients and optimizer state, but for some of them."""
    return (
        need is not None
        and need.static - sum(need.parts.get(each, 0) for each in without) > need.available
    )


def _try_all(facts: Facts, proposals: Sequence[_Suggestion], trials: Trials) -> list[_Suggestion]:
    """Return what came of the suggestions: of those that may fit alone first, of others where none of these does."""
    found, edits, shown = list[_Suggestion](), set[tuple[object, ...]](), list[_Suggestion]()

    def show(best: _Suggestion) -> None:
        if not shown:
            shown.append(best)
            progress.known(known_early(_finished(facts, best)))

    with progress.counted(len(proposals), "trying") as tell:
        for each in sorted(proposals, key=lambda one: (one.tier >= DRASTIC, one.is_too_little)):
            fitting = [each for each in found if each.fits_here and each.trial.certain]
            best = min(fitting, key=lambda each: (each.tier, each.place), default=None)
            if best is not None and best.tier <= each.tier:
                show(best)  # nothing that is tried from here on costs less
            if _is_enough(each, found, trials):
                break
            advice, edit = each.advice, (each.advice.changes, each.advice.first)
            if each.choice is not None:
                tell(advice.title)
                found.append(
                    _with_number(each, each.choice, trials, show, is_brief=best is not None)
                )
            elif not (any(edit) and edit in edits) and not (
                advice.gpu and any(one.advice.gpu for one in found)
            ):
                edits.add(edit)  # else two rules come to the same, or a smaller GPU does
                tell(advice.title)
                trial = trials.of(advice) if any(edit) or advice.gpu else EditTrial()
                if not (advice.gpu and trial.fits is False):  # else the next is larger
                    found.append(replace(each, trial=trial))
    return found


def _is_enough(proposed: _Suggestion, found: Sequence[_Suggestion], trials: Trials) -> bool:
    """Return whether nobody needs what is to be tried next: another method, a larger GPU, what helps only a little."""
    fits = [each for each in found if each.trial.fits and not each.is_exhausted]
    if fits and trials.stop_if_slow():
        return True
    return (proposed.tier >= DRASTIC or proposed.is_too_little) and any(
        each.tier < DRASTIC for each in fits
    )


def _with_number(
    proposed: _Suggestion,
    choice: Choice,
    trials: Trials,
    show: Callable[[_Suggestion], None],
    *,
    is_brief: bool,
) -> _Suggestion:
    """Return a suggestion with the number that was found; in brief where a plainer one fits: with its guess.

    One that makes the same result is shown before the largest number is known.
    """

    def tried(chosen: Chosen) -> _Suggestion:
        tier = OTHER_RESULT if choice.changes_result and not chosen.is_finished else proposed.tier
        return replace(
            proposed,
            tier=tier,
            advice=chosen.advice,
            trial=chosen.trial,
            is_exhausted=chosen.is_exhausted,
        )

    trial = trials.of(proposed.advice) if is_brief else EditTrial()
    if trial.fits:
        return tried(Chosen(proposed.advice, trial))
    return tried(choose_number(trials, choice, known=lambda early: show(tried(early))))


def _cheapest_set(facts: Facts, found: Sequence[_Suggestion], trials: Trials) -> _Suggestion | None:
    """Return the suggestions that fit together, as one: the first that do, without those that are not needed."""
    there = [each for each in found if each.trial.fits is False and each.tier < MONEY]
    # What saves nothing alone may do so where others have lowered what needed more. Of optimizers the one first that
    # saves most.
    there.sort(
        key=lambda each: (
            not each.saves,
            each.tier >= DRASTIC,
            -each.saves if each.tier >= DRASTIC else 0,
        )
    )
    cheap = [each for each in there if each.tier < DRASTIC]
    sets = {
        "; ".join(each.advice.title for each in one): one
        for some in (cheap, there)
        for one in _sets(facts, some)
    }
    with progress.counted(len(sets), "trying together") as tell:
        for title, members in sets.items():
            tell(title)
            trial = trials.of(*(each.advice for each in members))
            if not trial.fits:
                continue
            progress.known(known_early(_finished(facts, _joined(facts, members, trial))))
            (low, *others), trial = _needed(members, trial, trials)
            if low.choice is not None:
                chosen = choose_number(
                    trials, low.choice, *(each.advice for each in others), at=low.choice.small
                )
                if chosen.trial.fits:
                    low, trial = replace(low, advice=chosen.advice), chosen.trial
            return _joined(facts, [low, *others], trial)
    return None


def _sets(facts: Facts, there: Sequence[_Suggestion]) -> Iterator[list[_Suggestion]]:
    """Yield what may fit together, the likeliest first; of what has a number, with a small one and at the front."""
    missing = facts.need.missing if facts.need is not None else 0
    plain = _apart(facts, [each for each in there if each.choice is None])
    useful = sum(bool(each.saves) for each in plain)
    for number in range(2, useful + 1):
        is_all = number == useful  # together they may save more than the sum
        if sum(each.saves for each in plain[:number]) * (1 + is_all) >= missing:
            yield plain[:number]
    for each in there:
        members = _apart(facts, [each, *plain])[1:]
        if each.choice is None or not members:
            continue
        low = replace(each, advice=each.choice.make(each.choice.small))
        # Two that save enough together, then any two: each may lower another of two peaks.
        pairs = sorted(
            ([low, one] for one in members), key=lambda two: each.saves + two[1].saves < missing
        )
        yield from [*pairs, *([[low, *members]] if len(members) > 1 else [])]


def _apart(facts: Facts, found: Sequence[_Suggestion]) -> list[_Suggestion]:
    """Return those of some suggestions that can be followed together, the first of any that cannot."""
    apart, bound = list[_Suggestion](), set[str]()
    for each in found:
        changes = [change for other in (*apart, each) for change in other.advice.changes]
        name, is_bound, _ = (each.advice.first or "").partition(" = ")
        if is_bound and name in bound:  # another optimizer instead of the same
            continue
        with contextlib.suppress(ValueError):
            new = [
                apply_changes(
                    [one for one in changes if one.cell == text.cell], text.source, text.cell
                )
                for text in facts.frames.texts
            ]
            if all(map(texts.parse, new)):  # changes of the same lines may have been indented apart
                apart.append(each)
                bound |= {name}
    return apart


def _needed(
    members: Sequence[_Suggestion], trial: EditTrial, trials: Trials
) -> tuple[list[_Suggestion], EditTrial]:
    """Return those of a set that fits without which it does not, the costliest left out first, and what came of it.

    What has a number stays.
    """
    needed = list(members)
    for each in sorted(members, key=lambda each: (-each.tier, each.saves)):
        rest = [other for other in needed if other is not each]
        if len(rest) < 2:
            break
        without = (
            trials.of(*(other.advice for other in rest)) if each.choice is None else EditTrial()
        )
        if without.fits:
            needed, trial = rest, without
    return needed, trial


def _joined(facts: Facts, members: Sequence[_Suggestion], trial: EditTrial) -> _Suggestion:
    """Return a set as one suggestion."""
    advice = [each.advice for each in members]
    titles = [
        advice[0].title,
        *(f"{each.title[:1].lower()}{each.title[1:]}" for each in advice[1:]),
    ]
    changes = tuple(change for each in advice for change in each.changes)
    changed = [
        text for text in facts.frames.texts if any(each.cell == text.cell for each in changes)
    ]
    joined = Advice(
        title="; ".join(titles),
        frees=None,
        covers=None,
        evidence="none of them fits alone",
        cost="; ".join(
            dict.fromkeys(
                each.cost for each in advice if each.cost and not each.cost.startswith("none")
            )
        ),
        edit="\n".join(text.after(changes) for text in changed) or None,
        changes=changes,
        first="\n".join(dict.fromkeys(each.first for each in advice if each.first)) or None,
    )
    return _Suggestion(max(each.tier for each in members), 0, joined, trial=trial)


def _is_worth_a_word(found: _Suggestion, facts: Facts) -> bool:
    """Return whether a suggestion works, may work, or saves a fair share of what is missing."""
    if found.advice.title == ON_THE_CPU and not found.trial.fits:
        return False  # a larger device is no worse
    if facts.need is None:
        return True
    if found.trial.fits is None and found.trial.needs is not None and not found.saves:
        return False
    if found.trial.fits is not False:
        return found.trial.ending is not Ending.CELL_FAILS  # an edit that breaks the cell
    return found.saves > 0 and found.saves >= LEAST_SHARE * facts.need.missing


def _finished(facts: Facts, found: _Suggestion) -> Advice:
    advice, trial = found.advice, found.trial
    is_code = bool(advice.changes or advice.first)
    first = cleared(advice.first, facts) if is_code else advice.first
    return replace(
        advice,
        trial=trial if is_code or advice.gpu else None,
        covers=trial.fits,
        first=first,
        frees=advice.frees if trial.saves is None or advice.gpu else trial.saves,
        edit=advice.edit if advice.changes or not is_code else first,
    )


def _rank(found: _Suggestion, most: int) -> tuple[int, int, int, int]:
    """Order suggestions: what fits, what may, a larger GPU, what does not fit, what was not tried.

    Within these they are ordered by what they cost. `most` is the largest number of bytes that any is worth: crumbs
    never stand above a leak.
    """
    trial, is_crumb = found.trial, 0 < found.worth < CRUMB * most
    if trial.fits:
        return (0 if trial.certain else 1), found.tier, 0, found.place
    if found.tier == MONEY:
        return 3, 0, 0, found.place
    if trial.needs is not None:
        return (2 if trial.fits is None else 4), found.tier >= DRASTIC, -found.saves, found.place
    is_code = bool(
        found.advice.changes or found.advice.first
    )  # what it says is clear, where to write it may not be
    return (5 if is_code else 7), is_crumb, found.tier, found.place

"""The cheapest set of suggestions with which the cell fits, where it fits with none of them alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpumagic.advice.facts import Facts
from gpumagic.advice.number_choice import choose_number
from gpumagic.advice.records import Advice, EditTrial
from gpumagic.advice.suggestion import DRASTIC, MONEY, Suggestion
from gpumagic.advice.trials import Trials
from gpumagic.report import progress
from gpumagic.source import text as texts
from gpumagic.source.text import CellText, Change, apply_changes


def cheapest_set(
    facts: Facts, tried: Sequence[Suggestion], trials: Trials
) -> Suggestion | None:
    """Return the suggestions that fit together, as one: the first that do, without those that are not needed."""
    sets = _named_sets(facts, tried)
    with progress.counted(len(sets), "trying together") as tell:
        for title, members in sets.items():
            tell(title)
            trial = trials.of(*_advice_of(members))
            if trial.fits:
                _join(facts, members, trial).show_early(facts)
                return _best_of_set(facts, members, trial, trials)
    return None


def _named_sets(
    facts: Facts, tried: Sequence[Suggestion]
) -> dict[str, list[Suggestion]]:
    """Return the sets that may fit, the cheap ones first, by what is said while they are tried."""
    here = [suggestion for suggestion in tried if suggestion.tier < MONEY]
    failing = [suggestion for suggestion in here if suggestion.trial.fits is False]
    failing.sort(key=_likelihood_in_set)
    cheap = [suggestion for suggestion in failing if suggestion.tier < DRASTIC]
    sets: dict[str, list[Suggestion]] = {}
    for members in (*_sets(facts, cheap), *_sets(facts, failing)):
        titles = [advice.title for advice in _advice_of(members)]
        sets["; ".join(titles)] = members
    return sets


def _likelihood_in_set(suggestion: Suggestion) -> tuple[bool, bool, int]:
    """Order suggestions by what they may do for a set.

    What saves nothing alone may do so where others have lowered what needed more. Of optimizers the one comes first
    that saves most.
    """
    is_drastic = suggestion.tier >= DRASTIC
    return not suggestion.saves, is_drastic, -suggestion.saves if is_drastic else 0


def _sets(
    facts: Facts, suggestions: Sequence[Suggestion]
) -> Iterator[list[Suggestion]]:
    """Yield what may fit together, the likeliest first; of what has a number, with a small one and at the front."""
    missing = facts.need.missing if facts.need is not None else 0
    without_number = [
        suggestion for suggestion in suggestions if suggestion.choice is None
    ]
    plain = _compatible(facts, without_number)
    useful = sum(member.saves > 0 for member in plain)
    for number in range(2, useful + 1):
        members = plain[:number]
        saved = sum(member.saves for member in members)
        if number == useful:
            saved *= 2  # together they may save more than the sum
        if saved >= missing:
            yield members
    for suggestion in suggestions:
        if suggestion.choice is None:
            continue
        low = replace(
            suggestion, advice=suggestion.choice.make(suggestion.choice.small)
        )
        others = _compatible(facts, [suggestion, *plain])[1:]
        # Two that save enough together, then any two: each may lower another of two peaks.
        still_missing = missing - suggestion.saves
        for other in sorted(others, key=lambda other: other.saves < still_missing):
            yield [low, other]
        if len(others) > 1:
            yield [low, *others]


def _compatible(facts: Facts, suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    """Return those of some suggestions that can be followed together, the first of any that cannot."""
    followed: list[Suggestion] = []
    changes: list[Change] = []
    assigned: set[str] = set()
    for suggestion in suggestions:
        variables = _assigned_by(suggestion.advice.first or "")
        if variables & assigned:  # another optimizer instead of the same
            continue
        together = [*changes, *suggestion.advice.changes]
        if _can_be_made(together, facts.frames.texts):
            followed.append(suggestion)
            changes = together
            assigned |= variables
    return followed


def _assigned_by(code: str) -> set[str]:
    """Return what the statements of some code assign to."""
    tree = texts.parse_tree(code)
    assigned = set[str]()
    for statement in tree.body if tree is not None else ():
        if isinstance(statement, ast.Assign):
            assigned.update(map(ast.unparse, statement.targets))
    return assigned


def _can_be_made(changes: Sequence[Change], cells: Iterable[CellText]) -> bool:
    """Return whether changes can be made in the same cells; those of the same lines may indent them apart."""
    try:
        changed = [apply_changes(changes, text.source, text.cell) for text in cells]
    except ValueError:
        return False
    return all(texts.parse(source) is not None for source in changed)


def _best_of_set(
    facts: Facts, members: Sequence[Suggestion], trial: EditTrial, trials: Trials
) -> Suggestion:
    """Return a set that fits as one suggestion: without what it can do without, and with the largest number."""
    needed, trial = _minimal_subset(members, trial, trials)
    first, *others = needed
    if first.choice is not None:
        chosen = choose_number(
            trials, first.choice, *_advice_of(others), at=first.choice.small
        )
        if chosen.trial.fits:
            first = replace(first, advice=chosen.advice)
            trial = chosen.trial
    return _join(facts, [first, *others], trial)


def _minimal_subset(
    members: Sequence[Suggestion], trial: EditTrial, trials: Trials
) -> tuple[list[Suggestion], EditTrial]:
    """Return the members a fitting set cannot do without, costliest dropped first, and the trial of what remains.

    What has a number stays, and so do two members at least.
    """
    needed = list(members)
    for member in sorted(members, key=lambda member: (-member.tier, member.saves)):
        rest = [other for other in needed if other is not member]
        if len(rest) < 2:
            break
        if member.choice is not None:
            continue
        trial_of_rest = trials.of(*_advice_of(rest))
        if trial_of_rest.fits:
            needed = rest
            trial = trial_of_rest
    return needed, trial


def _advice_of(members: Iterable[Suggestion]) -> list[Advice]:
    return [member.advice for member in members]


def _join(facts: Facts, members: Sequence[Suggestion], trial: EditTrial) -> Suggestion:
    """Return a set as one suggestion."""
    first, *others = _advice_of(members)
    titles = [first.title]
    titles += (f"{advice.title[:1].lower()}{advice.title[1:]}" for advice in others)
    changes: list[Change] = []
    costs: dict[str, None] = {}
    statements: dict[str, None] = {}
    for advice in (first, *others):
        changes += advice.changes
        if advice.cost and not advice.is_free:
            costs[advice.cost] = None
        if advice.first:
            statements[advice.first] = None
    changed_cells = {change.cell for change in changes}
    new_lines = [
        text.after(changes) for text in facts.frames.texts if text.cell in changed_cells
    ]
    joined = Advice(
        title="; ".join(titles),
        frees=None,
        covers=None,
        evidence="none of them fits alone",
        cost="; ".join(costs),
        edit="\n".join(new_lines) or None,
        changes=tuple(changes),
        first="\n".join(statements) or None,
    )
    return Suggestion(max(member.tier for member in members), 0, joined, trial=trial)

"""A suggestion on its way through the search: what a rule proposes, and what came of it once it was tried."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpumagic.advice.facts import Facts
from gpumagic.advice.number_choice import Chosen
from gpumagic.advice.records import Advice, EditTrial
from gpumagic.advice.rules.proposal import Choice, cleared
from gpumagic.advice.view import known_early
from gpumagic.report import progress

OTHER_RESULT, DRASTIC, MONEY = 3, 4, 5
"""The tiers of a number that changes the result, of what changes the method, and of money."""


@dataclass(frozen=True)
class Suggestion:
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
    """As of `Chosen`."""

    @property
    def has_code(self) -> bool:
        """Whether it says what to type: what it means may be clear, and where to write it may not be."""
        return bool(self.advice.changes or self.advice.first)

    @property
    def fits_here(self) -> bool:
        """Whether the cell fits with it on the device that is here."""
        return bool(self.trial.fits) and self.tier < MONEY and not self.is_exhausted

    @property
    def saves(self) -> int:
        """The bytes that it saves, by its dry run."""
        return self.trial.saves or 0

    @property
    def worth(self) -> int:
        """The bytes that it saves, or gives back where it was not tried."""
        return self.saves or self.advice.frees or 0

    def with_number(self, chosen: Chosen) -> Suggestion:
        """Return it with the number that was chosen, in the tier of what that does to the result."""
        changes_result = self.choice is not None and self.choice.changes_result
        tier = OTHER_RESULT if changes_result and not chosen.is_finished else self.tier
        return replace(
            self,
            tier=tier,
            advice=chosen.advice,
            trial=chosen.trial,
            is_exhausted=chosen.is_exhausted,
        )

    def to_advice(self, facts: Facts) -> Advice:
        """Return what the report shows: with what its dry run told, and with what is to be run before the cell."""
        advice = self.advice
        frees = advice.frees
        if self.trial.saves is not None and not advice.gpu:
            frees = self.trial.saves
        advice = replace(advice, covers=self.trial.fits, frees=frees)
        if self.has_code:
            first = cleared(advice.first, facts)
            edit = advice.edit if advice.changes else first
            return replace(advice, trial=self.trial, first=first, edit=edit)
        return replace(advice, trial=self.trial if advice.gpu else None)

    def show_early(self, facts: Facts) -> None:
        """Show it while others are tried."""
        progress.known(known_early(self.to_advice(facts)))

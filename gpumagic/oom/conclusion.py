"""The report of a failure: what `advice` makes of the evidence."""

from __future__ import annotations

from gpumagic.oom.evidence import WORTH_SAYING, Circumstances, gather
from gpumagic.oom.failure import Failure
from gpumagic.oom.report import OomReport
from gpumagic.oom.rules import negatives, ranking, verdict
from gpumagic.oom.rules.facts import Facts
from gpumagic.report import origin
from gpumagic.report.units import size


def conclude(failure: Failure, circumstances: Circumstances) -> OomReport:
    """Return the report, from the failure and from what is alive now."""
    facts, notes = gather(failure, circumstances)
    return _report(facts, failure, circumstances, notes)


def _report(facts: Facts, failure: Failure, circumstances: Circumstances, notes: list[str]) -> OomReport:
    before, at_failure, after = facts.before, facts.at_failure, facts.after
    return OomReport(
        kind=facts.kind,
        certainty=failure.event.certainty,
        device=facts.device,
        requested=facts.requested,
        allocated_before=before.allocated if before else None,
        allocated_at_failure=at_failure.allocated if at_failure else None,
        allocated_after=after.allocated if after else None,
        reserved_before=before.reserved if before else None,
        reserved_at_failure=at_failure.reserved if at_failure else None,
        reserved_after=after.reserved if after else None,
        line=facts.scene.line,
        code=facts.scene.code,
        verdict=verdict.sentence(facts),
        cause=verdict.cause(facts),
        holders=facts.holders,
        advice=ranking.advise(facts),
        capacity=facts.capacity,
        retries=circumstances.retries,
        recovered=circumstances.recovered,
        message=failure.event.message,
        notes=(*notes, *negatives.sentences(facts), *_notes(facts, failure, circumstances)),
        origin=origin.here(),
    )


def _notes(facts: Facts, failure: Failure, circumstances: Circumstances) -> list[str]:
    event, notes = failure.event, []
    if circumstances.pinned is not None:
        notes.append(f"Kept for %debug: the failed frames hold at least {size(circumstances.pinned)} of it.")
    if event.raised != event.message:
        notes.append(f"It arrived as {event.raised}")
    if event.memory == "device" and event.device is None and failure.device is not None:
        notes.append(f"The error does not name the device; {failure.device} is the fullest of its kind in use.")
    if failure.scene.inside is not None:
        notes.append(f"It failed inside {failure.scene.inside}")
    nameless = _nameless(facts)
    if nameless >= WORTH_SAYING:
        notes.append(f"{size(nameless)} of what is allocated now has no name here: %devices says what keeps it.")
    return notes


def _nameless(facts: Facts) -> int:
    if facts.after is None or not facts.looked_at:
        return 0
    return facts.after.allocated - sum(holder.nbytes for holder in facts.holders)

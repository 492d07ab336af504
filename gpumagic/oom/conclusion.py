"""The report on a failure, from what was read before the release and what is alive after it.

It reads the notebook, has advice tried, and puts together what the verdict and the advice say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpumagic._compat import torch_private
from gpumagic.advice import search
from gpumagic.advice.facts import Facts, Frames, Memory, Notebook
from gpumagic.advice.rules import verdict
from gpumagic.advice.trials import Trials
from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.oom.evidence import read_notebook
from gpumagic.oom.failure import Failure, GuardState
from gpumagic.oom.report import OomReport
from gpumagic.report import base
from gpumagic.report.units import LARGE, size


def conclude(
    failure: Failure,
    state: GuardState,
    *,
    is_kept: bool = False,
    retries: int = 0,
    recovered: bool = False,
    seconds: float = 0.0,
    elsewhere: str = "",
) -> OomReport:
    """Return the report, from what was read before the release and what is alive now.

    Args:
        failure: what was read before the release.
        state: the session as it was when the block began.
        is_kept: whether the failed frames are kept for a debugger.
        retries: how often the block was run again.
        recovered: whether the last run passed.
        seconds: how long dry runs may try the advice.
        elsewhere: the device that the run that failed was sent to.
    """
    event, frames = failure.event, failure.frames
    notes = list(failure.notes)
    after = allocator.all_device_stats().get(event.device or "")
    try:
        frames = _after_run(frames, state)
        notebook = read_notebook(event, frames, state, after)
    except Exception as fault:  # a partial report is better than the loss of it
        notes.append(
            f"What lives in the notebook could not be looked at: {type(fault).__name__}: {fault}"
        )
        notebook = Notebook(after=after)
    facts = Facts(event, frames, notebook)
    trials = Trials(
        facts,
        state.namespace,
        seconds,
        elsewhere,
        is_cell=state.shell is not None,
        outside=state.watch.sentence(),
    )
    need = trials.need()
    facts = replace(facts, need=need)
    advice = () if recovered else search.advise(facts, trials)
    why_untried = trials.stop.sentence if trials.stop is not None else ""
    if why_untried and need is not None:
        notes.append(f"Not all advice was tried: {why_untried}.")
    # The first is shown, the others are folded away: what holds of most failures comes last.
    notes += dict.fromkeys(trials.exhausted)
    notes += _notes(facts, is_kept=is_kept)
    notes += verdict.sentences(facts)
    notes += torch_private.lacking("oomguard")
    explanation = verdict.explain(facts)
    return OomReport(
        kind=event.kind.value,
        certainty=event.certainty,
        device=event.device,
        requested=event.requested,
        allocated_before=_allocated(event.before),
        allocated_at_failure=_allocated(event.at_failure),
        allocated_after=_allocated(after),
        reserved_before=_reserved(event.before),
        reserved_at_failure=_reserved(event.at_failure),
        reserved_after=_reserved(after),
        line=frames.line,
        code=frames.code,
        verdict=explanation.sentence,
        cause=explanation.cause.value,
        need=need,
        untried=why_untried if need is None else "",
        holders=notebook.holders,
        advice=advice,
        capacity=event.capacity,
        retries=retries,
        recovered=recovered,
        message=event.message,
        notes=tuple(notes),
        origin=base.current_origin(),
    )


def _allocated(stats: AllocatorStats | None) -> int | None:
    return stats.allocated if stats is not None else None


def _reserved(stats: AllocatorStats | None) -> int | None:
    return stats.reserved if stats is not None else None


def _notes(facts: Facts, *, is_kept: bool) -> Iterator[str]:
    event, notebook = facts.event, facts.notebook
    if event.raised != event.message:
        yield f"It was raised as {event.raised}"
    is_guess = event.memory is Memory.DEVICE and not event.names_device
    if is_guess and event.device is not None:
        yield f"The error does not name the device; {event.device} is the fullest of its kind in use."
    if facts.frames.deepest_line is not None:
        yield f"It failed inside {facts.frames.deepest_line}"
    named = sum(holder.nbytes for holder in notebook.holders)
    unnamed = notebook.after.allocated - named if notebook.after is not None else 0
    if is_kept:
        yield f"Kept for %debug: the failed frames, which hold at most {size(unnamed)}."
    elif named and unnamed >= LARGE:
        yield f"{size(unnamed)} has no name, only autograd graphs or C++; see %devices --leaks."


def _after_run(frames: Frames, state: GuardState) -> Frames:
    """Return what the frames told, with what the run has shown of the cell: which of its loops made a pass."""
    if frames.cell is None:
        return frames
    names = state.namespace
    rebound = {
        name for name, value in names.items() if not state.bound.is_still(name, value)
    }
    return replace(frames, cell=frames.cell.after_run(frames.line, rebound))

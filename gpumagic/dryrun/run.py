"""A dry run from the notebook's side: what is sent to the worker, which of many ranks are run, and the report of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpumagic.dryrun import client, explore, parts, payload, targets
from gpumagic.dryrun import report as records
from gpumagic.dryrun.effects import NOT_DONE
from gpumagic.dryrun.judge import Result
from gpumagic.dryrun.report import DeviceNeed, DryRunReport, peak_of, reserved_of
from gpumagic.dryrun.request import request_of
from gpumagic.dryrun.script import Script
from gpumagic.dryrun.targets import Target
from gpumagic.dryrun.wire import (
    DeviceOutcome,
    Ended,
    Ending,
    Failure,
    Outcome,
    Rank,
    RankOutcome,
    Scenario,
)
from gpumagic.errors import DryRunUnavailable
from gpumagic.options import Ranks, number_of_ranks
from gpumagic.source.settings import sizes_in

TIME_LIMIT = 60.0
NCCL = (16 * targets.MIB, 1500 * targets.MIB)
"""What a communicator takes of the device, least and most: an estimate.

A channel has a buffer of 4 MiB a connection (NCCL_BUFFSIZE), and half a MiB and 4.7 MiB more where it uses the LL and
LL128 protocols; a ring has two connections, a tree three more, and there are 2 to 32 channels (NCCL_MAX_NCHANNELS).
People measured 1.6 GB for one communicator (https://github.com/NVIDIA/nccl/issues/864)."""
_ZEROS = f"of large tensors and arrays on the CPU, those beyond {parts.ROOM >> 20} MiB in all are assumed to be zeros"
_ROCM = "what ROCm takes for itself: of this GPU only the size is known here, and CUDA on an A100 stands in"
_NEEDS_CUDA = (
    "ranks are dry-run on torch's own CUDA: "
    "that takes a CUDA build of torch, which needs no GPU, and a C compiler"
)
Run = Callable[[Rank], tuple[DryRunReport, "Outcome | Ended"]]


def dry_run(
    what: Script,
    namespace: Mapping[str, Any],
    target: Target,
    *,
    values: Mapping[str, object] | None = None,
    time_limit: float = TIME_LIMIT,
    only: Scenario | None = None,
) -> DryRunReport:
    """Return what running the code would need, of ranks the one that needs most.

    Args:
        what: the code.
        namespace: the names it sees; they are read and not changed.
        target: the devices.
        values: other values for some of the names.
        time_limit: seconds after which the dry run is given up.
        only: the one scenario of values of which only the figures are wanted; all that the cell needs without.

    Raises:
        DryRunUnavailable: this torch or system cannot.
    """

    def one(rank: Rank | None) -> tuple[DryRunReport, Outcome | Ended]:
        """Return the report of a rank, or of a cell that is none, and the worker's reply."""
        here = target
        if rank is not None:
            here = replace(target, chosen=rank.number % rank.per_node)
        here = targets.with_engine(here)
        if here.engine == targets.FAKE and rank is not None:
            raise DryRunUnavailable(_NEEDS_CUDA)
        client.start(here.engine)  # it imports torch while the notebook is packed
        packed = payload.pack(namespace, what.names(), what.function, here)
        with contextlib.closing(packed.shared):
            request = request_of(what, packed, here, dict(values or {}), time_limit)
            result = explore.run(replace(request, rank=rank), only)
        sizes = sizes_in(what.source or "")
        return report_of(result, here, packed, sizes), result.reply

    if target.ranks is None:
        report, reply = one(None)
        if isinstance(reply, Outcome) or reply.ranks is None:
            return report
        target = targets.of_ranks(target, number_of_ranks(reply.ranks))
    assert target.ranks is not None
    return _fullest(one, target.ranks)


def _fullest(run: Run, ranks: Ranks) -> DryRunReport:
    """Return the dry run of the rank that needs most, with the figures of all that were run.

    Those are the first, the last, each stage of a pipeline; the others do what these do.

    Args:
        run: dry-runs a rank, and returns its report and the worker's reply.
        ranks: how many there are.
    """
    heard: dict[str, tuple[str, ...]] = {}
    reports: dict[int, DryRunReport] = {}
    waiting: set[int] = set()  # since one of them has said something new
    coming = [ranks.world - 1, 0]  # the last one is next
    while coming:
        number = coming.pop()
        if number in reports:
            continue
        rank = Rank(number, ranks.world, ranks.per_node, heard)
        report, reply = run(rank)
        others = _of_other_ranks(reply)
        if not others.said.items() <= heard.items():
            waiting.clear()
        heard = {**heard, **others.said}
        source = _waits_for(reply)
        if source is not None and number not in waiting:
            waiting.add(number)
            coming += [number, source]
            continue
        reports[number] = report
        if not report.fits:
            break
        for stage in others.stages:
            if stage not in coming:
                coming.insert(0, stage)

    def by_need(rank: int) -> tuple[bool, int, int]:
        return not reports[rank].fits, peak_of(reports[rank]), -rank

    most = max(reports, key=by_need)
    needs = [_rank_need(rank, reports[rank]) for rank in sorted(reports)]
    return replace(reports[most], rank=most, world=ranks.world, ranks=tuple(needs))


def _of_other_ranks(reply: Outcome | Ended) -> RankOutcome:
    """Return what a rank tells of the others; nothing where it came to nothing."""
    if isinstance(reply, Ended) or reply.rank is None:
        return RankOutcome(said={}, stages=())
    return reply.rank


def _waits_for(reply: Outcome | Ended) -> int | None:
    """Return the rank that has to be run before this one, if one has."""
    if isinstance(reply, Ended) or reply.failure is None:
        return None
    return reply.failure.waits_for


def _rank_need(rank: int, report: DryRunReport) -> records.RankNeed:
    """Return the figures of a rank on its device."""
    retries = 0
    for need in report.devices:
        if need.device == report.device:
            retries = need.retries
    return records.RankNeed(
        rank=rank,
        device=report.device or "",
        peak=peak_of(report),
        reserved=reserved_of(report),
        retries=retries,
        fits=report.fits,
        breakdown=report.breakdown,
    )


# ---- The report


def report_of(
    result: Result, target: Target, packed: payload.Payload, sizes: tuple[str, ...]
) -> DryRunReport:
    """Return the report of what a dry run came to.

    Args:
        result: what it came to.
        target: its devices.
        packed: what was sent of the notebook.
        sizes: as of `DryRunReport.sizes`.
    """
    outcome = result.reply
    if isinstance(outcome, Ended):
        return _report_of_ended(outcome, target)
    is_complete = outcome.failure is None and not outcome.is_cut_short
    devices = _needs(outcome, target, is_decided=is_complete and not result.depends)
    chosen = target.names[target.chosen]
    device = min(devices, key=lambda need: _room(need, chosen))
    figures = outcome.devices[devices.index(device)]
    verdicts = {need.fits for need in devices}
    fits: bool | None = True
    if False in verdicts:
        fits = False
    elif None in verdicts:
        fits = None
    ending, error = _how_it_ends(outcome.failure, result.failure_depends_on)
    least, most = NCCL
    nccl = least * outcome.communicators, most * outcome.communicators
    has_unknown_parts = result.varies or outcome.has_unknown_parts or target.is_amd
    return DryRunReport(
        device=device.device,
        peak={need.device: need.peak for need in devices},
        reserved={need.device: need.reserved for need in devices},
        line=figures.peak_at.line,
        code=figures.peak_at.code or None,
        operator=figures.peak_at.operator or None,
        breakdown=_largest_first(figures.breakdown),
        fits=fits,
        capacity=device.capacity,
        complete=is_complete,
        certain=is_complete and not has_unknown_parts,
        passes=outcome.passes,
        modules=figures.modules,
        timeline=_timeline(outcome, target),
        assumed=tuple(_assumed(outcome, packed)),
        unknown=tuple(dict.fromkeys(_unknown(outcome, packed, target))),
        engine=target.engine,
        gpu=target.gpu,
        overhead=target.extra,
        scenario=result.scenario,
        runs=result.runs,
        flat=tuple([(loop.place, loop.number) for loop in outcome.flat]),
        function=figures.peak_at.function or None,
        operator_bytes=figures.peak_at.nbytes,
        failure_line=None if figures.refused is None else figures.refused.line,
        open_on=result.open_on,
        effects=tuple([effect.text for effect in outcome.effects]),
        reaching=tuple(
            [effect.text for effect in outcome.effects if effect.reaches_others]
        ),
        error=error,
        ending=ending,
        exceeds_host=outcome.failure is not None and outcome.failure.exceeds_host,
        devices=devices,
        nccl=nccl,
        lines=_lines(outcome, target),
        operators=outcome.operators,
        seconds=result.seconds,
        worked=result.worked,
        versions=outcome.versions,
        sizes=sizes,
    )


def _report_of_ended(ended: Ended, target: Target) -> DryRunReport:
    """Return the report of a dry run without figures: the sentence that says why."""
    return DryRunReport(
        device=target.names[target.chosen],
        peak={},
        reserved={},
        capacity=target.capacities[target.chosen],
        gpu=target.gpu,
        engine=target.engine,
        error=ended.sentence,
        ending=ended.reason,
        exceeds_host=ended.exceeds_host,
        effects=tuple([effect.text for effect in ended.effects]),
        reaching=tuple(
            [effect.text for effect in ended.effects if effect.reaches_others]
        ),
    )


def _needs(
    outcome: Outcome, target: Target, *, is_decided: bool
) -> tuple[DeviceNeed, ...]:
    """Return what the cell takes of each device, and whether that fits.

    Args:
        outcome: the worker's.
        target: the devices.
        is_decided: whether the cell was seen to its end and no value decides on the verdict.
    """
    needs = []
    for name, figures, capacity in zip(
        target.names, outcome.devices, target.capacities, strict=True
    ):
        fits = None
        if capacity is not None:
            fits = _fits(figures, capacity, target.extra, is_decided=is_decided)
        needs.append(
            DeviceNeed(
                device=name,
                before=figures.before,
                peak=figures.peak,
                after=figures.after,
                reserved=figures.reserved,
                capacity=capacity,
                fits=fits,
                retries=figures.retries,
            )
        )
    return tuple(needs)


def _fits(
    figures: DeviceOutcome, capacity: int, extra: tuple[int, int], *, is_decided: bool
) -> bool | None:
    """Judge one device: a clear no, a clear yes only of a run that was seen to its end, and between them None."""
    least, most = extra
    if figures.failed:
        is_clear = least == most or figures.peak + least > capacity
        return False if is_clear else None
    return True if is_decided else None


def _room(device: DeviceNeed, chosen: str) -> tuple[int, float, bool]:
    """Order devices: those that fail, then by the share that is left, then the one that was asked about."""
    verdict = {False: 0, None: 1, True: 2}[device.fits]
    share = 1.0
    if device.capacity:
        share = (device.capacity - device.peak) / device.capacity
    return verdict, share, device.device != chosen


def _largest_first(parts_of_peak: Mapping[str, int]) -> dict[str, int]:
    ordered = sorted(parts_of_peak, key=lambda part: -parts_of_peak[part])
    return {part: parts_of_peak[part] for part in ordered}


def _timeline(outcome: Outcome, target: Target) -> tuple[records.DryRunPoint, ...]:
    points: list[records.DryRunPoint] = []
    for point in outcome.timeline:
        points.append(
            records.DryRunPoint(
                device=target.names[point.device],
                operator=point.operator,
                line=point.line,
                allocated=point.allocated,
                parts=point.parts,
            )
        )
    return tuple(points)


def _lines(outcome: Outcome, target: Target) -> tuple[records.DryRunRow, ...]:
    rows: list[records.DryRunRow] = []
    for use in sorted(outcome.lines, key=lambda use: (use.line, use.device)):
        rows.append(
            records.DryRunRow(
                device=target.names[use.device],
                line=use.line,
                code=use.code,
                peak=use.peak,
                after=use.after,
            )
        )
    return tuple(rows)


def _assumed(outcome: Outcome, packed: payload.Payload) -> Iterator[str]:
    yield from outcome.assumed
    if any(slot.offset is None for slot in packed.shared.slots):
        yield _ZEROS


def _unknown(
    outcome: Outcome, packed: payload.Payload, target: Target
) -> Iterator[str]:
    yield from outcome.unknown
    yield from packed.notes
    yield from target.unknown
    if target.is_amd:
        yield _ROCM


def _how_it_ends(
    failure: Failure | None, depends_on: str | None
) -> tuple[Ending | None, str | None]:
    """Return why the dry run did not come to the cell's end, as a reason and as a sentence.

    Args:
        failure: how the cell failed, if it did.
        depends_on: the expressions on whose assumed values that depends.
    """
    if failure is None:
        return None, None
    where = "" if failure.line is None else f" on line {failure.line}"
    if failure.is_refused:
        return Ending.STOPPED, f"the dry run stopped{where}: {failure.text}"
    message = f"{failure.kind}: {failure.text}"
    undone = f"it {failure.undone[-1]}, {NOT_DONE}" if failure.undone else ""
    if undone and failure.is_denied:
        return Ending.STOPPED, f"the dry run stopped{where}: {undone} ({message})"
    reasons = []
    if depends_on is not None:
        reasons.append(f"it depends on {depends_on}, whose values are assumed")
    if undone:
        reasons.append(f"before that {undone}")
    if reasons:
        why = "; ".join(reasons)
        return Ending.CELL_MAY_FAIL, f"the cell may fail{where}: {message} ({why})"
    return Ending.CELL_FAILS, f"the cell fails{where}: {message}"

"""What the outcome of a dry run means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpumagic.dryrun import payload
from gpumagic.dryrun.report import DeviceNeed, DryRunPoint, DryRunReport, DryRunRow, Passes, peak_of
from gpumagic.dryrun.targets import NCCL, Target
from gpumagic.report.units import count, size, size_range

MOST_PLACES = 2
"""Lines that a sentence names."""
_HOST = re.compile(r"(_Array)?MemoryError:|.*DefaultCPUAllocator: ", re.DOTALL)
"""How Python, numpy and torch say that the host's memory does not do."""
_ROCM = ("what ROCm takes for itself: of this GPU only the size is known here, and CUDA on an A100 stands in",)


def report_of(outcome: dict[str, Any], target: Target, parts: payload.Payload) -> DryRunReport:
    """Return the report of a worker's outcome."""
    error = outcome["error"]
    complete = error is None and not outcome["is_open"]
    devices = tuple(
        _device(name, found, capacity, target.extra, decided=complete and not outcome.get("depends"))
        for name, found, capacity in zip(target.names, outcome["devices"], target.capacities, strict=True)
    )
    deciding = min(range(len(devices)), key=lambda each: _room(devices[each], target.names[target.chosen]))
    device, found = devices[deciding], outcome["devices"][deciding]
    at, failure = found["at"], found["failure"]
    fits = {each.fits for each in devices}
    return DryRunReport(
        device=device.device,
        peak={each.device: each.peak for each in devices},
        reserved={each.device: each.reserved for each in devices},
        line=at["line"], code=at["code"] or None, operator=at["operator"] or None,
        breakdown=dict(sorted(found["breakdown"].items(), key=lambda item: -item[1])),
        fits=False if False in fits else None not in fits or None,
        capacity=device.capacity,
        complete=complete,
        certain=complete and not outcome.get("varies") and not outcome.get("lacks") and not target.is_amd,
        passes=tuple(Passes(*each) for each in outcome["passes"]),
        modules=dict(found.get("modules", ())),
        timeline=tuple(DryRunPoint(target.names[index], *point) for index, *point in outcome["timeline"]),
        assumed=(*outcome["assumed"], *parts.assumed),
        unknown=tuple(dict.fromkeys((*outcome["unknown"], *parts.notes, *target.unknown, *_ROCM * target.is_amd))),
        engine=target.engine, gpu=target.gpu, overhead=target.extra, scenario=outcome.get("most"), runs=outcome["runs"],
        flat=tuple((place, number) for place, number in outcome.get("flat", ())),
        function=at["function"] or None, operator_bytes=at["nbytes"],
        failure_line=None if failure is None else failure["line"],
        open_on=tuple((line, code) for line, code in outcome.get("open_on", ())),
        effects=tuple(outcome["effects"]), error=None if error is None else _failure_sentence(error),
        exceeds_host=error is not None and _HOST.match(f"{error['kind']}: {error['text']}") is not None,
        devices=devices, nccl=(NCCL[0] * outcome.get("communicators", 0), NCCL[1] * outcome.get("communicators", 0)),
        lines=tuple(
            DryRunRow(target.names[each["device"]], each["line"], each["code"], each["peak"], each["after"])
            for each in sorted(outcome["lines"], key=lambda each: (each["line"], each["device"]))
        ),
        operators=outcome["operators"], seconds=outcome["seconds"],
        versions=outcome.get("versions", {}),
    )  # fmt: skip


def report_of_nothing(target: Target, outcome: dict[str, Any]) -> DryRunReport:
    """Return the report of a run that gave no figures, with the sentence that says why."""
    return DryRunReport(
        device=target.names[target.chosen], peak={}, reserved={}, line=None, code=None, operator=None, breakdown={},
        fits=None, capacity=target.capacities[target.chosen], gpu=target.gpu, engine=target.engine,
        error=outcome["ended"], exceeds_host=outcome.get("exceeds_host", False),
        effects=tuple(outcome.get("effects", ())),
    )  # fmt: skip


def _device(
    name: str, found: dict[str, Any], capacity: int | None, extra: tuple[int, int], *, decided: bool
) -> DeviceNeed:
    """Judge one device: a clear no, a clear yes only of a run that was seen to its end, and between them None."""
    fits = True if decided else None
    if found["failed"]:
        fits = False if extra[0] == extra[1] or found["peak"] + extra[0] > (capacity or 0) else None
    return DeviceNeed(
        name, found["before"], found["peak"], found["after"], found["reserved"], capacity,
        None if capacity is None else fits, found.get("retries", 0),
    )  # fmt: skip


def _room(device: DeviceNeed, chosen: str) -> tuple[int, float, bool]:
    """Order devices: those that fail, then by the share that is left, then the one that was asked about."""
    verdict = {False: 0, None: 1, True: 2}[device.fits]
    share = (device.capacity - device.peak) / device.capacity if device.capacity else 1.0
    return verdict, share, device.device != chosen


def _failure_sentence(error: dict[str, Any]) -> str:
    """Return how the dry run ended, where not at the cell's end."""
    where = f" on line {error['line']}" if error["line"] is not None else ""
    if error["refused"]:
        return f"the dry run stopped{where}: {error['text']}"
    text = f"{where}: {error['kind']}: {error['text']}"
    if "depends" in error:
        return f"the cell may fail{text} (it depends on {error['depends']}, whose values are assumed)"
    return f"the cell fails{text}"


def shortcoming(report: DryRunReport) -> str:
    """Return why a dry run does not show that its cell fits, as the end of a sentence; nothing where it does."""
    if report.fits:
        return ""
    if report.error is not None:
        return report.error
    if report.fits is False:
        return f"line {report.failure_line} runs out of memory" if report.failure_line else "it runs out of memory"
    if report.open_on:
        on = _places(report.open_on)
        return f"it depends on {on}" if report.complete else f"with other values of {on} it did not run to the end"
    if report.complete:
        return f"it needs {size(peak_of(report))}, and {overhead(report)}"
    return next(
        (passes_sentence(each) for each in report.passes if each.run != each.asked), "it did not run to the end"
    )


def _places(lines: Sequence[tuple[int, str]]) -> str:
    """Return the first lines with their code."""
    shown = [f"line {line} (`{code}`)" for line, code in lines[:MOST_PLACES]]
    rest = [count(len(lines) - MOST_PLACES, "more line")] if len(lines) > MOST_PLACES else []
    return " and ".join([*shown, *rest])


def overhead(report: DryRunReport) -> str:
    """Return what a device needs besides."""
    return f"CUDA itself takes {size_range(*report.overhead)} (an estimate)"


def passes_sentence(passes: Passes) -> str:
    """Return how far a loop was run."""
    of = "" if passes.asked is None else f" of {passes.asked:,}"
    were = "pass" if (passes.asked or passes.run) == 1 else "passes"
    return f"{passes.run:,}{of} {were} of {passes.place} were run"

"""What the account of a dry run means: its report, and the sentences in it."""

from __future__ import annotations

from typing import Any

from gpumagic.dryrun import engine, models, parcel
from gpumagic.dryrun.engine import Engine
from gpumagic.dryrun.report import DeviceNeed, DryRunPoint, DryRunReport, DryRunRow
from gpumagic.dryrun.targets import Target
from gpumagic.report.units import size


def report_of(told: dict[str, Any], chosen: Engine, parts: parcel.Parcel) -> DryRunReport:
    """Return the report of a worker's account."""
    target = chosen.target
    error, complete = told["error"], told["error"] is None and not told["is_open"] and not told.get("hangs")
    devices = tuple(
        _device(name, found, capacity, target.extra, complete)
        for name, found, capacity in zip(target.names, told["devices"], target.capacities, strict=True)
    )
    deciding = min(devices, key=lambda each: _room(each, target.names[target.chosen]))
    unknown = [*told["unknown"], *parts.notes, *target.unknown]
    if target.extra[1]:
        unknown.append(not_modelled(target.extra, chosen.name))
    return DryRunReport(
        device=deciding.device,
        peak={each.device: each.peak for each in devices},
        line=deciding.line,
        code=deciding.code,
        operator=deciding.operator,
        breakdown=deciding.breakdown,
        engine=chosen.name,
        fits=_together([each.fits for each in devices]),
        capacity=deciding.capacity,
        verdict=verdict_sentence(deciding, error),
        points=tuple(DryRunPoint(target.names[index], *found) for index, *found in told["timeline"]),
        assumed=(*told["assumed"], *parts.assumed),
        unknown=tuple(dict.fromkeys(unknown)),
        effects=tuple(told["effects"]),
        error=None if error is None else failure_sentence(error),
        devices=devices,
        lines=tuple(
            DryRunRow(target.names[each["device"]], each["line"], each["code"], each["peak"], each["after"])
            for each in sorted(told["lines"], key=lambda each: (each["line"], each["device"]))
        ),
        operators=told["operators"],
        seconds=told["seconds"],
        models=models.models_of(told["models"], deciding.capacity),
    )  # fmt: skip


def _device(
    name: str, found: dict[str, Any], capacity: int | None, extra: tuple[int, int], complete: bool
) -> DeviceNeed:
    at, failure = found["at"], found["failure"]
    return DeviceNeed(
        device=name, peak=found["peak"], reserved=found["reserved"], before=found["before"], after=found["after"],
        capacity=capacity, extra=extra, fits=_fits(found, capacity, extra, complete), line=at["line"],
        code=at["code"] or None, function=at["function"] or None, operator=at["operator"] or None,
        operator_bytes=at["nbytes"], failure_line=None if failure is None else failure["line"],
        breakdown=dict(sorted(found["breakdown"].items(), key=lambda item: -item[1])),
    )  # fmt: skip


def _fits(found: dict[str, Any], capacity: int | None, extra: tuple[int, int], complete: bool) -> bool | None:
    """Judge one device: a clear no, a clear yes only of a run that was seen to its end, and between them None."""
    if capacity is None:
        return None
    if not found["failed"]:
        return True if complete else None
    return False if extra[0] == extra[1] or found["peak"] + extra[0] > capacity else None


def _room(device: DeviceNeed, chosen: str) -> tuple[int, float, bool]:
    """Order devices: those that fail, then by the share that is left, then the one that was asked about."""
    verdict = {False: 0, None: 1, True: 2}[device.fits]
    share = (device.capacity - device.peak) / device.capacity if device.capacity else 1.0
    return verdict, share, device.device != chosen


def _together(fits: list[bool | None]) -> bool | None:
    if False in fits:
        return False
    return None if None in fits else True


def report_of_nothing(target: Target, sentence: str) -> DryRunReport:
    """Return the report where there is no account, with the sentence that says why."""
    return DryRunReport(
        device=target.names[target.chosen], peak={}, line=None, code=None, operator=None, breakdown={}, fits=None,
        capacity=target.capacities[target.chosen], verdict=f"{sentence[:1].upper()}{sentence[1:]}.", error=sentence,
    )  # fmt: skip


def verdict_sentence(device: DeviceNeed, error: dict[str, Any] | None) -> str:
    """Return one sentence with the figures of the device that decides."""
    need = f"{size(device.peak)} at its peak"
    if error is not None and device.fits is not False:
        return f"It cannot be told whether the cell fits: {failure_sentence(error)}. Up to there it needs {need}."
    if device.capacity is None:
        return f"The cell needs {need} on {device.device}."
    room = f"{size(device.capacity)} on {device.device}"
    if device.fits:
        return f"The cell fits: it needs {need}, of {room}."
    if device.fits is False:
        where = f", first in line {device.failure_line}" if device.failure_line is not None else ""
        why = (
            ": what is free lies in pieces, each too small" if device.peak + device.extra[1] <= device.capacity else ""
        )
        return f"The cell does not fit: it needs {need}, of {room}; it would run out of memory{where}{why}."
    return f"It cannot be told whether the cell fits: it needs {need}, of {room}, and what is not known matters."


def failure_sentence(error: dict[str, Any]) -> str:
    """Return how the dry run ended, where not at the cell's end."""
    where = f" in line {error['line']}" if error["line"] is not None else ""
    if error["refused"]:
        return f"the dry run stopped{where}: {error['text']}"
    return f"the cell fails{where} with {error['kind']}: {error['text']}"


def not_modelled(extra: tuple[int, int], name: str) -> str:
    """Return what an engine does not model, as a band."""
    what = "the context takes" if name == engine.CUDA else "the context and the workspaces of kernels take"
    return (
        f"{what} another {size(extra[0])} to {size(extra[1])}, an estimate; nothing of this was measured on a real GPU"
    )

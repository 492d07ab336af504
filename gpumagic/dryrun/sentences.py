"""The sentences of a rehearsal: whether the cell fits, what was assumed, what cannot be known."""

from __future__ import annotations

from typing import Any

from gpumagic.dryrun.report import DeviceForecast
from gpumagic.report.units import count, size


def verdict(device: DeviceForecast, error: dict[str, Any] | None) -> str:
    """Return one sentence with the figures of the device that decides."""
    need = f"{size(device.peak)} at its peak"
    if error is not None and device.fits is not False:
        return f"It cannot be told whether the cell fits: {failure(error)}. Up to there it needs {need}."
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


def failure(error: dict[str, Any]) -> str:
    """Return how the rehearsal ended, where not at the cell's end."""
    where = f" in line {error['line']}" if error["line"] is not None else ""
    if error["refused"]:
        return f"the rehearsal stopped{where}: {error['text']}"
    return f"the cell fails{where} with {error['kind']}: {error['text']}"


def cut(place: str, passes: int) -> str:
    """Return what a loop's end says that was cut short."""
    made = count(passes, "pass", "passes")
    return f"the loop in {place} was rehearsed for {made}, and further ones are taken to repeat them"


def missed(place: str) -> str:
    """Return what a branch says that was never taken."""
    return f"{place} was not reached in the passes rehearsed, and may need more"


def not_modelled(extra: tuple[int, int]) -> str:
    """Return what is not modelled, as a band."""
    return (
        f"the context and the workspaces of kernels take another {size(extra[0])} to {size(extra[1])}, an estimate; "
        "nothing of this was measured on a real GPU"
    )

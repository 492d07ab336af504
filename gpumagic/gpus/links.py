"""What goes over a card's links: slow questions, asked only on request.

The driver measures PCIe throughput over 20 ms and blocks for them. NVLink has counters instead; they are read
before and after, so that the time the other questions take is what the rate is measured over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from gpumagic.gpus import nvml
from gpumagic.gpus.nvml import Readings

FIELDS = {"nvlink_sent": 138, "nvlink_received": 139}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX: KiB so far
ALL_LINKS = 0xFFFFFFFF
MOST_LINKS = 36
SHORTEST = 0.005
"""Seconds: over less than that the difference of two counters is no rate."""
LEVELS = {
    0: "same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one CPU's PCIe",
    40: "one NUMA node",
    50: "across CPUs",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """A card's NVLink counters at one moment, in bytes, or the reason why there are none."""

    moment: float
    values: Mapping[str, int]
    reasons: Mapping[str, str]


def counters(binding: ModuleType, handle: Any) -> Counters:
    """Read how much went over all NVLinks of a card since its driver was loaded."""
    # One entry more than wanted: NVML is said to touch the one after the last in NVLink queries (nvitop's source).
    wanted = [(number, ALL_LINKS) for number in (*FIELDS.values(), FIELDS["nvlink_received"])]
    answers = Readings()
    fields = answers.take("fields", lambda: binding.nvmlDeviceGetFieldValues(handle, wanted))
    found = Readings()
    for position, name in enumerate(FIELDS):
        if fields is None:
            found.reasons[name] = answers.reasons["fields"]
        else:
            found.take(name, lambda field=fields[position]: _kib(binding, field) * 1024)  # type: ignore[misc]
    return Counters(time.monotonic(), found.values, found.reasons)


def traffic(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what goes over PCIe and NVLink, in bytes a second, and how many NVLinks are up."""
    before = counters(binding, handle)
    sent, received = 0, 1
    readings.take("pcie_sent", lambda: binding.nvmlDeviceGetPcieThroughput(handle, sent) * 1024)
    readings.take("pcie_received", lambda: binding.nvmlDeviceGetPcieThroughput(handle, received) * 1024)
    readings.take("nvlinks", lambda: _links_up(binding, handle))
    rates(readings, before, counters(binding, handle))


def rates(readings: Readings, before: Counters, after: Counters) -> None:
    """Add the rates between two readings of the counters."""
    seconds = after.moment - before.moment
    for name in FIELDS:
        if name not in before.values or name not in after.values:
            readings.reasons[name] = {**before.reasons, **after.reasons}[name]
        elif seconds < SHORTEST:
            readings.reasons[name] = "measured over too short a time"
        else:
            readings.values[name] = int((after.values[name] - before.values[name]) / seconds)


def topology(binding: ModuleType, handles: Sequence[Any], mine: int) -> dict[str, str]:
    """Return how a card reaches each other one, by NVML index; a pair that cannot be read is left out."""
    found = {}
    for index, handle in enumerate(handles):
        if index == mine or handle is None or handles[mine] is None:
            continue
        way = Readings().take("way", lambda: _way(binding, handles[mine], handle))  # noqa: B023
        if way is not None:
            found[str(index)] = way
    return found


def _way(binding: ModuleType, one: Any, other: Any) -> str:
    over_nvlink, fine = 2, 0
    if Readings().take("nvlink", lambda: int(binding.nvmlDeviceGetP2PStatus(one, other, over_nvlink))) == fine:
        return "NVLink"
    return LEVELS[int(binding.nvmlDeviceGetTopologyCommonAncestor(one, other))]


def _links_up(binding: ModuleType, handle: Any) -> int:
    up = int(binding.nvmlDeviceGetNvLinkState(handle, 0))  # refused where the card has no NVLink at all
    for link in range(1, MOST_LINKS):
        state, refusal = nvml.ask(partial(binding.nvmlDeviceGetNvLinkState, handle, link))
        if refusal:
            break  # it has no more of them
        up += int(state or 0)
    return up


def _kib(binding: ModuleType, field: Any) -> int:
    if field.nvmlReturn != 0:
        raise binding.NVMLError(field.nvmlReturn)
    return int(field.value.ullVal)

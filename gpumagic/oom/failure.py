"""What is read of a failure before the release, from the exception and its frames while they are whole."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from gpumagic.heap.holders import Identities
from gpumagic.memory import allocator, devices
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.oom import failing_code, recognition
from gpumagic.oom.recognition import OomEvent
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.watch import CellWatch, Refusal

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Figures = Mapping[str, AllocatorStats]
NOT_IN_USE = AllocatorStats(0, 0, 0)
"""The figures of a backend that was not in use yet."""


class Failure(NamedTuple):
    """What is known of a failure while its frames are whole; it holds none of them."""

    event: OomEvent
    facts: Facts
    """Those that the exception and its frames tell."""
    notes: list[str]


@dataclass(frozen=True, slots=True)
class GuardState:
    """The session of a guarded block, as it was when the block began."""

    namespace: Mapping[str, object]
    """The notebook's variables, not a copy."""
    bound: Identities
    """What they were bound to."""
    before: Figures
    shell: InteractiveShell | None = None
    outside: frozenset[int] = frozenset()
    """The ids of exceptions that were being handled already."""
    watch: CellWatch = field(default_factory=lambda: CellWatch({}))


def examine(error: Exception, state: GuardState) -> Failure | None:
    """Return what the error and its frames tell, or None if it is not out-of-memory."""
    figures = allocator.all_device_stats()
    event, capacities = recognise(error, state.outside, figures)
    if event is None:
        return None
    facts, notes = Facts(event.kind.name, device=_device(event, capacities)), []
    try:
        facts = failing_code.read_frames(facts, error, state.namespace, state.shell, state.outside)
    except Exception as fault:  # our own failure must not cost the user the release
        notes.append(f"The failing frames could not be read: {type(fault).__name__}: {fault}")
    is_pinning = facts.functions & {"pin_memory", "_pin_memory_loop"}
    # A copy back to the host that does not wait pins memory as well
    if event.kind.name == "cuda runtime" and (is_pinning or re.search("pin_memory|non_blocking", facts.code or "")):
        event = event._replace(kind=recognition.PINNING)
        facts = replace(facts, device=_device(event, capacities))
    kind, numbers, device = event.kind, event.numbers, facts.device or ""
    requested, at_failure = _at_the_instant(event, figures.get(device), state.watch.refusals.get(device))
    now = devices.available_memory() if kind.memory == "host" else capacities.get(device)
    cached = at_failure.reserved - at_failure.allocated if at_failure is not None else None
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    can_expand = "expandable_segments" in event.text or "max_split_size_mb" in event.text
    facts = replace(
        facts,
        kind=kind.name,
        memory=kind.memory,
        requested=requested,
        capacity=now[1] if now is not None else numbers.capacity,
        free=numbers.free if numbers.free is not None or now is None else now[0],
        unallocated=cached if numbers.unallocated is None else numbers.unallocated,
        before=state.before.get(device) or (NOT_IN_USE if at_failure is not None else None),
        at_failure=at_failure,
        from_allocator=kind.allocator,
        segments_can_expand=kind.allocator and can_expand and "expandable_segments:True" not in settings,
    )
    return Failure(event, facts, notes)


Capacities = Mapping[str, tuple[int, int] | None]
"""Free and total bytes of each device where memory was taken."""


def recognise(error: Exception, outside: Collection[int], figures: Figures) -> tuple[OomEvent | None, Capacities]:
    """Return what the error says of itself, None if it is not out-of-memory, and what the devices have."""
    capacities: dict[str, tuple[int, int] | None] = {}
    for device, each in figures.items():
        if each.reserved:  # asking the driver about an idle CUDA device would create a context on it
            try:
                capacities[device] = allocator.mem_get_info(device)
            except RuntimeError:  # a sticky CUDA error makes every further call fail
                capacities[device] = None
    free = min((each[0] for each in capacities.values() if each is not None), default=None)
    return recognition.recognise(error, free, outside), capacities


def _at_the_instant(
    event: OomEvent, now: AllocatorStats | None, refusal: Refusal | None
) -> tuple[int | None, AllocatorStats | None]:
    """Return what was asked for, and the figures as they were when the allocator gave up.

    What an unwinding frame kept on its stack, such as a comprehension's list, is freed before it can be read. The
    allocator's text has what was allocated, to two decimals; it is used where it is clearly more.
    """
    requested, allocated = event.numbers.requested, event.numbers.allocated
    if not event.kind.allocator:
        return requested, now
    if refusal is not None and abs((requested or 0) - refusal.requested) <= 0.01 * refusal.requested:
        return refusal
    if now is not None and allocated is not None and allocated > now.allocated * 1.01:
        now = now._replace(allocated=min(allocated, now.reserved))
    return requested, now


def _device(event: OomEvent, capacities: Capacities) -> str | None:
    """Return the device that failed: the one the text names, else the fullest in use of its type."""
    if event.kind.memory != "device":
        return "cpu"
    if event.device is not None:
        return event.device
    free = {
        device: now[0] if now is not None else 0
        for device, now in capacities.items()
        if event.kind.backend in (None, Device.parse(device).backend)
    }
    return min(free, key=lambda device: free[device], default=None)

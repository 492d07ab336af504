"""What is read of a failure before the release: by an observer of CUDA's allocator, then from the exception's frames.

The error's text rounds its figures, and those of the allocator are others once frames unwind. torch calls observers
before that, without the allocator's lock (`torch._C._cuda_attach_out_of_memory_observer`, since 2.0).
There is no way to detach one, so ours is attached once and listens only while a guard is open. It is attached only
once CUDA is up (before, old versions crash: pytorch#107330), and only to torch's own allocator: cudaMallocAsync calls
none. It is also called for failures that torch recovers from itself, such as cuDNN's trials, so a refusal counts only
if it is the error's. It has run on torch's CUDA build over `fakecuda`, not on a real GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from gpumagic.heap.holders import Identities
from gpumagic.memory import allocator, devices
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.oom import failing_code, recognition
from gpumagic.oom.outside import Outside
from gpumagic.oom.recognition import OomEvent
from gpumagic.oom.rules.facts import Facts

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Figures = Mapping[str, AllocatorStats]
NOT_IN_USE = AllocatorStats(0, 0, 0)
"""The figures of a backend that was not in use yet."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of a failure while its frames are whole; it holds none of them."""

    event: OomEvent
    facts: Facts
    """Those that the exception and its frames tell."""
    at_failure: Figures
    notes: tuple[str, ...] = ()


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
    effects: Outside = field(default_factory=lambda: Outside({}))
    """What the block does outside of its process."""


class Refusal(NamedTuple):
    """What torch's allocator said when it gave up: the bytes asked for, and the figures at that instant."""

    requested: int
    figures: AllocatorStats


def examine(error: Exception, state: GuardState, observed: Mapping[str, Refusal] | None = None) -> Failure | None:
    """Return what the error and its frames tell, or None if it is not out-of-memory.

    `observed` is the last refusal of each device that the `OomObserver` saw; the error's text has rounded figures.
    """
    at_failure = allocator.all_device_stats()
    event, capacities = recognise(error, state.outside, at_failure)
    if event is None:
        return None
    facts, notes = Facts(event.kind, device=_device(event, capacities)), []
    try:
        facts = failing_code.read_frames(facts, error, state.namespace, state.shell, state.outside)
    except Exception as fault:  # our own failure must not cost the user the release
        notes.append(f"The failing frames could not be read: {type(fault).__name__}: {fault}")
    is_pinning = facts.functions & {"pin_memory", "_pin_memory_loop"}
    # A copy back to the host that does not wait pins memory as well
    if event.kind == "cuda runtime" and (is_pinning or re.search("pin_memory|non_blocking", facts.code or "")):
        event = replace(event, kind=recognition.PINNED, certainty="probable", memory="host", device=None, backend=None)
        facts = replace(facts, device=_device(event, capacities))
    device = facts.device or ""
    refusal = (observed or {}).get(device)
    if refusal is not None and _is_of(event, refusal):
        event = replace(event, numbers=replace(event.numbers, requested=refusal.requested, exact=True))
        at_failure[device] = refusal.figures
    elif device in at_failure:
        at_failure[device] = _at_the_instant(event, at_failure[device])
    figures, numbers = at_failure.get(device), event.numbers
    now = devices.available_memory() if event.memory == "host" else capacities.get(device)
    cached = figures.reserved - figures.allocated if figures is not None else None
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    can_expand = "expandable_segments" in event.text or "max_split_size_mb" in event.text
    facts = replace(
        facts,
        kind=event.kind,
        memory=event.memory,
        requested=numbers.requested,
        capacity=now[1] if now is not None else numbers.capacity,
        free=numbers.free if numbers.free is not None or now is None else now[0],
        unallocated=cached if numbers.unallocated is None else numbers.unallocated,
        before=state.before.get(device) or (NOT_IN_USE if figures is not None else None),
        at_failure=figures,
        from_allocator=event.from_allocator,
        segments_can_expand=event.from_allocator and can_expand and "expandable_segments:True" not in settings,
    )
    return Failure(event, facts, at_failure, tuple(notes))


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


def _is_of(event: OomEvent, refusal: Refusal) -> bool:
    """Return whether the error is of this refusal: torch recovers from some by itself, and its text is rounded."""
    stated = event.numbers.requested
    return event.from_allocator and stated is not None and abs(stated - refusal.requested) <= 0.01 * refusal.requested


def _at_the_instant(event: OomEvent, now: AllocatorStats) -> AllocatorStats:
    """Return the figures as they were when the allocator gave up.

    What an unwinding frame kept on its stack, such as a comprehension's list, is freed before it can be read. The
    allocator's text has what was allocated, to two decimals; it is used where it is clearly more.
    """
    stated = event.numbers.allocated if event.from_allocator else None
    if stated is None or stated <= now.allocated * 1.01:
        return now
    return now._replace(allocated=min(stated, now.reserved))


def _device(event: OomEvent, capacities: Capacities) -> str | None:
    """Return the device that failed: the one the text names, else the fullest in use of its type."""
    if event.memory != "device":
        return "cpu"
    if event.device is not None:
        return event.device
    free = {
        device: now[0] if now is not None else 0
        for device, now in capacities.items()
        if event.backend in (None, Device.parse(device).backend)
    }
    return min(free, key=lambda device: free[device], default=None)


class OomObserver:
    """Notes what torch's CUDA allocator says at each failure, while it is open; `notify` must not allocate there."""

    def __init__(self) -> None:
        self.refusals: dict[str, Refusal] = {}
        """The last refusal of each device."""

    def open(self) -> None:
        """Start to listen, where there is such an allocator."""
        if _attach():
            open_observers.append(self)

    def close(self) -> None:
        """Stop listening."""
        if self in open_observers:
            open_observers.remove(self)

    def notify(self, device: str, requested: int) -> None:
        """Note a refusal; never raises, because torch would raise that in place of its own error."""
        self.refusals.pop(device, None)
        with contextlib.suppress(Exception):
            figures = allocator.device_stats(device)
            self.refusals |= {device: Refusal(requested, figures)} if figures is not None else {}


open_observers: list[OomObserver] = []
"""The innermost last."""
_attached: list[object] = []


def _attach() -> bool:
    """Attach the callback unless it is, and return whether it is now."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if not _attached and attach is not None and torch.cuda.memory.get_allocator_backend() == "native":
        attach(_observe)
        _attached.append(attach)
    return bool(_attached)


def _observe(device: int, requested: int, _total: int, _free: int) -> None:
    """Called by torch's allocator."""
    if open_observers:
        open_observers[-1].notify(f"cuda:{device}", requested)

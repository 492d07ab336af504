"""What is read of a failure before the release, while the frames of its exception are whole.

The exception is recognised once, with the devices' figures at that moment; then `stack.py` reads the frames, and what
ran out becomes an `Event`. No frame and no tensor outlives the call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gpumagic._compat import torch_frames
from gpumagic.advice.facts import Event, Frames, Kind, Memory
from gpumagic.heap.holders import Identities
from gpumagic.memory import allocator, devices
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.oom import recognition
from gpumagic.oom.recognition import Recognition
from gpumagic.oom.stack import read_frames
from gpumagic.oom.watch import CellWatch, Refusal
from gpumagic.source.frames import summary_line

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Figures = Mapping[str, AllocatorStats]
"""What torch's allocators say of each device."""
Capacities = Mapping[str, tuple[int, int] | None]
"""Free and total bytes of each device where memory was taken."""
NOT_IN_USE = AllocatorStats(0, 0, 0)
"""The figures of a backend that was not in use yet."""


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


class Recognized(NamedTuple):
    """An exception that was recognised as out-of-memory, and the devices at that moment."""

    recognition: Recognition
    figures: Figures
    capacities: Capacities
    error_id: int
    """Of the exception, which is not kept alive."""

    def is_of(self, error: BaseException) -> bool:
        """Return whether this was read of the exception; of its text, too, as ids are used again."""
        return self.error_id == id(error) and self.recognition.raised == summary_line(
            error
        )


class Failure(NamedTuple):
    """What is known of a failure before the release; it holds no frame."""

    event: Event
    frames: Frames
    notes: list[str]
    """What could not be read."""


def recognise(error: BaseException, outside: Collection[int]) -> Recognized | None:
    """Return what an error says and what the devices have, None if it is not out-of-memory.

    `outside` has the ids of exceptions that were being handled before, and are none of this one's.
    """
    if not isinstance(error, Exception):
        return None
    figures = allocator.all_device_stats()
    capacities: dict[str, tuple[int, int] | None] = {}
    for device, stats in figures.items():
        if (
            stats.reserved
        ):  # to ask the driver about an idle CUDA device would create a context
            try:
                capacities[device] = allocator.mem_get_info(device)
            except RuntimeError:  # a sticky CUDA error makes every further call fail
                capacities[device] = None
    free = [capacity[0] for capacity in capacities.values() if capacity is not None]
    recognised = recognition.recognise(error, min(free, default=None), outside)
    if recognised is None:
        return None
    return Recognized(recognised, figures, capacities, id(error))


def examine(error: BaseException, recognized: Recognized, state: GuardState) -> Failure:
    """Return what an out-of-memory error and its frames tell."""
    device = _device(recognized.recognition, recognized.capacities)
    notes = []
    try:
        frames = read_frames(
            error, device or "cpu", state.namespace, state.shell, state.outside
        )
    except Exception as fault:  # our own failure must not cost the user the release
        notes.append(
            f"The failing frames could not be read: {type(fault).__name__}: {fault}"
        )
        frames = Frames()
    return Failure(read_event(recognized, frames, state), frames, notes)


def read_event(recognized: Recognized, frames: Frames, state: GuardState) -> Event:
    """Return what ran out: what the error says, or the driver where it does not."""
    text = recognized.recognition
    if _was_pinning(text, frames):
        text = text._replace(signature=recognition.PINNING)
    signature = text.signature
    numbers = text.numbers
    device = _device(text, recognized.capacities)
    key = device or ""
    requested, at_failure = _request_and_stats(
        text, recognized.figures.get(key), state.watch.refusals.get(key)
    )
    if signature.memory is Memory.HOST:
        free_and_total = devices.available_memory()
    else:
        free_and_total = recognized.capacities.get(key)
    free, capacity = free_and_total or (None, numbers.capacity)
    unallocated = numbers.unallocated
    if unallocated is None and at_failure is not None:
        unallocated = at_failure.reserved - at_failure.allocated
    before = state.before.get(key)
    if before is None and at_failure is not None:
        before = NOT_IN_USE
    return Event(
        kind=signature.kind,
        certainty=signature.certainty,
        memory=signature.memory,
        device=device,
        names_device=text.device is not None,
        message=text.message,
        raised=text.raised,
        requested=requested,
        capacity=capacity,
        free=free if numbers.free is None else numbers.free,
        unallocated=unallocated,
        before=before,
        at_failure=at_failure,
        from_allocator=signature.is_allocator,
        segments_can_expand=signature.is_allocator and _segments_can_expand(text.text),
    )


def _device(text: Recognition, capacities: Capacities) -> str | None:
    """Return the device that failed: the one the text names, else the fullest in use of its type."""
    if text.signature.memory is not Memory.DEVICE:
        return "cpu"
    if text.device is not None:
        return text.device
    free: dict[str, int] = {}
    for device, capacity in capacities.items():
        if text.signature.backend in (None, Device.parse(device).backend):
            free[device] = capacity[0] if capacity is not None else 0
    return min(free, key=lambda device: free[device], default=None)


def _was_pinning(text: Recognition, frames: Frames) -> bool:
    """Return whether memory of the host was to be pinned; a copy back to it that does not wait does so as well."""
    if text.signature.kind is not Kind.CUDA_RUNTIME:
        return False
    if frames.functions & {"pin_memory", torch_frames.IN_PIN_THREAD}:
        return True
    return re.search("pin_memory|non_blocking", frames.code or "") is not None


def _request_and_stats(
    text: Recognition, now: AllocatorStats | None, refusal: Refusal | None
) -> tuple[int | None, AllocatorStats | None]:
    """Return what was asked for, and the figures as they were when the allocator gave up.

    What an unwinding frame kept on its stack, such as a comprehension's list, is freed before it can be read. The
    allocator's text has what was allocated, to two decimals; it is used where it is clearly more.
    """
    requested = text.numbers.requested
    if not text.signature.is_allocator:
        return requested, now
    if refusal is not None:
        difference = abs((requested or 0) - refusal.requested)
        if difference <= 0.01 * refusal.requested:
            return refusal
    allocated = text.numbers.allocated or 0
    if now is not None and allocated > now.allocated * 1.01:
        now = now._replace(allocated=min(allocated, now.reserved))
    return requested, now


def _segments_can_expand(text: str) -> bool:
    """Return whether an allocator, by the text of its error, knows expandable segments and does not use them."""
    if "expandable_segments" not in text and "max_split_size_mb" not in text:
        return False
    variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = "".join(os.environ.get(variable, "") for variable in variables)
    return "expandable_segments:True" not in settings

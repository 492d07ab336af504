"""What is read of a failure before the release, while its frames are whole."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gpumagic.memory import allocator, host
from gpumagic.memory.allocator import AllocatorFigures
from gpumagic.oom import failing_code, operation, ownership, recognition, shares
from gpumagic.oom.recognition import OomEvent
from gpumagic.oom.report import Instant, Share
from gpumagic.oom.rules.facts import Scene, Work

Figures = Mapping[str, AllocatorFigures]


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of a failure while its frames are whole. Holds none of them."""

    event: OomEvent
    device: str | None
    scene: Scene
    work: Work
    before: Figures
    at_failure: Figures
    capacity: int | None
    free: int | None
    notes: tuple[str, ...] = ()


def recognise(error: Exception, outside: Collection[int] = ()) -> OomEvent | None:
    """Return what the error says of itself, or None if it is not out-of-memory."""
    return _recognise(error, _rooms(allocator.all_figures()), outside)


def examine(
    error: Exception,
    namespace: Mapping[str, object],
    before: Figures,
    outside: Collection[int] = (),
    shell: object | None = None,
) -> Failure | None:
    """Return what the error and its frames tell, or None if it is not out-of-memory."""
    at_failure = allocator.all_figures()
    rooms = _rooms(at_failure)
    event = _recognise(error, rooms, outside)
    if event is None:
        return None
    device = _device(event, rooms)
    seen, work, notes = Scene(), Work(), []
    try:
        seen = failing_code.read_scene(error, namespace, outside)
        work = failing_code.read_failing_code(error, namespace, device or "cpu", shell, outside)
    except Exception as fault:  # our own failure must not cost the user the release
        notes.append(f"The failing frames could not be read: {type(fault).__name__}: {fault}")
    capacity, free = _capacity(event, rooms.get(device) if device else None)
    if device in at_failure:
        at_failure[device] = _at_the_instant(event, at_failure[device])
    return Failure(event, device, seen, work, before, at_failure, capacity, free, tuple(notes))


def instant(
    error: Exception,
    failure: Failure,
    namespace: Mapping[str, object],
    bound: Mapping[str, int],
    outside: Collection[int] = (),
    shell: object | None = None,
    seen: tuple[Share, ...] = (),
) -> Instant:
    """Return what the failing operation worked on and what occupied the device, as far as that can be looked at.

    Args:
        error: the exception, with its frames.
        failure: what is known of it.
        namespace: the notebook's variables.
        bound: ``{name: id of its value}`` when the cell began.
        outside: ids of exceptions that were being handled before.
        shell: the shell.
        seen: what the allocator's observer saw occupy the device, before anything was unwound.
    """
    found = Instant()
    if failure.device is None or "torch" not in sys.modules:
        return found
    with contextlib.suppress(Exception):  # our own failure must not cost the user the release
        found = operation.operation(error, failure.work, outside)
        figures = failure.at_failure.get(failure.device)
        found = replace(found, shares=seen or shares.shares(namespace, bound, failure.device, shell, figures))
    return found


def pinned(
    error: BaseException, namespace: Mapping[str, object], failure: Failure, outside: Collection[int] = ()
) -> int | None:
    """Return the bytes that the frames of an error that is to be kept hold; None where that cannot be looked at."""
    if failure.device is None or "torch" not in sys.modules:
        return None
    return ownership.in_frames(error, namespace, failure.device, outside)


def _rooms(figures: Figures) -> dict[str, tuple[int, int] | None]:
    """Return free and total bytes of each device where memory was taken.

    To ask the driver about an idle CUDA device would create a context on it.
    """
    return {device: _room(device) for device, each in figures.items() if each.reserved}


def _recognise(
    error: Exception, rooms: Mapping[str, tuple[int, int] | None], outside: Collection[int]
) -> OomEvent | None:
    free = min((room[0] for room in rooms.values() if room is not None), default=None)
    return recognition.recognise(error, free, outside)


def _at_the_instant(event: OomEvent, now: AllocatorFigures) -> AllocatorFigures:
    """Return the figures as they were when the allocator gave up.

    What an unwinding frame kept on its stack, a comprehension's list say, is freed before anybody can look. The
    allocator says in its text what was allocated, to two decimals; it decides where it says clearly more.
    """
    said = event.numbers.allocated if event.from_allocator else None
    if said is None or said <= now.allocated * 1.01:
        return now
    return replace(now, allocated=said)


def _room(device: str) -> tuple[int, int] | None:
    try:
        return allocator.capacity(device)
    except RuntimeError:  # a sticky CUDA error makes every further call fail
        return None


def _device(event: OomEvent, rooms: Mapping[str, tuple[int, int] | None]) -> str | None:
    """Return the device that failed: the one the text names, else the fullest in use of its type."""
    if event.memory != "device":
        return "cpu"
    if event.device is not None:
        return event.device
    free = {
        device: room[0] if room is not None else 0
        for device, room in rooms.items()
        if event.backend in (None, device.partition(":")[0])
    }
    return min(free, key=lambda device: free[device], default=None)


def _capacity(event: OomEvent, room: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return (capacity, free when it failed), the driver's capacity before the text's, the text's free before now's."""
    if event.memory == "host":
        room = host.memory()
    capacity = room[1] if room is not None else event.numbers.capacity
    free = event.numbers.free if event.numbers.free is not None else (room[0] if room is not None else None)
    return capacity, free

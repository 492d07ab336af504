"""What a cell creates where, which of its lines copy what, and what it uses that stays elsewhere.

Known by weak references and by the counter that torch raises with every change in place, so nothing is kept alive
and a new batch in an old one's place is not taken for it.

The log is filled by the handlers of `calls` while the cell runs; it keeps numbers and names, never a
tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorFigures
from gpumagic.memory.timeline import MemoryTimeline
from gpumagic.report import origin
from gpumagic.report.base import Holder
from gpumagic.source.call_sites import CallSites
from gpumagic.transfers.advice import suggestions
from gpumagic.transfers.report import Explanation, TransferReport, TransferRow

_MOST = 10_000
"""Items of a container that are looked at."""


def tensors_elsewhere(variables: Mapping[str, object], device: str) -> list[Holder]:
    """Return the variables that have bytes on a device other than ``device``."""
    found = []
    for name, value in variables.items():
        # A module's `parameters` is the user's code: what it raises must cost neither the report nor the cell's error.
        with contextlib.suppress(Exception):
            totals = _bytes_by_device(value)
            found += [
                Holder(name, at, nbytes) for at, nbytes in totals.items() if nbytes and at not in (device, "meta")
            ]
    return sorted(found, key=lambda holder: -holder.nbytes)


def _bytes_by_device(value: object) -> dict[str, int]:
    import torch

    totals: dict[str, int] = {}
    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    if issubclass(type(value), torch.Tensor):
        tensors = [value]
    elif issubclass(type(value), torch.nn.Module):
        tensors = _module_tensors(value)
    elif type(value) in (list, tuple, dict):
        tensors = _items(value)
    else:
        return totals
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            where = str(tensor.device)  # type: ignore[attr-defined]
            totals[where] = totals.get(where, 0) + tensor.numel() * tensor.element_size()  # type: ignore[attr-defined]
    return totals


def _module_tensors(module: object) -> list[object]:
    import torch

    assert isinstance(module, torch.nn.Module)
    return [*module.parameters(), *module.buffers()]


def _items(container: Any) -> list[object]:
    """Return the tensors in a container, each once; of a very long one, those at its beginning."""
    import torch

    parts = itertools.islice(container.values() if type(container) is dict else container, _MOST)
    return list({id(part): part for part in parts if issubclass(type(part), torch.Tensor)}.values())


PINNABLE = frozenset({"cuda", "xpu"})
"""Backends that copy from pinned memory without a detour, while the host goes on; MPS shares the host's memory."""
WORTH_ASKING = 1024**2
"""Bytes below which it is not asked whether memory is pinned: asking takes a call of the driver's."""
_MANY = 1000
"""Tensors remembered before those that are gone are looked for."""


@dataclass
class Moved:
    """The tensors that the lines of one run moved.

    Attributes:
        copies: ``{(variable, source): (the tensor, its copy)}``, weakly.
    """

    copies: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    _before: dict[tuple[object, int], tuple[Any, int]] = field(default_factory=dict)
    _full: int = _MANY

    def is_repeat(self, place: object, subject: object) -> bool:
        """Return whether the same tensor, unchanged, was moved at this place before."""
        import torch

        if not isinstance(subject, torch.Tensor) or subject.is_inference():  # those do not count their changes
            return False
        key, version = (place, id(subject)), subject._version
        known = self._before.get(key)
        if known is not None and known[0]() is subject:
            self._before[key] = known[0], version
            return bool(known[1] == version)
        if len(self._before) > self._full:
            self._before = {each: kept for each, kept in self._before.items() if kept[0]() is not None}
            self._full = 2 * len(self._before) + _MANY
        self._before[key] = weakref.ref(subject), version
        return False

    def note_copy(self, name: str | None, source: str, subject: object, result: object) -> None:
        """Remember, weakly, a variable's tensor and its copy."""
        import torch

        if name is not None and isinstance(subject, torch.Tensor) and isinstance(result, torch.Tensor):
            self.copies[name, source] = weakref.ref(subject), weakref.ref(result)

    def still_both(self, variables: Mapping[str, object]) -> tuple[str, ...]:
        """Return the variables that are still bound to what was moved while its copy is alive, too."""
        return tuple(
            name
            for (name, _), (subject, result) in self.copies.items()
            if result() is not None and subject() is not None and variables.get(name) is subject()
        )


def is_pageable(subject: object, target: str, nbytes: int) -> bool | None:
    """Return whether a copy came from memory that is not pinned; None where that makes no difference, or little."""
    import torch

    if target.partition(":")[0] not in PINNABLE or nbytes < WORTH_ASKING or not isinstance(subject, torch.Tensor):
        return None
    return subject.device.type == "cpu" and not subject.is_pinned()


SCOPE = (
    "Counts what lines ask for, in threads that work for them and in backward through these moves too; what operators "
    "copy by themselves is seen with --trace."
)
UNDER_A_MODE = (
    "Ran under a function mode, which is slower for small operators, because {}. Counts what lines of this thread ask "
    "for, in backward through these moves too; what operators copy by themselves is seen with --trace."
)
TRACE = "--trace"
"""Why a traced run has a function mode, where there is no other reason."""
TRACED = "Counts what this thread and its backward passes copy, and what lines ask for in other threads."
TRACED_ALONE = "Counts what this thread and its backward passes copy; what other threads move is not seen, because {}."


def is_host(device: str) -> bool:
    """Return whether a device's memory is the host's own."""
    return device.partition(":")[0] == "cpu"


def direction(source: str, target: str) -> str:
    """Return ``"host-to-device"``, ``"device-to-host"`` or ``"device-to-device"``."""
    if is_host(source):
        return "host-to-device"
    return "device-to-host" if is_host(target) else "device-to-device"


@dataclass(slots=True)
class Made:
    """New tensors on one device."""

    count: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _Sum:
    count: int = 0
    nbytes: int = 0
    seconds: float | None = 0.0
    """None where the time of one of them is not known."""
    repeats: int = 0
    pageable: int | None = None

    def add(self, other: _Sum) -> None:
        """Add another sum."""
        self.count += other.count
        self.nbytes += other.nbytes
        self.seconds = None if self.seconds is None or other.seconds is None else self.seconds + other.seconds
        self.repeats += other.repeats
        if other.pageable is not None:
            self.pageable = (self.pageable or 0) + other.pageable


@dataclass
class TransferLog:
    """The running sums of one cell."""

    sites: CallSites
    is_traced: bool = False
    is_bystanders: bool = False
    """Whether a thread fills it that does not work for the cell, so that only its moves are told."""
    created: dict[object, Made] = field(default_factory=dict)
    moves: dict[tuple[object, ...], _Sum] = field(default_factory=dict)
    syncs: Counter[int] = field(default_factory=Counter)
    moved: Moved = field(default_factory=Moved)

    def add_created(self, device: object, nbytes: int) -> Made:
        """Count one new tensor, and return the sum it counts in; the device's name is only made for the report."""
        total = self.created.get(device)
        if total is None:
            total = self.created[device] = Made()
        total.count += 1
        total.nbytes += nbytes
        return total

    def add_move(
        self,
        source: str,
        target: str,
        nbytes: int,
        seconds: float | None,
        cause: str,
        subject: object,
        result: object = None,
    ) -> None:
        """Count one move at the line that is running now."""
        __tracebackhide__ = True  # Ctrl-C may come here
        site = self.sites.find(subject)
        cause = site.module_call or cause
        key = (direction(source, target), source, target, site.line, site.code, site.name, cause)
        repeats = 0
        if site.module_call is None:  # torch cannot swap a module's tensors while there are weak references to them
            repeats = int(self.moved.is_repeat(key, subject))
            self.moved.note_copy(site.name, source, subject, result)
        pageable = is_pageable(subject, target, nbytes)
        one = _Sum(1, nbytes, seconds, repeats, None if pageable is None else nbytes * pageable)
        self.moves.setdefault(key, _Sum()).add(one)

    def add_sync(self) -> None:
        """Count one operation that made the host wait for the device, at the line that is running now."""
        line = self.sites.find().line
        if line is not None:
            self.syncs[line] += 1

    def absorb(self, other: TransferLog) -> None:
        """Add what another thread's log has counted."""
        for device, made in other.created.items() if not other.is_bystanders else ():
            total = self.created.setdefault(device, Made())
            total.count += made.count
            total.nbytes += made.nbytes
        for key, moved in other.moves.items():
            self.moves.setdefault(key, _Sum()).add(moved)
        self.syncs.update(other.syncs)
        self.moved.copies.update(other.moved.copies)

    def created_by_device(self) -> dict[str, tuple[int, int]]:
        """Return the count and the bytes of new tensors by device."""
        named = {str(device): (total.count, total.nbytes) for device, total in self.created.items()}
        return dict(sorted(named.items()))

    def rows(self) -> tuple[TransferRow, ...]:
        """Return the moves, most bytes first."""
        rows = [
            TransferRow(
                way, source, target, total.count, total.nbytes, total.seconds, line, code, name, cause,  # type: ignore[arg-type]
                total.repeats, total.pageable,
            )
            for (way, source, target, line, code, name, cause), total in self.moves.items()
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda row: -row.nbytes))


class Watch:
    """The clock and the allocators' figures from the start of a cell to its end."""

    def __init__(self) -> None:
        self.before = allocator.all_figures()
        self._start = time.perf_counter()
        self._elapsed: float | None = None
        self.after: dict[str, AllocatorFigures] = {}

    def stop(self) -> None:
        """Take the closing figures."""
        self._elapsed = time.perf_counter() - self._start
        self.after = allocator.all_figures()

    @property
    def elapsed(self) -> float:
        """Seconds from start to stop."""
        return time.perf_counter() - self._start if self._elapsed is None else self._elapsed

    def peak(self) -> dict[str, int]:
        """Return the cell's peak by device, where it can be known without resetting the user's counter.

        The counter is the highest since the process began, so it tells this cell's peak only if the cell
        raised it.
        """
        earlier = {device: figures.peak or 0 for device, figures in self.before.items()}
        return {
            device: now.peak
            for device, now in self.after.items()
            if now.peak is not None and now.peak > earlier.get(device, 0)
        }


def report(
    device: str,
    log: TransferLog,
    watch: Watch,
    variables: Mapping[str, object],
    error: BaseException | None,
    before: tuple[TransferRow, ...] = (),
    explanation: Explanation | None = None,
    lines: tuple[tuple[int, str], ...] = (),
    hindrance: str | None = None,
    timeline: MemoryTimeline | None = None,
) -> TransferReport:
    """Return the report of one finished cell.

    Args:
        device: the default device of the cell.
        log: what was recorded.
        watch: the stopped watch of the cell.
        variables: what the cell names; those that live on another device are told.
        error: what ended the cell, if anything did; only the name of its type is kept.
        before: what was moved before the cell began, because it was asked for.
        explanation: what the error means, if it is about devices.
        lines: the cell's or the block's own, numbered.
        hindrance: why it ran under a function mode, if it did.
        timeline: what was allocated in its course.
    """
    moves, syncs = (*before, *log.rows()), dict(sorted(log.syncs.items()))
    return TransferReport(
        device=device,
        moves=moves,
        created=log.created_by_device(),
        syncs=syncs,
        peak=watch.peak(),
        elapsed=watch.elapsed,
        elsewhere=tuple(tensors_elsewhere(variables, device)),
        advice=suggestions(moves, syncs, log.moved.still_both(variables), lines),
        error=type(error).__name__ if error is not None else None,
        explanation=explanation,
        lines=lines,
        notes=(_scope(log, hindrance),),
        origin=origin.here(),
        timeline=timeline,
    )


def _scope(log: TransferLog, hindrance: str | None) -> str:
    """Return what the report counts, and what it cannot see."""
    if log.is_traced:
        return TRACED if hindrance in (None, TRACE) else TRACED_ALONE.format(hindrance)
    return SCOPE if hindrance is None else UNDER_A_MODE.format(hindrance)

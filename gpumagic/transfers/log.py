"""What a cell creates, transfers and waits for, by line; what it uses elsewhere; and what to change about it.

The handlers of `calls` fill a log while the cell runs. It keeps numbers and names, and tensors only by weak reference.
A tensor is recognised by the counter that torch increments with every change in place, so a new batch in the place of
an old one is not mistaken for it. Each rule of the advice uses only what was counted.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumagic.report.base import Holder
from gpumagic.report.units import count, size
from gpumagic.source import cell_code
from gpumagic.source.cell_code import LoopCode
from gpumagic.source.frames import CallSites
from gpumagic.transfers.report import TransferRow

PINNABLE = frozenset({"cuda", "xpu"})
"""Backends that copy from pinned memory directly, while the host continues; MPS shares the host's memory."""
MIN_PAGEABLE_BYTES = 1024**2
"""Bytes below which memory is not checked for being pinned, which takes a driver call."""
_MANY = 1000
"""Tensors kept before those that are gone are removed."""
_MAX_ITEMS = 10_000
"""Items of a container that are read."""
MIN_REPEATS = 2
"""Times a line must have repeated a transfer to be reported."""
MANY_SYNCS = 100
"""Syncs by one line from which they are reported."""
MIN_PINNED_BYTES = 16 * 1024**2
"""Bytes from pageable memory from which pinning pays."""
MIN_SECOND_COPY_BYTES = 1024**2
"""Bytes from which a second copy is reported."""

MASK = "mask"
"""The cause of a read of how many elements a mask has, where it is an index."""
SIZE_READS = frozenset({".nonzero", ".argwhere", ".where", ".masked_select", ".unique", ".unique_consecutive", MASK})
"""Causes of reads of how many elements a result has."""
_VALUE_READS = frozenset(
    {".item", ".tolist", "float()", "int()", "complex()", "index()", "bool()", "print", "allclose"}
)
_READS = SIZE_READS | _VALUE_READS


def is_host(device: str) -> bool:
    """Return whether a device's memory is the host's own."""
    return device.partition(":")[0] == "cpu"


def direction(source: str, target: str) -> str:
    """Return ``"host-to-device"``, ``"device-to-host"`` or ``"device-to-device"``."""
    if is_host(source):
        return "host-to-device"
    return "device-to-host" if is_host(target) else "device-to-device"


@dataclass(slots=True)
class CreatedSum:
    """New tensors on one device."""

    count: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _TransferSum:
    count: int = 0
    nbytes: int = 0
    seconds: float | None = 0.0
    """None where one of them was not measured."""
    repeats: int = 0
    pageable: int | None = None

    def add(self, other: _TransferSum) -> None:
        self.count += other.count
        self.nbytes += other.nbytes
        self.seconds = None if self.seconds is None or other.seconds is None else self.seconds + other.seconds
        self.repeats += other.repeats
        if other.pageable is not None:
            self.pageable = (self.pageable or 0) + other.pageable


@dataclass
class TransferHistory:
    """The tensors that the lines of one run transferred, by weak references."""

    copies: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    """``{(variable, source): (tensor, copy)}``."""
    _before: dict[tuple[object, int], tuple[Any, int]] = field(default_factory=dict)
    _full: int = _MANY

    def is_repeat(self, place: object, subject: object) -> bool:
        """Return whether the same tensor, unchanged, was transferred at this place before."""
        import torch

        if not isinstance(subject, torch.Tensor) or subject.is_inference():  # these do not count their changes
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
        import torch

        if name is not None and isinstance(subject, torch.Tensor) and isinstance(result, torch.Tensor):
            self.copies[name, source] = weakref.ref(subject), weakref.ref(result)

    def still_on_both(self, variables: Mapping[str, object]) -> tuple[str, ...]:
        """Return the variables that are still bound to what was transferred while its copy is alive too."""
        return tuple(
            name
            for (name, _), (subject, result) in self.copies.items()
            if result() is not None and subject() is not None and variables.get(name) is subject()
        )


@dataclass
class TransferLog:
    """The running sums of one cell."""

    sites: CallSites
    is_unrelated: bool = False
    """Whether it is filled by a thread that does not work for the cell, so that only its transfers are reported."""
    created: dict[object, CreatedSum] = field(default_factory=dict)
    moves: dict[tuple[object, ...], _TransferSum] = field(default_factory=dict)
    syncs: Counter[int] = field(default_factory=Counter)
    history: TransferHistory = field(default_factory=TransferHistory)

    def add_created(self, device: object, nbytes: int) -> CreatedSum:
        """Count one new tensor, and return the sum for its device, which is named only in the report."""
        total = self.created.get(device)
        if total is None:
            total = self.created[device] = CreatedSum()
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
        *,
        waits: bool = False,
    ) -> None:
        """Count one transfer at the line that is running now, and a sync if the host waits for it."""
        __tracebackhide__ = True  # Ctrl-C may come here
        site = self.sites.find(subject)
        cause = site.module_call or cause
        key = (direction(source, target), source, target, site.line, site.code, site.name, cause)
        repeats = 0
        if site.module_call is None:  # torch cannot swap a module's tensors while there are weak references to them
            repeats = int(self.history.is_repeat(key, subject))
            self.history.note_copy(site.name, source, subject, result)
        pageable = is_pageable(subject, target, nbytes)
        one = _TransferSum(1, nbytes, seconds, repeats, None if pageable is None else nbytes * pageable)
        self.moves.setdefault(key, _TransferSum()).add(one)
        if waits and site.line is not None:
            self.syncs[site.line] += 1

    def add_sync(self) -> None:
        """Count one operation that made the host wait for the device, at the line that is running now."""
        line = self.sites.find().line
        if line is not None:
            self.syncs[line] += 1

    def absorb(self, other: TransferLog) -> None:
        """Add what another thread's log counted."""
        for device, made in other.created.items() if not other.is_unrelated else ():
            total = self.created.setdefault(device, CreatedSum())
            total.count += made.count
            total.nbytes += made.nbytes
        for key, moved in other.moves.items():
            self.moves.setdefault(key, _TransferSum()).add(moved)
        self.syncs.update(other.syncs)
        self.history.copies.update(other.history.copies)

    def created_by_device(self) -> dict[str, tuple[int, int]]:
        """Return the count and the bytes of new tensors by device."""
        named = {str(device): (total.count, total.nbytes) for device, total in self.created.items()}
        return dict(sorted(named.items()))

    def rows(self) -> tuple[TransferRow, ...]:
        """Return the transfers, most bytes first."""
        rows = [
            TransferRow(
                way, source, target, total.count, total.nbytes, total.seconds, line, code, name, cause,  # type: ignore[arg-type]
                total.repeats, total.pageable,
            )
            for (way, source, target, line, code, name, cause), total in self.moves.items()
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda row: -row.nbytes))


def is_pageable(subject: object, target: str, nbytes: int) -> bool | None:
    """Return whether a copy came from memory that is not pinned; None where that makes little difference."""
    import torch

    if target.partition(":")[0] not in PINNABLE or nbytes < MIN_PAGEABLE_BYTES or not isinstance(subject, torch.Tensor):
        return None
    return subject.device.type == "cpu" and not subject.is_pinned()


def tensors_elsewhere(variables: Mapping[str, object], device: str) -> list[Holder]:
    """Return the variables that have bytes on a device other than ``device``, most bytes first."""
    found = []
    for name, value in variables.items():
        # A module's `parameters` is the user's code: what it raises must hide neither the report nor the cell's error.
        with contextlib.suppress(Exception):
            totals = _bytes_by_device(value)
            found += [
                Holder(name, at, nbytes) for at, nbytes in totals.items() if nbytes and at not in (device, "meta")
            ]
    return sorted(found, key=lambda holder: -holder.nbytes)


def _bytes_by_device(value: Any) -> Counter[str]:
    import torch

    totals: Counter[str] = Counter()
    tensors: list[Any] = []
    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    if issubclass(type(value), torch.Tensor):
        tensors = [value]
    elif issubclass(type(value), torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    elif type(value) in (list, tuple, dict):
        tensors = _items(value)
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            totals[str(tensor.device)] += tensor.numel() * tensor.element_size()
    return totals


def _items(container: Any) -> list[Any]:
    """Return the tensors in a container, each once; of a very long one, those at the start."""
    import torch

    parts = itertools.islice(container.values() if type(container) is dict else container, _MAX_ITEMS)
    return list({id(part): part for part in parts if issubclass(type(part), torch.Tensor)}.values())


def suggestions(
    moves: Sequence[TransferRow],
    syncs: Mapping[int, int],
    both: Collection[str] = (),
    lines: tuple[tuple[int, str], ...] = (),
) -> tuple[str, ...]:
    """Return one sentence for each change that the counts justify.

    ``syncs`` is ``{line: count}``; ``both`` are variables whose tensor is alive along with its copy on the device.
    """
    code = cell_code.read_loops(lines) if moves or syncs else LoopCode()
    return (
        *(_hoist(row, code) for row in moves if _is_repeated(row)),
        *_waits(moves, syncs, code),
        *_created(moves, code),
        *(_pin(row) for row in moves if _is_pageable_stream(row)),
        *(_rebind(row) for row in moves if _is_left_behind(row, both)),
    )


def _is_repeated(row: TransferRow) -> bool:
    return row.repeats >= MIN_REPEATS and row.cause not in _READS and row.line is not None


def _hoist(row: TransferRow, code: LoopCode) -> str:
    each, what = row.nbytes // row.count, row.name or "it"
    if row.repeats < row.count - 1:
        again = f"{count(row.repeats, 'move')}, {size(each * row.repeats)}"
        return f"line {row.line} moved again what it had moved before ({again}): keep the copies of the first time"
    where = "before the loop" if row.line in code.loops else "and keep the copy"
    return f"line {row.line} moved the same {size(each)} {row.count:,} times: move {what} once, {where}"


def _waits(moves: Sequence[TransferRow], syncs: Mapping[int, int], code: LoopCode) -> Iterator[str]:
    for line, waits in syncs.items():
        # A copy from the host waits too, and has advice of its own.
        waits -= sum(row.count for row in moves if row.line == line and row.direction == "host-to-device")  # noqa: PLW2901
        if waits < MANY_SYNCS:
            continue
        causes = {row.cause for row in moves if row.line == line and row.cause in _READS and row.count >= MANY_SYNCS}
        loop = " in the loop" if line in code.loops else ""
        if causes == {"bool()"}:
            yield f"line {line}: a condition{loop} was read from the device {waits:,} times, and each read waits"
        elif causes & SIZE_READS:
            what = min(causes & SIZE_READS)
            call = "a mask" if what == MASK else f"{what}()"
            yield (
                f"line {line}: {call}{loop} made {waits:,} syncs, each to learn how many elements there are: "
                "torch.where(mask, a, b) keeps the shape and makes none"
            )
        elif causes and "print" not in causes:
            call = min(causes) + ("()" if min(causes).startswith(".") else "")
            yield f"line {line}: {call}{loop} made {waits:,} syncs: accumulate on the device and read once at the end"
        else:
            yield f"line {line} made the host wait {waits:,} times{loop}"


def _created(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[str]:
    for creation in code.creations:
        for row in moves:
            at_once = creation.name is None and row.name is None
            named = row.name == creation.name and creation.name is not None
            if row.line != creation.moved or row.cause in _READS or row.direction == "device-to-host":
                continue
            if named:
                first = f"line {creation.created} created {row.name} on {row.source} and line {row.line} moved it"
                yield f'{first}: create it with device="{row.target}"'
            elif at_once:
                yield f'line {row.line} created on {row.source} what it moved: create it with device="{row.target}"'


def _is_pageable_stream(row: TransferRow) -> bool:
    """Return whether a line transfers new data each time, as a loop over batches does; pinning pays only then."""
    return (
        row.line is not None and (row.pageable or 0) >= MIN_PINNED_BYTES and row.count - row.repeats >= MIN_REPEATS + 1
    )


def _pin(row: TransferRow) -> str:
    what = f"line {row.line} copied {size(row.pageable)} in {row.count:,} moves from pageable memory"
    return f"{what}: DataLoader(..., pin_memory=True) and .to(..., non_blocking=True) let the host go on meanwhile"


def _is_left_behind(row: TransferRow, both: Collection[str]) -> bool:
    is_one = row.count - row.repeats == 1 and not _is_repeated(row)
    is_move = row.direction != "device-to-host" and not row.cause.startswith("Module.") and row.cause not in _READS
    return is_one and is_move and row.name in both and row.nbytes >= MIN_SECOND_COPY_BYTES


def _rebind(row: TransferRow) -> str:
    kept = f"{row.name} is still on {row.source}, {size(row.nbytes)}, beside its copy on {row.target}"
    return f"{kept}: rebind the name, {row.name} = {row.name}.to(...), to keep only that"

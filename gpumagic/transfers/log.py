"""What a cell creates, transfers and waits for, by line, and what it uses elsewhere.

A log is filled while the cell runs. It keeps numbers and names, and no tensor.
A tensor is recognised by the counter that torch increments with every change in place, so a new batch in the place of
an old one is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumagic._compat import torch_private
from gpumagic.backends import backend_named
from gpumagic.heap import kinds, storages
from gpumagic.heap.storages import nbytes_of
from gpumagic.memory.devices import Device
from gpumagic.report.base import Holder
from gpumagic.report.units import LARGE
from gpumagic.transfers.report import TransferRow
from gpumagic.transfers.sites import CallSites

_MANY = 1000
"""Tensors kept before those that are gone are removed."""
_MAX_ITEMS = 10_000
"""Items of a container that are read."""


def direction(source: str, target: str) -> str:
    """Return ``"host-to-device"``, ``"device-to-host"`` or ``"device-to-device"``."""
    if source.startswith("cpu"):
        return "host-to-device"
    return "device-to-host" if target.startswith("cpu") else "device-to-device"


@dataclass(slots=True)
class _TransferSum:
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waits: int = 0
    repeats: int = 0
    pageable: int | None = None

    def add(self, other: _TransferSum) -> None:
        self.count += other.count
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.waits += other.waits
        self.repeats += other.repeats
        if other.pageable is not None:
            self.pageable = (self.pageable or 0) + other.pageable


@dataclass
class TransferHistory:
    """What the lines of one run transferred; it keeps no tensor alive."""

    _before: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Versions by place and view; a storage is known by its number, which no other gets."""
    _full: int = _MANY
    _tensor: Any = field(default_factory=lambda: sys.modules["torch"].Tensor)
    _version_of: Callable[[Any], int | None] = field(default_factory=torch_private.VERSION.get)

    def is_repeat(self, place: int, subject: Any) -> bool:
        """Return whether the same part of a storage, unchanged, was transferred at this place before."""
        if (
            not isinstance(subject, self._tensor) or subject.is_inference()
        ):  # in inference mode no changes are counted
            return False
        try:
            number = storages.number_of(subject.untyped_storage())
            key = (place, number, subject.storage_offset(), subject.shape)
            version = self._version_of(subject)
        except (NotImplementedError, RuntimeError, ValueError):
            return False  # it has no storage
        if version is None:
            return False
        known = self._before.get(key)
        self._before[key] = version
        if known is None and len(self._before) > self._full:
            storages.forget_expired()
            alive = storages.numbers_in_use()
            self._before = {each: kept for each, kept in self._before.items() if each[1] in alive}
            self._full = 2 * len(self._before) + _MANY
        return known is not None and bool(known == version)


MoveKey = tuple[str, str, str, "int | None", "str | None", "str | None", str]
"""The direction of transfers, their source and target, their line, its code, the variable and the cause."""


@dataclass
class TransferLog:
    """The running sums of one cell."""

    sites: CallSites
    created: dict[object, list[int]] = field(default_factory=dict)
    """The count and the bytes of new tensors by device, which is named only in the report."""
    moves: dict[MoveKey, _TransferSum] = field(default_factory=dict)
    waits: Counter[int] = field(default_factory=Counter)
    """By line, the waits that copy nothing."""
    history: TransferHistory = field(default_factory=TransferHistory)

    def add_created(self, device: object, nbytes: int, count: int = 1) -> None:
        """Count new tensors."""
        total = self.created.get(device) or self.created.setdefault(device, [0, 0])
        total[0] += count
        total[1] += nbytes

    def add_move(
        self,
        asks: str,
        source: Any,
        target: Any,
        nbytes: int,
        seconds: float,
        waits: bool,
        found: object,
        is_copy: bool = False,
    ) -> None:
        """Count one transfer at the line that is running now, and a sync if the host waits for it.

        It is called ``asks`` where the line does not say it; torch was given ``found`` to copy, or to read.
        """
        __tracebackhide__ = True  # Ctrl-C may come here
        site, subject, name = self.sites.find(asks, found)
        total = site.sums.get((source, target, name))
        if total is None:
            way, ends = direction(str(source), str(target)), (str(source), str(target))
            total = self.moves.setdefault(
                (way, *ends, site.line, site.code, name, site.cause), _TransferSum()
            )
            site.sums[source, target, name] = total
        total.count += 1
        total.nbytes += nbytes
        total.seconds += seconds
        total.waits += waits
        if is_copy:
            total.repeats += self.history.is_repeat(id(total), subject)
        if nbytes >= LARGE:  # to ask whether memory is pinned takes a driver call
            pageable = is_pageable(subject, str(target))
            total.pageable = (
                total.pageable if pageable is None else (total.pageable or 0) + nbytes * pageable
            )

    def add_sync(self) -> None:
        """Count one operation that made the host wait for the device, at the line that is running now."""
        line = self.sites.line()
        if line is not None:
            self.waits[line] += 1

    def syncs(self) -> dict[int, int]:
        """Return how often the host waited at each line."""
        found = self.waits.copy()
        for (_, _, _, line, *_), total in self.moves.items():
            if isinstance(line, int) and total.waits:
                found[line] += total.waits
        return dict(sorted(found.items()))

    def absorb(self, other: TransferLog) -> None:
        """Add what another thread's log counted, which may go on counting."""
        for device, (count, nbytes) in list(other.created.items()):
            self.add_created(device, nbytes, count)
        for key, moved in list(other.moves.items()):
            self.moves.setdefault(key, _TransferSum()).add(moved)
        self.waits.update(other.waits.copy())

    def rows(self) -> tuple[TransferRow, ...]:
        """Return the transfers, most bytes first."""
        rows: list[TransferRow] = []
        for key, total in self.moves.items():
            way, source, target, line, code, name, cause = key
            row = TransferRow(
                direction=way,
                source=source,
                target=target,
                count=total.count,
                nbytes=total.nbytes,
                seconds=total.seconds,
                line=line,
                code=code,
                name=name,
                cause=cause,
                repeats=total.repeats,
                pageable=total.pageable,
            )
            rows.append(row)
        return tuple(sorted(rows, key=lambda row: -row.nbytes))


def is_pageable(subject: object, target: str) -> bool | None:
    """Return whether a copy came from memory that is not pinned; None where that makes little difference."""
    import torch

    backend = backend_named(Device.parse(target).backend)
    if not backend.copies_pinned or not isinstance(subject, torch.Tensor):
        return None
    return subject.device.type == "cpu" and not subject.is_pinned()


def tensors_elsewhere(variables: Mapping[str, object], device: str) -> list[Holder]:
    """Return the variables that have bytes on a device other than ``device``, most bytes first."""
    found = []
    for name, value in variables.items():
        if (kind := kind_of(value)) in ("tensor", "module", "container"):
            with contextlib.suppress(Exception):  # of a tensor of a class of its own
                totals = bytes_by_device(value, kind)
                found += [
                    Holder(name, at, nbytes)
                    for at, nbytes in totals.items()
                    if nbytes and at not in (device, "meta")
                ]
    return sorted(found, key=lambda holder: -holder.nbytes)


def kind_of(value: Any) -> Any:
    """Return what a value is that has a device, or whose parts may have one; None for anything else."""
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    types: dict[str, type | tuple[type, ...]] = {
        "tensor": torch.Tensor,
        "module": torch.nn.Module,
        "optimizer": torch.optim.Optimizer,
        "generator": torch.Generator,
        "container": (list, tuple, dict),
    }
    return next((name for name, kind in types.items() if issubclass(type(value), kind)), None)


def bytes_by_device(value: Any, kind: str) -> Counter[str]:
    """Return the bytes by device of the tensors that a value of a kind holds, each tensor once."""
    totals: Counter[str] = Counter()
    if kind == "generator":
        totals[str(value.device)] = 0
        return totals
    with torch_private.DISABLE_TORCH_FUNCTION.get()():
        for tensor in {id(each): each for each in tensors_in(value, kind)}.values():
            totals[str(tensor.device)] += nbytes_of(tensor)
    return totals


def tensors_in(value: Any, kind: str) -> Iterator[Any]:
    """Yield the tensors that a value of a kind holds, but for those that have no memory yet."""
    import torch

    if kind == "tensor":
        yield from () if torch.nn.parameter.is_lazy(value) else (value,)
    elif kind == "module":
        for _, part in kinds.modules_in(value):
            kept = [
                *kinds.registered(part, torch_private.PARAMETERS),
                *kinds.registered(part, torch_private.BUFFERS),
            ]
            yield from (each for _, each in kept if not torch.nn.parameter.is_lazy(each))
    elif kind == "optimizer":
        value = kinds.unwrapped(value)
        yield from (each for group in kinds.parameter_groups(value) for each in group["params"])
        kept = [(key, each) for state in value.state.values() for key, each in state.items()]
        yield from (each for key, each in kept if key != "step" and kind_of(each) == "tensor")
    elif kind == "container":
        base = next(each for each in (dict, list, tuple) if issubclass(type(value), each))
        parts = dict.values(value) if base is dict else base.__iter__(value)
        yield from (
            each for each in itertools.islice(parts, _MAX_ITEMS) if kind_of(each) == "tensor"
        )

"""What a cell creates, transfers and waits for, by line, and what it uses elsewhere.

A log is filled while the cell runs. It keeps numbers and names, and no tensor.
A tensor is recognised by the counter that torch increments with every change in place, so a new batch in the place of
an old one is not mistaken for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpumagic._compat import torch_private
from gpumagic.backends import backend_named
from gpumagic.heap import storages
from gpumagic.memory.devices import Device
from gpumagic.report.units import LARGE
from gpumagic.transfers.report import TransferRow
from gpumagic.transfers.sites import CallSites, Site

_MANY = 1000
"""Tensors kept before those that are gone are removed."""


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
    _version_of: Callable[[Any], int | None] = field(
        default_factory=torch_private.VERSION.get
    )

    def is_repeat(self, place: int, subject: Any) -> bool:
        """Return whether the same part of a storage, unchanged, was transferred at this place before."""
        if not isinstance(subject, self._tensor):
            return False
        if subject.is_inference():  # in inference mode no changes are counted
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
            self._forget_gone()
        return known is not None and bool(known == version)

    def _forget_gone(self) -> None:
        """Forget the storages that are gone."""
        storages.forget_expired()
        alive = storages.numbers_in_use()
        self._before = {
            key: kept for key, kept in self._before.items() if key[1] in alive
        }
        self._full = 2 * len(self._before) + _MANY


class _TransferKey(NamedTuple):
    """What the transfers have in common that are one row of the report."""

    direction: str
    source: str
    target: str
    line: int | None
    code: str | None
    name: str | None
    cause: str


@dataclass
class TransferLog:
    """The running sums of one cell."""

    sites: CallSites
    created: dict[object, list[int]] = field(default_factory=dict)
    """The count and the bytes of new tensors by device, which is named only in the report."""
    transfers: dict[_TransferKey, _TransferSum] = field(default_factory=dict)
    waits: Counter[int] = field(default_factory=Counter)
    """By line, the waits that copy nothing."""
    history: TransferHistory = field(default_factory=TransferHistory)

    def add_created(self, device: object, nbytes: int, count: int = 1) -> None:
        """Count new tensors."""
        total = self.created.get(device) or self.created.setdefault(device, [0, 0])
        total[0] += count
        total[1] += nbytes

    def add_transfer(
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
            total = self._sum_at(site, str(source), str(target), name)
            site.sums[source, target, name] = total
        total.count += 1
        total.nbytes += nbytes
        total.seconds += seconds
        total.waits += waits
        if is_copy:
            total.repeats += self.history.is_repeat(id(total), subject)
        if nbytes >= LARGE:  # to ask whether memory is pinned takes a driver call
            pageable = is_pageable(subject, str(target))
            if pageable is not None:
                total.pageable = (total.pageable or 0) + nbytes * pageable

    def _sum_at(
        self, site: Site, source: str, target: str, name: str | None
    ) -> _TransferSum:
        way = direction(source, target)
        key = _TransferKey(way, source, target, site.line, site.code, name, site.cause)
        return self.transfers.setdefault(key, _TransferSum())

    def add_sync(self) -> None:
        """Count one operation that made the host wait for the device, at the line that is running now."""
        line = self.sites.line()
        if line is not None:
            self.waits[line] += 1

    def syncs(self) -> dict[int, int]:
        """Return how often the host waited at each line."""
        waits = self.waits.copy()
        for key, total in self.transfers.items():
            if key.line is not None and total.waits:
                waits[key.line] += total.waits
        return dict(sorted(waits.items()))

    def merge(self, other: TransferLog) -> None:
        """Add what another thread's log counted, which may go on counting."""
        for device, (count, nbytes) in list(other.created.items()):
            self.add_created(device, nbytes, count)
        for key, total in list(other.transfers.items()):
            self.transfers.setdefault(key, _TransferSum()).add(total)
        self.waits.update(other.waits.copy())

    def rows(self) -> tuple[TransferRow, ...]:
        """Return the transfers, most bytes first."""
        rows: list[TransferRow] = []
        for key, total in self.transfers.items():
            row = TransferRow(
                direction=key.direction,
                source=key.source,
                target=key.target,
                count=total.count,
                nbytes=total.nbytes,
                seconds=total.seconds,
                line=key.line,
                code=key.code,
                name=key.name,
                cause=key.cause,
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

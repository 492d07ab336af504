"""What an `OomReport` says of the instant of the failure, before anything was given back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what was allocated on the device."""

    what: str
    """``"parameters"``, ``"gradients"``, ``"optimizer state"``, ``"activations"``, ``"names of this cell"``..."""
    nbytes: int
    names: tuple[str, ...] = ()
    """The largest of those that have a name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor that the failing operation worked on."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Action:
    """A line to run now."""

    code: str
    note: str = ""
    """What it gives."""


@dataclass(frozen=True, slots=True)
class Instant:
    """The failing operation and what occupied the device."""

    operator: str = ""
    """The function or the sign of it; empty where it is not known."""
    operands: tuple[Shape, ...] = ()
    shares: tuple[Share, ...] = ()
    """Of everything in torch's live tensors, and the allocator's cache and other processes below it."""

"""A name of the notebook and what it keeps, as more than one report says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A name of the notebook, and the bytes it keeps on one device."""

    name: str
    device: str
    nbytes: int
    kind: str = "plain"

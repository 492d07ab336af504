"""What memory is for: the parts of a breakdown, and what one tensor of each is called."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A part of a breakdown."""

    name: str
    """As reports sum it: ``"parameters"``. `report.document.PART_COLOURS` has its colour."""
    kind: str | None = None
    """What `%devices` calls one tensor of it, ``"parameter"``; None for what is told over time only."""
    short: str | None = None
    """The kind in a narrow column."""


PARTS = (
    Part("parameters", "parameter", "param"),
    Part("gathered parameters"),
    Part("buffers", "buffer", "buffer"),
    Part("optimizer state", "optimizer state", "optim"),
    Part("gradients", "gradient", "grad"),
    Part("buckets"),
    Part("activations", "activation", "activ."),
    Part("temporaries"),
    Part("other"),
    Part("earlier cells"),
    Part("library workspaces"),
)
"""In the order in which they are shown."""
_OF_NONE = ("library workspaces", "earlier cells", "gathered parameters", "buckets")
OF_MODULES = tuple(part.name for part in PARTS if part.name not in _OF_NONE)
"""Those of which a module has a share."""
PART_OF_KIND = {part.kind: part.name for part in PARTS if part.kind}
"""The part by the kind of one tensor."""
SHORT_KINDS = {part.kind: part.short for part in PARTS if part.kind and part.short}

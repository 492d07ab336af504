"""What memory is made of, in the order in which pictures lay it: what stays longest at the bottom, each in its colour.

The colours are those of Okabe and Ito, told apart by colour-blind people too, and of middle lightness, so that they
show on white and on black.
"""

from __future__ import annotations

from collections.abc import Iterable

COLOURS = {
    "other": (128, 128, 128),
    "parameters": (0, 114, 178),
    "buffers": (86, 180, 233),
    "optimizer state": (0, 158, 115),
    "gradients": (230, 159, 0),
    "activations": (213, 94, 0),
    "temporaries": (204, 121, 167),
}
UNKNOWN = COLOURS["other"]


def ordered(parts: Iterable[str]) -> list[str]:
    """Return the parts from the bottom of a picture to its top, each once."""
    known = list(COLOURS)
    return sorted(dict.fromkeys(parts), key=lambda part: known.index(part) if part in COLOURS else len(known))

"""A way to a tensor, and how to type it.

What is written is code wherever code can reach the tensor, and evaluates to it. What no expression reaches stands
between angle brackets, so that nobody takes it for code: ``step.<closure>.x``, ``cache[<Point>]``.
"""

from __future__ import annotations

import keyword
import math
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple

from gpumagic.heap.anatomy import Style

LONGEST_KEY = 200
"""Characters of a key that are written; the name of a longer one is cut, and no code."""


class Path(NamedTuple):
    """One step from a parent to a child; the first step is a name."""

    parent: Path | None
    style: Style
    key: Any
    rank: int
    """The worst rank of the steps so far: how well it names what it leads to."""
    depth: int
    kind: type | None = None
    """The type of what the step leads to."""

    def root(self) -> str:
        """Return the name that the path starts from."""
        return str(self.steps()[0].key)

    def steps(self) -> list[Path]:
        """Return the path's beginnings, from its root to itself."""
        path: Path | None = self
        found = []
        while path is not None:
            found.append(path)
            path = path.parent
        return found[::-1]


def is_typed(name: str) -> bool:
    """Return whether Python reads a name as it is stored: it normalises what is typed, ``ﬁ`` to ``fi`` (PEP 3131)."""
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    return is_name and (name.isascii() or unicodedata.normalize("NFKC", name) == name)


def variable(name: str) -> str:
    """Return how to type a variable that may have been bound by other means than typing its name."""
    return name if is_typed(name) else f"globals()[{_key(name)}]"


def spell(path: Path, name_of: Callable[[int], str | None]) -> str:
    """Return a path as one would type it: ``model.layers[3].weight``, ``cfg['k']``, ``opt.state[w].exp_avg``.

    Args:
        path: the way to a tensor.
        name_of: returns the name of the tensor with an `id`, for optimizer states.
    """
    if path.parent is None:
        return str(path.key)
    if path.style == "state":
        return spell(path.parent, name_of) + f".state[{name_of(path.key) or '...'}]"
    return spell(path.parent, name_of) + step(path.style, path.key, path.parent.kind)


def step(style: Style, key: Any, owner: type | None) -> str:
    """Return how to type one step from an object of a type: ``.weight``, ``[3]``, ``['k']``."""
    if style == "in":
        place, name = key
        return f".<{place}>.{name}" if name and name.isidentifier() else f".<{place}>"
    if style == "{":
        return "{...}"
    if style == "." and type(key) is str:
        return _attribute(key, owner)
    return f"[{_key(key)}]"


def _attribute(name: str, owner: type | None) -> str:
    if is_typed(name):
        return f".{name}"
    import torch.nn

    if owner is not None and issubclass(owner, torch.nn.ModuleDict | torch.nn.ParameterDict):
        return f"[{_key(name)}]"
    if owner is not None and issubclass(owner, torch.nn.Module):
        is_number = name.isascii() and name.isdigit()  # the layers of a Sequential are indexed by ints
        return f"[{name}]" if is_number else f".__getattr__({_key(name)})"
    return f".__getattribute__({_key(name)})"


def _key(key: Any, depth: int = 0) -> str:
    text = f"<{type(key).__name__}>"  # the repr of anything else is its author's code
    if type(key) is float and not math.isfinite(key):
        text = "<nan>" if math.isnan(key) else f"float('{key}')"  # another nan does not find it
    elif type(key) is tuple and depth < 3:
        inner = [_key(each, depth + 1) for each in key]
        text = f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    elif type(key) in (str, float, bool, type(None), bytes) or (type(key) is int and key.bit_length() < 4096):
        text = repr(key)  # longer numbers may not be written (sys.set_int_max_str_digits)
    return text if len(text) <= LONGEST_KEY else f"<{text[:36]}...>"

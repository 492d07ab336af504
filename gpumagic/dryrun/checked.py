"""Which kinds of operators were compared with memory that others measured on real GPUs; `tests/published` writes it.

A kind is a kernel, whatever its template's arguments: which kernels torch launches decides what an operator allocates.
Products are by cuBLAS, which is in nearly every published figure. What asks another library how much memory it wants is
of no such kind.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("checked.json")
_TYPE_AND_TILE = re.compile(r"_b?f(16|32)_.*")  # of memory-efficient attention, whose kernels have these in their names


def kinds_of(kernels: Iterable[str]) -> set[str]:
    """Return the kinds of some kernels, given by their symbols as the compiler mangled them."""
    return {_TYPE_AND_TILE.sub("", _last_name(symbol)) for symbol in kernels}


def sentence(kernels: Iterable[str]) -> str | None:
    """Return what is known of the error of figures, where each of these kernels is of a kind that was compared."""
    launched = kinds_of(kernels)
    if not launched or not launched <= kinds():
        return None
    share = f"{_data()['within']} of {_data()['figures']} published figures"
    return f"kinds of operators checked against real GPUs: within 1 % in {share}"


def kinds() -> set[str]:
    """Return the kinds that ran where a published figure agrees within 1 %."""
    return set(_data()["kinds"])


def _last_name(symbol: str) -> str:
    """Return the name of a function without its namespaces and template arguments."""
    found, rest = symbol, re.sub(r"^_ZN?", "", symbol)
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        found, rest = rest[length.end() : end], rest[end:]
    return found


@functools.cache
def _data() -> dict[str, Any]:
    return dict(json.loads(DATA.read_text(encoding="utf-8")))

"""Which names of a notebook a piece of code uses, itself or through the functions and classes that it calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType


def names_used(reads: Iterable[str], namespace: Mapping[str, object]) -> set[str]:
    """Return the names that code reading these names uses, itself or through functions and classes of the notebook."""
    used: set[str] = set()
    waiting = list(reads)
    while waiting:
        name = waiting.pop()
        if name not in used and name in namespace:
            used.add(name)
            waiting += _names_behind(namespace[name], namespace)
    return used


def _names_behind(value: object, namespace: Mapping[str, object]) -> Iterator[str]:
    for function in _functions_of(value):
        if function.__globals__ is namespace:
            yield from _names_in(function.__code__)


def _functions_of(value: object) -> Iterator[FunctionType]:
    value = getattr(value, "__func__", value) if type(value).__name__ == "method" else value
    if isinstance(value, FunctionType):
        yield value
        return
    for base in (value if isinstance(value, type) else type(value)).__mro__:
        if base.__module__ == "__main__":
            yield from (each for each in vars(base).values() if isinstance(each, FunctionType))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)

"""The functions that `--trace=FUNCTION,...` names, and which code belongs to a trace."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from gpumagic.errors import OptionError

Function = str | Callable[..., Any]
"""A function, a method or a module of torch's; or its name."""


def find(functions: Iterable[Function], namespace: Mapping[str, Any]) -> dict[str, CodeType]:
    """Return the code of each function by its name.

    Raises:
        OptionError: there is nothing by this name, or it is not written in Python.
    """
    named = {
        each if isinstance(each, str) else getattr(each, "__qualname__", type(each).__name__): each
        for each in functions
    }
    return {
        name: _code_of(name, _look_up(name, namespace) if isinstance(each, str) else each)
        for name, each in named.items()
    }


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from nested(each)


def _look_up(name: str, namespace: Mapping[str, Any]) -> Any:
    """Return what a dotted name is bound to: a variable's attribute, or one of a module that has been imported."""
    first, *rest = name.split(".")
    found = namespace.get(first, sys.modules.get(first))
    if found is None:
        raise OptionError(f"--trace: there is no {first}; functions that the cell itself defines are traced anyway")
    for place, each in enumerate(rest):
        if not hasattr(found, each):
            raise OptionError(f"--trace: {'.'.join((first, *rest[:place]))} has no {each}")
        found = getattr(found, each)
    return found


def _code_of(name: str, value: Any) -> CodeType:
    if isinstance(value, type):
        raise OptionError(f"--trace: {name} is a class; name a method, such as {name}.forward")
    if not inspect.isroutine(value) and not isinstance(value, functools.partial):
        value = getattr(value, "forward", value)  # a module of torch's
    while isinstance(value, functools.partial):
        value = value.func
    code = getattr(inspect.unwrap(value), "__code__", None)
    if not isinstance(code, CodeType):
        raise OptionError(f"--trace: {name} is not written in Python, so it has no lines")
    return code

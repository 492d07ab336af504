"""JSON as records: dataclasses and named tuples, of which each field is checked against its type.

`json.dumps` writes a named tuple as a list and, with ``default=vars``, a dataclass as an object. What was written by
somebody whom nobody trusts is read here: a field too many or too few, or a value of another type, is an error.
"""

from __future__ import annotations

import functools
import json
import math
import types
from enum import Enum
from typing import (
    Any,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

Record = TypeVar("Record")
_LARGEST = 1 << 63
"""Beyond it a number is no figure, and floats cannot be made of all."""


def parse(data: bytes) -> Any:
    """Return the value of JSON that some bytes are, without NaN and infinities.

    Raises:
        ValueError: they are none.
        RecursionError: it is nested too deep.
    """
    return json.loads(data, parse_constant=_refuse)


def read(record: type[Record], content: Any) -> Record:
    """Return a dataclass from an object of JSON that has its fields, each of its type, and no others.

    Raises:
        ValueError, TypeError, AttributeError, ArithmeticError: it is none.
    """
    kinds = _types_of(cast("Any", record))
    if content.keys() != kinds.keys():
        _refuse(content)
    fields = {}
    for name, kind in kinds.items():
        fields[name] = _read(kind, content[name])
    return record(**fields)


def _read(kind: Any, value: Any) -> Any:  # one way a kind of type
    """Return a value of JSON as one of a type that a field of a record has."""
    if kind in {bool, int, float, str, type(None)}:
        return _read_scalar(kind, value)
    origin = get_origin(kind)
    if origin is tuple:
        return _read_tuple(get_args(kind), value)
    if origin is dict:
        _, kind_of_item = get_args(kind)
        return {key: _read(kind_of_item, item) for key, item in value.items()}
    if origin in {Union, types.UnionType}:
        (kind_of_some,) = set(get_args(kind)) - {type(None)}
        return None if value is None else _read(kind_of_some, value)
    if issubclass(kind, Enum):
        return kind(value)
    if issubclass(kind, tuple):
        return kind(*_read_tuple(tuple(_types_of(kind).values()), value))
    return read(kind, value)


def _read_scalar(kind: type, value: Any) -> Any:
    """Return a value of JSON that is of a plain type; a whole number may stand where a fraction does."""
    if kind is float and type(value) is int:
        value = float(value)
    is_right = type(value) is kind
    if is_right and kind is int:
        is_right = abs(value) < _LARGEST
    elif is_right and kind is float:
        is_right = math.isfinite(value)
    return value if is_right else _refuse(value)


def _read_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """Return a list of JSON as a tuple of given types; ``...`` for the second stands for any number of the first."""
    if type(value) is not list:
        _refuse(value)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    items = []
    for kind, item in zip(kinds, value, strict=True):
        items.append(_read(kind, item))
    return tuple(items)


@functools.cache
def _types_of(record: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass or a named tuple."""
    return get_type_hints(record)


def _refuse(value: object) -> NoReturn:
    raise ValueError(f"a {type(value).__name__} is not what stands here")

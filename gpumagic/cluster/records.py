"""Reads what engines answer: records of gpumagic's own and plain data, and nothing else.

A pickle can name any function to call. An engine runs its user's code, and what it answers need not come from ours.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from enum import Enum
from typing import Any

_PLAIN = frozenset({
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "complex"), ("builtins", "bytearray"),
    ("builtins", "range"), ("builtins", "slice"), ("collections", "Counter"), ("collections", "OrderedDict"),
    ("collections", "deque"),
})  # fmt: skip


def load(data: bytes) -> Any:
    """Return what was pickled.

    Raises:
        pickle.UnpicklingError: it has something else than records and plain data.
    """
    return _Records(io.BytesIO(data)).load()


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith("gpumagic.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and _is_record(found):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no record of gpumagic's")


def _is_record(kind: type) -> bool:
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or is_named_tuple or issubclass(kind, Enum)

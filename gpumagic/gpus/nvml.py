"""The connection to NVIDIA's management library (NVML), and its errors in words.

NVML is queried through nvidia-ml-py, whose module is called `pynvml`. It is initialised once per process and kept:
initialising for every query is slow, and shutting down at exit can race a thread that still queries (nvitop#222).
A forked child initialises its own. NVML never creates a CUDA context.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

# The codes are NVML's ABI. They are written out because the binding's exceptions define __eq__ without __hash__, and
# so can neither be put into a set nor be compared.
UNINITIALIZED, FUNCTION_NOT_FOUND = 1, 13
_PROBLEMS = {4: "no permission", 9: "no driver", 12: "no library", 13: "old driver", 18: "version mismatch"}
_REASONS = {3: "not supported", 4: "no permission", 6: "not found", 13: "driver too old", 15: "lost",
            16: "needs a reset", 25: "driver too old", 28: "lost"}  # fmt: skip
DRIVER_TOO_OLD = "driver too old"
FINAL_REASONS = ("lost", "no permission", "needs a reset")
"""Reasons that an older version of the same query cannot change, so it is not tried."""

_initialised: set[int] = set()  # pids: a forked child finds its parent's here


@dataclass(frozen=True, slots=True)
class NvmlFailure:
    """Why NVML does not answer."""

    problem: str
    """``"no binding"``, ``"no library"``, ``"no driver"``, ``"version mismatch"``, ``"no permission"``,
    ``"old driver"`` or ``"error"``."""
    detail: str = ""


@dataclass(slots=True)
class Readings:
    """Fields of one device, each either a value or a reason why there is none."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, *queries: Callable[[], T]) -> T | None:
        """Try the queries in order until one succeeds; keep its value, or the most specific reason."""
        reason = DRIVER_TOO_OLD
        for each in queries:
            value, why = query(each)
            if why is None:
                self.values[name] = value
                return value
            reason = why if reason == DRIVER_TOO_OLD else reason
            if reason in FINAL_REASONS:
                break
        self.reasons[name] = reason
        return None


def query(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the value and None, or None and the reason, whatever the binding raises."""
    try:
        return function(), None
    except Exception as error:  # besides NVMLError the binding raises TypeError, UnicodeDecodeError...
        return None, reason_of(error)


def connect() -> ModuleType | NvmlFailure:
    """Return the binding with NVML initialised in this process, or why it does not answer."""
    binding = _import_pynvml()
    if binding is None:
        return NvmlFailure("no binding")
    if os.getpid() not in _initialised:
        try:
            binding.nvmlInit()
        except Exception as error:
            return failure_of(error)
        _initialised.add(os.getpid())
    return binding


def reset() -> None:
    """Initialise again at the next `connect`, after other code in this process has shut NVML down."""
    _initialised.clear()


def is_shadowed(binding: ModuleType) -> bool:
    """Return whether `pynvml` is the deprecated package of that name, which hides nvidia-ml-py's module."""
    return hasattr(binding, "__path__")


def failure_of(error: Exception) -> NvmlFailure:
    """Return why NVML does not answer, from an error of initialising or counting."""
    return NvmlFailure(_PROBLEMS.get(error_code(error), "error"), message_of(error))


def error_code(error: Exception) -> int:
    """Return NVML's code of an error, or -1 for any other exception."""
    if type(error).__name__ == "NVMLLibraryMismatchError":  # not an NVMLError, although it wraps one
        return FUNCTION_NOT_FOUND
    value = getattr(error, "value", -1)
    return value if isinstance(value, int) else -1


def reason_of(error: Exception) -> str:
    """Return in a few words why a field could not be read."""
    if isinstance(error, UnicodeDecodeError):
        return "not decodable"
    if isinstance(error, AttributeError):
        return "nvidia-ml-py too old"
    if isinstance(error, ValueError):
        return "unreadable"
    number = error_code(error)
    if number == -1:
        return f"unreadable ({type(error).__name__})"
    return _REASONS.get(number) or f"driver error {number}"


def message_of(error: Exception) -> str:
    """Return the library's own message."""
    try:
        return str(error)
    except Exception:  # the message comes from the library, which may be missing
        return f"NVML error {error_code(error)}"


def _import_pynvml() -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            # The deprecated PyPI package `pynvml` blames whoever imports the module of that name.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except Exception:  # a broken installation is no installation
        return None
    return pynvml if isinstance(pynvml, ModuleType) else None

"""The connection to NVIDIA's management library, and the words for what it refuses.

NVML is asked through nvidia-ml-py, whose module is called `pynvml`. It is initialised once a process and kept:
initialising again for every question costs, and shutting down at exit can race a thread that still asks
(nvitop#222). A forked child initialises its own. NVML never creates a CUDA context.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

# The codes are NVML's ABI; they are written out because an exception of the binding cannot be put into a set
# or compared with another one: it defines __eq__ without __hash__.
UNINITIALIZED, FUNCTION_NOT_FOUND = 1, 13
_PROBLEMS = {4: "no permission", 9: "no driver", 12: "no library", 13: "old driver", 18: "version mismatch"}
_REASONS = {
    3: "not supported",
    4: "no permission",
    6: "not found",
    13: "driver too old",
    15: "lost",
    16: "needs a reset",
    25: "driver too old",
    28: "lost",
}
DRIVER_TOO_OLD = "driver too old"
FINAL_REASONS = ("lost", "no permission", "needs a reset")
"""Reasons that an older form of the same question cannot change, so it is not asked."""

_initialised: set[int] = set()  # pids: a forked child finds its parent's here


@dataclass(frozen=True, slots=True)
class NvmlFailure:
    """Why NVML does not answer at all."""

    problem: str
    """``"no binding"``, ``"no library"``, ``"no driver"``, ``"version mismatch"``, ``"no permission"``,
    ``"old driver"`` or ``"error"``."""
    detail: str = ""


@dataclass(slots=True)
class Readings:
    """Fields of one device, each either a value or a reason why there is none."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, *questions: Callable[[], T]) -> T | None:
        """Ask the questions in turn until one is answered; keep its answer, or the most telling refusal."""
        reason = DRIVER_TOO_OLD
        for question in questions:
            answer, refusal = query(question)
            if refusal is None:
                self.values[name] = answer
                return answer
            reason = refusal if reason == DRIVER_TOO_OLD else reason
            if reason in FINAL_REASONS:
                break
        self.reasons[name] = reason
        return None


def query(question: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the answer and None, or None and why there is none, whatever the binding raises."""
    try:
        return question(), None
    except Exception as error:  # besides NVMLError the binding raises TypeError, UnicodeDecodeError...
        return None, reason_of(error)


def connect() -> ModuleType | NvmlFailure:
    """Return the binding with NVML initialised in this process, or why that cannot be."""
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
    """Initialise again at the next `connect`: someone in this process has shut NVML down."""
    _initialised.clear()


def is_shadowed(binding: ModuleType) -> bool:
    """Return whether `pynvml` is not nvidia-ml-py's module but the old package of that name, which hides it."""
    return hasattr(binding, "__path__")


def failure_of(error: Exception) -> NvmlFailure:
    """Return what an error of initialising or counting means for the whole machine."""
    return NvmlFailure(_PROBLEMS.get(error_code(error), "error"), message_of(error))


def error_code(error: Exception) -> int:
    """Return NVML's number of an error of the binding, or -1 for an exception of another kind."""
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
    """Return the library's own text of an error."""
    try:
        return str(error)
    except Exception:  # the text is asked of the library, which may not be there
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

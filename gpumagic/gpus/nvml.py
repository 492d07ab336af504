"""The connection to NVIDIA's management library (NVML), and its errors in words.

NVML is queried through nvidia-ml-py, whose module is called `pynvml`. It is initialised once per process and kept:
initialising for every query is slow, and shutting down at exit can race a thread that still queries (nvitop#222).
A forked child initialises its own. NVML never creates a CUDA context.

A driver can hang, and a thread that waits in it cannot be interrupted. So it is read in a thread of its own, for
`TIME_LIMIT` at most; while one reading hangs, no other is begun.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

# The codes are NVML's ABI. They are written out because the binding's exceptions define __eq__ without __hash__, and
# so can neither be put into a set nor be compared.
UNINITIALIZED, FUNCTION_NOT_FOUND = 1, 13
_PROBLEMS = {
    4: "no permission",
    9: "no driver",
    12: "no library",
    13: "old driver",
    18: "version mismatch",
}
_REASONS = {3: "not supported", 4: "no permission", 6: "not found", 13: "driver too old", 15: "lost",
            16: "needs a reset", 25: "driver too old", 28: "lost"}  # fmt: skip
DRIVER_TOO_OLD = "driver too old"
FINAL_REASONS = ("lost", "no permission", "needs a reset")
"""Reasons that an older version of the same query cannot change, so it is not tried."""

TIME_LIMIT = 5.0
"""Seconds that one reading of all GPUs may take."""

_initialised: set[int] = set()  # pids: a forked child finds its parent's here
_hanging: tuple[Future[Any], int, float] | None = None
"""The answer that has not come, the process that asked (a forked child has no such thread), and when."""


@dataclass(frozen=True, slots=True)
class NvmlFailure:
    """Why NVML does not answer."""

    problem: str
    """``"no binding"``, ``"no library"``, ``"no driver"``, ``"version mismatch"``, ``"no permission"``,
    ``"old driver"``, ``"no answer"`` or ``"error"``."""
    detail: str = ""


class Unavailable(Exception):
    """Why a figure cannot be told, in the few words that stand in its place."""


@dataclass(slots=True)
class Readings:
    """What is read of one device: each figure is a value, or a reason why there is none."""

    binding: Any
    handle: Any
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    _answers: dict[tuple[Query, ...], tuple[Any, str | None]] = field(default_factory=dict)

    def take(self, name: str, *queries: Query, to: Callable[[Any], Any]) -> None:
        """Keep what ``to`` makes of an answer as a figure, or why there is none; figures of one query are read once."""
        if queries not in self._answers:
            self._answers[queries] = self.ask(*queries)
        value, reason = self._answers[queries]
        if reason is None:
            value, reason = query(partial(to, value))
        if reason is None:
            self.values[name] = value
        else:
            self.reasons[name] = reason

    def ask(
        self, *queries: Query, to: Callable[[Any], Any] | None = None
    ) -> tuple[Any, str | None]:
        """Return the answer to the first query that succeeds and None, or None and the most specific reason.

        The newest version of a query comes first, then those that older drivers know.
        """
        reason = DRIVER_TOO_OLD
        for name, *arguments in queries:
            value, why = query(lambda: getattr(self.binding, name)(self.handle, *arguments))  # noqa: B023  # called here
            if why is None and to is not None:
                value, why = query(partial(to, value))
            if why is None:
                return value, None
            reason = why if reason == DRIVER_TOO_OLD else reason
            if reason in FINAL_REASONS:
                break
        return None, reason


Query = tuple[Any, ...]
"""A question to the driver about one device: a function of the binding, and its arguments after the handle."""


def query(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the value and None, or None and the reason, whatever the binding raises."""
    try:
        return function(), None
    except (
        Exception
    ) as error:  # besides NVMLError the binding raises TypeError, UnicodeDecodeError...
        return None, reason_of(error)


def connect(*, again: bool = True) -> tuple[ModuleType, int] | NvmlFailure:
    """Return the binding, with NVML initialised in this process, and the number of cards; or why it does not answer.

    Other code in this process may have shut NVML down since; it is initialised ``again``, once.
    """
    try:
        with warnings.catch_warnings():
            # The deprecated PyPI package `pynvml` blames whoever imports the module of that name.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml as binding
    except Exception:  # a broken installation is no installation
        return NvmlFailure("no binding")
    try:
        if os.getpid() not in _initialised:
            binding.nvmlInit()
            _initialised.add(os.getpid())
        return binding, int(binding.nvmlDeviceGetCount())
    except Exception as error:
        if again and error_code(error) == UNINITIALIZED:
            _initialised.clear()
            return connect(again=False)
        try:
            message = str(error)
        except Exception:  # the message comes from the library, which may be missing
            message = f"NVML error {error_code(error)}"
        return NvmlFailure(_PROBLEMS.get(error_code(error), "error"), message)


def within_time(read: Callable[[], T | NvmlFailure]) -> T | NvmlFailure:
    """Return what a function reads from the driver, or that the driver does not answer.

    Args:
        read: runs in another thread, where Ctrl-C does not reach it; it ends the wait all the same.
    """
    global _hanging  # noqa: PLW0603  of this process, as the driver is
    if _hanging is not None and not _hanging[0].done() and _hanging[1] == os.getpid():
        return NvmlFailure("no answer", f"{time.monotonic() - _hanging[2]:.0f} s")
    answer: Future[T | NvmlFailure] = (
        Future()
    )  # a thread's `join` that Ctrl-C ends takes it for ended (bpo-45274)

    def run() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:
            answer.set_exception(error)

    _hanging = answer, os.getpid(), time.monotonic()
    thread = threading.Thread(
        target=run, name="gpumagic driver", daemon=True
    )  # else a process could not end meanwhile
    thread.start()
    if not wait([answer], TIME_LIMIT).done:
        return NvmlFailure("no answer", f"{TIME_LIMIT:g} s")
    thread.join()
    _hanging = None
    return answer.result()


def error_code(error: Exception) -> int:
    """Return NVML's code of an error, or -1 for any other exception."""
    if (
        type(error).__name__ == "NVMLLibraryMismatchError"
    ):  # not an NVMLError, although it wraps one
        return FUNCTION_NOT_FOUND
    value = getattr(error, "value", -1)
    return value if isinstance(value, int) else -1


def reason_of(error: Exception) -> str:
    """Return in a few words why a field could not be read."""
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, AttributeError):
        return "nvidia-ml-py too old"
    if isinstance(error, ValueError):  # also a text that cannot be decoded
        return "unreadable"
    number = error_code(error)
    if number == -1:
        return f"unreadable ({type(error).__name__})"
    return _REASONS.get(number) or f"driver error {number}"

"""The connection to NVIDIA's management library (NVML), and its errors in words.

NVML is queried through nvidia-ml-py, whose module is called `pynvml`. It is initialised once per process and kept:
initialising for every query is slow, and shutting down at exit can race a thread that still queries (nvitop#222).
A forked child initialises its own. NVML never creates a CUDA context.

A driver can hang, and a thread that waits in it cannot be interrupted. So it is read in a thread of its own, for
`TIME_LIMIT` at most; while one reading hangs, no other is begun. Threads that read at the same time, such as a cell and
`%gpuinfo -w`, take turns. Waiting for one's turn is no sign of a driver that hangs.
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

from gpumagic.report.units import duration

T = TypeVar("T")

# The codes are NVML's ABI. They are written out because the binding's exceptions define __eq__ without __hash__, and
# so can neither be put into a set nor be compared.
UNINITIALIZED = 1
FUNCTION_NOT_FOUND = 13
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

_AFTER_CTRL_C = 1.0
"""Seconds that the next reader waits for a reading that Ctrl-C has left behind."""

_initialised: set[int] = set()  # pids: a forked child finds its parent's here


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
    _answers: dict[tuple[Query, ...], tuple[Any, str | None]] = field(
        default_factory=dict
    )

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
            value, why = query(partial(self._call, name, arguments))
            if why is None and to is not None:
                value, why = query(partial(to, value))
            if why is None:
                return value, None
            if reason == DRIVER_TOO_OLD:
                reason = why
            if reason in FINAL_REASONS:
                break
        return None, reason

    def _call(self, name: str, arguments: list[Any]) -> Any:
        return getattr(self.binding, name)(self.handle, *arguments)


Query = tuple[Any, ...]
"""A question to the driver about one device: a function of the binding, and its arguments after the handle."""


def query(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the value and None, or None and the reason, whatever the binding raises."""
    try:
        return function(), None
    except (
        Exception
    ) as error:  # the binding raises TypeError, UnicodeDecodeError and others too
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
        code = error_code(error)
        try:
            message = str(error)
        except Exception:  # the message comes from the library, which may be missing
            message = f"NVML error {code}"
        return NvmlFailure(_PROBLEMS.get(code, "error"), message)


class _Reading:
    """One reading of the driver, in a thread of its own.

    Attributes:
        answer: what was read. (Not the thread is waited for: a `join` that Ctrl-C ends takes it for ended, bpo-45274.)
        began: when the reading began, by `time.monotonic`.
        is_left: whether its reader waits no longer, since it took too long or Ctrl-C was pressed.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self.answer: Future[Any] = Future()
        self.began = time.monotonic()
        self.is_left = False
        # As long as a thread that is no daemon hangs, its process cannot end.
        self._thread = threading.Thread(
            target=self._run, name="gpumagic driver", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer.set_result(self._read())
        except BaseException as error:
            self.answer.set_exception(error)

    def has_ended(self) -> bool:
        """Return whether it ends within its time limit, which began with it."""
        left = self.began + TIME_LIMIT - time.monotonic()
        if self.is_left:
            left = min(left, _AFTER_CTRL_C)
        if not wait([self.answer], max(0.0, left)).done:
            return False
        self._thread.join(1.0)  # it has nothing left to do; a second is ample
        return True


class _Turns:
    """The turns of the threads of one process that read the driver.

    Attributes:
        last: the reading whose turn it is, or was last.
    """

    def __init__(self) -> None:
        self.last: _Reading | None = None
        self._lock = threading.Lock()

    def take(self, read: Callable[[], Any]) -> tuple[_Reading, bool]:
        """Begin a reading and return it and True, or the one that has not ended and False."""
        with self._lock:
            if self.last is not None and not self.last.answer.done():
                return self.last, False
            self.last = _Reading(read)
            return self.last, True


_turns: dict[int, _Turns] = {}
"""By pid: a forked child has none of its parent's threads, and may have been forked while one of them held the lock."""


def within_time(read: Callable[[], T | NvmlFailure]) -> T | NvmlFailure:
    """Return what a function reads from the driver, or that the driver does not answer.

    Where another thread reads at the moment, the function is called after that.

    Args:
        read: runs in another thread, where Ctrl-C does not reach it; it ends the wait all the same.
    """
    turns = _turns.setdefault(os.getpid(), _Turns())
    is_own = False
    while not is_own:
        reading, is_own = turns.take(read)
        has_ended = False
        try:
            has_ended = reading.has_ended()
        finally:
            if is_own and not has_ended:
                reading.is_left = True
        if not has_ended:
            return NvmlFailure("no answer", duration(time.monotonic() - reading.began))
    answer: T | NvmlFailure = reading.answer.result()
    return answer


def error_code(error: Exception) -> int:
    """Return NVML's code of an error, or -1 for any other exception."""
    # This one is no NVMLError, although it wraps one.
    if type(error).__name__ == "NVMLLibraryMismatchError":
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

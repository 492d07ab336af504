"""An exception -> whether it is out-of-memory, of which kind, and what its text says.

Works on text and class names alone, over the whole graph of the exception, so it needs no torch and knows
the errors of libraries that are not installed. `OutOfMemory`, the one-line error a guarded cell fails with,
is made here on first use, because it is a subclass of torch's own.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumagic.oom import oom_numbers
from gpumagic.oom.oom_kinds import BY_CLASS, HOST_ENOMEM, KINDS, Kind
from gpumagic.oom.oom_numbers import Numbers
from gpumagic.source import frames

if TYPE_CHECKING:

    class OutOfMemory(RuntimeError, MemoryError):
        """Raised in place of an out-of-memory error; holds its type and first line as text, and no frame."""


NEARLY_FULL = 1024**3
"""Free bytes below which a library's vague failure is believed to be a shortage."""


@dataclass(frozen=True, slots=True)
class OomEvent:
    """An out-of-memory error, as far as the exception alone tells."""

    kind: str
    certainty: str
    """``"certain"``, ``"probable"``, or ``"not-oom"``: torch's out-of-memory error without a shortage."""
    memory: str
    """``"device"``, ``"host"`` or ``"shared"``."""
    device: str | None
    """Such as ``"cuda:1"``; None where the text does not settle it."""
    backend: str | None
    numbers: Numbers
    message: str
    """``"Type: first line"`` of the exception that says so."""
    raised: str
    """The same of the exception that ended the cell; differs where that one wrapped it."""
    from_allocator: bool = False
    """True where torch's caching allocator raised it, after emptying its own cache."""
    text: str = ""


def recognise(error: BaseException, free: int | None = None, outside: Collection[int] = ()) -> OomEvent | None:
    """Return what ran out, or None for any other exception.

    Args:
        error: the exception that ended the cell; causes, contexts and group members are looked at too.
        free: bytes free on the fullest device in use; settles texts that mean several things.
        outside: ids of exceptions that were being handled before, and are none of this one's.
    """
    probable = None
    for each in frames.related_exceptions(error, outside):
        kind = _kind_of(each)
        if kind is None or not _is_credible(kind, free):
            continue
        event = _event(kind, each, error)
        if kind.certainty != "probable":
            return event
        probable = probable or event
    return probable


def _kind_of(error: BaseException) -> Kind | None:
    if _is_of_another_trade(error):
        return None
    text = _text(error)
    for kind in KINDS:
        if kind.matches(text):
            return kind
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return HOST_ENOMEM
    names = [each.__name__ for each in type(error).__mro__]
    return next((BY_CLASS[name] for name in names if name in BY_CLASS), None)


def _is_of_another_trade(error: BaseException) -> bool:
    """Whether it is a built-in error that no allocator raises, so that its text is someone's prose."""
    cls = type(error)
    if getattr(builtins, cls.__name__, None) is not cls:
        return False
    return not issubclass(cls, (RuntimeError, MemoryError, OSError, SystemError)) and cls is not Exception


def _is_credible(kind: Kind, free: int | None) -> bool:
    if kind.certainty == "not-oom":
        return kind.allocator  # torch's own out-of-memory error all the same: it pins memory and wants a report
    if kind.certainty == "certain" or kind.memory != "device":
        return True
    if free is None:
        return not kind.needs_low_free
    return free < NEARLY_FULL


def _event(kind: Kind, error: BaseException, raised: BaseException) -> OomEvent:
    text = _text(error)
    numbers = oom_numbers.read(text)
    backend = kind.backend or _backend_in(text)
    indexed = kind.memory == "device" and backend is not None and numbers.index is not None
    return OomEvent(
        kind=kind.name,
        certainty=kind.certainty,
        memory=kind.memory,
        device=f"{backend}:{numbers.index}" if indexed else None,
        backend=backend if kind.memory == "device" else None,
        numbers=numbers,
        message=frames.first_line(error),
        raised=frames.first_line(raised),
        from_allocator=kind.allocator,
        text=text,
    )


def _backend_in(text: str) -> str | None:
    word = text.partition(" out of memory")[0].rpartition(" ")[2]
    return word.lower() if word.isalnum() and " out of memory. Tried" in text else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a foreign __str__ must not replace the user's error
        return ""


def __getattr__(name: str) -> object:
    if name != "OutOfMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _make_out_of_memory()
    globals()["OutOfMemory"] = made
    return made


def _make_out_of_memory() -> type[RuntimeError]:
    def render(self: BaseException) -> list[str]:
        return [f"OutOfMemory: {self}"]

    return type(
        "OutOfMemory",
        (_torch_class(), MemoryError),
        {
            "__doc__": "Raised in place of an out-of-memory error; holds its type and first line, and no frame.",
            "__module__": __name__,
            "_render_traceback_": render,  # IPython shows this instead of the traceback (7.34 to 9)
        },
    )


def _torch_class() -> type[RuntimeError]:
    try:
        import torch
    except ImportError:
        return RuntimeError
    found: type[RuntimeError] = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError  # before 2.5
    return found

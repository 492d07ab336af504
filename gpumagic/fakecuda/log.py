"""What the fake runtime saw of this process: copies, launches, synchronisations, memory."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

_HOST = -1


class Copy(NamedTuple):
    """A copy that the runtime made.

    Attributes:
        direction: "host-to-device", "device-to-host", "device-to-device" or "within a device".
        source: `cpu` or `cuda:0`.
        target: `cpu` or `cuda:0`.
        nbytes: bytes that were copied.
        pinned: whether the host's side is page-locked.
        stream: the stream's handle; 0 is the default stream.
    """

    direction: str
    source: str
    target: str
    nbytes: int
    pinned: bool
    stream: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a device: what the card has, what others hold, what this process took of it, and the peak of that.

    What a context and loaded kernels take of a real card, some hundred MiB, is not counted. `context` says whether
    anything here has made a CUDA context on it.
    """

    capacity: int
    others: int
    used: int
    peak: int
    context: bool


class _Record(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("pinned", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("nbytes", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p), ("name", ctypes.c_char_p), ("count", ctypes.c_int64), ("binary", ctypes.c_void_p)
    )  # fmt: skip


class _UnknownSize(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("count", ctypes.c_int64))


def is_enabled() -> bool:
    """Return whether this process runs over the fake runtime."""
    return "libfakecuda.so" in os.environ.get("LD_PRELOAD", "") and hasattr(ctypes.CDLL(None), "fakecuda_syncs")


def copies() -> list[Copy]:
    """Return every copy since `reset`, oldest first; none where the process does not run over the fake runtime."""
    return [_copy(record) for record in _records("fakecuda_copies", _Record)]


def launches() -> Counter[str]:
    """Return how often each kernel was launched since `reset`, by its symbol as the compiler mangled it.

    These are torch's own kernels, and those of Triton and of `torch.cuda.jiterator`. What cuBLAS, cuDNN and the other
    libraries would launch is not among them. A kernel in a CUDA graph counts when the graph is launched.
    """
    return _counted("fakecuda_launches", _Kernel)


def unknown_sizes() -> Counter[str]:
    """Return how often a library was asked how much memory it wants where only the real one knows, since `reset`.

    The answer was 0: the workspaces of cuDNN, cuSOLVER, cuSPARSE and cuFFT and the reserve space of an RNN are missing
    from what torch has allocated here. `{"cudnn graph": 3}` is three plans of convolutions or attention.
    """
    return _counted("fakecuda_unknown_sizes", _UnknownSize)


def _records(function: str, kind: type[ctypes.Structure]) -> list[Any]:
    """Return the records that a function of the runtime writes."""
    if not is_enabled():
        return []
    write = getattr(_library(), function)
    room = write(None, 0)
    records: Any = (kind * room)()
    return list(records[: min(write(records, room), room)])


def _counted(function: str, kind: type[ctypes.Structure]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for record in _records(function, kind):
        counted[(record.name or b"?").decode()] += record.count
    return counted


def syncs() -> int:
    """Return how often the host waited for a device since `reset`: for a stream, an event, or all of it."""
    return int(_library().fakecuda_syncs()) if is_enabled() else 0


def reset() -> None:
    """Forget the copies, launches, synchronisations and unknown sizes counted so far."""
    if is_enabled():
        _library().fakecuda_forget_copies()
        _library().fakecuda_forget_launches()
        _library().fakecuda_forget_unknown_sizes()


def was_asked() -> bool:
    """Return whether anything has asked for the devices: from then on they stay what the environment said."""
    return is_enabled() and bool(_library().fakecuda_was_asked())


def memory(device: int = 0) -> Memory:
    """Return the memory of a device, by its index among those that are visible.

    Raises:
        IndexError: there is no such device.
    """
    library = _library()
    capacity, others, used, peak, context = (int(library.fakecuda_memory(device, what)) for what in range(5))
    if capacity < 0:
        raise IndexError(f"there is no device {device}")
    return Memory(capacity, others, used, peak, bool(context))


def set_memory(
    device: int = 0, *, capacity: int | None = None, others: int | None = None, limit: int | None = None
) -> None:
    """Change what a device has, or what others hold of it, in bytes; its peak begins anew.

    Args:
        device: its index among those that are visible.
        capacity: what it says that it has.
        others: what it says that other processes hold.
        limit: what it gives in all, whatever it says; 0 for no more than that.

    Raises:
        IndexError: there is no such device.
    """
    told = [-1 if size is None else size for size in (capacity, others, limit)]
    if _library().fakecuda_set_memory(device, *map(ctypes.c_int64, told)):
        raise IndexError(f"there is no device {device}")


def leave_out(least: int) -> None:
    """Leave out what is in copies of at least so many bytes from now on: their targets are zeros without pages."""
    _library().fakecuda_leave_out(ctypes.c_int64(least))


def run_ahead(is_ahead: bool) -> None:  # the only thing that is said
    """Let the host be ahead of the devices, as far as torch's watchdog over NCCL sees: no collective has finished."""
    if is_enabled():
        _library().fakecuda_run_ahead(int(is_ahead))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for name in ("fakecuda_syncs", "fakecuda_memory"):
        getattr(library, name).restype = ctypes.c_int64
    for name in ("fakecuda_copies", "fakecuda_launches", "fakecuda_unknown_sizes"):
        getattr(library, name).restype = ctypes.c_int64
        getattr(library, name).argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return library


def _copy(record: Any) -> Copy:
    source, target = ("cpu" if each == _HOST else f"cuda:{each}" for each in (record.source, record.target))
    if source == target:
        direction = "within a device" if source != "cpu" else "within the host"
    elif source == "cpu":
        direction = "host-to-device"
    else:
        direction = "device-to-host" if target == "cpu" else "device-to-device"
    return Copy(direction, source, target, record.nbytes, bool(record.pinned), record.stream)

"""A CUDA runtime without a GPU, below torch's own CUDA build.

`python -m gpumagic.fakecuda -- python script.py` runs a script over it; `environment()` has what a process needs to
start over it. Then `torch.cuda.is_available()` is true. Everything above the runtime is torch's own: the caching
allocator with its statistics, snapshot and fragmentation, `torch.OutOfMemoryError`, streams, events, CUDA graphs,
pinned memory, copies with their contents, autocast, `torch.compile` with Triton.

No kernel runs, so **computed values mean nothing**: they are zeros or what the memory held before. Values that were
copied are right. `nonzero`, masks, `unique` and `any()` find nothing; other sizes that depend on values (`bincount`,
`one_hot`) cannot be trusted. What looks at values to decide what to do may fail: `torch.linalg.eig`, `matrix_exp` and
`lobpcg` do. Processes of one job do not reach each other through NCCL. How much memory cuDNN, cuSOLVER, cuSPARSE and
cuFFT take for themselves is not known without a GPU: of cuDNN it follows rules that were measured on an H200, of the
others it is left out, and `unknown_sizes()` says how often each was asked.

Each process has the cards for itself and sees no other's memory; what a context and loaded kernels take of a card is
not counted. Device memory and events are not shared between processes (`cudaIpc...`), as `torch.multiprocessing`
would. The profiler has the host's side only. CUDA graphs have no conditional nodes, and nothing is allocated in a
capture under `backend:cudaMallocAsync`. Memory that is allocated without torch's cache takes at least 2 MiB each
time, where CUDA lets small pieces share.

To start reading: `build.py` says which libraries are exchanged, compiles `native/` and generates the rest.
`native/fake.h` lists what the libraries share; `runtime.c` and its neighbours are libcudart,
`driver.c` is libcuda, each other file is the library of its name. `memory/presets.py` has the GPUs that can be
stood in for, `__main__.py` is the command.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpumagic.errors import OptionError
from gpumagic.memory.presets import GPU, GPUS, name_of, settings
from gpumagic.report.units import parse_size

__all__ = [
    "GPU", "GPUS", "Copy", "copies", "environment", "is_enabled", "launches", "leave_out", "memory", "reset",
    "run_ahead", "set_memory", "syncs", "unknown_sizes", "was_asked",
]  # fmt: skip

VARIABLE = "GPUMAGIC_FAKECUDA"
MOST_DEVICES = 16


def environment(
    gpus: str | GPU | Sequence[str | GPU] = "A100",
    *,
    devices: int | None = None,
    capacity: str | int | None = None,
    others: str | int = 0,
    peer_access: bool = False,
) -> dict[str, str]:
    """Return the variables of a process that is to start over the fake runtime, compiling it if need be.

    Args:
        gpus: a name of `GPUS`, a `GPU`, or one for each device.
        devices: how many of them; by default as many as `gpus` names.
        capacity: bytes of each, or text such as `"8GiB"`, in place of what the GPU has.
        others: bytes of each that other processes hold.
        peer_access: whether kernels may read the memory of another device, as over NVLink; if so, torch makes
            strided copies between devices with a kernel, which the log of copies does not have.

    Raises:
        OptionError: an argument cannot be read.
        FakecudaUnavailable: torch is no CUDA build, or there is no C compiler.
    """
    from gpumagic.fakecuda import build

    chosen = _chosen(gpus, devices)
    held = _bytes(others)
    if capacity is not None:
        nbytes = _bytes(capacity)
        chosen = [replace(gpu, capacity=nbytes) for gpu in chosen]
    parts = [f"peer={int(peer_access)}"]
    for number, gpu in enumerate(chosen):
        parts.append(settings(gpu, number, held))
    folder = build.libraries()
    preloaded = sorted(
        str(path) for path in folder.glob("*.so*") if not path.is_symlink()
    )
    before = os.environ.get("LD_PRELOAD")
    if before and not is_enabled():
        preloaded.append(before)
    return {
        "LD_PRELOAD": ":".join(preloaded),
        VARIABLE: "|".join(parts),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _bytes(size: str | int) -> int:
    """Return a size that is given in bytes or as text."""
    return size if isinstance(size, int) else parse_size(size)


def _chosen(gpus: str | GPU | Sequence[str | GPU], devices: int | None) -> list[GPU]:
    """Return the GPU of each device."""
    asked = [gpus] if isinstance(gpus, (str, GPU)) else gpus
    found: list[GPU] = []
    for gpu in asked:
        found.append(gpu if isinstance(gpu, GPU) else GPUS[name_of(gpu)])
    count = len(found) if devices is None else devices
    if not 0 <= count <= MOST_DEVICES:
        raise OptionError(
            f"{count} devices are not possible; ask for 0 to {MOST_DEVICES}"
        )
    if len(found) not in {1, count}:
        raise OptionError(
            f"{count} devices cannot be made of {len(found)} GPUs; name one, or one for each"
        )
    if len(found) == 1:
        return found * count
    return found


# ---- What the runtime saw of this process

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
        ("function", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("count", ctypes.c_int64),
        ("binary", ctypes.c_void_p),
    )


class _UnknownSize(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("count", ctypes.c_int64))


def is_enabled() -> bool:
    """Return whether this process runs over the fake runtime."""
    if "libfakecuda.so" not in os.environ.get("LD_PRELOAD", ""):
        return False
    return hasattr(ctypes.CDLL(None), "fakecuda_syncs")


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

    The workspaces of cuSOLVER, cuSPARSE and cuFFT are missing from what torch has allocated here; those of cuDNN, and
    the reserve space of an RNN, are what an H200 took of the like. `{"cudnn graph": 3}` is three plans of convolutions
    or attention; a `count` is one of different elements, of which none was found.
    """
    return _counted("fakecuda_unknown_sizes", _UnknownSize)


def _records(function: str, kind: type[ctypes.Structure]) -> list[Any]:
    """Return the records that a function of the runtime writes."""
    if not is_enabled():
        return []
    write = getattr(_library(), function)
    room = write(None, 0)
    records: Any = (kind * room)()
    written = write(
        records, room
    )  # more than there is room for, if another thread has made some since
    return list(records[: min(written, room)])


def _counted(function: str, kind: type[ctypes.Structure]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for record in _records(function, kind):
        name: bytes = record.name or b"?"
        counted[name.decode()] += record.count
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
    capacity, others, used, peak, context = (
        int(library.fakecuda_memory(device, what)) for what in range(5)
    )
    if capacity < 0:
        raise IndexError(f"there is no device {device}")
    return Memory(capacity, others, used, peak, bool(context))


def set_memory(
    device: int = 0,
    *,
    capacity: int | None = None,
    others: int | None = None,
    limit: int | None = None,
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
    sizes: list[ctypes.c_int64] = []
    for size in (capacity, others, limit):
        sizes.append(ctypes.c_int64(-1 if size is None else size))
    if _library().fakecuda_set_memory(device, *sizes):
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
    source = _device(record.source)
    target = _device(record.target)
    if source == target:
        direction = "within the host" if source == "cpu" else "within a device"
    elif source == "cpu":
        direction = "host-to-device"
    elif target == "cpu":
        direction = "device-to-host"
    else:
        direction = "device-to-device"
    return Copy(
        direction=direction,
        source=source,
        target=target,
        nbytes=record.nbytes,
        pinned=bool(record.pinned),
        stream=record.stream,
    )


def _device(number: int) -> str:
    return "cpu" if number == _HOST else f"cuda:{number}"

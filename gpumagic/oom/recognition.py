"""An exception -> whether it is out-of-memory, of which kind, and what its text says.

Texts are those of PyTorch 2.6 to 2.13 (CUDA, ROCm, XPU, MPS, CPU), CUDA's libraries, NCCL, numpy, CuPy, RMM,
JAX and TensorFlow. The first row that matches wins, so a row stands before the more general ones.

Texts round to two decimals, and print 16 EiB where the driver knew nothing (microsoft/WSL#11050). Their numbers are a
fallback for what the allocator no longer knows; the size of the request is found nowhere else.

It uses text and class names alone, over the whole graph of the exception, so it needs no torch and recognises
the errors of libraries that are not installed. `OutOfMemory`, the one-line error a guarded cell fails with,
is made here on first use, because it is a subclass of torch's own.
"""

from __future__ import annotations

import builtins
import errno
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.advice.facts import PINNED
from gpumagic.source import frames

if TYPE_CHECKING:

    class OutOfMemory(RuntimeError, MemoryError):
        """Raised in place of an out-of-memory error; holds its type and first line as text, and no frame."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of running out of memory."""

    name: str
    text: str
    """Regular expression searched in the exception's text."""
    certainty: str = "certain"
    """``"certain"``; ``"probable"``: other faults have the same text; ``"not-oom"``: torch's error of this type without
    a shortage."""
    memory: str = "device"
    """What ran out: ``"device"``, ``"host"`` or ``"shared"`` (/dev/shm) memory."""
    backend: str | None = None
    """Torch's name of the device type, where the text settles it."""
    needs_low_free: bool = False
    """True where the text alone proves nothing: believed only if the device is known to be nearly full."""
    allocator: bool = False
    """True for torch's caching allocators, which empty their cache and try again before they raise."""


KINDS: tuple[Kind, ...] = (
    # torch's caching allocators.
    Kind("size bug", r"[Tt]ried to allocate more than 1EB", "not-oom", allocator=True),
    Kind(
        "memory fraction",
        r"preemptively rejected because it would exceed per_process_memory_fraction",
        backend="cuda",
        allocator=True,
    ),
    Kind(
        "cuda async allocator",
        r"Allocation on device ([\d\x01-\x1f]* ?would exceed|\Z)",
        backend="cuda",
    ),
    Kind("cuda allocator", r"CUDA out of memory\.", backend="cuda", allocator=True),
    Kind("rocm allocator", r"HIP out of memory\.", backend="cuda", allocator=True),
    Kind("xpu allocator", r"XPU out of memory\.", backend="xpu", allocator=True),
    Kind("mps allocator", r"MPS backend out of memory", backend="mps", allocator=True),
    Kind(
        "xpu block limit",
        r"can NOT allocate memory block with size larger than 4\s*GB",
        backend="xpu",
    ),
    Kind("xpu driver", r"UR_RESULT_ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)", backend="xpu"),
    Kind("accelerator allocator", r"\b\w+ out of memory\. Tried to allocate", allocator=True),
    Kind(
        "expandable segments",
        r"expandable_segments: memory (mapping|allocation) failed with OOM",
        backend="cuda",
    ),
    # CUDA and its libraries, which ask the driver directly.
    Kind(
        "nccl",
        r"(NCCL|nccl).*(Failed to CUDA calloc|Cuda failure.{0,12}out of memory)",
        backend="cuda",
    ),
    Kind("rmm", r"std::bad_alloc: (out_of_memory|CUDA error)", backend="cuda"),
    Kind("cuda driver", r"(CUDA|HIP) driver error: out of memory", backend="cuda"),
    Kind(
        "cuda runtime",
        r"(CUDA|HIP) error: out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
        backend="cuda",
    ),
    Kind("cublas", r"(CU|HIP|ROC)BLAS_STATUS_ALLOC_FAILED", "probable", backend="cuda"),
    Kind(
        "cublas",
        r"(CU|HIP|ROC)BLAS_STATUS_NOT_INITIALIZED",
        "probable",
        backend="cuda",
        needs_low_free=True,
    ),
    Kind(
        "cudnn",
        r"(CUDNN|MIOPEN)_STATUS_ALLOC_FAILED|miopenStatusAllocFailed",
        "probable",
        backend="cuda",
    ),
    Kind(
        "cudnn",
        r"CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)|Unable to find a valid cuDNN algorithm"
        r"|GET was unable to find an engine to execute this computation",
        "probable",
        backend="cuda",
        needs_low_free=True,
    ),
    Kind(
        "cusolver or cusparse",
        r"CU(SOLVER|SPARSE|FFT|RAND)_(STATUS_)?ALLOC_FAILED",
        "probable",
        backend="cuda",
    ),
    # Other frameworks on the same device.
    Kind("cupy", r"Out of memory allocating [\d,]+ bytes \(allocated so far", backend="cuda"),
    Kind(
        "jax",
        r"RESOURCE_EXHAUSTED.*([Oo]ut of memory|allocat)|Failed to allocate request for .* on device ordinal",
    ),
    Kind("tensorflow", r"OOM when allocating tensor with shape.*device:GPU", backend="cuda"),
    Kind("tensorflow (host)", r"OOM when allocating tensor with shape", memory="host"),
    # Shared memory between DataLoader workers.
    Kind(
        "shared memory",
        r"unable to (mmap|write|allocate shared memory|resize|open shared memory).{0,300}"
        r"(Cannot allocate memory \(12\)|No space left on device \(28\))",
        memory="shared",
    ),
    Kind(
        "dataloader bus error", r"DataLoader worker.*killed by signal: Bus error", memory="shared"
    ),
    Kind(
        "dataloader killed",
        r"DataLoader worker.*killed by signal: Killed",
        "probable",
        memory="host",
    ),
    # Host memory.
    Kind("numpy", r"Unable to allocate [\d.]+ \w+ for an array with shape", memory="host"),
    Kind(
        "host allocator",
        r"DefaultCPUAllocator: can't allocate memory|alloc_cpu.*Cannot allocate memory"
        r"|not enough memory: you tried to allocate|\bstd::bad_alloc\b",
        memory="host",
    ),
    Kind("python", r"Caught MemoryError in (DataLoader worker|replica|pin memory)", memory="host"),
)

BY_CLASS: dict[str, Kind] = {
    "OutOfMemoryError": Kind("accelerator allocator", "", allocator=True),
    "MemoryError": Kind("python", "", memory="host"),
}
"""The kind of an exception whose text matches no row, by the name of one of its classes."""

PINNING = Kind(PINNED, "", "probable", memory="host")
"""A failed ``cudaHostAlloc``: its text is that of any failure of the CUDA runtime, only its line tells."""

_UNITS = {"b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4, "p": 1024**5}
_SIZE = r"(\d[\d,]*(?:\.\d+)?)\s*([KMGTP]i?B|bytes?|B)\b"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers in an error's text, in bytes; None where there is no credible one."""

    requested: int | None = None
    index: int | None = None
    """The device's index."""
    capacity: int | None = None
    """Of the device; where the text names only a cap below it (MPS, CuPy), that cap."""
    free: int | None = None
    allocated: int | None = None
    """In torch's live tensors, at the instant of the failure."""
    unallocated: int | None = None
    """Reserved by torch but unallocated: what fragmentation could have cost."""
    capped: bool = False
    """Whether a cap that the process has set itself left less than the device had free."""


_REQUESTED = (
    rf"(?:[Tt]ried to allocate|Requested\s*:|[Oo]ut of memory (?:while trying to allocate|allocating))\s*{_SIZE}",
    rf"Requested size: {_SIZE}",
    r"Requested size: (\d[\d,]*)()",
    rf"Failed to allocate request for (?:[^(]*\()?{_SIZE}",
    rf"(?:Unable to allocate|calloc(?: async)?|unable to (?:mmap|write|resize)|allocate(?: about)?) {_SIZE}",
)
_CAPACITY = rf"total capacity of {_SIZE}", rf"Device limit\s*:\s*{_SIZE}"
_FREE = rf"of which {_SIZE} is free", rf"Free \(according to CUDA\)\s*:\s*{_SIZE}"
_ALLOCATED = rf"MPS allocated: {_SIZE}", rf"allocated so far: {_SIZE}"
_LIMIT = rf"max allowed: {_SIZE}", rf"limit set to: {_SIZE}"


def read_numbers(text: str) -> Numbers:
    """Return the numbers of one error's text; what exceeds twice the capacity is a sentinel and left out."""
    capacity, limit, free = _size(text, *_CAPACITY), _size(text, *_LIMIT), _size(text, *_FREE)
    in_tensors = _size(text, rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
    unallocated = _size(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    if (
        capacity is None and limit is not None
    ):  # MPS and CuPy name the cap that counts, not the device's size
        capacity, allocated = limit, _size(text, *_ALLOCATED)
        free = (
            None
            if allocated is None
            else limit - allocated - (_size(text, rf"other allocations: {_SIZE}") or 0)
        )
    allowed = _size(text, rf"{_SIZE} allowed;")  # by `set_per_process_memory_fraction`
    left = None if allowed is None else allowed - (in_tensors or 0) - (unallocated or 0)
    capped = left is not None and free is not None and left < free
    index = re.search(r"(?:GPU|on device|device ordinal|device:GPU:)\s?(\d+)\b", text)
    free, in_tensors, unallocated = (
        None if each is None or each > 2 * (capacity or each) or each >= 2**60 else max(0, each)
        for each in (left if capped else free, in_tensors, unallocated)
    )
    return Numbers(
        _size(text, *_REQUESTED),
        int(index[1]) if index is not None else None,
        capacity,
        free,
        in_tensors,
        unallocated,
        capped,
    )


def _size(text: str, *patterns: str) -> int | None:
    """Return the bytes that the first pattern that matches finds."""
    match = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
    if match is None:
        return None
    return int(float(match[1].replace(",", "")) * _UNITS[(match[2] or "b")[0].lower()])


NEARLY_FULL = 1024**3
"""Free bytes below which a library's vague failure is taken for out-of-memory."""


class OomEvent(NamedTuple):
    """An out-of-memory error, as far as the exception alone tells."""

    kind: Kind
    """Its backend is the one that the text names."""
    numbers: Numbers
    message: str
    """``"Type: first line"`` of the exception that says so."""
    raised: str
    """The same of the exception that ended the cell; differs where that one wrapped it."""
    text: str

    @property
    def device(self) -> str | None:
        """Such as ``"cuda:1"``; None where the text does not settle it."""
        is_named = (
            self.kind.memory == "device"
            and self.kind.backend is not None
            and self.numbers.index is not None
        )
        return f"{self.kind.backend}:{self.numbers.index}" if is_named else None


def recognise(
    error: BaseException, free: int | None = None, outside: Collection[int] = ()
) -> OomEvent | None:
    """Return what ran out, or None for any other exception; causes, contexts and group members are read too.

    Args:
        error: the exception that ended the cell.
        free: bytes free on the fullest device in use; settles texts that mean several things.
        outside: ids of exceptions that were being handled before, and are none of this one's.
    """
    probable = None
    for each in frames.related_exceptions(error, outside):
        text = frames.text_of(each)
        kind = _kind_of(each, text)
        if kind is None:
            continue
        is_vague = kind.certainty == "probable" and kind.memory == "device"
        if is_vague and (kind.needs_low_free if free is None else free >= NEARLY_FULL):
            continue
        numbers, word = read_numbers(text), text.partition(" out of memory")[0].rpartition(" ")[2]
        if kind.backend is None and word.isalnum() and " out of memory. Tried" in text:
            kind = replace(kind, backend=word.lower())
        if numbers.capped:
            kind = replace(kind, name="memory fraction")
        event = OomEvent(kind, numbers, frames.summary_line(each), frames.summary_line(error), text)
        if kind.certainty != "probable":
            return event
        probable = probable or event
    return probable


def _kind_of(error: BaseException, text: str) -> Kind | None:
    cls = type(error)
    is_builtin = getattr(builtins, cls.__name__, None) is cls
    if (
        is_builtin
        and not issubclass(cls, RuntimeError | MemoryError | OSError | SystemError)
        and cls is not Exception
    ):
        return None  # one that no allocator raises, whatever its text says
    kind = next((kind for kind in KINDS if re.search(kind.text, text, re.DOTALL)), None)
    if kind is None and isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Kind("operating system", "", memory="host")  # fork, mmap
    return kind or next(
        (BY_CLASS[each.__name__] for each in cls.__mro__ if each.__name__ in BY_CLASS), None
    )


def __getattr__(name: str) -> object:
    if name != "OutOfMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch
    except ImportError:
        base: Any = RuntimeError
    else:
        base = torch.OutOfMemoryError
    members = {
        "__doc__": "Raised in place of an out-of-memory error; holds its type and first line, and no frame.",
        "__module__": __name__,
        # IPython shows this instead of the traceback (7.34 to 9)
        "_render_traceback_": lambda self: [f"OutOfMemory: {self}"],
    }
    return globals().setdefault(name, type(name, (base, MemoryError), members))

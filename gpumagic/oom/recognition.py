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

from gpumagic.advice.facts import Certainty, Kind, Memory
from gpumagic.source import frames

if TYPE_CHECKING:

    class OutOfMemory(RuntimeError, MemoryError):
        """Raised in place of an out-of-memory error; holds its type and first line as text, and no frame."""


@dataclass(frozen=True, slots=True)
class Signature:
    """How one way of running out of memory is known."""

    kind: Kind
    pattern: str
    """Regular expression searched in the exception's text."""
    certainty: Certainty = "certain"
    memory: Memory = Memory.DEVICE
    backend: str | None = None
    """Torch's name of the device type, where the text settles it."""
    needs_low_free: bool = False
    """True where the text alone proves nothing: believed only if the device is known to be nearly full."""
    is_allocator: bool = False
    """True for torch's caching allocators, which empty their cache and try again before they raise."""


SIGNATURES: tuple[Signature, ...] = (
    # torch's caching allocators.
    Signature(
        Kind.SIZE_BUG,
        r"[Tt]ried to allocate more than 1EB",
        "not-oom",
        is_allocator=True,
    ),
    Signature(
        Kind.MEMORY_FRACTION,
        r"preemptively rejected because it would exceed per_process_memory_fraction",
        backend="cuda",
        is_allocator=True,
    ),
    Signature(
        Kind.CUDA_ASYNC_ALLOCATOR,
        r"Allocation on device ([\d\x01-\x1f]* ?would exceed|\Z)",
        backend="cuda",
    ),
    Signature(
        Kind.CUDA_ALLOCATOR, r"CUDA out of memory\.", backend="cuda", is_allocator=True
    ),
    Signature(
        Kind.ROCM_ALLOCATOR, r"HIP out of memory\.", backend="cuda", is_allocator=True
    ),
    Signature(
        Kind.XPU_ALLOCATOR, r"XPU out of memory\.", backend="xpu", is_allocator=True
    ),
    Signature(
        Kind.MPS_ALLOCATOR,
        r"MPS backend out of memory",
        backend="mps",
        is_allocator=True,
    ),
    Signature(
        Kind.XPU_BLOCK_LIMIT,
        r"can NOT allocate memory block with size larger than 4\s*GB",
        backend="xpu",
    ),
    Signature(
        Kind.XPU_DRIVER,
        r"UR_RESULT_ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)",
        backend="xpu",
    ),
    Signature(
        Kind.ACCELERATOR_ALLOCATOR,
        r"\b\w+ out of memory\. Tried to allocate",
        is_allocator=True,
    ),
    Signature(
        Kind.EXPANDABLE_SEGMENTS,
        r"expandable_segments: memory (mapping|allocation) failed with OOM",
        backend="cuda",
    ),
    # CUDA and its libraries, which ask the driver directly.
    Signature(
        Kind.NCCL,
        r"(NCCL|nccl).*(Failed to CUDA calloc|Cuda failure.{0,12}out of memory)",
        backend="cuda",
    ),
    Signature(Kind.RMM, r"std::bad_alloc: (out_of_memory|CUDA error)", backend="cuda"),
    Signature(
        Kind.CUDA_DRIVER, r"(CUDA|HIP) driver error: out of memory", backend="cuda"
    ),
    Signature(
        Kind.CUDA_RUNTIME,
        r"(CUDA|HIP) error: out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
        backend="cuda",
    ),
    Signature(
        Kind.CUBLAS, r"(CU|HIP|ROC)BLAS_STATUS_ALLOC_FAILED", "probable", backend="cuda"
    ),
    Signature(
        Kind.CUBLAS,
        r"(CU|HIP|ROC)BLAS_STATUS_NOT_INITIALIZED",
        "probable",
        backend="cuda",
        needs_low_free=True,
    ),
    Signature(
        Kind.CUDNN,
        r"(CUDNN|MIOPEN)_STATUS_ALLOC_FAILED|miopenStatusAllocFailed",
        "probable",
        backend="cuda",
    ),
    Signature(
        Kind.CUDNN,
        r"CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)|Unable to find a valid cuDNN algorithm"
        r"|GET was unable to find an engine to execute this computation",
        "probable",
        backend="cuda",
        needs_low_free=True,
    ),
    Signature(
        Kind.CUSOLVER_OR_CUSPARSE,
        r"CU(SOLVER|SPARSE|FFT|RAND)_(STATUS_)?ALLOC_FAILED",
        "probable",
        backend="cuda",
    ),
    # Other frameworks on the same device.
    Signature(
        Kind.CUPY,
        r"Out of memory allocating [\d,]+ bytes \(allocated so far",
        backend="cuda",
    ),
    Signature(
        Kind.JAX,
        r"RESOURCE_EXHAUSTED.*([Oo]ut of memory|allocat)|Failed to allocate request for .* on device ordinal",
    ),
    Signature(
        Kind.TENSORFLOW,
        r"OOM when allocating tensor with shape.*device:GPU",
        backend="cuda",
    ),
    Signature(
        Kind.TENSORFLOW_HOST,
        r"OOM when allocating tensor with shape",
        memory=Memory.HOST,
    ),
    # Shared memory between DataLoader workers.
    Signature(
        Kind.SHARED_MEMORY,
        r"unable to (mmap|write|allocate shared memory|resize|open shared memory).{0,300}"
        r"(Cannot allocate memory \(12\)|No space left on device \(28\))",
        memory=Memory.SHARED,
    ),
    Signature(
        Kind.DATALOADER_BUS_ERROR,
        r"DataLoader worker.*killed by signal: Bus error",
        memory=Memory.SHARED,
    ),
    Signature(
        Kind.DATALOADER_KILLED,
        r"DataLoader worker.*killed by signal: Killed",
        "probable",
        memory=Memory.HOST,
    ),
    # Host memory.
    Signature(
        Kind.NUMPY,
        r"Unable to allocate [\d.]+ \w+ for an array with shape",
        memory=Memory.HOST,
    ),
    Signature(
        Kind.HOST_ALLOCATOR,
        r"DefaultCPUAllocator: can't allocate memory|alloc_cpu.*Cannot allocate memory"
        r"|not enough memory: you tried to allocate|\bstd::bad_alloc\b",
        memory=Memory.HOST,
    ),
    Signature(
        Kind.PYTHON,
        r"Caught MemoryError in (DataLoader worker|replica|pin memory)",
        memory=Memory.HOST,
    ),
)

BY_CLASS: dict[str, Signature] = {
    "OutOfMemoryError": Signature(Kind.ACCELERATOR_ALLOCATOR, "", is_allocator=True),
    "MemoryError": Signature(Kind.PYTHON, "", memory=Memory.HOST),
}
"""The signature of an exception whose text matches no row, by the name of one of its classes."""

PINNING = Signature(Kind.PINNED_MEMORY, "", "probable", memory=Memory.HOST)
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
    capacity = _find_size(text, *_CAPACITY)
    free = _find_size(text, *_FREE)
    in_tensors = _find_size(
        text, rf"Of the allocated memory {_SIZE} is allocated by PyTorch"
    )
    unallocated = _find_size(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    limit = _find_size(text, *_LIMIT)
    if capacity is None and limit is not None:
        # MPS and CuPy name the cap that counts, not the device's size
        capacity = limit
        free = None
        allocated = _find_size(text, *_ALLOCATED)
        if allocated is not None:
            other = _find_size(text, rf"other allocations: {_SIZE}") or 0
            free = limit - allocated - other
    capped = False
    allowed = _find_size(
        text, rf"{_SIZE} allowed;"
    )  # by `set_per_process_memory_fraction`
    if allowed is not None and free is not None:
        left = allowed - (in_tensors or 0) - (unallocated or 0)
        if left < free:
            capped = True
            free = left
    index = re.search(r"(?:GPU|on device|device ordinal|device:GPU:)\s?(\d+)\b", text)
    return Numbers(
        requested=_find_size(text, *_REQUESTED),
        index=int(index[1]) if index is not None else None,
        capacity=capacity,
        free=_credible(free, capacity),
        allocated=_credible(in_tensors, capacity),
        unallocated=_credible(unallocated, capacity),
        capped=capped,
    )


def _find_size(text: str, *patterns: str) -> int | None:
    """Return the bytes that the first pattern finds that matches."""
    for pattern in patterns:
        match = re.search(pattern, text)
        if match is not None:
            number = float(match[1].replace(",", ""))
            unit = match[2] or "b"
            return int(number * _UNITS[unit[0].lower()])
    return None


def _credible(nbytes: int | None, capacity: int | None) -> int | None:
    """Return a number of bytes, at least 0; None where it is too large to be one of the device."""
    if nbytes is None or nbytes >= 2**60:
        return None
    if capacity and nbytes > 2 * capacity:
        return None
    return max(0, nbytes)


NEARLY_FULL = 1024**3
"""Free bytes below which a library's vague failure is taken for out-of-memory."""


class Recognition(NamedTuple):
    """What an out-of-memory error says of itself."""

    signature: Signature
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
            self.signature.memory is Memory.DEVICE
            and self.signature.backend is not None
            and self.numbers.index is not None
        )
        return f"{self.signature.backend}:{self.numbers.index}" if is_named else None


def recognise(
    error: BaseException, free: int | None = None, outside: Collection[int] = ()
) -> Recognition | None:
    """Return what ran out, or None for any other exception; causes, contexts and group members are read too.

    Args:
        error: the exception that ended the cell.
        free: bytes free on the fullest device in use; settles texts that mean several things.
        outside: ids of exceptions that were being handled before, and are none of this one's.
    """
    first_probable = None
    for related in frames.related_exceptions(error, outside):
        text = frames.text_of(related)
        signature = _signature_of(related, text)
        if signature is None:
            continue
        if signature.certainty == "probable" and signature.memory is Memory.DEVICE:
            is_doubtful = (
                signature.needs_low_free if free is None else free >= NEARLY_FULL
            )
            if is_doubtful:
                continue
        if signature.backend is None and " out of memory. Tried" in text:
            word = text.partition(" out of memory")[0].rpartition(" ")[2]
            if word.isalnum():
                signature = replace(signature, backend=word.lower())
        numbers = read_numbers(text)
        if numbers.capped:
            signature = replace(signature, kind=Kind.MEMORY_FRACTION)
        recognition = Recognition(
            signature,
            numbers,
            message=frames.summary_line(related),
            raised=frames.summary_line(error),
            text=text,
        )
        if signature.certainty != "probable":
            return recognition
        first_probable = first_probable or recognition
    return first_probable


def _signature_of(error: BaseException, text: str) -> Signature | None:
    """Return the first signature that fits one exception: by its text, else by its class."""
    cls = type(error)
    is_builtin = getattr(builtins, cls.__name__, None) is cls
    can_be_oom = cls is Exception or issubclass(
        cls, RuntimeError | MemoryError | OSError | SystemError
    )
    if is_builtin and not can_be_oom:
        return None  # no allocator raises it, whatever its text says
    for signature in SIGNATURES:
        if re.search(signature.pattern, text, re.DOTALL):
            return signature
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Signature(Kind.OPERATING_SYSTEM, "", memory=Memory.HOST)  # fork, mmap
    for base in cls.__mro__:
        if base.__name__ in BY_CLASS:
            return BY_CLASS[base.__name__]
    return None


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

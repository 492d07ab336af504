"""The table of out-of-memory errors: which text or class is which, and how sure that makes us.

Texts are those of PyTorch 0.3 to 2.13 (CUDA, ROCm, XPU, MPS, CPU), CUDA's libraries, NCCL, numpy, CuPy, RMM,
JAX and TensorFlow. The first row that matches wins, so a row stands before the more general ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of running out of memory."""

    name: str
    text: str
    """Regular expression searched in the exception's text."""
    certainty: str = "certain"
    """``"certain"``; ``"probable"``: other faults read the same; ``"not-oom"``: reads like it and is not."""
    memory: str = "device"
    """What ran out: ``"device"``, ``"host"`` or ``"shared"`` (/dev/shm) memory."""
    backend: str | None = None
    """Torch's name of the device type, where the text settles it."""
    needs_low_free: bool = False
    """True where the text alone proves nothing: believed only if the device is known to be nearly full."""
    allocator: bool = False
    """True for torch's caching allocators, which empty their cache and try again before they raise."""

    def matches(self, text: str) -> re.Match[str] | None:
        """Return where the text shows this kind."""
        return re.search(self.text, text, re.DOTALL)


_LOW = {"certainty": "probable", "needs_low_free": True, "backend": "cuda"}

KINDS: tuple[Kind, ...] = (
    # Faults that speak of memory or resources and need another remedy.
    Kind("device-side assert", r"device-side assert triggered", "not-oom"),
    Kind("triton shared memory", r"out of resource: (shared memory|tensor memory|threads)", "not-oom"),
    Kind("size overflow", r"Storage size calculation overflowed", "not-oom"),
    # torch's caching allocators.
    Kind("size bug", r"[Tt]ried to allocate more than 1EB", "not-oom", allocator=True),
    Kind("memory fraction", r"preemptively rejected because it would exceed per_process_memory_fraction",
         backend="cuda", allocator=True),
    Kind("cuda async allocator", r"Allocation on device \d+ would exceed allowed memory", backend="cuda"),
    Kind("cuda allocator", r"CUDA out of memory\.", backend="cuda", allocator=True),
    Kind("rocm allocator", r"HIP out of memory\.", backend="cuda", allocator=True),
    Kind("xpu allocator", r"XPU out of memory\.", backend="xpu", allocator=True),
    Kind("mps allocator", r"MPS backend out of memory", backend="mps", allocator=True),
    Kind("xpu block limit", r"can NOT allocate memory block with size larger than 4\s*GB", backend="xpu"),
    Kind("xpu driver", r"UR_RESULT_ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)", backend="xpu"),
    Kind("accelerator allocator", r"\b\w+ out of memory\. Tried to allocate", allocator=True),
    Kind("expandable segments", r"expandable_segments: memory (mapping|allocation) failed with OOM", backend="cuda"),
    # CUDA and its libraries, which ask the driver directly.
    Kind("cuda runtime (old)", r"cuda runtime error \(2\) ?: out of memory", backend="cuda"),
    Kind("nccl", r"NCCL.*(Failed to CUDA calloc|Cuda failure.{0,12}out of memory)", backend="cuda"),
    Kind("nccl", r"(ncclUnhandledCudaError|nccl).*(Failed to CUDA calloc|Cuda failure.{0,12}out of memory)",
         backend="cuda"),
    Kind("rmm", r"std::bad_alloc: (out_of_memory|CUDA error)", backend="cuda"),
    Kind("cuda driver", r"(CUDA|HIP) driver error: out of memory", backend="cuda"),
    Kind("cuda runtime", r"(CUDA|HIP) error: out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
         backend="cuda"),
    Kind("cublas", r"(CU|HIP|ROC)BLAS_STATUS_ALLOC_FAILED", "probable", backend="cuda"),
    Kind("cublas", r"(CU|HIP|ROC)BLAS_STATUS_NOT_INITIALIZED", **_LOW),  # type: ignore[arg-type]
    Kind("cudnn", r"(CUDNN|MIOPEN)_STATUS_ALLOC_FAILED|miopenStatusAllocFailed", "probable", backend="cuda"),
    Kind("cudnn", r"CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)", **_LOW),  # type: ignore[arg-type]
    Kind("cudnn", r"Unable to find a valid cuDNN algorithm", **_LOW),  # type: ignore[arg-type]
    Kind("cudnn", r"GET was unable to find an engine to execute this computation", **_LOW),  # type: ignore[arg-type]
    Kind("cusolver or cusparse", r"CU(SOLVER|SPARSE|FFT|RAND)_(STATUS_)?ALLOC_FAILED", "probable", backend="cuda"),
    # Other frameworks on the same device.
    Kind("cupy", r"Out of memory allocating [\d,]+ bytes \(allocated so far", backend="cuda"),
    Kind("jax", r"RESOURCE_EXHAUSTED.*([Oo]ut of memory|allocat)|Failed to allocate request for .* on device ordinal"),
    Kind("tensorflow", r"OOM when allocating tensor with shape.*device:GPU", backend="cuda"),
    Kind("tensorflow (host)", r"OOM when allocating tensor with shape", memory="host"),
    # Shared memory between DataLoader workers.
    Kind("shared memory", r"unable to (mmap|write|allocate shared memory|resize|open shared memory).{0,300}"
                          r"(Cannot allocate memory \(12\)|No space left on device \(28\))", memory="shared"),
    Kind("dataloader bus error", r"DataLoader worker.*killed by signal: Bus error", memory="shared"),
    Kind("dataloader killed", r"DataLoader worker.*killed by signal: Killed", "probable", memory="host"),
    # Host memory.
    Kind("host allocator", r"DefaultCPUAllocator: can't allocate memory|alloc_cpu.*Cannot allocate memory"
                           r"|DefaultCPUAllocator: not enough memory|not enough memory: you tried to allocate",
         memory="host"),
    Kind("numpy", r"Unable to allocate [\d.]+ \w+ for an array with shape", memory="host"),
    Kind("host allocator", r"\bstd::bad_alloc\b", memory="host"),
    Kind("python", r"Caught MemoryError in (DataLoader worker|replica|pin memory)", memory="host"),
)  # fmt: skip

BY_CLASS: dict[str, Kind] = {
    "OutOfMemoryError": Kind("accelerator allocator", "", allocator=True),
    "MemoryError": Kind("python", "", memory="host"),
}
"""What is left to say of an exception whose text no row knows, by the name of one of its classes."""

HOST_ENOMEM = Kind("operating system", "", memory="host")
"""``OSError`` with errno ENOMEM: fork, mmap."""

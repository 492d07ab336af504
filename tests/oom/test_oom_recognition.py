"""Out-of-memory is told from its look-alikes by text and class, in every form it has been seen in."""

# ruff: noqa: E501  # the texts stand as they were printed

from __future__ import annotations

import errno
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpumagic
from gpumagic.oom import recognition
from gpumagic.oom.recognition import recognise

MIB, GIB = 2**20, 2**30

CUDA_24 = (
    "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacity of 6.00 GiB of which 0 bytes is free. "
    "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated memory 2.93 GiB "
    "is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated. max_split_size_mb"
)
CUDA_NEW = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which 5.25 GiB is free. "
    "Of the allocated memory 73.00 GiB is allocated by PyTorch, with 1.50 GiB allocated in private pools (e.g., CUDA "
    "Graphs), and 200.00 MiB is reserved by PyTorch but unallocated."
)
ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 5.00 GiB\n"
    "Requested               : 2.50 GiB\nDevice limit            : 7.79 GiB\nFree (according to CUDA): 11.19 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)


def named(name, base=RuntimeError):
    return type(name, (base,), {})


OOM = torch.OutOfMemoryError
CERTAIN = [
    (OOM(CUDA_24), "cuda allocator"),
    (OOM("CUDA out of memory. Tried to allocate 2.00 MiB. GPU "), "cuda allocator"),
    (OOM(CUDA_NEW), "cuda allocator"),
    (OOM("CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
         "limit. Requested size: 2147483648"), "memory fraction"),
    (OOM(ASYNC), "cuda async allocator"),
    (RuntimeError("expandable_segments: memory mapping failed with OOM on device"), "expandable segments"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), "cuda runtime"),
    (named("AcceleratorError")("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), "cuda runtime"),
    (RuntimeError("CUDA driver error: out of memory"), "cuda driver"),
    (RuntimeError("HIP error: out of memory"), "cuda runtime"),
    (named("DistBackendError")("NCCL error in: x.cpp:1, unhandled cuda error, ncclUnhandledCudaError: Call to CUDA "
     "function failed.\nLast error:\nFailed to CUDA calloc async 4194304 bytes"), "nccl"),
    (named("DistBackendError")("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), "nccl"),
    (OOM("HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 64.00 GiB"), "rocm allocator"),
    (OOM("XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB"), "xpu allocator"),
    (RuntimeError("Current platform can NOT allocate memory block with size larger than 4GB!"), "xpu block limit"),
    (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), "xpu driver"),
    (RuntimeError("MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
                  "27.20 GiB). Tried to allocate 292.50 MiB on private pool."), "mps allocator"),
    (OOM("simgpu out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 4.00 GiB of which 1.00 GiB "
         "is free."), "accelerator allocator"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                  "allocate 1152921504606846976 bytes. Error code 12 (Cannot allocate memory)"), "host allocator"),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1024 bytes."), "host allocator"),
    (named("_ArrayMemoryError", MemoryError)("Unable to allocate 728. TiB for an array with shape (10,) and data type "
                                             "float64"), "numpy"),
    (MemoryError(), "python"),
    (named("OutOfMemoryError", MemoryError)("Out of memory allocating 8,000,000,512 bytes (allocated so far: 0 bytes)."),
     "cupy"),
    (MemoryError("std::bad_alloc: out_of_memory: CUDA error at: cuda.hpp: cudaErrorMemoryAllocation out of memory"), "rmm"),
    (named("XlaRuntimeError")("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."), "jax"),
    (named("ResourceExhaustedError", Exception)("OOM when allocating tensor with shape[8,8] and type float on "
     "/job:localhost/device:GPU:0 by allocator GPU_0_bfc"), "tensorflow"),
    (RuntimeError("unable to mmap 128 bytes from file </torch_1>: Cannot allocate memory (12)"), "shared memory"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "operating system"),
    (OOM("Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n" + CUDA_24),
     "cuda allocator"),
    (RuntimeError("Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"),
     "python"),
    (OOM("Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call last):\n" + CUDA_NEW),
     "cuda allocator"),
    (named("BackendCompilerFailed")("backend='x' raised:\nOutOfMemoryError: " + CUDA_NEW), "cuda allocator"),
]  # fmt: skip

PROBABLE = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
]

NOT_OOM = [
    RuntimeError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    ),
    named("OutOfResources", Exception)(
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376."
    ),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 8]"),
    ValueError("the shop ran CUDA out of memory. Sorry"),
    KeyError("out of memory"),
    RuntimeError("the pool is out of memory tokens"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize(("error", "kind"), CERTAIN)
def test_every_certain_form_is_recognised(error, kind) -> None:
    event = recognise(error, free=100 * GIB)
    assert event is not None
    assert (event.signature.kind, event.signature.certainty) == (kind, "certain")


@pytest.mark.parametrize("text", PROBABLE)
def test_a_vague_failure_is_believed_only_on_a_nearly_full_device(text) -> None:
    event = recognise(RuntimeError(text), free=100 * MIB)
    assert event is not None
    assert event.signature.certainty == "probable"
    assert recognise(RuntimeError(text), free=20 * GIB) is None


@pytest.mark.parametrize("error", NOT_OOM)
def test_what_only_sounds_like_it_is_not(error) -> None:
    assert recognise(error, free=0) is None


def test_an_impossible_size_is_torchs_error_but_no_shortage() -> None:
    event = recognise(OOM("CUDA out of memory. Tried to allocate more than 1EB memory."))
    assert event is not None
    assert (event.signature.kind, event.signature.certainty) == ("size bug", "not-oom")


def chained(how):
    try:
        try:
            raise OOM(CUDA_NEW)  # noqa: TRY301
        except OOM as error:
            if how == "cause":
                raise ValueError("wrapped") from error
            if how == "hidden":
                raise ValueError("wrapped") from None
            raise ValueError("wrapped")  # noqa: B904  # a context without a cause is one of the cases
    except ValueError as error:
        return error


@pytest.mark.parametrize("how", ["cause", "hidden", "context"])
def test_it_is_found_behind_the_error_that_wrapped_it(how) -> None:
    event = recognise(chained(how))
    assert event is not None
    assert event.device == "cuda:3"
    assert event.raised == "ValueError: wrapped"
    assert event.message.startswith("OutOfMemoryError: CUDA out of memory.")


def test_it_is_found_in_a_group_and_a_cycle_ends() -> None:
    group = ValueError("several")
    group.exceptions = (KeyError("x"), OOM(CUDA_NEW))
    group.exceptions[0].__context__ = group
    event = recognise(group)
    assert event is not None
    assert event.signature.kind == "cuda allocator"


@pytest.mark.parametrize(("reason", "memory"), [("Killed", "host"), ("Bus error", "shared")])
def test_a_killed_dataloader_worker_is_explained_by_its_cause(reason, memory) -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {reason}. ")
    event = recognise(error)
    assert event is not None
    assert event.signature.memory == memory


def test_an_error_whose_text_fails_is_still_classified_by_its_class() -> None:
    class Broken(OOM):
        def __str__(self):
            raise RuntimeError("no text")

    event = recognise(Broken())
    assert event is not None
    assert event.signature.kind == "accelerator allocator"


def test_the_numbers_of_a_text_are_read() -> None:
    new = recognition.read_numbers(CUDA_NEW)
    assert (new.requested, new.index, new.capacity, new.free) == (
        20 * GIB,
        3,
        int(79.15 * GIB),
        int(5.25 * GIB),
    )
    assert new.unallocated == 200 * MIB


def test_sentinels_beyond_twice_the_capacity_are_discarded_but_a_request_never_is() -> None:
    numbers = recognition.read_numbers(ASYNC)
    assert (numbers.requested, numbers.capacity) == (int(2.5 * GIB), int(7.79 * GIB))
    full = recognition.read_numbers(
        CUDA_NEW.replace("5.25 GiB is free", "17179869184.00 GiB is free")
    )
    assert full.free is None
    huge = recognition.read_numbers(
        "X out of memory. Tried to allocate 900.00 GiB. GPU 0 has a total capacity of 4.00 GiB"
    )
    assert huge.requested == 900 * GIB


def test_where_only_a_cap_is_named_it_is_the_capacity() -> None:
    numbers = recognition.read_numbers(
        "MPS backend out of memory (MPS allocated: 9.50 GiB, other allocations: 17.25 GiB, max allowed: 27.25 GiB). "
        "Tried to allocate 292.50 MiB on private pool."
    )
    assert (numbers.requested, numbers.capacity, numbers.free) == (
        int(292.5 * MIB),
        int(27.25 * GIB),
        GIB // 2,
    )


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12",
            4096,
        ),
        (
            "Out of memory allocating 8,000,000,512 bytes (allocated so far: 0 bytes).",
            8_000_000_512,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", 8 * GIB),
        ("Failed to allocate request for 6.27GiB (6732906496B) on device ordinal 0", 6732906496),
        ("preemptively rejected because it would exceed limit. Requested size: 77", 77),
        ("unable to mmap 128 bytes from file </torch_1>: Cannot allocate memory (12)", 128),
        ("Failed to CUDA calloc async 4194304 bytes", 4194304),
    ],
)
def test_sizes_in_bytes_are_exact(text, requested) -> None:
    numbers = recognition.read_numbers(text)
    assert numbers.requested == requested


def test_out_of_memory_is_caught_as_torchs_own_and_as_pythons() -> None:
    assert issubclass(gpumagic.OutOfMemory, torch.OutOfMemoryError)
    assert issubclass(gpumagic.OutOfMemory, MemoryError)


def test_out_of_memory_is_one_line_and_survives_a_pickle() -> None:
    error = gpumagic.OutOfMemory("cuda:0 ran out of memory")
    assert error._render_traceback_() == ["OutOfMemory: cuda:0 ran out of memory"]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (gpumagic.OutOfMemory, str(error))


def test_recognition_and_the_error_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import gpumagic\n"
        "from gpumagic.oom.recognition import recognise\n"
        "print(recognise(MemoryError()).signature.kind, gpumagic.OutOfMemory.__mro__[1].__name__)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "python",
        "RuntimeError",
    ]


KNOWN = [*(str(error) for error, _ in CERTAIN), *PROBABLE, *(str(error) for error in NOT_OOM)]
TYPES = [
    OOM,
    RuntimeError,
    MemoryError,
    OSError,
    Exception,
    named("AcceleratorError"),
    named("XlaRuntimeError"),
]
LOCALES = [
    str.maketrans(".,", ",."),
    str.maketrans(".", "\u066b"),
    str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩"),
]


@st.composite
def mangled(draw):
    """An out-of-memory text as a log, a wrapper or a foreign locale may have left it."""
    text = draw(st.sampled_from(KNOWN) | st.text())
    text = text.translate(draw(st.sampled_from([{}, *LOCALES])))
    start = draw(st.integers(0, len(text)))
    text = (
        draw(st.sampled_from(["", "\n\n", "Caught OutOfMemoryError in replica 0.\n", "\0", "é"]))
        + text[start // 8 :]
    )
    text = text[: draw(st.integers(0, len(text)))]
    return text.upper() if draw(st.booleans()) else text


class Hostile(RuntimeError):
    """An error whose every part fails to be read."""

    __notes__ = property(lambda self: 1 / 0)
    exceptions = ("not", "errors")

    def __str__(self):
        raise RecursionError("no text")

    __repr__ = __str__


@given(st.lists(st.tuples(mangled(), st.sampled_from(TYPES), st.sampled_from(["cause", "context", "group"])), min_size=1,
                max_size=5), st.none() | st.integers(0, 2**40))  # fmt: skip
def test_no_text_however_mangled_and_wrapped_makes_the_recogniser_fail(layers, free) -> None:
    error: BaseException = Hostile()
    for text, kind, link in layers:
        outer = kind(text)
        if link == "group":
            outer = named("Group", Exception)(text)
            outer.exceptions = (error, outer)
        else:
            setattr(outer, f"__{link}__", error)
        error = outer
    event = recognise(error, free)
    if event is not None:
        numbers = event.numbers
        assert all(
            value is None or 0 <= value < 2**70
            for value in (numbers.requested, numbers.capacity, numbers.free)
        )
        assert "\n" not in event.message


@pytest.mark.parametrize(("error", "kind"), CERTAIN)
def test_every_certain_form_is_found_five_errors_deep(error, kind) -> None:
    for depth in range(5):
        outer = ValueError(f"layer {depth}")
        setattr(outer, "__cause__" if depth % 2 else "__context__", error)
        error = outer
    event = recognise(error, free=100 * GIB)
    assert event is not None
    assert event.signature.kind == kind


@pytest.mark.parametrize(("error", "kind"), CERTAIN)
def test_a_truncated_text_of_torchs_own_class_is_still_out_of_memory(error, kind) -> None:
    if type(error) is OOM:
        for end in range(len(str(error))):
            assert recognise(OOM(str(error)[:end])) is not None


def test_the_table_has_all_the_kinds_of_the_literature() -> None:
    """Thirty-one forms at least, of which accelerate knows ten, and four that only read like it."""
    assert len(CERTAIN) + len(PROBABLE) >= 31
    assert len({str(error) for error in NOT_OOM[:3]} | {"1EB"}) == 4


@given(mangled())
def test_the_numbers_of_any_text_are_sizes_or_absent(text) -> None:
    numbers = recognition.read_numbers(text)
    for value in (
        numbers.requested,
        numbers.capacity,
        numbers.free,
        numbers.allocated,
        numbers.unallocated,
    ):
        assert value is None or type(value) is int

"""A simulated accelerator, for tests, CI and demos on machines without a GPU.

After `enable(devices=2, memory="4GiB")` torch has two devices, `simgpu:0` and `simgpu:1`. Tensors on them live in
host memory and every operator runs on the CPU, but what surrounds them is real: a caching allocator that fills the
statistics of `torch.accelerator` and raises `torch.OutOfMemoryError`, `torch.simgpu` with the names of
`torch.cuda`, refusal of operands on different devices, and an account of every copy between devices (`copies`).

It is a PrivateUse1 backend in C++ (`simgpu.cpp`), compiled once, in the user's cache. It was tried with torch 2.13.

What differs from a GPU: memory that a CPU kernel takes and returns within one operator is not counted; a large block
is cut to size, so `memory_allocated` is exactly the sum of the live storages, each rounded up to 512 bytes; work is
done when the call returns, so streams and events order nothing. What it does not do raises: sparse and quantized
tensors, DataParallel (torch's CPU build lacks what it scatters with), DLPack, sending its tensors to other processes.
"""

from __future__ import annotations

import os
import threading

from gpumagic.errors import OptionError, SimgpuUnavailable

__all__ = ["copies", "enable", "enable_from_environment", "is_enabled", "reset_copies"]

VARIABLE = "GPUMAGIC_SIMGPU"
DEFAULT_DEVICES = 2
DEFAULT_MEMORY = "4GiB"
_MOST_DEVICES = 64


_shape: tuple[int, int] | None = None
"""How many devices there are, and the bytes of each."""
_ENABLING = threading.Lock()
"""Held while the backend is registered and configured: torch takes one of that name once."""


def enable(devices: int = DEFAULT_DEVICES, memory: str | int = DEFAULT_MEMORY) -> None:
    """Give torch simulated GPUs, `simgpu:0` and so on; idempotent with the same arguments.

    Args:
        devices: how many, 1 to 64.
        memory: the capacity of each, in bytes or as text such as `"4GiB"`; it costs nothing until it is written to.

    Raises:
        OptionError: the count or the capacity cannot be read.
        SimgpuUnavailable: it cannot be compiled here, another backend holds torch's slot for out-of-tree devices,
            or the devices exist with another shape and hold tensors.
    """
    from gpumagic.report.units import parse_size

    if not 1 <= devices <= _MOST_DEVICES:
        raise OptionError(
            f"{devices} is not a number of simulated GPUs; write 1 to {_MOST_DEVICES}"
        )
    size = memory if isinstance(memory, int) else parse_size(memory)
    if size <= 0:
        raise OptionError(
            f"{memory!r} is not a GPU's memory; write a size such as 4GiB"
        )
    with _ENABLING:
        _enable(devices, size)


def _enable(devices: int, size: int) -> None:
    """Give torch so many simulated GPUs of so many bytes."""
    global _shape  # noqa: PLW0603  torch has one slot for an out-of-tree backend, for the life of the process
    if _shape == (devices, size):
        return
    from gpumagic.simgpu import _module

    if _shape is None:
        _module.register()
    if not _module.native.configure(devices, size):
        raise SimgpuUnavailable(
            "the simulated GPUs hold tensors and cannot change their number or capacity; "
            "delete the tensors, or restart the kernel and enable them with the shape you want"
        )
    _shape = devices, size


def enable_from_environment() -> bool:
    """Enable what the variable GPUMAGIC_SIMGPU asks for, such as `2x4GiB`, `4GiB` or `2`; return whether it is set.

    Raises:
        OptionError: the variable cannot be read.
        SimgpuUnavailable: as `enable`.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return False
    from gpumagic.options import positive_int

    count, times, memory = text.lower().partition("x")
    try:
        if text.isdecimal() or times:
            enable(positive_int(count.strip()), memory if times else DEFAULT_MEMORY)
        else:
            enable(1, text)
    except OptionError:
        raise OptionError(
            f"{VARIABLE}={text!r} is not a number of GPUs and their memory; write {VARIABLE}=2x4GiB"
        ) from None
    return True


def is_enabled() -> bool:
    """Return whether this process has simulated GPUs. Imports nothing."""
    return _shape is not None


def copies() -> list[tuple[str, str, str, int]]:
    """Return every copy between devices since `reset_copies`, as (direction, source, target, bytes), oldest first.

    The direction is "host-to-device", "device-to-host" or "device-to-device". The bytes are those that cross: where
    a copy also converts the type, CUDA does that on the host, or on the device if the copy is non-blocking, and so
    does this. `.item()` is a copy of one element; an operator that runs on a device copies nothing.
    """
    if _shape is None:
        return []
    from gpumagic.simgpu import _module

    return list(_module.native.copies())


def reset_copies() -> None:
    """Forget the copies counted so far."""
    if _shape is not None:
        from gpumagic.simgpu import _module

        _module.native.reset_copies()

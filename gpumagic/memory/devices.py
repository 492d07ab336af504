"""Devices and the host: names as people write them, taken apart, and what memory can still be had of each.

``cuda``, ``cuda:1``, ``mps``, ``xpu:0``, ``cpu``, ``meta``, ``simgpu:1`` mean what they mean in torch; a bare number or
``gpu:1`` is that index of whatever accelerator the machine has; ``auto`` is the one with most free memory.

A container has a limit of its own memory, that of its control group, mostly far below the machine's.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from gpumagic.backends import BACKENDS, backend_named
from gpumagic.errors import DeviceNotFound, nearest
from gpumagic.memory import Device as Device  # noqa: PLC0414  # this is where others import it from
from gpumagic.memory import allocator, cgroups

BUILTIN_DEVICES = ("cpu", "meta")
_BACKEND_NAMES = [backend.name for backend in BACKENDS]
_WORDS = ("auto", "gpu", *_BACKEND_NAMES, *BUILTIN_DEVICES)
"""What a device may be written as, with an index or without."""


class DriverFigures(NamedTuple):
    """What a device's driver says of its memory, in bytes; None where it does not."""

    free: int | None
    other_processes: int | None


driver_figures: Callable[[Collection[str]], Mapping[str, DriverFigures]] = lambda _: {}  # noqa: E731
"""Returns what drivers say of the devices of some backends, without initialising one; `gpumagic` sets it to what
`gpus.probe` reads, which this folder does not import."""


def room(device: str) -> int | None:
    """Return the bytes that torch can still allocate on a device, or None where that is unknown.

    They are what the driver has free and what torch's allocator has cached, up to the cap that
    `torch.cuda.set_per_process_memory_fraction` has set. A device that is not in use is not asked itself, since that
    would create a context on it.
    """
    if device == "cpu":
        memory = available_memory()
        return None if memory is None else memory[0]
    free = _driver_free(device)
    figures = allocator.device_stats(device)
    if free is None or figures is None:
        return free
    most = min(free + figures.reserved, allocator.cap(device) or sys.maxsize)
    return most - figures.allocated


def _driver_free(device: str) -> int | None:
    """Return the bytes that a device's driver has free, or None where it does not tell."""
    memory = allocator.mem_get_info(device)
    if memory is not None:
        free, _ = memory
        return free
    backend = Device.parse(device).backend
    figures = driver_figures({backend}).get(device)
    return None if figures is None else figures.free


def most_free(devices: list[str]) -> str | None:
    """Return the device with most room, a real one before a simulated one; the first of equals, None of none."""

    def rank(device: str) -> tuple[bool, int]:
        backend = backend_named(Device.parse(device).backend)
        return not backend.is_simulated, room(device) or 0

    return max(devices, key=rank, default=None)


def resolve(name: str, fallback: str | None = None) -> str:
    """Return the full torch name, such as ``"cuda:1"``, of a device written in any of the accepted ways.

    Args:
        name: as the user wrote it.
        fallback: the device to use instead where ``name`` is valid but not on this machine.

    Raises:
        DeviceNotFound: neither is there; the message names the closest match and the available devices.
    """
    if fallback is not None:
        fallback = resolve(fallback)
    try:
        return _resolve(name.strip())
    except DeviceNotFound:
        if fallback is None or not is_readable(name):
            raise
        return fallback


def available() -> list[str]:
    """Return every device that this process can use, accelerators first. Imports torch."""
    return [*allocator.accelerators(), *BUILTIN_DEVICES]


def completions() -> list[str]:
    """Return names to offer on Tab, without importing torch."""
    if "torch" not in sys.modules:
        return ["cuda", "auto", *BUILTIN_DEVICES]
    return [*available(), "auto"]


def _resolve(name: str) -> str:
    """Return the full torch name of a device, without another in its place."""
    if "{" in name or "$" in name:
        raise DeviceNotFound(
            f"{name!r} was left as it is: is the variable in it defined?"
        )
    match = re.fullmatch(r"([a-z]*?):?(\d+)?", name.lower())
    if match is None or not any(match.groups()):
        raise _unknown(name)
    backend: str = match[1]
    index = None if match[2] is None else int(match[2])
    if backend in BUILTIN_DEVICES and not index:
        return backend
    candidates: list[str] = []
    for device in allocator.accelerators():
        parsed = Device.parse(device)
        is_of_backend = backend in ("", "gpu", "auto", parsed.backend)
        if is_of_backend and index in (None, parsed.index):
            candidates.append(device)
    if not candidates or (backend == "auto" and index is not None):
        raise _unknown(name)
    if backend == "auto":
        return most_free(candidates) or candidates[0]
    if backend == "gpu" or index is not None:
        return candidates[0]
    return allocator.current_device(backend)


def is_readable(name: str) -> bool:
    """Return whether a word is written as a device, which need not be here."""
    name = name.strip()
    word, _, _ = name.partition(":")
    return word.lower() in _WORDS or name.isdigit()


def _unknown(name: str) -> DeviceNotFound:
    """Return the error for a device that is not here, with what may be meant."""
    here = available()
    backends = {Device.parse(device).backend for device in here}
    listed = f"there are {', '.join(here)}"
    if name.strip().lower().startswith("simgpu") and "simgpu" not in backends:
        remedy = "gpumagic.simgpu.enable() adds simulated GPUs"
        return DeviceNotFound(f"{name!r} is not here: {remedy}; {listed}")
    if is_readable(name) and not allocator.accelerators():
        cause = "torch sees no GPU (%gpuinfo says why)"
        return DeviceNotFound(f"{name!r} is not here: {cause}; {listed}")
    near = nearest(name, [*here, *backends])
    hint = f"did you mean {near}? " if near else ""
    return DeviceNotFound(f"{name!r} is not a device here; {hint}{listed}")


# ---- The host

HOST_ROOT = Path("/")


def available_memory() -> tuple[int, int] | None:
    """Return (available, total) bytes of RAM, or None where it cannot be asked.

    They are the machine's, or those of the control group that leaves this process least: a container's, a job's.
    """
    limits = cgroups.limits(HOST_ROOT)
    meminfo = _read_file("proc/meminfo")
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE))
    if "MemAvailable" in lines and "MemTotal" in lines:
        limits.append(
            (1024 * int(lines["MemAvailable"]), 1024 * int(lines["MemTotal"]))
        )
    return min(limits, default=None)


def private_memory(process: int) -> int:
    """Return the bytes of RAM that a process has besides files and shared memory; 0 where it cannot be asked."""
    pages = _read_file(f"proc/{process}/statm").split()
    if not pages:
        return 0
    _, resident, shared, *_ = map(int, pages)
    return (resident - shared) * mmap.PAGESIZE


def _read_file(path: str) -> str:
    return cgroups.read_file(HOST_ROOT / path)

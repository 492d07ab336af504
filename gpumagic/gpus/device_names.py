"""Resolves device names as people write them to the names torch uses.

``cuda``, ``cuda:1``, ``mps``, ``xpu:0``, ``cpu``, ``meta``, ``simgpu:1`` mean what they mean in torch; a bare number or
``gpu:1`` is that index of whatever accelerator the machine has; ``auto`` is the one with most free memory.
"""

from __future__ import annotations

import re
import sys

from gpumagic import simgpu
from gpumagic.errors import DeviceNotFound, nearest
from gpumagic.memory import allocator

BUILTIN_DEVICES = ("cpu", "meta")
_BACKENDS = ("auto", "gpu", "cuda", "mps", "xpu", "hpu", "npu", "simgpu", *BUILTIN_DEVICES)


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
        if fallback is None or not _is_readable(name):
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
    if "{" in name or "$" in name:
        raise DeviceNotFound(f"{name!r} was left as it is: is the variable in it defined?")
    accelerators = allocator.accelerators()
    if name.lower() == "auto":
        from gpumagic.gpus import probe

        if not accelerators:
            raise _unknown("auto")
        return probe.read_gpus().best or accelerators[0]
    match = re.fullmatch(r"([a-z]*?):?(\d+)?", name.lower())
    if match is None or not any(match.groups()):
        raise _unknown(name)
    backend, index = match[1], match[2]
    if backend in BUILTIN_DEVICES and int(index or 0) == 0:
        return backend
    return _resolve_index(name, backend, index, accelerators)


def _resolve_index(name: str, backend: str, index: str | None, accelerators: list[str]) -> str:
    if backend in ("", "gpu"):
        candidates = accelerators
    else:
        candidates = [each for each in accelerators if each.partition(":")[0] == backend]
    if not candidates:
        raise _unknown(name)
    if index is None:
        return allocator.current_device(candidates[0].partition(":")[0]) if backend != "gpu" else candidates[0]
    found = [each for each in candidates if each.endswith(f":{int(index)}")]
    if not found:
        raise _unknown(name)
    return found[0]


def most_free(devices: list[str]) -> str | None:
    """Return the device with most free memory, the first where that is unknown; None for an empty list."""
    from gpumagic.gpus import probe

    free = {row.device: row.memory_free for row in probe.read_gpus() if row.memory_free is not None}
    return max(devices, key=lambda device: free.get(device, 0), default=None)


def check_spelling(name: str) -> None:
    """Raise `DeviceNotFound` for what is no device on any machine; imports no torch."""
    if not _is_readable(name):
        near = nearest(name.partition(":")[0], _BACKENDS)
        hint = f"did you mean {near}?" if near else "write cuda, cuda:1, 1, auto or cpu"
        raise DeviceNotFound(f"{name!r} is not a device; {hint}")


def _is_readable(name: str) -> bool:
    return name.strip().partition(":")[0].lower() in _BACKENDS or name.strip().isdigit()


def _unknown(name: str) -> DeviceNotFound:
    here = available()
    listed = f"there are {', '.join(here)}"
    if name.strip().lower().startswith("simgpu") and not simgpu.is_enabled():
        return DeviceNotFound(f"{name!r} is not here: gpumagic.simgpu.enable() adds simulated GPUs; {listed}")
    if not allocator.accelerators() and _is_readable(name):
        return DeviceNotFound(f"{name!r} is not here: torch sees no GPU (%gpuinfo says why); {listed}")
    near = nearest(name, [*here, *(each.partition(":")[0] for each in here)])
    hint = f"did you mean {near}? " if near else ""
    return DeviceNotFound(f"{name!r} is not a device here; {hint}{listed}")

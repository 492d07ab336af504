"""Whether what is to be moved fits."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.errors import GpuMagicError
from gpumagic.memory import allocator, host
from gpumagic.report.units import size
from gpumagic.transfers.move.loads import CAUSE


def check(names: Sequence[str], nbytes: int, device: str) -> None:
    """Raise `GpuMagicError` where a device has not so many bytes left; what cannot be asked is tried."""
    free = _free(device)
    if free is not None and nbytes > free:
        need = f"{', '.join(names)} need{'s' if len(names) == 1 else ''} {size(nbytes)}"
        raise GpuMagicError(f"{CAUSE}: {need} on {device}, which has {size(free)} free; nothing was moved")


def _free(device: str) -> int | None:
    """Return the bytes that torch can still give on a device: the driver's free ones and its own cache."""
    if device == "cpu":
        memory = host.memory()
        return None if memory is None else memory[0]
    backend, _, index = device.partition(":")
    module = allocator.device_module(backend)
    if module is None or not hasattr(module, "mem_get_info"):
        return None
    free = int(module.mem_get_info(int(index or 0))[0])
    figures = allocator.figures(device)
    return free + (figures.reserved - figures.allocated if figures is not None else 0)

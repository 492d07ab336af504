"""Which devices a cell is dry-run for, what of each this process can have, and which engine answers for them.

That is torch's own CUDA over the fake runtime where it can be had, else fake tensors.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, replace

from gpumagic import fakecuda
from gpumagic._compat import torch_private
from gpumagic.backends import IN_TREE, backend_named
from gpumagic.errors import DryRunUnavailable, FakecudaUnavailable, OptionError
from gpumagic.memory import allocator, devices, presets, segments
from gpumagic.memory.devices import Device
from gpumagic.memory.presets import GPUS, like, settings
from gpumagic.memory.segments import Segment
from gpumagic.options import Ranks

CUDA = "cuda"
FAKE = "fake"
MIB = 1 << 20
CONTEXT = (250 * MIB, 900 * MIB)
"""What a CUDA context and the libraries take of the device, least and most: an estimate, it differs by card and driver.

People measured 254 MiB (lazy loading), 426 (RTX 6000 Ada) and 600 to 625 (A10G). On an H200 it was 619 MiB with a first
kernel, 685 with a product, 749 with a backward pass, 767 with convolutions and 871 with singular values."""
EAGER = 1900 * MIB
"""The most where all kernels are loaded at the start: 815 and 1,343 MiB were measured, and 1,841 on the H200."""
WORKSPACES = (0, 200 * MIB)
"""What cuBLAS and cuDNN take of torch's allocator, least and most: an estimate."""
LIBRARIES = 350 * MIB
"""The most that libraries take of a device that is in use already, outside of torch's allocator: see `CONTEXT`."""
STATED = (0, 64 * MIB)
"""The same where a capacity is what torch may have: two workspaces of cuBLAS, at most Hopper's, lie in it."""

_EXPANDABLE = "expandable segments are not modelled: segments have a fixed size here, so more may fit than is said"


@dataclass(frozen=True)
class Target:
    """All devices of one backend.

    The lists have one entry a device.
    """

    backend: str
    chosen: int
    """The index of the device that is asked about."""
    capacities: list[int | None]
    allocated: list[int]
    """What this process has allocated there now."""
    extra: tuple[int, int]
    segments: list[list[Segment] | None]
    """Where blocks lie in the allocator's cache; None where that cannot be known, as on an imagined device."""
    unknown: tuple[str, ...] = ()
    is_imagined: bool = False
    """Whether a capacity or a GPU was asked for, so that nothing of the devices here counts."""
    is_here: bool = True
    """Whether this machine has devices of the backend, so that the notebook's tensors may be on them."""
    gpu: str | None = None
    """The GPU that was asked for: a name of `presets.GPUS`."""
    ranks: Ranks | None = None
    """The processes of which each dry run is one; the devices are those of its machine."""
    engine: str = FAKE
    """What answers for the devices, `CUDA` or `FAKE`; what it does not model is in the figures then."""
    gpus: str = ""
    """The devices as the fake runtime reads them."""

    @property
    def names(self) -> list[str]:
        """The devices' torch names."""
        return [f"{self.backend}:{index}" for index in range(len(self.capacities))]

    @property
    def is_amd(self) -> bool:
        """Whether ROCm would run the cell, and all that is known of the GPU here is its size."""
        return self.gpu is not None and GPUS[self.gpu].name.startswith("AMD")

    def tells_segments(self) -> bool:
        """Return whether it is known where everything lies that is in use."""
        for segments_of_device, held in zip(self.segments, self.allocated, strict=True):
            if held and segments_of_device is None:
                return False
        return True


def choose(
    device: str | None,
    capacity: int | None,
    gpu: str | None = None,
    ranks: Ranks | None = None,
) -> Target:
    """Return what a dry run is for.

    Args:
        device: a device of this machine; where ``capacity`` or ``gpu`` is given, also one that it does not have.
        capacity: bytes that torch may have of the imagined device; what is free and this process's own without.
        gpu: the imagined device by its name, such as ``"T4"``; its memory counts where no capacity is given.
        ranks: the processes of which each has such a device, and nothing on it yet.

    Raises:
        DeviceNotFound: the device is not here, and neither a capacity nor a GPU is given.
        OptionError: there is no accelerator here, and neither is given; or no such GPU is known.
    """
    here = allocator.accelerators()
    is_stated = capacity is not None
    if gpu is not None:
        gpu = presets.name_of(gpu)
        device = device or "cuda:0"
        if capacity is None:
            capacity = presets.GPUS[gpu].capacity
    is_imagined = capacity is not None
    device = _resolved(device, here, is_imagined=is_imagined)
    backend, chosen = Device.parse(device)
    if backend in devices.BUILTIN_DEVICES:
        raise OptionError(
            f"a dry run is for an accelerator, and {device} is not one; name one of {', '.join(here)}"
        )
    of_backend = [name for name in here if name.startswith(f"{backend}:")]
    count = max(chosen + 1, len(of_backend))
    capacities: list[int | None] = []
    allocated: list[int] = []
    segments_of: list[list[Segment] | None] = []
    has_context = False
    for index in range(count):
        name = f"{backend}:{index}"
        figures = allocator.device_stats(name) if name in here else None
        held = 0 if figures is None else figures.allocated
        free = devices.room(name) if not is_imagined and name in here else None
        capacities.append(capacity if free is None else free + held)
        allocated.append(held)
        if figures is None or is_imagined:
            segments_of.append(None)
        else:
            has_context = True
            segments_of.append(segments.read_segments(name, figures))
    is_simulated = backend_named(backend).is_simulated
    if is_simulated:
        extra = (0, 0)
    elif is_stated:
        extra = STATED
    else:
        extra = _overhead_range(has_context=has_context)
    target = Target(
        backend,
        chosen,
        capacities=capacities,
        allocated=allocated,
        extra=extra,
        segments=segments_of,
        unknown=(_EXPANDABLE,)
        if segments.may_be_expandable() and not is_simulated
        else (),
        is_imagined=is_imagined,
        is_here=bool(of_backend),
        gpu=gpu,
    )
    return target if ranks is None else of_ranks(target, ranks)


def _resolved(device: str | None, here: list[str], *, is_imagined: bool) -> str:
    """Return the name of the device that is asked about, by default the first; an imagined one need not be here."""
    if device is None:
        if here:
            return here[0]
        if is_imagined:
            return "cuda:0"
        raise OptionError(
            "there is no GPU here; name one, --gpu T4, or give a size, --capacity 16GiB"
        )
    is_name = re.fullmatch(rf"({'|'.join(IN_TREE)})(:\d+)?", device) is not None
    if is_imagined and device not in here and is_name:
        return device
    return devices.resolve(device)


def of_ranks(target: Target, ranks: Ranks) -> Target:
    """Return the machine of some ranks: as many devices as it has of them, all like the one that was asked about."""
    number = min(ranks)
    extra = target.extra if target.is_imagined else _overhead_range(has_context=False)
    return replace(
        target,
        chosen=0,
        capacities=[target.capacities[target.chosen]] * number,
        allocated=[0] * number,
        segments=[None] * number,
        extra=extra,
        is_here=False,
        ranks=ranks,
    )


def _overhead_range(*, has_context: bool) -> tuple[int, int]:
    if has_context:
        return WORKSPACES[0], WORKSPACES[1] + LIBRARIES
    most = EAGER if os.environ.get("CUDA_MODULE_LOADING") == "EAGER" else CONTEXT[1]
    return CONTEXT[0] + WORKSPACES[0], most + WORKSPACES[1]


def _still_to_load(device: str, backend: str) -> int:
    """Return the bytes that CUDA's libraries may yet take of a device in use; 0 where a cap leaves so much alone."""
    figures = allocator.device_stats(device)
    memory = allocator.mem_get_info(device)
    driver = devices.driver_figures({backend}).get(device)
    others = None if driver is None else driver.other_processes
    if figures is None or memory is None or others is None:
        return 0
    free, total = memory
    taken = total - free - figures.reserved - others
    if taken <= 0:
        return 0  # the fake runtime counts no context
    cap = allocator.cap(device)
    if cap is not None and free + figures.reserved - cap >= LIBRARIES:
        return 0
    return min(LIBRARIES, max(0, CONTEXT[1] - taken))


# ---- The engine

VARIABLE = "GPUMAGIC_DRYRUN_ENGINE"
"""An environment variable: ``fake`` keeps to fake tensors where torch's own CUDA could be had, for comparisons."""


def with_engine(target: Target) -> Target:
    """Return some devices with the engine that answers for them; where the better one cannot be had, it says why."""
    import torch

    if not torch_private.BACKENDS_IN_PYTHON.is_there():
        needs = (
            f"a dry run needs torch {torch_private.BACKENDS_IN_PYTHON.since} or newer"
        )
        raise DryRunUnavailable(
            f"{needs}: {torch_private.BACKENDS_IN_PYTHON.missing()}"
        )
    if (
        target.backend != "cuda"
        or torch.version.cuda is None
        or os.environ.get(VARIABLE) == FAKE
    ):
        return target
    reason = _unavailable()
    if reason is not None:
        return replace(target, unknown=(*target.unknown, reason))
    least = max(0, target.extra[0] - WORKSPACES[0])
    most = max(0, target.extra[1] - WORKSPACES[1])
    if most and not least:  # the device is in use
        most = min(most, _still_to_load(target.names[target.chosen], target.backend))
    target = replace(target, extra=(least, most), unknown=())
    parts = [_device(index, target) for index in range(len(target.names))]
    return replace(target, engine=CUDA, gpus="|".join(["peer=0", *parts]))


@functools.cache
def _unavailable() -> str | None:
    """Return why the fake runtime cannot be had; the first call compiles it."""
    try:
        fakecuda.environment()
    except FakecudaUnavailable as error:
        return f"what torch's own CUDA allocator does: {error}"
    return None


def _is_initialized(index: int) -> bool:
    """Return whether this process uses CUDA and has such a device."""
    import torch

    return bool(torch.cuda.is_initialized() and index < torch.cuda.device_count())


def _device(index: int, target: Target) -> str:
    """Return the settings of a device: what this process cannot have of it is held by others."""
    number = 0 if target.ranks is not None else index
    gpu = GPUS["A100"]
    if target.gpu is not None:
        gpu = GPUS[target.gpu]
    elif not target.is_imagined and _is_initialized(number):
        gpu = like(number)
    room = target.capacities[index]
    if room is None:
        return settings(gpu, index, 0)
    if room > gpu.capacity or target.is_imagined:
        gpu = replace(gpu, capacity=room)
    return settings(gpu, index, max(0, gpu.capacity - room) + target.extra[1])

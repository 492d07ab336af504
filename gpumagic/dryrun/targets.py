"""Which devices a cell is dry-run for, what of each this process can have, and what is not modelled there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpumagic.errors import OptionError
from gpumagic.memory import allocator, devices, presets, segments
from gpumagic.memory.devices import Device
from gpumagic.memory.segments import Segment

MIB = 1 << 20
CONTEXT = (300 * MIB, 700 * MIB)
"""What a CUDA context takes of the device, least and most: an estimate, it differs by card and driver."""
WORKSPACES = (0, 400 * MIB)
"""What cuBLAS and cuDNN take for themselves, least and most: an estimate."""

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
    pinned: list[int]
    """Bytes that the allocator cannot give back now: live blocks, and what lies between them."""
    extra: tuple[int, int]
    cuts_to_size: bool
    """Whether the allocator is simgpu's; see `stage.allocator`."""
    segments: list[list[Segment] | None]
    """Where blocks lie in the allocator's cache; None where that cannot be known, as on an imagined device."""
    unknown: tuple[str, ...] = ()
    is_imagined: bool = False
    """Whether a capacity or a GPU was asked for, so that nothing of the devices here counts."""
    is_here: bool = True
    """Whether this machine has devices of the backend, so that the notebook's tensors may be on them."""
    gpu: str | None = None
    """The GPU that was asked for: a name of `presets.GPUS`."""

    @property
    def names(self) -> list[str]:
        """The devices' torch names."""
        return [f"{self.backend}:{index}" for index in range(len(self.capacities))]

    def tells_segments(self) -> bool:
        """Return whether it is known where everything lies that is in use."""
        return all(each is not None for each, held in zip(self.segments, self.allocated, strict=True) if held)


def choose(device: str | None, capacity: int | None, gpu: str | None = None) -> Target:
    """Return what a dry run is for.

    Args:
        device: a device of this machine; where ``capacity`` or ``gpu`` is given, also one that it does not have.
        capacity: bytes of the imagined device; what is free and this process's own without.
        gpu: the imagined device by its name, such as ``"T4"``; its memory counts where no capacity is given.

    Raises:
        DeviceNotFound: the device is not here, and neither a capacity nor a GPU is given.
        OptionError: there is no accelerator here, and neither is given; or no such GPU is known.
    """
    here = allocator.accelerators()
    if gpu is not None:
        gpu = presets.name_of(gpu)
        capacity = presets.GPUS[gpu].capacity if capacity is None else capacity
        device = device or "cuda:0"
    if device is None:
        if not here and capacity is None:
            raise OptionError("there is no GPU here; name one, --gpu T4, or give a size, --capacity 16GiB")
        device = here[0] if here else "cuda:0"
    elif capacity is None or device in here or not _is_imaginable(device):
        device = devices.resolve(device)
    backend, chosen = Device.parse(device)
    if backend in devices.BUILTIN_DEVICES:
        raise OptionError(f"a dry run is for an accelerator, and {device} is not one; name one of {', '.join(here)}")
    count = max(chosen + 1, sum(each.startswith(f"{backend}:") for each in here))
    names = [f"{backend}:{each}" for each in range(count)]
    figures = [allocator.device_stats(name) if name in here else None for name in names]
    simulated = backend == "simgpu"
    initialised = any(figures)
    return Target(
        backend, chosen,
        capacities=[_capacity(name, capacity, here) for name in names],
        allocated=[0 if each is None else each.allocated for each in figures],
        pinned=[0 if each is None else each.allocated + _between(name) for name, each in zip(names, figures)],  # noqa: B905
        extra=(0, 0) if simulated else _extra(has_context=initialised and capacity is None),
        cuts_to_size=simulated,
        segments=[
            None if each is None or capacity is not None else segments.read_segments(name, each)
            for name, each in zip(names, figures)  # noqa: B905
        ],
        unknown=(_EXPANDABLE,) if segments.may_be_expandable() and not simulated else (),
        is_imagined=capacity is not None, is_here=any(each.startswith(f"{backend}:") for each in here), gpu=gpu,
    )  # fmt: skip


def _extra(*, has_context: bool) -> tuple[int, int]:
    if has_context:
        return WORKSPACES
    return CONTEXT[0] + WORKSPACES[0], CONTEXT[1] + WORKSPACES[1]


def _is_imaginable(device: str) -> bool:
    return re.fullmatch(r"(cuda|xpu|mps)(:\d+)?", device) is not None


def _capacity(name: str, capacity: int | None, here: list[str]) -> int | None:
    """Return what this process can have of a device: what it holds already, and what is free."""
    if capacity is not None or name not in here:
        return capacity
    free, figures = devices.room(name), allocator.device_stats(name)
    return free if free is None or figures is None else free + figures.allocated


def _between(name: str) -> int:
    """Return the bytes of cached blocks whose segments hold live ones too."""
    backend, index = Device.parse(name)
    module = allocator.device_module(backend)
    if module is None or not hasattr(module, "memory_stats"):
        return 0
    return int(module.memory_stats(index).get("inactive_split_bytes.all.current", 0))

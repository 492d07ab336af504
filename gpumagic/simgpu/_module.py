"""`torch.simgpu`: the names of `torch.cuda` for the simulated GPUs, and their registration with torch."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from gpumagic.errors import SimgpuUnavailable
from gpumagic.simgpu import _build

if TYPE_CHECKING:
    import torch

    DeviceLike: TypeAlias = torch.device | str | int | None

BACKEND = "simgpu"
native: ModuleType
"""The compiled backend, once `register` has run."""


def register() -> None:
    """Compile the backend if it has to be, and make it torch's out-of-tree device.

    Raises:
        SimgpuUnavailable: as `_build.load`, or another backend is there already.
    """
    global native  # noqa: PLW0603  there is one for the life of the process
    import torch

    taken = torch._C._get_privateuse1_backend_name()
    if taken not in {"privateuseone", BACKEND}:
        raise SimgpuUnavailable(
            f"torch has one slot for an out-of-tree device and {taken!r} holds it; "
            "use simulated GPUs in a process that does not load it"
        )
    native = _build.load()
    native.start()
    torch.utils.rename_privateuse1_backend(BACKEND)
    torch._register_device_module(BACKEND, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def is_available() -> bool:
    """Return whether there is a device."""
    return bool(native.device_count())


def is_initialized() -> bool:
    """Return whether any device has been allocated on."""
    return any(native.used(index) for index in range(device_count()))


def init() -> None:
    """Do nothing: a device needs no initialisation."""


def device_count() -> int:
    """Return the number of devices."""
    return int(native.device_count())


def current_device() -> int:
    """Return the index of the current device."""
    return int(native.current_device())


def set_device(device: DeviceLike) -> None:
    """Make a device the current one of this thread."""
    native.set_device(_index(device))


class device:  # noqa: N801  torch.cuda's name
    """Make a device the current one inside a `with`; `None` or a negative index changes nothing."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = _index(device) if device is not None else -1
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = native.exchange_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        native.exchange_device(self.prev_idx)


class device_of(device):  # noqa: N801  torch.cuda's name
    """Make a tensor's device the current one inside a `with`; a tensor elsewhere changes nothing."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.device.type == BACKEND else None)


def synchronize(device: DeviceLike = None) -> None:
    """Check the device; its work is done already."""
    native.check_ordinal(_index(device))


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the one stream of a device."""
    import torch

    if not hasattr(torch, "accelerator"):  # it came with torch 2.6
        return torch.Stream(device=f"{BACKEND}:{_index(device)}")
    return torch.accelerator.current_stream(_index(device))


default_stream = current_stream


def __getattr__(name: str) -> object:
    # torch's own stream and event classes work for every accelerator.
    if name in {"Stream", "Event", "Generator"}:
        import torch

        return getattr(torch, name)
    if name == "_initialized":  # torch.utils.checkpoint saves the generators' states only where this is true
        return is_initialized()
    if name == "default_generators":
        return tuple(native.default_generator(index) for index in range(device_count()))
    raise AttributeError(f"module 'torch.{BACKEND}' has no attribute {name!r}")


# ---- Memory


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes in live storages, each rounded up to 512."""
    return _stat(device, "allocated_bytes.all.current")


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the highest `memory_allocated` since `reset_peak_memory_stats`."""
    return _stat(device, "allocated_bytes.all.peak")


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that the allocator holds of the device, in use or cached."""
    return _stat(device, "reserved_bytes.all.current")


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the highest `memory_reserved` since `reset_peak_memory_stats`."""
    return _stat(device, "reserved_bytes.all.peak")


def memory_stats(device: DeviceLike = None) -> OrderedDict[str, int]:
    """Return the allocator's figures under torch.cuda's names, sorted."""
    return OrderedDict(sorted(native.memory_stats(_index(device)).items()))


def memory_snapshot() -> list[dict[str, Any]]:
    """Return every segment with its blocks, as torch.cuda does; a block in use has the address its tensors give."""
    segments: list[dict[str, Any]] = native.memory_snapshot()
    return segments


def record_history(is_on: bool) -> None:
    """Keep what the allocators hand out and take back from now on, the last million of each; or end that."""
    native.record_history(is_on)


def history(device: DeviceLike = None) -> list[tuple[int, int, float]]:
    """Return what has been recorded: address, bytes (negative where they were given back), monotonic seconds."""
    found: list[tuple[int, int, float]] = native.history(_index(device))
    return found


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the device's free and total bytes."""
    total = native.capacity(_index(device))
    return total - memory_reserved(device), total


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start the peaks again from the present figures."""
    native.reset_peaks(_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Start the running totals again from zero."""
    native.reset_accumulated(_index(device))


def empty_cache() -> None:
    """Give every segment without a live block back to its device."""
    native.empty_cache()


# ---- What a device is


@dataclass(frozen=True)
class DeviceProperties:
    """What a simulated GPU says of itself."""

    name: str
    total_memory: int
    uuid: str
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device."""
    return get_device_properties(device).name


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return name, memory and UUID of a device."""
    index = _index(device)
    return DeviceProperties("Simulated GPU", native.capacity(index), f"00000000-0000-0000-0000-{index:012x}")


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return a compute capability, for code that asks: that of a card which knows bfloat16."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def is_bf16_supported() -> bool:
    """Return True: the CPU kernels know bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may use."""
    import torch

    return [torch.float16, torch.bfloat16, torch.float32]


# ---- Random numbers


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator; torch.manual_seed calls this."""
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> None:
    """Seed the current device's generator at random."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed every device's generator with one random number."""
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return int(_generator(None).initial_seed())


def get_rng_state(device: DeviceLike = BACKEND) -> torch.Tensor:
    """Return the state of a device's generator, a tensor of bytes on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = BACKEND) -> None:
    """Set the state of a device's generator."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device's generator."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the state of every device's generator."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- What torch asks of a device module


def _is_in_bad_fork() -> bool:
    return False  # a forked child has a copy of the cards that works


def _lazy_init() -> None:
    pass


def _generator(device: DeviceLike) -> torch.Generator:
    generator: torch.Generator = native.default_generator(_index(device))
    return generator


def _stat(device: DeviceLike, name: str) -> int:
    return int(native.memory_stats(_index(device))[name])


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return current_device()
    named = _named(str(device))
    if named.type != BACKEND:
        raise ValueError(f"Expected a {BACKEND} device, but got: {device}")
    return current_device() if named.index is None else int(named.index)


@cache
def _named(device: str) -> Any:
    import torch

    return torch.device(device)

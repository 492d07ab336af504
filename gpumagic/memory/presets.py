"""The GPUs that can be stood in for: what CUDA says of them, as far as it decides what torch allocates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import OptionError, nearest

MIB = 1024**2


@dataclass(frozen=True)
class GPU:
    """What a CUDA device says of itself. The names are those of `native/devices.c`.

    Attributes:
        name: as `torch.cuda.get_device_name` has it.
        capacity: bytes in all, as `torch.cuda.get_device_properties(...).total_memory` has them.
        major: of the compute capability.
        minor: of the compute capability.
        multiprocessors: how many.
        threads_per_multiprocessor: resident threads at most.
        blocks_per_multiprocessor: resident blocks at most.
        shared_per_multiprocessor: bytes of shared memory.
        shared_per_block_optin: bytes of it that a kernel may ask for.
        l2_cache: bytes.
        clock_rate: kHz at most.
        memory_clock_rate: kHz at most.
        memory_bus_width: bits.
    """

    name: str
    capacity: int
    major: int
    minor: int
    multiprocessors: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_per_multiprocessor: int
    shared_per_block_optin: int
    l2_cache: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int


@dataclass(frozen=True)
class _Architecture:
    """What all GPUs of a compute capability have in common: the table of the CUDA C++ Programming Guide."""

    threads: int
    blocks: int
    shared: int
    optin: int


_ARCHITECTURES = {
    (7, 0): _Architecture(2048, 32, 96 * 1024, 96 * 1024),
    (7, 5): _Architecture(1024, 16, 64 * 1024, 64 * 1024),
    (8, 0): _Architecture(2048, 32, 164 * 1024, 163 * 1024),
    (8, 6): _Architecture(1536, 16, 100 * 1024, 99 * 1024),
    (8, 9): _Architecture(1536, 24, 100 * 1024, 99 * 1024),
    (9, 0): _Architecture(2048, 32, 228 * 1024, 227 * 1024),
    (10, 0): _Architecture(2048, 32, 228 * 1024, 227 * 1024),
    (12, 0): _Architecture(1536, 24, 100 * 1024, 99 * 1024),
}


def _gpu(
    name: str, capability: tuple[int, int], sms: int, mib: int, l2_mib: int, mhz: int, memory: int, bus: int
) -> GPU:
    shape = _ARCHITECTURES[capability]
    return GPU(
        name, mib * MIB, *capability, sms, shape.threads, shape.blocks, shape.shared, shape.optin, l2_mib * MIB,
        1000 * mhz, 1000 * memory, bus,
    )  # fmt: skip


# The figures are those that CUDA's sample `deviceQuery` prints on such cards, as people published them. The memory is
# less than the card's label and differs by driver and by some 1 %: of a T4, 14,913 to 15,110 MiB were seen.
GPUS = {
    "T4": _gpu("Tesla T4", (7, 5), 40, 14913, 4, 1590, 5001, 256),
    "V100": _gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 16144, 6, 1530, 877, 4096),
    "A100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81157, 40, 1410, 1593, 5120),
    "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40339, 40, 1410, 1215, 5120),
    "L4": _gpu("NVIDIA L4", (8, 9), 58, 22518, 48, 2040, 6251, 192),
    "RTX 3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 24237, 6, 1695, 9751, 384),
    "RTX 4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24207, 72, 2520, 10501, 384),
    "H100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 81079, 50, 1980, 2619, 5120),
}
"""By the name to ask for."""


def named(name: str) -> GPU:
    """Return a GPU by its name; see `name_of`."""
    return GPUS[name_of(name)]


def name_of(name: str) -> str:
    """Return the name of a GPU as `GPUS` has it, without regard to case, spaces, dashes or `RTX`.

    Raises:
        OptionError: there is none of that name.
    """
    known = {_plain(each): each for each in GPUS}
    if _plain(name) in known:
        return known[_plain(name)]
    near = nearest(_plain(name), known)
    hint = f"did you mean {known[near]}?" if near else f"there are {', '.join(GPUS)}"
    raise OptionError(f"{name!r} is not a GPU that is known here; {hint}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum()).removeprefix("rtx")


def like(device: int | str) -> GPU:
    """Return what torch says of a CUDA device that is here. This initialises CUDA.

    Torch does not tell how many blocks a multiprocessor holds; that follows from the compute capability. Rates that an
    older torch does not tell either are 0; nothing that torch allocates depends on them.

    Args:
        device: its index, or as `cuda:1`.
    """
    import torch

    said = torch.cuda.get_device_properties(device)
    shape = _ARCHITECTURES.get((said.major, said.minor), _ARCHITECTURES[9, 0])
    return GPU(
        name=said.name,
        capacity=said.total_memory,
        major=said.major,
        minor=said.minor,
        multiprocessors=said.multi_processor_count,
        threads_per_multiprocessor=said.max_threads_per_multi_processor,
        blocks_per_multiprocessor=shape.blocks,
        shared_per_multiprocessor=_said(said, "shared_memory_per_multiprocessor", shape.shared),
        shared_per_block_optin=_said(said, "shared_memory_per_block_optin", shape.optin),
        l2_cache=_said(said, "L2_cache_size", 40 * MIB),
        clock_rate=_said(said, "clock_rate", 0),
        memory_clock_rate=_said(said, "memory_clock_rate", 0),
        memory_bus_width=_said(said, "memory_bus_width", 0),
    )


def _said(properties: Any, name: str, otherwise: int) -> int:
    return int(getattr(properties, name, otherwise))


def settings(gpu: GPU, number: int, others: int) -> str:
    """Return the settings of one device as `native/devices.c` reads them."""
    fields = {**dataclasses.asdict(gpu), "others": others, "uuid": f"fa4ec0da{number:024x}"}
    return ",".join(f"{name}={str(value).replace(',', ' ').replace('|', ' ')}" for name, value in fields.items())

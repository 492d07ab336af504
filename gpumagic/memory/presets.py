"""The GPUs that can be stood in for: what CUDA says of them, as far as it decides what torch allocates."""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
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


@dataclass(frozen=True)
class _Architecture:
    """What all GPUs of a compute capability have in common.

    That is a table of the CUDA C++ Programming Guide, and `cuda/__device/arch_traits.h` of NVIDIA's CCCL has it.
    """

    threads: int
    blocks: int
    shared: int
    optin: int


_ARCHITECTURES = {
    (6, 0): _Architecture(2048, 32, 64 * 1024, 48 * 1024),
    (6, 1): _Architecture(2048, 32, 96 * 1024, 48 * 1024),
    (7, 0): _Architecture(2048, 32, 96 * 1024, 96 * 1024),
    (7, 5): _Architecture(1024, 16, 64 * 1024, 64 * 1024),
    (8, 0): _Architecture(2048, 32, 164 * 1024, 163 * 1024),
    (8, 6): _Architecture(1536, 16, 100 * 1024, 99 * 1024),
    (8, 9): _Architecture(1536, 24, 100 * 1024, 99 * 1024),
    (9, 0): _Architecture(2048, 32, 228 * 1024, 227 * 1024),
    (10, 0): _Architecture(2048, 32, 228 * 1024, 227 * 1024),
    (10, 3): _Architecture(2048, 32, 228 * 1024, 227 * 1024),
    (12, 0): _Architecture(1536, 24, 100 * 1024, 99 * 1024),
}


def _read_gpus() -> Iterator[tuple[str, GPU]]:
    """Yield the GPUs of ``gpus.csv``.

    Multiprocessors, compute capability and L2 are from NVIDIA's data sheets and white papers. The memory is what CUDA
    tells torch: less than the label, and by driver and ECC some 3 % more or less; of several published figures this is
    mostly the least, a recent driver's. Its source is "props" for torch's own print of a device's properties, "yolo"
    and "llama" for the lines in which Ultralytics and llama.cpp tell it, "oom" for torch's message (two decimals of a
    GiB), "log" for another program's; with the issue that has it, or else from public files. All are of Linux but for
    "windows", where CUDA tells nearly the label. Of AMD's GPUs only the size counts here; all else, and each
    workspace, is an A100's. An MI250X is two devices.
    """
    with resources.files("gpumagic.memory").joinpath("gpus.csv").open(encoding="utf-8") as table:
        for name, full_name, capability, multiprocessors, mib, l2_mib, _ in list(csv.reader(table))[1:]:
            major, minor = map(int, capability.split("."))
            shape = _ARCHITECTURES[major, minor]
            yield name, GPU(
                full_name, int(mib) * MIB, major, minor, int(multiprocessors), shape.threads, shape.blocks,
                shape.shared, shape.optin, int(float(l2_mib) * MIB),
            )  # fmt: skip


GPUS = dict(_read_gpus())
"""By the name to ask for."""

USUAL = (
    "T4", "L4", "A10G", "RTX 3090", "RTX 4090", "RTX 5090", "L40S", "A100-40GB", "A100", "H100", "H200", "B200",
)  # fmt: skip
"""Those that most people have, rent or buy; messages and advice name them first."""
_LABELS = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 180, 192, 288)
"""The sizes, in GB, that are printed on the boxes of GPUs."""
_MAKERS = re.compile(
    "nvidia|geforce|quadro|tesla|amd|instinct|rtx|gtx|generation|blackwell|workstation|server|edition|gpu"
    r"|sxm\d?|hbm\d?e?|[\W_]"
)
"""What a name means the same without."""


def label(gpu: GPU) -> int:
    """Return the size of a GPU's memory as its maker tells it, in GB: the next one above what CUDA says."""
    return next(size for size in _LABELS if size * 1024 * MIB >= gpu.capacity)


def named(name: str) -> GPU:
    """Return a GPU by its name; see `name_of`."""
    return GPUS[name_of(name)]


def name_of(name: str) -> str:
    """Return the name of a GPU as `GPUS` has it.

    Case, spaces, dashes, the maker, `RTX` and the like make no difference. The size of the memory may follow
    (`a100-80gb`), and torch's name for the device will do.

    Raises:
        OptionError: there is none of that name; the message suggests what may be meant.
    """
    known = _spellings()
    plain = _plain(name)
    if plain not in known:
        raise OptionError(_refusal(name, plain, known))
    return known[plain]


@functools.cache
def _spellings() -> dict[str, str]:
    """Return the names of `GPUS` by what may be written for them."""
    sized = {_plain(f"{name} {label(gpu)}"): name for name, gpu in GPUS.items()}
    return sized | {_plain(gpu.name): name for name, gpu in GPUS.items()} | {_plain(name): name for name in GPUS}


def _plain(name: str) -> str:
    return re.sub(r"(?<=\d)gi?b$", "", _MAKERS.sub("", name.casefold()))


def typed(names: Iterable[str]) -> list[str]:
    """Return names of `GPUS` as the line of a magic takes them: without spaces."""
    return [name.replace(" ", "-") for name in dict.fromkeys(names)]


def _refusal(name: str, plain: str, known: dict[str, str]) -> str:
    if plain == "list":
        return f"there are {', '.join(typed(GPUS))}"
    if size := re.fullmatch(r"\s*(\d{1,3})\s*(g|gb|gib)?\s*", name.casefold()):
        having = ", ".join(typed(each for each in (*USUAL, *GPUS) if label(GPUS[each]) == int(size[1])))
        return (
            f"{name!r} is a size" + (f": {having} have it; or" if having else "; write") + f" --capacity {size[1]}GiB"
        )
    near = nearest(plain, known)
    like = [known[each] for each in known if each == near or (plain and plain in each)]
    if like:
        return f"{name!r} is not a GPU that is known here; did you mean {' or '.join(typed(like)[:4])}?"
    return f"{name!r} is not a GPU that is known here; there are {', '.join(typed(USUAL))} and others: --gpu list"


def like(device: int | str) -> GPU:
    """Return what torch says of a CUDA device that is here. This initialises CUDA.

    Torch does not tell how many blocks a multiprocessor holds; that follows from the compute capability.

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
    )


def _said(properties: Any, name: str, otherwise: int) -> int:
    return int(getattr(properties, name, otherwise))


def settings(gpu: GPU, number: int, others: int) -> str:
    """Return the settings of one device as `native/devices.c` reads them."""
    fields = {**dataclasses.asdict(gpu), "others": others, "uuid": f"fa4ec0da{number:024x}"}
    return ",".join(f"{name}={str(value).replace(',', ' ').replace('|', ' ')}" for name, value in fields.items())

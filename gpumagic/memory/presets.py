"""The GPUs that can be stood in for: what CUDA says of them, as far as it decides what torch allocates."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

from gpumagic.errors import OptionError

KIB, MIB = 1024, 1024**2


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


_SHAPES = {
    (6, 0): (2048, 32, 64, 48),
    (6, 1): (2048, 32, 96, 48),
    (7, 0): (2048, 32, 96, 96),
    (7, 5): (1024, 16, 64, 64),
    (8, 0): (2048, 32, 164, 163),
    (8, 6): (1536, 16, 100, 99),
    (8, 9): (1536, 24, 100, 99),
    (9, 0): (2048, 32, 228, 227),
    (10, 0): (2048, 32, 228, 227),
    (10, 3): (2048, 32, 228, 227),
    (12, 0): (1536, 24, 100, 99),
}
"""What all GPUs of a compute capability have: threads and blocks of a multiprocessor, KiB of shared memory of it, and
KiB that a kernel may ask for. It is a table of the CUDA C++ Programming Guide, and `cuda/__device/arch_traits.h` of
NVIDIA's CCCL has it."""


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
    with (
        resources.files("gpumagic.memory")
        .joinpath("gpus.csv")
        .open(encoding="utf-8") as table
    ):
        _, *rows = csv.reader(table)  # the first has what the columns are called
    for name, full_name, capability, multiprocessors, mib, l2_mib, _source in rows:
        major, minor = map(int, capability.split("."))
        threads, blocks, shared, optin = _SHAPES[major, minor]
        gpu = GPU(
            name=full_name,
            capacity=int(mib) * MIB,
            major=major,
            minor=minor,
            multiprocessors=int(multiprocessors),
            threads_per_multiprocessor=threads,
            blocks_per_multiprocessor=blocks,
            shared_per_multiprocessor=shared * KIB,
            shared_per_block_optin=optin * KIB,
            l2_cache=int(float(l2_mib) * MIB),
        )
        yield name, gpu


GPUS = dict(_read_gpus())
"""By the name to ask for."""

USUAL = (
    "T4", "L4", "A10G", "RTX 3090", "RTX 4090", "RTX 5090", "L40S", "A100-40GB", "A100", "H100", "H200", "B200",
)  # fmt: skip
"""Those that most people have, rent or buy; messages and advice name them first."""
_MAKERS = re.compile(
    "nvidia|geforce|quadro|tesla|amd|instinct|rtx|gtx|generation|blackwell|workstation|server|edition|gpu"
    r"|sxm\d?|hbm\d?e?|[\W_]"
)
"""What a name means the same without."""


def name_of(name: str) -> str:
    """Return the name of a GPU as `GPUS` has it.

    Case, spaces, dashes, the maker, `RTX` and the like make no difference, and torch's name for the device will do.

    Raises:
        OptionError: there is none of that name; the message suggests what may be meant.
    """
    plain = _plain(name)
    known = _spellings()
    if plain == "list":
        raise OptionError(f"there are {', '.join(typed(GPUS))}")
    if plain in known:
        return known[plain]
    cutoff = 0.5 if len(plain) < 3 and not plain.isdigit() else 0.7
    spellings = difflib.get_close_matches(plain, known, 4, cutoff)
    near = typed(known[spelling] for spelling in spellings)
    hint = f"there are {', '.join(typed(USUAL))} and others"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    raise OptionError(
        f"{name!r} is not a GPU that is known here; {hint} (--gpu list names all, --capacity 48GiB takes a size)"
    )


@functools.cache
def _spellings() -> dict[str, str]:
    """Return the names of `GPUS` by what may be written for them."""
    spellings = {_plain(gpu.name): name for name, gpu in GPUS.items()}
    spellings.update((_plain(name), name) for name in GPUS)
    return spellings


def _plain(name: str) -> str:
    without_maker = _MAKERS.sub("", name.casefold())
    return re.sub(r"(?<=\d)gi?b$", "", without_maker)


def typed(names: Iterable[str]) -> list[str]:
    """Return names of `GPUS` as the line of a magic takes them: without spaces."""
    return [name.replace(" ", "-") for name in dict.fromkeys(names)]


def like(device: int | str) -> GPU:
    """Return what torch says of a CUDA device that is here. This initialises CUDA.

    Torch does not tell how many blocks a multiprocessor holds; that follows from the compute capability.

    Args:
        device: its index, or as `cuda:1`.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    _, blocks, shared, optin = _SHAPES.get(capability, _SHAPES[9, 0])

    def size(name: str, default: int) -> int:  # not every version of torch tells all
        return int(getattr(properties, name, default))

    return GPU(
        name=properties.name,
        capacity=properties.total_memory,
        major=properties.major,
        minor=properties.minor,
        multiprocessors=properties.multi_processor_count,
        threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        blocks_per_multiprocessor=blocks,
        shared_per_multiprocessor=size(
            "shared_memory_per_multiprocessor", shared * KIB
        ),
        shared_per_block_optin=size("shared_memory_per_block_optin", optin * KIB),
        l2_cache=size("L2_cache_size", 40 * MIB),
    )


def settings(gpu: GPU, number: int, others: int) -> str:
    """Return the settings of one device as `native/devices.c` reads them."""
    fields = dataclasses.asdict(gpu)
    fields["others"] = others
    fields["uuid"] = f"fa4ec0da{number:024x}"
    parts: list[str] = []
    for name, value in fields.items():
        text = str(value).replace(",", " ").replace("|", " ")
        parts.append(f"{name}={text}")
    return ",".join(parts)

"""The GPUs that can be stood in for: what CUDA says of them, as far as it decides what torch allocates."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
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


def _gpu(name: str, capability: tuple[int, int], sms: int, mib: int, l2_mib: float) -> GPU:
    shape = _ARCHITECTURES[capability]
    return GPU(
        name, mib * MIB, *capability, sms, shape.threads, shape.blocks, shape.shared, shape.optin, int(l2_mib * MIB)
    )


# Multiprocessors, compute capability and L2 are from NVIDIA's data sheets and white papers. The memory is what CUDA
# tells torch: less than the label, and by driver and ECC some 3 % more or less; of several published figures this is
# mostly the least, a recent driver's. Behind each row is where it was read: "props" is torch's own print of a device's
# properties, "yolo" and "llama" are the lines in which Ultralytics and llama.cpp tell it, "oom" is torch's message (two
# decimals of a GiB), "log" another program's that tells it so; with the issue that has it, or else from public files.
# All are of Linux but for "windows", where CUDA tells nearly the label; on Linux such a card has some 3 % less.
GPUS = {
    "P40": _gpu("Tesla P40", (6, 1), 30, 22917, 3),  # oom, LinkSoul-AI/Chinese-Llama-2-7b#56
    "P100": _gpu("Tesla P100-PCIE-16GB", (6, 0), 56, 16276, 4),  # yolo
    "V100": _gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 16144, 6),  # oom, 15.77 GiB
    "V100-32GB": _gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 32494, 6),  # yolo
    "T4": _gpu("Tesla T4", (7, 5), 40, 14913, 4),  # oom, 14.56 GiB with ECC; props of Colab: 15095
    "A10": _gpu("NVIDIA A10", (8, 6), 72, 22600, 6),  # log, torch 2.7: 22.07 GiB
    "A10G": _gpu("NVIDIA A10G", (8, 6), 80, 22587, 6),  # props
    "A30": _gpu("NVIDIA A30", (8, 0), 56, 24094, 24),  # oom, google/RB-Modulation#5
    "A40": _gpu("NVIDIA A40", (8, 6), 84, 45416, 6),  # props
    "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40326, 40),  # props; oom, TianheWu/CoSeR#10: 39.50 GiB
    "A100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81157, 40),  # oom, levihsu/OOTDiffusion#235
    "A100 PCIe": _gpu("NVIDIA A100 80GB PCIe", (8, 0), 108, 81154, 40),  # yolo
    "L4": _gpu("NVIDIA L4", (8, 9), 58, 22563, 48),  # yolo
    "L40": _gpu("NVIDIA L40", (8, 9), 142, 45465, 96),  # log: 44.40 GiB
    "L40S": _gpu("NVIDIA L40S", (8, 9), 142, 45486, 96),  # oom, stepfun-ai/Step-Video-T2V#8; props: 45589
    "H100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 81079, 50),  # props: 81082 to 81090
    "H100 PCIe": _gpu("NVIDIA H100 PCIe", (9, 0), 114, 81008, 50),  # props
    "H100 NVL": _gpu("NVIDIA H100 NVL", (9, 0), 132, 95320, 60),  # yolo
    "H200": _gpu("NVIDIA H200", (9, 0), 132, 143156, 60),  # props
    "GH200": _gpu("NVIDIA GH200 480GB", (9, 0), 132, 96768, 60),  # log: 94.5 GiB
    "B200": _gpu("NVIDIA B200", (10, 0), 148, 182631, 126),  # props
    "GTX 1080 Ti": _gpu("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 11172, 2.75),  # yolo
    "GTX 1650": _gpu("NVIDIA GeForce GTX 1650", (7, 5), 14, 3904, 1),  # yolo
    "GTX 1660": _gpu("NVIDIA GeForce GTX 1660", (7, 5), 22, 5928, 1.5),  # yolo
    "GTX 1660 SUPER": _gpu("NVIDIA GeForce GTX 1660 SUPER", (7, 5), 22, 5928, 1.5),  # yolo
    "GTX 1660 Ti": _gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5), 24, 5914, 1.5),  # yolo
    "RTX 2060": _gpu("NVIDIA GeForce RTX 2060", (7, 5), 30, 5918, 3),  # yolo
    "RTX 2070": _gpu("NVIDIA GeForce RTX 2070", (7, 5), 36, 7782, 4),  # log, driver 580
    "RTX 2070 SUPER": _gpu("NVIDIA GeForce RTX 2070 SUPER", (7, 5), 40, 7972, 4),  # yolo
    "RTX 2080": _gpu("NVIDIA GeForce RTX 2080", (7, 5), 46, 7783, 4),  # hashcat
    "RTX 2080 SUPER": _gpu("NVIDIA GeForce RTX 2080 SUPER", (7, 5), 48, 7982, 4),  # yolo
    "RTX 2080 Ti": _gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 10825, 5.5),  # yolo; older drivers: 11019
    "RTX 3050 Laptop": _gpu("NVIDIA GeForce RTX 3050 Laptop GPU", (8, 6), 16, 3902, 2),  # yolo
    "RTX 3060": _gpu("NVIDIA GeForce RTX 3060", (8, 6), 28, 11910, 2.25),  # yolo; older drivers: 12044
    "RTX 3060 Laptop": _gpu("NVIDIA GeForce RTX 3060 Laptop GPU", (8, 6), 30, 5946, 3),  # hashcat
    "RTX 3060 Ti": _gpu("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 7833, 4),  # yolo
    "RTX 3070": _gpu("NVIDIA GeForce RTX 3070", (8, 6), 46, 7834, 4),  # yolo
    "RTX 3070 Laptop": _gpu("NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), 40, 8192, 4),  # yolo, windows
    "RTX 3070 Ti": _gpu("NVIDIA GeForce RTX 3070 Ti", (8, 6), 48, 7840, 4),  # llama
    "RTX 3080": _gpu("NVIDIA GeForce RTX 3080", (8, 6), 68, 10002, 5),  # yolo; oom, zai-org/CogVideo#34: 9.78 GiB
    "RTX 3080 Laptop": _gpu("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 48, 15993, 4),  # yolo; others have 8 GB
    "RTX 3080 Ti": _gpu("NVIDIA GeForce RTX 3080 Ti", (8, 6), 80, 11910, 6),  # yolo
    "RTX 3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 24123, 6),  # llama; ultralytics/ultralytics#5359: 24260
    "RTX 3090 Ti": _gpu("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84, 24110, 6),  # yolo
    "RTX 4050 Laptop": _gpu("NVIDIA GeForce RTX 4050 Laptop GPU", (8, 9), 20, 5806, 12),  # log, torch 2.13: 5.67 GiB
    "RTX 4060": _gpu("NVIDIA GeForce RTX 4060", (8, 9), 24, 7807, 24),  # yolo
    "RTX 4060 Laptop": _gpu("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 24, 7806, 32),  # yolo
    "RTX 4060 Ti": _gpu("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 7806, 32),  # yolo
    "RTX 4060 Ti 16GB": _gpu("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 15944, 32),  # llama
    "RTX 4070": _gpu("NVIDIA GeForce RTX 4070", (8, 9), 46, 11866, 36),  # llama
    "RTX 4070 Laptop": _gpu("NVIDIA GeForce RTX 4070 Laptop GPU", (8, 9), 36, 7806, 32),  # yolo
    "RTX 4070 SUPER": _gpu("NVIDIA GeForce RTX 4070 SUPER", (8, 9), 56, 12282, 48),  # yolo, windows
    "RTX 4070 Ti": _gpu("NVIDIA GeForce RTX 4070 Ti", (8, 9), 60, 12007, 48),  # yolo
    "RTX 4070 Ti SUPER": _gpu("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 66, 15974, 48),  # props
    "RTX 4080": _gpu("NVIDIA GeForce RTX 4080", (8, 9), 76, 16049, 64),  # props
    "RTX 4080 Laptop": _gpu("NVIDIA GeForce RTX 4080 Laptop GPU", (8, 9), 58, 12282, 48),  # yolo, windows
    "RTX 4080 SUPER": _gpu("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 80, 15944, 64),  # yolo
    "RTX 4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24081, 72),  # yolo; oom, ali-vilab/VGen#104: 23.64 GiB
    "RTX 4090 Laptop": _gpu("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76, 16076, 64),  # log: 15.70 GiB
    "RTX 5060": _gpu("NVIDIA GeForce RTX 5060", (12, 0), 30, 8150, 32),  # llama, windows
    "RTX 5060 Laptop": _gpu("NVIDIA GeForce RTX 5060 Laptop GPU", (12, 0), 26, 8151, 32),  # yolo, windows
    "RTX 5060 Ti": _gpu("NVIDIA GeForce RTX 5060 Ti", (12, 0), 36, 15841, 32),  # props; others have 8 GB
    "RTX 5070": _gpu("NVIDIA GeForce RTX 5070", (12, 0), 48, 12226, 48),  # llama, windows
    "RTX 5070 Laptop": _gpu("NVIDIA GeForce RTX 5070 Laptop GPU", (12, 0), 36, 8150, 32),  # llama, windows
    "RTX 5070 Ti": _gpu("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 15808, 48),  # llama
    "RTX 5080": _gpu("NVIDIA GeForce RTX 5080", (12, 0), 84, 15840, 64),  # yolo
    "RTX 5080 Laptop": _gpu("NVIDIA GeForce RTX 5080 Laptop GPU", (12, 0), 60, 16303, 64),  # yolo, windows
    "RTX 5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 32102, 96),  # yolo; ultralytics/ultralytics#19833: 32120
    "RTX 5090 Laptop": _gpu("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), 82, 24463, 64),  # log: 23.89 GiB, windows
    "RTX A2000": _gpu("NVIDIA RTX A2000", (8, 6), 26, 6137, 3),  # hashcat, windows
    "RTX A2000 12GB": _gpu("NVIDIA RTX A2000 12GB", (8, 6), 26, 12017, 3),  # yolo
    "RTX A4000": _gpu("NVIDIA RTX A4000", (8, 6), 48, 15984, 4),  # oom, DengKaiCQ/VGGT-Long#6
    "RTX A4500": _gpu("NVIDIA RTX A4500", (8, 6), 56, 20070, 6),  # log, torch 2.4: 19.60 GiB
    "RTX A5000": _gpu("NVIDIA RTX A5000", (8, 6), 64, 24138, 6),  # props
    "RTX A6000": _gpu("NVIDIA RTX A6000", (8, 6), 84, 48537, 6),  # log: 47.40 GiB; props: 48676; with ECC 44.55 GiB
    "RTX 4000 Ada": _gpu("NVIDIA RTX 4000 Ada Generation", (8, 9), 48, 20009, 48),  # log, torch 2.5: 19.54 GiB
    "RTX 5000 Ada": _gpu("NVIDIA RTX 5000 Ada Generation", (8, 9), 100, 32358, 72),  # log: 31.6 GiB
    "RTX 6000 Ada": _gpu("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 48520, 96),  # yolo; with ECC 44.43 GiB
    "RTX PRO 6000": _gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 97247, 128
    ),  # llama; props: 97250
    # Of AMD's GPUs only the size counts here; all else, and each workspace, is an A100's. An MI250X is two devices.
    "MI250X": _gpu("AMD Instinct MI250X", (8, 0), 108, 65520, 40),  # props
    "MI300X": _gpu("AMD Instinct MI300X", (8, 0), 108, 196592, 40),  # props, ROCm/ROCm#4203
}
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

"""A CUDA runtime without a GPU, below torch's own CUDA build.

`python -m gpumagic.fakecuda -- python script.py` runs a script over it; `environment()` has what a process needs to
start over it. Then `torch.cuda.is_available()` is true. Everything above the runtime is torch's own: the caching
allocator with its statistics, snapshot and fragmentation, `torch.OutOfMemoryError`, streams, events, CUDA graphs,
pinned memory, copies with their contents, autocast, `torch.compile` with Triton.

No kernel runs, so **computed values mean nothing**: they are zeros or what the memory held before. Values that were
copied are right. `nonzero`, masks, `unique` and `any()` find nothing; other sizes that depend on values (`bincount`,
`one_hot`) cannot be trusted. What looks at values to decide what to do may fail: `torch.linalg.eig`, `matrix_exp` and
`lobpcg` do. Processes of one job do not reach each other through NCCL. How much memory cuDNN, cuSOLVER, cuSPARSE and
cuFFT take for themselves is not known without a GPU: it is left out, and `unknown_sizes()` says how often.

Each process has the cards for itself and sees no other's memory; what a context and loaded kernels take of a card is
not counted. Device memory and events are not shared between processes (`cudaIpc...`), as `torch.multiprocessing`
would. The profiler has the host's side only. CUDA graphs have no conditional nodes, and nothing is allocated in a
capture under `backend:cudaMallocAsync`. Memory that is allocated without torch's cache takes at least 2 MiB each
time, where CUDA lets small pieces share.

To start reading: `build.py` says which libraries are exchanged, compiles `native/` and generates the rest.
`native/fake.h` lists what the libraries share; `runtime.c` and its neighbours are libcudart,
`driver.c` is libcuda, each other file is the library of its name. `memory/presets.py` has the GPUs that can be
stood in for, `log.py` reads what the runtime saw, `__main__.py` is the command.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpumagic.errors import OptionError
from gpumagic.fakecuda.log import (
    Copy,
    copies,
    is_enabled,
    launches,
    leave_out,
    memory,
    reset,
    run_ahead,
    set_memory,
    syncs,
    unknown_sizes,
    was_asked,
)  # fmt: skip
from gpumagic.memory.presets import GPU, GPUS

__all__ = [
    "GPU", "GPUS", "Copy", "copies", "environment", "is_enabled", "launches", "leave_out", "memory", "reset",
    "run_ahead", "set_memory", "syncs", "unknown_sizes", "was_asked",
]  # fmt: skip

VARIABLE = "GPUMAGIC_FAKECUDA"
MOST_DEVICES = 16


def environment(
    gpus: str | GPU | Sequence[str | GPU] = "A100",
    *,
    devices: int | None = None,
    capacity: str | int | None = None,
    others: str | int = 0,
    peer_access: bool = False,
) -> dict[str, str]:
    """Return the variables of a process that is to start over the fake runtime, compiling it if need be.

    Args:
        gpus: a name of `GPUS`, a `GPU`, or one for each device.
        devices: how many of them; by default as many as `gpus` names.
        capacity: bytes of each, or text such as `"8GiB"`, in place of what the GPU has.
        others: bytes of each that other processes hold.
        peer_access: whether kernels may read the memory of another device, as over NVLink; if so, torch makes
            strided copies between devices with a kernel, which the log of copies does not have.

    Raises:
        OptionError: an argument cannot be read.
        FakecudaUnavailable: torch is no CUDA build, or there is no C compiler.
    """
    from dataclasses import replace

    from gpumagic.fakecuda import build
    from gpumagic.memory.presets import settings

    chosen, held = _chosen(gpus, devices), _bytes(others)
    if capacity is not None:
        chosen = [replace(gpu, capacity=_bytes(capacity)) for gpu in chosen]
    parts = [f"peer={int(peer_access)}", *(settings(gpu, number, held) for number, gpu in enumerate(chosen))]
    folder = build.libraries()
    made = sorted(str(path) for path in folder.glob("*.so*") if not path.is_symlink())
    preloaded = [os.environ["LD_PRELOAD"]] if os.environ.get("LD_PRELOAD") and not is_enabled() else []
    return {
        "LD_PRELOAD": ":".join([*made, *preloaded]),
        VARIABLE: "|".join(parts),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _chosen(gpus: str | GPU | Sequence[str | GPU], devices: int | None) -> list[GPU]:
    from gpumagic.memory.presets import named

    asked = [gpus] if isinstance(gpus, (str, GPU)) else list(gpus)
    found = [gpu if isinstance(gpu, GPU) else named(gpu) for gpu in asked]
    count = len(found) if devices is None else devices
    if not 0 <= count <= MOST_DEVICES:
        raise OptionError(f"{count} devices are not possible; ask for 0 to {MOST_DEVICES}")
    if len(found) not in {1, count}:
        raise OptionError(f"{count} devices cannot be made of {len(found)} GPUs; name one, or one for each")
    return found * count if len(found) == 1 else found


def _bytes(size: str | int) -> int:
    from gpumagic.report.units import parse_size

    nbytes = size if isinstance(size, int) else parse_size(size)
    if nbytes < 0:
        raise OptionError(f"{size} is not a size; write bytes or a unit: 4096, 100MiB, 1.5GiB")
    return nbytes

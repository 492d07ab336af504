"""Devices that NVML does not know, or not the memory of: simulated ones, other backends, unified memory.

On them NVML refuses to answer (GB10), or answers with the host's figures, of which "used" counts every program
of the machine (nvitop#208, nvtop PR#511). A refusal alone proves nothing: WSL and old drivers refuse too. What does
is CUDA's own word once it is in use; before that, a refusal by a card that shares the host's page tables (llmfit#93),
or the card's name together with such figures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from gpumagic.gpus.nvml import Readings
from gpumagic.gpus.processes import DriverProcess
from gpumagic.gpus.report import GpuRow
from gpumagic.gpus.torch_build import TorchBuild, bare_uuid, cuda_devices
from gpumagic.memory import allocator, host

UNIFIED_MEMORY_NAMES = re.compile(r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE)
HOST_MEMORY = "the host's memory, shared"
BY_NAME = "judged by its name"
_ATS_MODE = 2
"""NVML_DEVICE_ADDRESSING_MODE_ATS: the GPU walks the host's page tables. GH200 does so too, and has its own memory."""


def is_unified(readings: Readings, binding: ModuleType, handle: Any) -> bool:
    """Return whether a card has no memory of its own; where only its name tells, that is said among the reasons."""
    _, properties = cuda_devices().get(bare_uuid(readings.values.get("uuid")), (None, None))
    integrated = getattr(properties, "is_integrated", None)
    if integrated is not None:
        return bool(integrated)
    refused = readings.reasons.get("memory_total") == "not supported"
    if refused and _shares_page_tables(binding, handle):
        return True
    if not UNIFIED_MEMORY_NAMES.search(readings.values.get("name") or "") or not (
        refused or _reports_host_memory(readings)
    ):
        return False
    readings.reasons["unified"] = BY_NAME
    return True


def _shares_page_tables(binding: ModuleType, handle: Any) -> bool:
    return Readings().take("mode", lambda: int(binding.nvmlDeviceGetAddressingMode(handle))) == _ATS_MODE


def _reports_host_memory(readings: Readings) -> bool:
    of_the_host, total = host.available_memory(), readings.values.get("memory_total")
    return of_the_host is not None and total is not None and abs(total - of_the_host[1]) <= of_the_host[1] // 8


def use_host_memory(readings: Readings, processes: Sequence[DriverProcess] | None) -> None:
    """Replace the figures: all of the host's memory, what it can still give, and what is charged to GPU processes."""
    for name in ("memory_total", "memory_used", "memory_free", "memory_reserved"):
        readings.values.pop(name, None)
        readings.reasons[name] = HOST_MEMORY
    readings.values["unified"] = True
    of_the_host = host.available_memory()
    if of_the_host is not None:
        readings.values.update(memory_free=of_the_host[0], memory_total=of_the_host[1])
    figures = [each.memory for each in processes or ()]
    known = [figure for figure in figures if figure is not None]
    if processes is not None and len(known) == len(figures):
        readings.values["memory_used"] = sum(known)
    else:
        readings.reasons["memory_used"] = "the driver does not say what the GPU's processes use"


TORCH_FIELDS = ("device", "name", "memory_total", "memory_used", "memory_free", "kernel_allocated", "kernel_reserved",
               "predicted", "simulated", "unified", "reasons")  # fmt: skip
NVML_FIELDS = tuple(field.name for field in fields(GpuRow) if field.name not in TORCH_FIELDS)


def torch_rows(build: TorchBuild, known: Sequence[GpuRow], refusal: str) -> list[GpuRow]:
    """Return the devices that only torch reports: CUDA and ROCm in use without NVML, XPU and MPS.

    Empty while torch is not imported. CUDA not in use is not asked, because asking would start it.

    Args:
        build: what the installed torch was built for.
        known: the rows that NVML gave.
        refusal: why NVML gave no more.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = []
    if torch.cuda.is_initialized():
        listed = {row.device for row in known}
        found += [
            _torch_row(name, torch.cuda, refusal) for name in _device_names("cuda", torch.cuda) if name not in listed
        ]
    if build.xpu and torch.xpu.is_available():
        found += [_torch_row(name, torch.xpu, "torch does not report it") for name in _device_names("xpu", torch.xpu)]
    if sys.platform == "darwin" and torch.backends.mps.is_available():
        found.append(_mps_row(torch.mps))
    return found


def simulated_rows() -> list[GpuRow]:
    """Return the devices of simgpu, if this process has enabled it."""
    simgpu = sys.modules.get("gpumagic.simgpu")
    if simgpu is None or not simgpu.is_enabled():
        return []
    import torch

    module: ModuleType = torch.simgpu
    return [_simulated_row(index, module) for index in range(module.device_count())]


def with_kernel_memory(row: GpuRow) -> GpuRow:
    """Return the row with the part of this kernel's allocator; 0 while torch has not used the device at all."""
    if row.device is None:
        reason = "torch cannot use it"
        return replace(row, reasons={**row.reasons, "kernel_allocated": reason, "kernel_reserved": reason})
    figures = allocator.device_stats(row.device)
    if figures is not None:
        return replace(row, kernel_allocated=figures.allocated, kernel_reserved=figures.reserved)
    if "torch" not in sys.modules or not allocator.is_initialised(row.device.partition(":")[0]):
        return replace(row, kernel_allocated=0, kernel_reserved=0)
    reason = "no counting allocator"
    return replace(row, reasons={**row.reasons, "kernel_allocated": reason, "kernel_reserved": reason})


def _simulated_row(index: int, module: ModuleType) -> GpuRow:
    free, total = module.mem_get_info(index)
    uuid = getattr(module.get_device_properties(index), "uuid", None)
    return with_kernel_memory(
        GpuRow(
            device=f"simgpu:{index}", name=str(module.get_device_name(index)), simulated=True,
            memory_total=int(total), memory_free=int(free), memory_used=int(total) - int(free),
            uuid=None if uuid is None else str(uuid), reasons=dict.fromkeys(NVML_FIELDS, "simulated"),
        )
    )  # fmt: skip


def _torch_row(name: str, module: ModuleType, reason: str) -> GpuRow:
    index = int(name.partition(":")[2])
    properties = module.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    row = with_kernel_memory(
        GpuRow(
            device=name, name=str(properties.name), memory_total=int(properties.total_memory),
            uuid=None if uuid is None else str(uuid), reasons=dict.fromkeys(NVML_FIELDS, reason),
            unified=bool(getattr(properties, "is_integrated", False)),
        )
    )  # fmt: skip
    if not row.kernel_reserved:
        reason = "asking torch would create a context there"  # pytorch#86493
        return replace(row, reasons={**row.reasons, "memory_free": reason, "memory_used": reason})
    free, total = allocator.mem_get_info(name) or (None, None)
    if row.unified:
        return replace(row, memory_free=free, reasons={**row.reasons, "memory_used": HOST_MEMORY})
    used = None if free is None or total is None else total - free
    return replace(row, memory_free=free, memory_used=used)


def _mps_row(module: ModuleType) -> GpuRow:
    """Return Apple's GPU. Its memory is the machine's; ``total`` is what Metal recommends as the most to use."""
    reasons = dict.fromkeys((*NVML_FIELDS, "memory_free", "memory_used"), "torch does not report it")
    total = int(module.recommended_max_memory())
    return with_kernel_memory(GpuRow("mps:0", name="Apple GPU", memory_total=total, unified=True, reasons=reasons))


def _device_names(backend: str, module: ModuleType) -> list[str]:
    return [f"{backend}:{index}" for index in range(module.device_count())]

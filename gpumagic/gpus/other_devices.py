"""Devices that NVML does not know, or not the memory of: simulated ones, other backends, unified memory.

With unified memory NVML reports none (GB10), or the host's figures, of which "used" counts every program of the
machine (nvitop#208, nvtop PR#511). A missing figure alone proves nothing: WSL and old drivers lack it too. CUDA knows
once it is in use; before that it is concluded from a missing figure of a card that shares the host's page tables
(llmfit#93), or from the card's name together with such figures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from gpumagic.gpus import nvml
from gpumagic.gpus.nvml import Readings
from gpumagic.gpus.processes import DriverProcess, total_memory
from gpumagic.gpus.report import GpuRow
from gpumagic.gpus.torch_build import TorchBuild, bare_uuid, cuda_devices
from gpumagic.memory import allocator, host
from gpumagic.memory.devices import Device

UNIFIED_MEMORY_NAMES = re.compile(r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE)
HOST_MEMORY = "the host's memory, shared"
BY_NAME = "judged by its name"
_ATS_MODE = 2
"""NVML_DEVICE_ADDRESSING_MODE_ATS: the GPU walks the host's page tables. GH200 does too, with memory of its own."""


def is_unified(readings: Readings, binding: ModuleType, handle: Any) -> bool:
    """Return whether a card has no memory of its own; where only its name says so, note that in the reasons."""
    _, properties = cuda_devices().get(bare_uuid(readings.values.get("uuid")), (None, None))
    integrated = getattr(properties, "is_integrated", None)
    if integrated is not None:
        return bool(integrated)
    unsupported = readings.reasons.get("memory_total") == "not supported"
    if unsupported and nvml.query(lambda: int(binding.nvmlDeviceGetAddressingMode(handle)))[0] == _ATS_MODE:
        return True
    named = UNIFIED_MEMORY_NAMES.search(readings.values.get("name") or "") is not None
    if not named or not (unsupported or _reports_host_memory(readings)):
        return False
    readings.reasons["unified"] = BY_NAME
    return True


def _reports_host_memory(readings: Readings) -> bool:
    host_memory, total = host.available_memory(), readings.values.get("memory_total")
    return host_memory is not None and total is not None and abs(total - host_memory[1]) <= host_memory[1] // 8


def use_host_memory(readings: Readings, processes: Sequence[DriverProcess] | None) -> None:
    """Replace the figures by the host's total and free memory, and by the sum that is charged to GPU processes."""
    for name in ("memory_total", "memory_used", "memory_free", "memory_reserved"):
        readings.values.pop(name, None)
        readings.reasons[name] = HOST_MEMORY
    readings.values["unified"] = True
    if host_memory := host.available_memory():
        readings.values.update(memory_free=host_memory[0], memory_total=host_memory[1])
    used = None if processes is None else total_memory([each.memory for each in processes])
    if used is None:
        readings.reasons["memory_used"] = "the driver does not say what the GPU's processes use"
    else:
        readings.values["memory_used"] = used


TORCH_FIELDS = ("device", "name", "memory_total", "memory_used", "memory_free", "kernel_allocated", "kernel_reserved",
               "predicted", "simulated", "unified", "reasons")  # fmt: skip
NVML_FIELDS = tuple(field.name for field in fields(GpuRow) if field.name not in TORCH_FIELDS)


def torch_rows(build: TorchBuild, known: Sequence[GpuRow], reason: str) -> list[GpuRow]:
    """Return the devices that only torch reports: CUDA and ROCm in use without NVML, XPU and MPS.

    Empty while torch is not imported. CUDA that is not in use is not queried, because that would initialise it.
    ``known`` are the rows from NVML, and ``reason`` is why there are no more.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = []
    if torch.cuda.is_initialized():
        listed = {row.device for row in known}
        found += [
            _torch_row(name, torch.cuda, reason) for name in _device_names("cuda", torch.cuda) if name not in listed
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
    """Return the row with this kernel's allocator figures; 0 while torch has not used the device."""
    reason = "torch cannot use it"
    if row.device is not None:
        figures = allocator.device_stats(row.device)
        if figures is not None:
            return replace(row, kernel_allocated=figures.allocated, kernel_reserved=figures.reserved)
        if "torch" not in sys.modules or not allocator.is_initialised(Device.parse(row.device).backend):
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
    index = Device.parse(name).index
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
    """Return Apple's GPU. Its memory is the host's; ``memory_total`` is the maximum that Metal recommends."""
    reasons = dict.fromkeys((*NVML_FIELDS, "memory_free", "memory_used"), "torch does not report it")
    total = int(module.recommended_max_memory())
    return with_kernel_memory(GpuRow("mps:0", name="Apple GPU", memory_total=total, unified=True, reasons=reasons))


def _device_names(backend: str, module: ModuleType) -> list[str]:
    return [f"{backend}:{index}" for index in range(module.device_count())]

"""What torch says of the GPUs: which build it is, and the devices that NVML does not know.

The build is read without importing torch. Devices that NVML does not know are CUDA's and ROCm's in use without NVML,
XPU, MPS, and simulated ones.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumagic.gpus.report import SIMULATED, GpuRow
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device

HOST_MEMORY = "the host's memory, shared"
NOT_REPORTED = "torch does not report it"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch; all None if there is none."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @property
    def label(self) -> str | None:
        """Return ``"12.8"`` for CUDA, ``"ROCm 6.2"``, ``"XPU 2025.0"``, or None for a CPU-only build."""
        if self.hip:
            return f"ROCm {self.hip}"
        if self.cuda:
            return self.cuda
        return f"XPU {self.xpu}" if self.xpu else None


def torch_build() -> TorchBuild:
    """Return the imported torch, else the one that an import would find."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _installed()
    version = getattr(torch, "version", None)
    return TorchBuild(
        str(torch.__version__),
        cuda=getattr(version, "cuda", None),
        hip=getattr(version, "hip", None),
        xpu=getattr(version, "xpu", None),
    )


def _installed() -> TorchBuild:
    try:
        spec = importlib.util.find_spec("torch")
        folders = spec.submodule_search_locations if spec is not None else None
        text = (
            Path(folders[0], "version.py").read_text(encoding="utf-8")
            if folders
            else ""
        )
    except (ImportError, ValueError, OSError):
        return TorchBuild()
    return TorchBuild(
        _assigned(text, "__version__"),
        cuda=_assigned(text, "cuda"),
        hip=_assigned(text, "hip"),
        xpu=_assigned(text, "xpu"),
    )


def _assigned(text: str, name: str) -> str | None:
    """Return the text that a line of torch's ``version.py`` assigns to a name, if one does."""
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return None if match is None else match[1]


def cuda_devices() -> dict[str, tuple[int, Any]]:
    """Return each device's index and properties by its bare UUID; empty while CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    devices = {}
    for ordinal in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(ordinal)
        uuid = str(getattr(properties, "uuid", ""))
        devices[bare_uuid(uuid)] = ordinal, properties
    return devices


def bare_uuid(uuid: str | None) -> str:
    """Return a UUID without NVML's prefix, which torch does not write."""
    return re.sub(r"^(GPU-|MIG-)", "", uuid or "").lower()


def torch_rows(build: TorchBuild, known: Sequence[GpuRow], reason: str) -> list[GpuRow]:
    """Return the devices that only torch reports: CUDA and ROCm in use without NVML, XPU and MPS.

    Empty while torch is not imported. CUDA that is not in use is not queried, because that would initialise it.
    ``known`` are the rows from NVML, and ``reason`` is why there are no more.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    rows = []
    if torch.cuda.is_initialized():
        listed = {row.device for row in known}
        missing = [name for name in _names("cuda", torch.cuda) if name not in listed]
        rows += [_torch_row(name, torch.cuda, reason) for name in missing]
    if build.xpu and torch.xpu.is_available():
        rows += [
            _torch_row(name, torch.xpu, NOT_REPORTED)
            for name in _names("xpu", torch.xpu)
        ]
    if sys.platform == "darwin" and torch.backends.mps.is_available():
        rows.append(_mps_row(torch))
    return rows


def _mps_row(torch: ModuleType) -> GpuRow:
    """Return Apple's GPU. Its memory is the host's; the total is the maximum that Metal recommends."""
    row = GpuRow(
        "mps:0",
        name="Apple GPU",
        memory_total=int(torch.mps.recommended_max_memory()),
        unified=True,
        reasons={"all": NOT_REPORTED},
    )
    return with_kernel_memory(row)


def simulated_rows() -> list[GpuRow]:
    """Return the devices of simgpu, if this process has enabled it."""
    simgpu = sys.modules.get("gpumagic.simgpu")
    if simgpu is None or not simgpu.is_enabled():
        return []
    import torch

    rows = []
    for name in _names("simgpu", torch.simgpu):
        free, total = torch.simgpu.mem_get_info(Device.parse(name).index)
        row = _row_of_properties(name, torch.simgpu, SIMULATED)
        rows.append(
            replace(row, simulated=True, memory_free=free, memory_used=total - free)
        )
    return rows


def with_kernel_memory(row: GpuRow) -> GpuRow:
    """Return the row with this kernel's allocator figures; 0 while torch has not used the device."""
    if row.device is None:
        return _without_kernel_memory(row, "torch cannot use it")
    stats = allocator.device_stats(row.device)
    if stats is not None:
        return replace(
            row, kernel_allocated=stats.allocated, kernel_reserved=stats.reserved
        )
    backend = Device.parse(row.device).backend
    if "torch" in sys.modules and allocator.is_initialised(backend):
        return _without_kernel_memory(row, "no counting allocator")
    return replace(row, kernel_allocated=0, kernel_reserved=0)


def _without_kernel_memory(row: GpuRow, why: str) -> GpuRow:
    reasons = {**row.reasons, "kernel_allocated": why, "kernel_reserved": why}
    return replace(row, reasons=reasons)


def _torch_row(name: str, module: ModuleType, reason: str) -> GpuRow:
    row = _row_of_properties(name, module, reason)
    if not row.kernel_reserved:
        why = "asking torch would create a context there"  # pytorch#86493
        return replace(
            row, reasons={**row.reasons, "memory_free": why, "memory_used": why}
        )
    free, total = allocator.mem_get_info(name) or (None, None)
    if row.unified:  # what CUDA counts as used there is every program's of the machine
        return replace(
            row, memory_free=free, reasons={**row.reasons, "memory_used": HOST_MEMORY}
        )
    used = None
    if free is not None and total is not None:
        used = total - free
    return replace(row, memory_free=free, memory_used=used)


def _row_of_properties(name: str, module: ModuleType, reason: str) -> GpuRow:
    """Return what torch says without a context; ``reason`` is why the rest is not known."""
    properties = module.get_device_properties(Device.parse(name).index)
    uuid = getattr(properties, "uuid", None)
    return with_kernel_memory(
        GpuRow(
            device=name,
            name=str(properties.name),
            memory_total=int(properties.total_memory),
            uuid=None if uuid is None else str(uuid),
            unified=bool(getattr(properties, "is_integrated", False)),
            reasons={"all": reason},
        )
    )


def _names(backend: str, module: ModuleType) -> list[str]:
    return [f"{backend}:{index}" for index in range(module.device_count())]

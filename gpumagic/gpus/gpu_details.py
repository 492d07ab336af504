"""Every field of one device, for `%gpuinfo -a`: its value, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpumagic.gpus.gpu_table import absent, clock, power, short
from gpumagic.gpus.report import GpuRow
from gpumagic.report.document import Cell, Column, Table
from gpumagic.report.units import percent, rate, size


def table(row: GpuRow, rows: Sequence[GpuRow]) -> Table:
    """Return all that is known of one of the devices, and of the rest why it is not."""
    names = {str(each.nvml_index): short(each) for each in reversed(rows)}
    known = {field: each for field, each in DETAILS.items() if row.reasons.get(field) != "simulated"}
    grid = [[label, _detail(row, field, show)] for field, (label, show) in known.items()]
    grid += [[f"To {names.get(index, f'NVML {index}')}", way] for index, way in (row.topology or {}).items()]
    return Table([Column(short(row)), Column(row.name or "unknown", shrinks=True)], grid, f"All of {short(row)}")


def _detail(row: GpuRow, field: str, show: Callable[[GpuRow], str]) -> Cell | str:
    if getattr(row, field) is not None:
        return show(row)
    return Cell(absent(row.reasons.get(field)), muted=True)


def _of(now: int | None, most: int | None) -> str:
    return str(now) if most is None else f"{now} of {most}"


DETAILS: Mapping[str, tuple[str, Callable[[GpuRow], str]]] = {
    "nvml_index": ("NVML index", lambda row: str(row.nvml_index)),
    "uuid": ("UUID", lambda row: str(row.uuid)),
    "bus_id": ("PCI bus", lambda row: str(row.bus_id)),
    "compute_capability": ("Compute capability", lambda row: str(row.compute_capability)),
    "memory_total": ("Memory, total", lambda row: size(row.memory_total)),
    "memory_used": ("Memory, used", lambda row: size(row.memory_used)),
    "memory_free": ("Memory, free", lambda row: size(row.memory_free)),
    "memory_reserved": ("Memory, driver's own", lambda row: size(row.memory_reserved)),
    "kernel_allocated": ("This kernel, tensors", lambda row: size(row.kernel_allocated)),
    "kernel_reserved": ("This kernel, with cache", lambda row: size(row.kernel_reserved)),
    "other_processes": ("Other processes", lambda row: size(row.other_processes)),
    "utilization": ("Utilisation", lambda row: percent(row.utilization)),
    "temperature": ("Temperature", lambda row: f"{row.temperature:.0f} C"),
    "power": ("Power", power),
    "fan": ("Fan", lambda row: percent(row.fan)),
    "performance_state": ("State (P0 is fastest)", lambda row: str(row.performance_state)),
    "clock_sm": ("SM clock", lambda row: clock(row.clock_sm, row.clock_sm_max)),
    "clock_memory": ("Memory clock", lambda row: clock(row.clock_memory, row.clock_memory_max)),
    "memory_utilization": ("Memory busy", lambda row: percent(row.memory_utilization)),
    "encoder_utilization": ("Encoder", lambda row: percent(row.encoder_utilization)),
    "decoder_utilization": ("Decoder", lambda row: percent(row.decoder_utilization)),
    "ecc_errors": ("Uncorrected memory errors", lambda row: str(row.ecc_errors)),
    "pcie_generation": ("PCIe generation", lambda row: _of(row.pcie_generation, row.pcie_generation_max)),
    "pcie_width": ("PCIe lanes", lambda row: _of(row.pcie_width, row.pcie_width_max)),
    "pcie_sent": ("PCIe, to the host", lambda row: rate(row.pcie_sent)),
    "pcie_received": ("PCIe, from the host", lambda row: rate(row.pcie_received)),
    "nvlinks": ("NVLinks up", lambda row: str(row.nvlinks)),
    "nvlink_sent": ("NVLink, sent", lambda row: rate(row.nvlink_sent)),
    "nvlink_received": ("NVLink, received", lambda row: rate(row.nvlink_received)),
    "throttle_reasons": ("Held back by", lambda row: ", ".join(row.throttle_reasons or ()) or "nothing"),
}

"""The view of `%gpuinfo`: one row per device, what is not available and why, and what `-p` and `-a` add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpumagic.gpus import history_view  # noqa: F401  # it registers its views
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.base import grouped
from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Segment, Table, document_of
from gpumagic.report.units import NOT_AVAILABLE, count, percent, rate, size, size_of, size_pair

BAR_LEGEND = "Bar: this kernel's tensors, its cache, other use."
ELSEWHERE = "in a wider terminal, or with -a"
UTILIZATION_LEGEND = "Util: percent of the last sample period in which any kernel ran; 100% need not be full load."


@document_of.register(GPUReport)
def view_gpus(report: GPUReport) -> Document:
    """Return the report as a table of devices, or as one paragraph where there is none."""
    blocks: list[Block] = [Heading(headline(report.devices, report.cause)), Paragraph(_versions(report), muted=True)]
    if report.devices:
        blocks += table_blocks(report.devices, explained=report.cause is not None)
    if report.show_processes and report.devices:
        blocks += process_blocks(report.devices)
    if report.show_all:
        blocks += [details_table(row, report.devices) for row in report.devices]
        blocks.append(Paragraph(f"{BAR_LEGEND} {UTILIZATION_LEGEND}", muted=True))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


FULL = 0.1
"""The share of a device's memory that is free, below which it counts as full."""


def headline(rows: Sequence[GpuRow], cause: str | None = None) -> str:
    """Return which device has room, or what fills them, or why there is none."""
    real = [row for row in rows if not row.simulated]
    if cause:
        return f"{f'No usable GPU of {len(real)}' if real else 'No GPU'}: {cause}"
    kind = count(len(real), "GPU") if real else count(len(rows), "simulated GPU") if rows else "No GPU"
    known = [row for row in real or rows if row.device is not None and row.memory_free is not None and row.memory_total]
    if not known:
        return kind
    best = max(known, key=lambda row: row.memory_free or 0)
    room = size_of(best.memory_free or 0, best.memory_total)
    is_full = (best.memory_free or 0) < FULL * (best.memory_total or 0)
    if len(known) == 1:
        return (
            f"{best.device} has only {room} free: {_who_fills(best)}" if is_full else f"{best.device} has {room} free"
        )
    if is_full:
        return f"{kind}, all full: {best.device} has most free memory, {room}; {_who_fills(best)}"
    return f"{kind}: {best.device} has most free memory, {room}"


def _who_fills(row: GpuRow) -> str:
    """Return who holds most of a full device, and what to do."""
    others, own = row.other_processes or 0, row.kernel_reserved or 0
    if own > others:
        return f"this kernel holds {size(own)}, %devices lists it"
    largest = max(
        (each for each in row.processes or () if not each.this_kernel and each.memory), default=None,
        key=lambda each: each.memory or 0,
    )  # fmt: skip
    if largest is None or largest.pid is None:
        return f"other processes hold {size(others) if others else 'the rest'}, %gpuinfo -p lists them"
    user = f" of {largest.user}" if largest.user else ""
    name = f" ({largest.name})" if largest.name else ""
    return f"other processes hold {size(others)}, most of it PID {largest.pid}{user}{name}"


def _versions(report: GPUReport) -> str:
    if report.torch_version is None:
        parts = ["torch is not installed"]
    else:
        build = report.cuda_build or "CPU-only build"
        parts = [f"torch {report.torch_version} ({f'CUDA {build}' if build[0].isdigit() else build})"]
    if report.driver_version:
        parts.append(f"driver {report.driver_version}")
    if report.cuda_visible_devices is not None:
        parts.append(f'CUDA_VISIBLE_DEVICES="{report.cuda_visible_devices}"')
    return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class FieldColumn:
    """A column of the table, and the field of `GpuRow` whose reason explains why it is not available."""

    column: Column
    field: str
    cell: Callable[[GpuRow], Cell | str]
    extra: bool = False
    """Whether nothing is said where no device has it; `-a` says why."""


def table_blocks(rows: Sequence[GpuRow], *, explained: bool) -> list[Block]:
    """Return the table and the sentences under it; ``explained`` if the report says why torch can use no device."""
    shown = [each for each in FIELD_COLUMNS if any(_has_value(row, each) for row in rows)]
    indices = [(row.device, row.nvml_index) for row in rows if row.device is not None and row.nvml_index is not None]
    if all(device.endswith(f":{index}") for device, index in indices):
        shown = [each for each in shown if each.field != "nvml_index"]
    grid = [[_cell(row, each) for each in shown] for row in rows]
    found: list[Block] = [Table([each.column for each in shown], grid, "GPUs", elsewhere=ELSEWHERE)]
    throttled = grouped((row.throttle_reasons, short_name(row)) for row in rows if row.throttle_reasons)
    for reasons, names in throttled.items():
        verb = "is" if len(names) == 1 else "are"
        where = f"All {len(rows)}" if len(names) == len(rows) > 2 else ", ".join(names)
        found.append(Paragraph(f"{where} {verb} throttled by: {', '.join(reasons)}."))
    for row in rows:
        if row.ecc_errors:
            errors = count(row.ecc_errors, "uncorrected memory error")
            found.append(Paragraph(f"{short_name(row)} has had {errors} since its driver was loaded."))
    missing = [*([] if explained else _unusable_gpus(rows)), *_missing_fields(rows)]
    return found + ([Paragraph(" ".join(missing), muted=True)] if missing else [])


def _has_value(row: GpuRow, column: FieldColumn) -> bool:
    return column.field == "device" or getattr(row, column.field) is not None


def _cell(row: GpuRow, column: FieldColumn) -> Cell | str:
    return column.cell(row) if _has_value(row, column) else _reason_cell(row.reasons.get(column.field, ""))


def _reason_cell(reason: str) -> Cell:
    return Cell(reason if reason.startswith(NOT_AVAILABLE) else NOT_AVAILABLE, muted=True, title=reason)


def _unusable_gpus(rows: Sequence[GpuRow]) -> list[str]:
    """Return which of the driver's GPUs have no name in torch, and why."""
    unnamed = [row for row in rows if row.device is None]
    reasons = grouped((row.reasons.get("device", "not known"), short_name(row)) for row in unnamed)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return [f"Not usable in torch here: {'; '.join(parts)}."] if parts else []


def _missing_fields(rows: Sequence[GpuRow]) -> list[str]:
    """Return why columns lack figures, in words, since a title is only seen with a mouse."""
    reasons = grouped(
        (row.reasons.get(column.field, "not known"), (column.column.title, short_name(row)))
        for row in rows
        for column in (*FIELD_COLUMNS, THROTTLING)
        if not _has_value(row, column) and not row.simulated and not _is_implied(rows, row, column)
    )
    sentences = []
    for reason, where in reasons.items():
        titles = grouped((tuple(names), title) for title, names in grouped(where).items())
        parts = [", ".join(t) + ("" if len(n) == len(rows) else f" of {', '.join(n)}") for n, t in titles.items()]
        sentences.append(f"{'; '.join(parts)}: {not_available(reason)}.")
    return sentences


def _is_implied(rows: Sequence[GpuRow], row: GpuRow, column: FieldColumn) -> bool:
    if any(_has_value(each, column) for each in rows):
        if row.reasons.get(column.field, "").startswith(NOT_AVAILABLE):
            return True  # the cell itself says it
    elif column.extra:
        return True
    of_the_kernel = column.field in ("kernel_allocated", "nvml_index")
    return row.device is None and (of_the_kernel or row.reasons.get(column.field) == row.reasons.get("device"))


def not_available(reason: str | None) -> str:
    """Return ``"n/a (reason)"``."""
    reason = reason or "not known"
    return reason if reason.startswith(NOT_AVAILABLE) else f"{NOT_AVAILABLE} ({reason})"


def short_name(row: GpuRow) -> str:
    """Return torch's name of a device, or NVML's where torch has none."""
    if row.device is not None:
        return row.device
    return f"NVML {row.nvml_index}" + (" MIG" if _is_instance(row) else "")


def _is_instance(row: GpuRow) -> bool:
    return (row.uuid or "").startswith("MIG-")


def _device(row: GpuRow) -> Cell:
    indent = "· " if _is_instance(row) else ""
    if row.device is None:
        return Cell(indent + short_name(row), muted=True, title=row.reasons.get("device", ""))
    if row.predicted:
        return Cell(f"{indent}{row.device}?", title="predicted from the environment")
    return Cell(indent + row.device)


def _name(row: GpuRow) -> Cell:
    name = (row.name or "").removeprefix("NVIDIA ")
    if _is_instance(row):
        name = name[max(0, name.find("MIG ")) :]  # it stands under its card, which has the rest
    if row.simulated and "simulated" not in name.lower():
        name += " (simulated)"
    if row.unified:
        name += " (unified memory)"
    return Cell(name, title=row.name or "")


def _memory(row: GpuRow) -> Cell:
    if row.memory_used is None:
        return Cell(size(row.memory_total), title=row.reasons.get("memory_used", ""))
    kept = "" if row.memory_reserved is None else f", reserved by the driver {size(row.memory_reserved)}"
    title = f"free {size(row.memory_free)}, used {size(row.memory_used)}{kept}"
    return Cell(size_pair(row.memory_used, row.memory_total), bar=memory_bar(row), title=title)


def memory_bar(row: GpuRow) -> tuple[Segment, ...]:
    """Return the shares of tensors, cache and other memory in use; empty where they are unknown."""
    if not row.memory_total or row.memory_used is None:
        return ()
    allocated, reserved = row.kernel_allocated or 0, row.kernel_reserved or 0
    return (
        Segment(allocated / row.memory_total, "main"),
        Segment(max(0, reserved - allocated) / row.memory_total, "second"),
        Segment(max(0, row.memory_used - reserved) / row.memory_total, "other"),
    )


def _kernel(row: GpuRow) -> Cell | str:
    if not row.kernel_reserved:
        return Cell("nothing", muted=True, title="torch holds no memory there in this process")
    return Cell(size_pair(row.kernel_allocated or 0, row.kernel_reserved), title="in tensors / with the cache")


def power(row: GpuRow) -> str:
    """Return ``"252/400 W"``."""
    limit = "" if row.power_limit is None else f"/{row.power_limit:.0f}"
    return f"{row.power:.0f}{limit} W"


def clock(now: int | None, most: int | None) -> str:
    """Return ``"1410 / 1980 MHz"``."""
    return f"{now} MHz" if most is None else f"{now} / {most} MHz"


FIELD_COLUMNS = (
    FieldColumn(Column("Device"), "device", _device),
    FieldColumn(Column("NVML", "right", 2), "nvml_index", lambda row: str(row.nvml_index)),
    FieldColumn(Column("Name", shrinks=True), "name", _name),
    FieldColumn(Column("Memory"), "memory_total", _memory),
    FieldColumn(Column("This kernel", "right", 1), "kernel_allocated", _kernel),
    FieldColumn(Column("Others", "right", 4), "other_processes", lambda row: size(row.other_processes)),
    FieldColumn(Column("Util", "right", 3), "utilization", lambda row: percent(row.utilization)),
    FieldColumn(Column("Temp", "right", 5), "temperature", lambda row: f"{row.temperature:.0f} C"),
    FieldColumn(Column("Power", "right", 6), "power", power),
    FieldColumn(
        Column("Mem busy", "right", 7), "memory_utilization", lambda row: percent(row.memory_utilization), extra=True
    ),
    FieldColumn(
        Column("SM clock", "right", 8), "clock_sm", lambda row: clock(row.clock_sm, row.clock_sm_max), extra=True
    ),
    FieldColumn(Column("State", "right", 9), "performance_state", lambda row: str(row.performance_state), extra=True),
)
THROTTLING = FieldColumn(Column("Throttling"), "throttle_reasons", lambda row: ", ".join(row.throttle_reasons or ()))
"""No column: what throttles a device is said in a sentence."""


def process_blocks(rows: Sequence[GpuRow]) -> list[Block]:
    """Return the processes of all devices in one table, and why those of some are not available."""
    columns = [Column("Device"), Column("PID", "right"), Column("Memory", "right"), Column("Util", "right", 2),
               Column("User", priority=1), Column("Process", shrinks=True)]  # fmt: skip
    listed = [(row, each) for row in rows for each in row.processes or ()]
    grid = [_process(row, each) for row, each in listed]
    if not any(each.utilization is not None for _, each in listed):
        columns, grid = columns[:3] + columns[4:], [cells[:3] + cells[4:] for cells in grid]
    found: list[Block] = [Heading("Processes"), Table(columns, grid, "Processes on the GPUs")] if grid else []
    reasons = {each.reason for _, each in listed if each.memory is None and each.reason}
    found += [
        Paragraph(f"Memory: {not_available(reason)}.", muted=True)
        for reason in sorted(reasons)
        if not reason.startswith(NOT_AVAILABLE)
    ]
    hidden = grouped((row.reasons.get("processes"), short_name(row)) for row in rows if row.processes is None)
    if not grid and any(row.processes is not None for row in rows):
        found.append(Paragraph("No process uses a GPU."))
    for why, names in hidden.items():
        found.append(Paragraph(f"Processes of {', '.join(names)}: {not_available(why)}.", muted=True))
    return found


def _process(row: GpuRow, each: ProcessRow) -> list[Cell | str]:
    name = each.name or ("another user's or an ended process" if each.pid is not None else "unknown")
    marks = ["this kernel"] * each.this_kernel + ["graphics"] * (each.kind == "graphics")
    return [
        short_name(row),
        Cell("-", muted=True) if each.pid is None else str(each.pid),
        size(each.memory) if each.memory is not None else _reason_cell(each.reason or "the driver does not say"),
        Cell("-", muted=True, title="no sample") if each.utilization is None else percent(each.utilization),
        each.user or Cell("-", muted=True),
        Cell(name + (f" ({', '.join(marks)})" if marks else ""), title=name),
    ]


def details_table(row: GpuRow, rows: Sequence[GpuRow]) -> Table:
    """Return all fields of one of the devices, each with its value or the reason why it has none."""
    names = {str(each.nvml_index): short_name(each) for each in reversed(rows)}
    grid: list[list[Cell | str]] = []
    for field, (label, show) in DETAILS.items():
        reason = row.reasons.get(field)
        if getattr(row, field) is not None and reason != "simulated":
            grid.append([label, show(row)])
        elif reason != "simulated":
            grid.append([label, Cell(not_available(reason), muted=True)])
    grid += [[f"To {names.get(index, f'NVML {index}')}", link] for index, link in (row.topology or {}).items()]
    columns = [Column(short_name(row)), Column(row.name or "unknown", shrinks=True)]
    return Table(columns, grid, f"All of {short_name(row)}")


def _of_max(now: int | None, most: int | None) -> str:
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
    "utilization": ("Utilization", lambda row: percent(row.utilization)),
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
    "pcie_generation": ("PCIe generation", lambda row: _of_max(row.pcie_generation, row.pcie_generation_max)),
    "pcie_width": ("PCIe lanes", lambda row: _of_max(row.pcie_width, row.pcie_width_max)),
    "pcie_sent": ("PCIe, to the host", lambda row: rate(row.pcie_sent)),
    "pcie_received": ("PCIe, from the host", lambda row: rate(row.pcie_received)),
    "nvlinks": ("NVLinks up", lambda row: str(row.nvlinks)),
    "nvlink_sent": ("NVLink, sent", lambda row: rate(row.nvlink_sent)),
    "nvlink_received": ("NVLink, received", lambda row: rate(row.nvlink_received)),
    "throttle_reasons": ("Throttled by", lambda row: ", ".join(row.throttle_reasons or ()) or "nothing"),
}

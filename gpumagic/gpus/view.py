"""The view of `%gpuinfo`: one row per device, what is not available and why, and what `-p` and `-a` add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpumagic.gpus.report import (
    FIGURES,
    NOT_KNOWN,
    SIMULATED,
    CellChange,
    GPUReport,
    GpuRow,
    ProcessRow,
)
from gpumagic.report.base import grouped
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Paragraph,
    Segment,
    Table,
    document_of,
)
from gpumagic.report.text import terminal_has_unicode, to_ascii
from gpumagic.report.units import (
    NOT_AVAILABLE,
    count,
    duration,
    printable,
    size,
    size_of,
    size_pair,
    truncate_words,
)

LEGEND = (
    "Bar: this kernel's tensors, its cache, other use. Util: percent of the last sample period in which any kernel "
    "ran; 100% need not be full load."
)


@document_of.register(GPUReport)
def view_gpus(report: GPUReport) -> Document:
    """Return the report as a table of devices, or as one paragraph where there is none."""
    blocks: list[Block] = [
        Heading(headline(report.devices, report.cause)),
        Paragraph(_versions(report), muted=True),
    ]
    if report.devices:
        elsewhere = "in the lists below" if report.show_all else "in a wider terminal, or with -a"
        blocks += table_blocks(
            report.devices, explained=report.cause is not None, elsewhere=elsewhere
        )
    if report.show_processes and report.devices:
        blocks += process_blocks(report.devices)
    if report.show_all and report.devices:
        blocks += [block for row in report.devices for block in details_blocks(row)]
        blocks.append(Paragraph(LEGEND, muted=True))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


FULL = 0.1
"""The share of a device's memory that is free, below which it counts as full."""


def headline(rows: Sequence[GpuRow], cause: str | None = None) -> str:
    """Return which device has room, or what fills them, or why there is none."""
    real = [row for row in rows if not row.simulated]
    if cause:
        return f"{f'No usable GPU of {len(real)}' if real else 'No GPU'}: {cause}"
    kind = (
        count(len(real), "GPU") if real else count(len(rows), "simulated GPU") if rows else "No GPU"
    )
    known = [
        row
        for row in real or rows
        if row.device is not None and row.memory_free is not None and row.memory_total
    ]
    if not known:
        return kind
    best = max(known, key=lambda row: row.memory_free or 0)
    room = size_of(best.memory_free or 0, best.memory_total)
    is_full = (best.memory_free or 0) < FULL * (best.memory_total or 0)
    if len(known) == 1:
        return (
            f"{best.device} has only {room} free: {_who_fills(best)}"
            if is_full
            else f"{best.device} has {room} free"
        )
    if is_full:
        return f"{kind}, all full: {best.device} has most free memory, {room}; {_who_fills(best)}"
    return f"{kind}: {best.device} has most free memory, {room}"


def _who_fills(row: GpuRow) -> str:
    """Return who holds most of a full device, and what to do."""
    others, own = row.other_processes or 0, row.kernel_reserved or 0
    if own > others:
        return f"this kernel holds {size(own)}, %devices lists it"
    listed = [each for each in row.processes or () if not each.this_kernel and each.memory]
    largest = max(listed, default=None, key=lambda each: each.memory or 0)
    if largest is None or largest.pid is None:
        return (
            f"other processes hold {size(others) if others else 'the rest'}, %gpuinfo -p lists them"
        )
    user = f" of {largest.user}" if largest.user else ""
    name = f" ({largest.name})" if largest.name else ""
    return f"other processes hold {size(others)}, most of it PID {largest.pid}{user}{name}"


def _versions(report: GPUReport) -> str:
    build = report.cuda_build or "CPU-only build"
    built = f"torch {report.torch_version} ({f'CUDA {build}' if build[0].isdigit() else build})"
    parts = ["torch is not installed" if report.torch_version is None else built]
    if report.driver_version:
        parts.append(f"driver {report.driver_version}")
    if report.cuda_visible_devices is not None:
        parts.append(f'CUDA_VISIBLE_DEVICES="{report.cuda_visible_devices}"')
    return " · ".join(parts)


def table_blocks(rows: Sequence[GpuRow], *, explained: bool, elsewhere: str) -> list[Block]:
    """Return the table and the sentences under it; ``explained`` if the report says why torch can use no device."""
    indices = [
        (row.device, row.nvml_index)
        for row in rows
        if row.device is not None and row.nvml_index is not None
    ]
    are_torchs = all(device.endswith(f":{index}") for device, index in indices)
    columns = [
        each for each in COLUMNS if not (are_torchs and each.title == FIGURES["nvml_index"].title)
    ]
    found: list[Block] = [Table.of(rows, columns, "GPUs", elsewhere=elsewhere)]
    throttled = grouped((row.throttle_reasons, row.label) for row in rows if row.throttle_reasons)
    for reasons, names in throttled.items():
        verb = "is" if len(names) == 1 else "are"
        where = f"All {len(rows)}" if len(names) == len(rows) > 2 else ", ".join(names)
        found.append(Paragraph(f"{where} {verb} throttled by: {', '.join(reasons)}."))
    for row in rows:
        if row.ecc_errors:
            errors = count(row.ecc_errors, "uncorrected memory error")
            found.append(Paragraph(f"{row.label} has had {errors} since its driver was loaded."))
    missing = _missing_figures(rows)
    unusable = grouped(
        (row.reasons.get("device", NOT_KNOWN), row.label) for row in rows if row.device is None
    )
    if unusable and not explained:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in unusable.items()]
        missing.insert(0, f"Not usable in torch here: {'; '.join(parts)}.")
    return found + ([Paragraph(" ".join(missing), muted=True)] if missing else [])


def shown(row: GpuRow, name: str) -> str:
    """Return a figure that the row has as text, with its maximum where it has one."""
    figure = FIGURES[name]
    most = (getattr(row, figure.most),) if figure.most else ()
    return figure.show(getattr(row, name), *most)


def _reason_cell(reason: str) -> Cell:
    return Cell(
        reason if reason.startswith(NOT_AVAILABLE) else NOT_AVAILABLE, muted=True, title=reason
    )


def _missing_figures(rows: Sequence[GpuRow]) -> list[str]:
    """Return why the table lacks figures, in words, since a title is only seen with a mouse."""
    reasons = grouped(
        (row.reasons.get(name, NOT_KNOWN), (figure.title, row.label))
        for row in rows
        for name, figure in FIGURES.items()
        if figure.title
        and getattr(row, name) is None
        and not row.simulated
        and not _is_implied(rows, row, name)
    )
    sentences = []
    for reason, where in reasons.items():
        titles = grouped((tuple(names), title) for title, names in grouped(where).items())
        parts = [
            ", ".join(t) + ("" if len(n) == len(rows) else f" of {', '.join(n)}")
            for n, t in titles.items()
        ]
        sentences.append(f"{'; '.join(parts)}: {not_available(reason)}.")
    return sentences


def _is_implied(rows: Sequence[GpuRow], row: GpuRow, name: str) -> bool:
    if any(getattr(each, name) is not None for each in rows):
        if row.reasons.get(name, "").startswith(NOT_AVAILABLE):
            return True  # the cell itself says it
    elif FIGURES[name].extra:
        return True
    of_the_kernel = name in ("kernel_allocated", "nvml_index")
    return row.device is None and (
        of_the_kernel or row.reasons.get(name) == row.reasons.get("device")
    )


def not_available(reason: str | None) -> str:
    """Return ``"n/a (reason)"``."""
    reason = reason or NOT_KNOWN
    return reason if reason.startswith(NOT_AVAILABLE) else f"{NOT_AVAILABLE} ({reason})"


def _device(row: GpuRow) -> Cell:
    indent = "· " if row.is_instance else ""
    if row.device is None:
        return Cell(indent + row.label, muted=True, title=row.reasons.get("device", ""))
    return Cell(
        indent + row.device + "?" * row.predicted,
        title="predicted from the environment" * row.predicted,
    )


def _name(row: GpuRow) -> Cell:
    name = (row.name or "").removeprefix("NVIDIA ")
    if row.is_instance:
        name = name[max(0, name.find("MIG ")) :]  # it stands under its card, which has the rest
    if row.simulated and "simulated" not in name.lower():
        name += " (simulated)"
    if row.unified:
        name += " (unified memory)"
    return Cell(name, title=row.name or "")


SMALLEST = 0.005
"""The share of a device's memory below which its bar is empty: in text a twelfth is the least that can be drawn."""


def _memory(row: GpuRow) -> Cell:
    """Return the memory in use, with a bar of the shares of tensors, cache and the rest."""
    total, used = row.memory_total or 0, row.memory_used
    if used is None:
        return Cell(size(row.memory_total), title=row.reasons.get("memory_used", ""))
    kept = (
        ""
        if row.memory_reserved is None
        else f", reserved by the driver {size(row.memory_reserved)}"
    )
    allocated, reserved = row.kernel_allocated or 0, row.kernel_reserved or 0
    bar: tuple[Segment, ...] = ()
    if total and max(used, reserved) < SMALLEST * total:
        bar = (Segment(0),)
    elif total:
        cache, rest = max(0, reserved - allocated), max(0, used - reserved)
        bar = (
            Segment(allocated / total),
            Segment(cache / total, "second"),
            Segment(rest / total, "other"),
        )
    title = f"free {size(row.memory_free)}, used {size(used)}{kept}"
    return Cell(size_pair(used, row.memory_total), bar=bar, title=title)


def _kernel(row: GpuRow) -> Cell | str:
    if not row.kernel_reserved:
        return Cell("nothing", muted=True, title="torch holds no memory there in this process")
    return Cell(
        size_pair(row.kernel_allocated or 0, row.kernel_reserved),
        title="in tensors / with the cache",
    )


CELLS: Mapping[str, Callable[[GpuRow], Cell | str]] = {
    "name": _name,
    "memory_total": _memory,
    "kernel_allocated": _kernel,
}
"""The cells that show more than their own figure."""


def _column(name: str, column: Column[Any]) -> Column[GpuRow]:
    def cell(row: GpuRow) -> Cell | str:
        if getattr(row, name) is None:
            return _reason_cell(row.reasons.get(name, ""))
        return CELLS[name](row) if name in CELLS else shown(row, name)

    return replace(column, value=cell, when=lambda row: getattr(row, name) is not None)


COLUMNS = (
    Column("Device", _device),
    *(_column(name, each.column) for name, each in FIGURES.items() if each.column),
)
Listed = tuple[GpuRow, ProcessRow]
PROCESS_COLUMNS: tuple[Column[Listed], ...] = (
    Column("Device", lambda each: each[0].label),
    Column("PID", lambda each: _or_dash(each[1].pid), "right"),
    Column(
        "Memory",
        lambda each: (
            size(each[1].memory)
            if each[1].memory is not None
            else _reason_cell(each[1].reason or "the driver does not say")
        ),
        "right",
    ),
    Column("User", lambda each: _or_dash(each[1].user), priority=1),
    Column("Process", lambda each: _process_name(each[1]), shrinks=True),
)


def process_blocks(rows: Sequence[GpuRow]) -> list[Block]:
    """Return the processes of all devices in one table, and why those of some are not available."""
    listed = [(row, each) for row in rows for each in row.processes or ()]
    found: list[Block] = []
    if listed:
        found += [Heading("Processes"), Table.of(listed, PROCESS_COLUMNS, "Processes on the GPUs")]
    elif any(row.processes is not None for row in rows):
        found.append(Paragraph("No process uses a GPU."))
    reasons = {each.reason for _, each in listed if each.memory is None and each.reason}
    unsaid = sorted(reason for reason in reasons if not reason.startswith(NOT_AVAILABLE))
    found += [Paragraph(f"Memory: {not_available(reason)}.", muted=True) for reason in unsaid]
    hidden = grouped(
        (row.reasons.get("processes"), row.label) for row in rows if row.processes is None
    )
    for why, names in hidden.items():
        found.append(
            Paragraph(f"Processes of {', '.join(names)}: {not_available(why)}.", muted=True)
        )
    return found


def _or_dash(value: object) -> Cell | str:
    return Cell("-", muted=True) if value is None else str(value)


def _process_name(each: ProcessRow) -> Cell:
    name = each.name or (
        "another user's or an ended process" if each.pid is not None else "unknown"
    )
    marks = ["this kernel"] * each.this_kernel + ["graphics"] * (each.kind == "graphics")
    return Cell(name + (f" ({', '.join(marks)})" if marks else ""), title=name)


def details_blocks(row: GpuRow) -> list[Block]:
    """Return all figures that a device has, and in a line what it lacks for each reason."""
    labels = {name: figure.label for name, figure in FIGURES.items() if figure.label}
    grid = [
        (label, shown(row, name))
        for name, label in labels.items()
        if getattr(row, name) is not None
    ]
    columns = [Column[Any](row.label), Column[Any](row.name or "unknown", shrinks=True)]
    absent = grouped(
        (row.reasons.get(name), label)
        for name, label in labels.items()
        if getattr(row, name) is None
    )
    lacking = [
        f"{'; '.join(each)}: {not_available(reason)}."
        for reason, each in absent.items()
        if reason != SIMULATED
    ]
    return [
        Table(columns, grid, f"All of {row.label}"),
        *(Paragraph(line, muted=True) for line in lacking),
    ]


def cell_line(seconds: float, changes: Sequence[CellChange]) -> str:
    """Return ``"1.24 s · cuda:0 +1.2 GiB to 3.4 GiB, peak 5.0 GiB"``."""
    parts = [duration(seconds)]
    for device, growth, allocated, peak in changes:
        sign = "+" if growth > 0 else "-" if growth < 0 else "±"
        highest = "" if peak is None else f", peak {size(peak)}"
        parts.append(f"{device} {sign}{size(abs(growth))} to {size(allocated)}{highest}")
    text = truncate_words(
        printable(" · ".join(parts if changes else [*parts, "no device memory used"]))
    )
    return text if terminal_has_unicode() else to_ascii(text)

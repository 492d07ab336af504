"""The view of `%gpuinfo`: one row per device, what is not available and why, and what `-p` and `-a` add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
        elsewhere = (
            "in the lists below"
            if report.show_all
            else "in a wider terminal, or with -a"
        )
        is_explained = report.cause is not None
        blocks += table_blocks(
            report.devices, explained=is_explained, elsewhere=elsewhere
        )
        if report.show_processes:
            blocks += process_blocks(report.devices)
        if report.show_all:
            for row in report.devices:
                blocks += details_blocks(row)
            blocks.append(Paragraph(LEGEND, muted=True))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


FULL = 0.1
"""The share of a device's memory that is free, below which it counts as full."""


def headline(rows: Sequence[GpuRow], cause: str | None = None) -> str:
    """Return which device has room, or what fills them, or why there is none."""
    real = [row for row in rows if not row.simulated]
    if cause:
        none = f"No usable GPU of {len(real)}" if real else "No GPU"
        return f"{none}: {cause}"
    if real:
        kind = count(len(real), "GPU")
    else:
        kind = count(len(rows), "simulated GPU") if rows else "No GPU"
    known = [row for row in real or rows if _has_room_known(row)]
    if not known:
        return kind
    best = max(known, key=lambda row: row.memory_free or 0)
    free = best.memory_free or 0
    room = size_of(free, best.memory_total)
    is_full = free < FULL * (best.memory_total or 0)
    if len(known) == 1:
        if is_full:
            return f"{best.device} has only {room} free: {_who_fills(best)}"
        return f"{best.device} has {room} free"
    if is_full:
        return f"{kind}, all full: {best.device} has most free memory, {room}; {_who_fills(best)}"
    return f"{kind}: {best.device} has most free memory, {room}"


def _has_room_known(row: GpuRow) -> bool:
    return (
        row.device is not None
        and row.memory_free is not None
        and bool(row.memory_total)
    )


def _who_fills(row: GpuRow) -> str:
    """Return who holds most of a full device, and what to do."""
    others = row.other_processes or 0
    own = row.kernel_reserved or 0
    if own > others:
        return f"this kernel holds {size(own)}, %devices lists it"
    foreign = [process for process in row.processes or () if not process.this_kernel]
    largest = max(foreign, default=None, key=lambda process: process.memory or 0)
    if largest is None or not largest.memory or largest.pid is None:
        held = size(others) if others else "the rest"
        return f"other processes hold {held}, %gpuinfo -p lists them"
    sentence = f"other processes hold {size(others)}, most of it PID {largest.pid}"
    if largest.user:
        sentence += f" of {largest.user}"
    if largest.name:
        sentence += f" ({largest.name})"
    return sentence


def _versions(report: GPUReport) -> str:
    if report.torch_version is None:
        parts = ["torch is not installed"]
    else:
        build = report.cuda_build or "CPU-only build"
        if build[0].isdigit():
            build = f"CUDA {build}"
        parts = [f"torch {report.torch_version} ({build})"]
    if report.driver_version:
        parts.append(f"driver {report.driver_version}")
    if report.cuda_visible_devices is not None:
        parts.append(f'CUDA_VISIBLE_DEVICES="{report.cuda_visible_devices}"')
    return " · ".join(parts)


def table_blocks(
    rows: Sequence[GpuRow], *, explained: bool, elsewhere: str
) -> list[Block]:
    """Return the table and the sentences under it; ``explained`` if the report says why torch can use no device."""
    blocks: list[Block] = [Table.of(rows, _columns(rows), "GPUs", elsewhere=elsewhere)]
    blocks += _throttled(rows)
    for row in rows:
        if row.ecc_errors:
            errors = count(row.ecc_errors, "uncorrected memory error")
            blocks.append(
                Paragraph(f"{row.label} has had {errors} since its driver was loaded.")
            )
    missing = _missing_figures(rows)
    if not explained:
        missing = [*_unusable(rows), *missing]
    if missing:
        blocks.append(Paragraph(" ".join(missing), muted=True))
    return blocks


def _throttled(rows: Sequence[GpuRow]) -> Iterator[Paragraph]:
    """Yield which devices are throttled, by the reasons."""
    throttled = grouped(
        (row.throttle_reasons, row.label) for row in rows if row.throttle_reasons
    )
    for reasons, labels in throttled.items():
        if len(labels) == len(rows) > 2:
            where = f"All {len(rows)}"
        else:
            where = ", ".join(labels)
        verb = "is" if len(labels) == 1 else "are"
        yield Paragraph(f"{where} {verb} throttled by: {', '.join(reasons)}.")


def _columns(rows: Sequence[GpuRow]) -> list[Column[GpuRow]]:
    """Return the table's columns; NVML's index is left out where it is torch's."""
    if not all(map(_has_torchs_index, rows)):
        return list(COLUMNS)
    return [column for column in COLUMNS if column.title != FIGURES["nvml_index"].title]


def _has_torchs_index(row: GpuRow) -> bool:
    """Return whether NVML and torch number a device alike, as far as both do."""
    if row.device is None or row.nvml_index is None:
        return True
    return row.device.endswith(f":{row.nvml_index}")


def _unusable(rows: Sequence[GpuRow]) -> Iterator[str]:
    """Yield why torch can use none of some devices, if there are such."""
    unusable = grouped(
        (row.reasons.get("device", NOT_KNOWN), row.label)
        for row in rows
        if row.device is None
    )
    if unusable:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in unusable.items()]
        yield f"Not usable in torch here: {'; '.join(parts)}."


def shown(row: GpuRow, name: str) -> str:
    """Return a figure that the row has as text, with its maximum where it has one."""
    figure = FIGURES[name]
    value = getattr(row, name)
    if figure.most:
        return figure.show(value, getattr(row, figure.most))
    return figure.show(value)


def _reason_cell(reason: str) -> Cell:
    text = reason if reason.startswith(NOT_AVAILABLE) else NOT_AVAILABLE
    return Cell(text, muted=True, title=reason)


def _missing_figures(rows: Sequence[GpuRow]) -> list[str]:
    """Return why the table lacks figures, in words, since a title is only seen with a mouse."""
    missing: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for name, figure in FIGURES.items():
            if figure.title and _is_to_be_explained(rows, row, name):
                by_title = missing.setdefault(row.reasons.get(name, NOT_KNOWN), {})
                by_title.setdefault(figure.title, []).append(row.label)
    sentences = []
    for reason, by_title in missing.items():
        parts = "; ".join(_of_devices(by_title, rows))
        sentences.append(f"{parts}: {not_available(reason)}.")
    return sentences


def _of_devices(
    by_title: Mapping[str, Sequence[str]], rows: Sequence[GpuRow]
) -> Iterator[str]:
    """Yield the titles of figures with the devices that lack them, where these are not all."""
    titles_by_labels = grouped(
        (tuple(labels), title) for title, labels in by_title.items()
    )
    for labels, titles in titles_by_labels.items():
        part = ", ".join(titles)
        if len(labels) < len(rows):
            part += f" of {', '.join(labels)}"
        yield part


def _is_to_be_explained(rows: Sequence[GpuRow], row: GpuRow, name: str) -> bool:
    """Return whether a row lacks a figure, and nothing else in the report says why."""
    if row.simulated or getattr(row, name) is not None:
        return False
    reason = row.reasons.get(name)
    if all(getattr(other, name) is None for other in rows):
        if FIGURES[name].extra:
            return False
    elif (reason or "").startswith(NOT_AVAILABLE):
        return False  # its cell in the table says it
    if row.device is not None:
        return True
    is_torchs = name in ("kernel_allocated", "nvml_index")
    return not is_torchs and reason != row.reasons.get("device")


def not_available(reason: str | None) -> str:
    """Return ``"n/a (reason)"``."""
    reason = reason or NOT_KNOWN
    return reason if reason.startswith(NOT_AVAILABLE) else f"{NOT_AVAILABLE} ({reason})"


def _device(row: GpuRow) -> Cell:
    indent = "· " if row.is_instance else ""
    if row.device is None:
        return Cell(indent + row.label, muted=True, title=row.reasons.get("device", ""))
    if row.predicted:
        return Cell(f"{indent}{row.device}?", title="predicted from the environment")
    return Cell(indent + row.device)


def _name(row: GpuRow) -> Cell:
    name = (row.name or "").removeprefix("NVIDIA ")
    if row.is_instance:
        name = name[
            max(0, name.find("MIG ")) :
        ]  # it stands under its card, which has the rest
    if row.simulated and "simulated" not in name.lower():
        name += " (simulated)"
    if row.unified:
        name += " (unified memory)"
    return Cell(name, title=row.name or "")


SMALLEST = 0.005
"""The share of a device's memory below which its bar is empty: in text a twelfth is the least that can be drawn."""


def _memory(row: GpuRow) -> Cell:
    """Return the memory in use, with a bar of the shares of tensors, cache and the rest."""
    used = row.memory_used
    if used is None:
        return Cell(size(row.memory_total), title=row.reasons.get("memory_used", ""))
    title = f"free {size(row.memory_free)}, used {size(used)}"
    if row.memory_reserved is not None:
        title += f", reserved by the driver {size(row.memory_reserved)}"
    return Cell(
        size_pair(used, row.memory_total), bar=_memory_bar(row, used), title=title
    )


def _memory_bar(row: GpuRow, used: int) -> tuple[Segment, ...]:
    total = row.memory_total or 0
    allocated = row.kernel_allocated or 0
    reserved = row.kernel_reserved or 0
    if not total:
        return ()
    if max(used, reserved) < SMALLEST * total:
        return (Segment(0),)
    cached = max(0, reserved - allocated)
    rest = max(0, used - reserved)
    return (
        Segment(allocated / total),
        Segment(cached / total, "second"),
        Segment(rest / total, "other"),
    )


def _kernel(row: GpuRow) -> Cell | str:
    if not row.kernel_reserved:
        return Cell(
            "nothing", muted=True, title="torch holds no memory there in this process"
        )
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
    """Return the column of a figure, which is shown if any row has it."""

    def is_known(row: GpuRow) -> bool:
        return getattr(row, name) is not None

    def cell(row: GpuRow) -> Cell | str:
        if not is_known(row):
            return _reason_cell(row.reasons.get(name, ""))
        if name in CELLS:
            return CELLS[name](row)
        return shown(row, name)

    return replace(column, value=cell, when=is_known)


COLUMNS = (
    Column("Device", _device),
    *(
        _column(name, figure.column)
        for name, figure in FIGURES.items()
        if figure.column
    ),
)


class _Listed(NamedTuple):
    """A process on a device."""

    row: GpuRow
    process: ProcessRow


def _process_memory(listed: _Listed) -> Cell | str:
    if listed.process.memory is None:
        return _reason_cell(listed.process.reason or "the driver does not say")
    return size(listed.process.memory)


def _process_name(listed: _Listed) -> Cell:
    process = listed.process
    unknown = "unknown" if process.pid is None else "another user's or an ended process"
    name = process.name or unknown
    marks = []
    if process.this_kernel:
        marks.append("this kernel")
    if process.kind == "graphics":
        marks.append("graphics")
    text = f"{name} ({', '.join(marks)})" if marks else name
    return Cell(text, title=name)


def _or_dash(value: object) -> Cell | str:
    return Cell("-", muted=True) if value is None else str(value)


PROCESS_COLUMNS: tuple[Column[_Listed], ...] = (
    Column("Device", lambda listed: listed.row.label),
    Column("PID", lambda listed: _or_dash(listed.process.pid), "right"),
    Column("Memory", _process_memory, "right"),
    Column("User", lambda listed: _or_dash(listed.process.user), priority=1),
    Column("Process", _process_name, shrinks=True),
)


def process_blocks(rows: Sequence[GpuRow]) -> list[Block]:
    """Return the processes of all devices in one table, and why those of some are not available."""
    listed: list[_Listed] = []
    for row in rows:
        listed += [_Listed(row, process) for process in row.processes or ()]
    blocks: list[Block] = []
    if listed:
        blocks.append(Heading("Processes"))
        blocks.append(Table.of(listed, PROCESS_COLUMNS, "Processes on the GPUs"))
    elif any(row.processes is not None for row in rows):
        blocks.append(Paragraph("No process uses a GPU."))
    for reason in _unsaid_reasons(listed):
        blocks.append(Paragraph(f"Memory: {not_available(reason)}.", muted=True))
    hidden = grouped(
        (row.reasons.get("processes"), row.label)
        for row in rows
        if row.processes is None
    )
    for why, names in hidden.items():
        sentence = f"Processes of {', '.join(names)}: {not_available(why)}."
        blocks.append(Paragraph(sentence, muted=True))
    return blocks


def _unsaid_reasons(listed: Iterable[_Listed]) -> list[str]:
    """Return why the memory of some processes is not known, where their cells in the table do not say it."""
    reasons = {process.reason for _, process in listed if process.memory is None}
    return sorted(
        reason for reason in reasons if reason and not reason.startswith(NOT_AVAILABLE)
    )


def details_blocks(row: GpuRow) -> list[Block]:
    """Return all figures that a device has, and in a line what it lacks for each reason."""
    grid = []
    absent: dict[str | None, list[str]] = {}
    for name, figure in FIGURES.items():
        if not figure.label:
            continue
        if getattr(row, name) is not None:
            grid.append((figure.label, shown(row, name)))
        else:
            absent.setdefault(row.reasons.get(name), []).append(figure.label)
    columns = [Column[Any](row.label), Column[Any](row.name or "unknown", shrinks=True)]
    blocks: list[Block] = [Table(columns, grid, f"All of {row.label}")]
    for reason, labels in absent.items():
        if reason != SIMULATED:
            sentence = f"{'; '.join(labels)}: {not_available(reason)}."
            blocks.append(Paragraph(sentence, muted=True))
    return blocks


def cell_line(seconds: float, changes: Sequence[CellChange]) -> str:
    """Return ``"1.24 s · cuda:0 +1.2 GiB to 3.4 GiB, peak 5.0 GiB"``."""
    parts = [duration(seconds)]
    for change in changes:
        part = f"{change.device} {_signed(change.growth)} to {size(change.allocated)}"
        if change.peak is not None:
            part += f", peak {size(change.peak)}"
        parts.append(part)
    if not changes:
        parts.append("no device memory used")
    text = truncate_words(printable(" · ".join(parts)))
    return text if terminal_has_unicode() else to_ascii(text)


def _signed(growth: int) -> str:
    if growth == 0:
        return f"±{size(growth)}"
    return f"+{size(growth)}" if growth > 0 else size(growth)

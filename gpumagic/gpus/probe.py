"""The GPUs of this machine as one report: NVML's cards joined with torch's names and this kernel's memory.

Nothing here initialises CUDA, imports torch or starts a process. While CUDA is not in use, torch's names are predicted
from the environment; once it is, cards and names are matched by UUID, the only certain key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from gpumagic.backends import backend_named
from gpumagic.errors import DeviceNotFound
from gpumagic.gpus import cards, torch_devices, visibility
from gpumagic.gpus.cards import ESTIMATED, NvmlSnapshot, attribute_processes
from gpumagic.gpus.nvml import NvmlFailure
from gpumagic.gpus.report import NOT_KNOWN, NULLABLE, GPUReport, GpuRow
from gpumagic.gpus.torch_devices import TorchBuild, torch_build
from gpumagic.gpus.visibility import Visibility
from gpumagic.memory.devices import Device, DriverFigures
from gpumagic.report import base

DEVICE_PATTERN = r"auto|\d+|(gpu|cuda|mps|xpu|simgpu)(:\d+)?|(GPU|MIG)-.+"
"""Valid names where there is no GPU: the answer is why there is none, not that the name is wrong."""


def best_device(rows: Sequence[GpuRow]) -> str | None:
    """Return the torch device with most memory that is free, or cached by this kernel and so reusable.

    Any real GPU comes before a simulated one; of equal ones the first is returned.
    """
    usable = [
        row for row in rows if row.device is not None and row.memory_free is not None
    ]
    if not usable:
        return None
    return max(usable, key=_room).device


def _room(row: GpuRow) -> tuple[bool, int]:
    cached = (row.kernel_reserved or 0) - (row.kernel_allocated or 0)
    return not row.simulated, (row.memory_free or 0) + cached


def selected_rows(rows: Sequence[GpuRow], wanted: Sequence[str]) -> tuple[GpuRow, ...]:
    """Return the wanted rows, each once and in that order; all if none is given.

    Raises:
        DeviceNotFound: one of them is not here, or names no GPU; where there is no GPU, a valid name is no error.
    """
    if not wanted:
        return tuple(rows)
    chosen: dict[int, GpuRow] = {}
    for name in map(str.strip, wanted):
        named = {id(row): row for row in rows if _matches(name, row, rows)}
        readable = re.fullmatch(DEVICE_PATTERN, name, re.IGNORECASE)
        if not named and (rows or not readable):
            here = ", ".join(row.device for row in rows if row.device)
            here = here or "none that torch can use (%gpuinfo says why)"
            wrong = "a GPU here" if readable or name in ("cpu", "meta") else "a device"
            raise DeviceNotFound(f"{name!r} is not {wrong}; there are {here}")
        chosen.update(named)
    return tuple(chosen.values())


def _matches(name: str, row: GpuRow, rows: Sequence[GpuRow]) -> bool:
    if name.startswith(("GPU-", "MIG-")):
        return row.uuid is not None and row.uuid.startswith(name)
    if row.device is None:
        return False
    lowered = name.lower()
    if lowered == "auto":
        return row.device == best_device(rows)
    if re.fullmatch(r"(gpu:)?\d+", lowered):
        return Device.parse(row.device).index == int(lowered.rpartition(":")[2])
    return lowered in (row.device, Device.parse(row.device).backend, "gpu")


def read_gpus(
    devices: Sequence[str] = (), *, processes: bool = False, everything: bool = False
) -> GPUReport:
    """Return the state of every GPU, or why there is none.

    Args:
        devices: only these, written as anywhere else (``"cuda:1"``, ``"1"``, ``"cuda"``, ``"auto"``) or as the
            beginning of a UUID; by default all.
        processes: whether the report shows the processes.
        everything: whether it shows every field.

    Raises:
        DeviceNotFound: one of ``devices`` is not here, or names no GPU; where there is no GPU, the report says why.
    """
    build = torch_build()
    answer = cards.read_cards()
    rows, notes, view = _nvidia_rows(answer, build)
    rows += torch_devices.torch_rows(build, known=rows, reason=_why_not_listed(answer))
    cause = None
    if all(row.device is None for row in rows):
        cause = visibility.explain(answer, build, view)
    simulated = torch_devices.simulated_rows()
    if simulated:
        why = f" {cause}" if cause else ""
        notes.append(f"simgpu devices are simulated.{why}")
        cause = None
    rows = [_with_all_reasons(row) for row in (*rows, *simulated)]
    chosen = selected_rows(rows, devices)
    return GPUReport(
        devices=chosen,
        torch_version=build.version,
        cuda_build=build.label,
        driver_version=answer.driver_version
        if isinstance(answer, NvmlSnapshot)
        else None,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        best=best_device(chosen),
        cause=cause,
        show_processes=processes,
        show_all=everything,
        notes=tuple(notes),
        origin=base.current_origin(),
    )


def _with_all_reasons(row: GpuRow) -> GpuRow:
    """Return the row with reasons for exactly those of its fields that are None."""
    every = row.reasons.get("all") or NOT_KNOWN
    absent = [name for name in NULLABLE if getattr(row, name) is None]
    return replace(
        row, reasons={name: row.reasons.get(name) or every for name in absent}
    )


def driver_figures(backends: Collection[str]) -> dict[str, DriverFigures]:
    """Return what drivers say of the devices of some backends, such as ``{"cuda"}``, for `memory.devices`."""
    simulated = {backend for backend in backends if backend_named(backend).is_simulated}
    rows = torch_devices.simulated_rows() if simulated else []
    if set(backends) != simulated:
        build = torch_build()
        answer = cards.read_cards()
        nvidia_rows, _, _ = _nvidia_rows(answer, build)
        rows += nvidia_rows
        rows += torch_devices.torch_rows(
            build, known=rows, reason=_why_not_listed(answer)
        )
    figures = {}
    for row in rows:
        if row.device is not None:
            figures[row.device] = DriverFigures(row.memory_free, row.other_processes)
    return figures


def _why_not_listed(answer: NvmlSnapshot | NvmlFailure) -> str:
    if isinstance(answer, NvmlFailure):
        return f"NVML: {answer.problem}"
    return "NVML does not list it"


def _nvidia_rows(
    answer: NvmlSnapshot | NvmlFailure, build: TorchBuild
) -> tuple[list[GpuRow], list[str], Visibility | None]:
    """Return NVML's cards and instances by torch's index, notes on them, and what of them CUDA sees."""
    if isinstance(answer, NvmlFailure):
        return [], [], None
    uuids: list[str | None] = []
    instance_uuids: list[str | None] = []
    for card, *instances in answer.cards:
        uuids.append(card.uuid)
        instance_uuids += [instance.uuid for instance in instances]
    view = visibility.visible_cards(
        os.environ.get("CUDA_VISIBLE_DEVICES"), uuids, instance_uuids
    )
    rows = [
        _gpu_row(row, build) for row in visibility.with_torch_names(answer, build, view)
    ]
    # Instances follow their card, where the first of them stands that torch can use.
    place: dict[int | None, tuple[bool, int, int]] = {}
    for row in sorted(rows, key=_sort_key):
        place.setdefault(row.nvml_index, _sort_key(row))
    rows.sort(key=lambda row: place[row.nvml_index])
    return rows, _notes(rows, view), view


def _sort_key(row: GpuRow) -> tuple[bool, int, int]:
    return row.device is None, Device.parse(row.device or "").index, row.nvml_index or 0


def _gpu_row(row: GpuRow, build: TorchBuild) -> GpuRow:
    """Return a card or an instance with its processes by name, this kernel's memory, and why torch cannot use it."""
    reasons = dict(row.reasons)
    if row.device is None:
        if row.reasons.keys() == {"all"}:  # nothing of the card could be read
            reasons["device"] = row.reasons["all"]
        elif "device" not in reasons:
            hidden = "not visible to CUDA in this process"
            reasons["device"] = (
                hidden if build.cuda else "no torch here is built for it"
            )
    processes = None
    others = None
    if row.processes is None:
        why_no_others = reasons.get("processes") or reasons.get("all")
    else:
        used = None if row.memory_reserved is None else row.memory_used
        processes, others, why_no_others = attribute_processes(row.processes, used)
    if why_no_others:
        reasons["other_processes"] = why_no_others
    row = replace(row, reasons=reasons, processes=processes, other_processes=others)
    return torch_devices.with_kernel_memory(row)


_PREDICTED = (
    "Names marked ? are predicted: until CUDA is in use in this process only it knows how it numbers these "
    "GPUs. CUDA_DEVICE_ORDER=PCI_BUS_ID numbers them as nvidia-smi does."
)
_UNIFIED = (
    "Unified memory is the host's: total is all of it, free is what the host can still give, used is what the "
    "driver charges to processes on the GPU. Until CUDA, which knows, is in use here, a GPU's name tells whether "
    "it has unified memory."
)
_ESTIMATED_IN_CONTAINER = (
    "In this container the driver may hide others' processes: what they use is estimated, as memory used "
    "less this kernel's."
)


def _notes(rows: Sequence[GpuRow], view: Visibility) -> list[str]:
    notes = []
    if any(row.predicted for row in rows):
        notes.append(_PREDICTED)
    if view.problem and any(row.device for row in rows):
        notes.append(f"CUDA_VISIBLE_DEVICES {view.problem}.")
    if any(row.unified for row in rows):
        notes.append(_UNIFIED)
    if any(row.reasons.get("other_processes") == ESTIMATED for row in rows):
        notes.append(_ESTIMATED_IN_CONTAINER)
    return notes

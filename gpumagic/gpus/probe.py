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
    usable = [row for row in rows if row.device is not None and row.memory_free is not None]

    def room(row: GpuRow) -> tuple[bool, int]:
        return not row.simulated, (row.memory_free or 0) + (row.kernel_reserved or 0) - (
            row.kernel_allocated or 0
        )

    return max(usable, key=room).device if usable else None


def selected_rows(rows: Sequence[GpuRow], wanted: Sequence[str]) -> tuple[GpuRow, ...]:
    """Return the wanted rows, each once and in that order; all if none is given.

    Raises:
        DeviceNotFound: one of them is not here, or names no GPU; where there is no GPU, a valid name is no error.
    """
    chosen: list[GpuRow] = [] if wanted else list(rows)
    for name in (each.strip() for each in wanted):
        found = [row for row in rows if _matches(name, row, rows)]
        readable = re.fullmatch(DEVICE_PATTERN, name, re.IGNORECASE)
        if not found and (rows or not readable):
            here = (
                ", ".join(row.device for row in rows if row.device)
                or "none that torch can use (%gpuinfo says why)"
            )
            wrong = "a GPU here" if readable or name in ("cpu", "meta") else "a device"
            raise DeviceNotFound(f"{name!r} is not {wrong}; there are {here}")
        chosen += [row for row in found if not any(row is each for each in chosen)]
    return tuple(chosen)


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
    cause = (
        visibility.explain(answer, build, view)
        if not any(row.device is not None for row in rows)
        else None
    )
    rows += torch_devices.simulated_rows()
    for place, row in enumerate(rows):  # each has reasons for exactly those fields that are None
        every, absent = (
            row.reasons.get("all") or NOT_KNOWN,
            [name for name in NULLABLE if getattr(row, name) is None],
        )
        rows[place] = replace(
            row, reasons={name: row.reasons.get(name) or every for name in absent}
        )
    if any(row.simulated for row in rows):
        notes.append(
            f"simgpu devices are simulated. {cause}" if cause else "simgpu devices are simulated."
        )
        cause = None
    chosen = selected_rows(rows, devices)
    return GPUReport(
        devices=chosen,
        torch_version=build.version,
        cuda_build=build.label,
        driver_version=answer.driver_version if isinstance(answer, NvmlSnapshot) else None,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        best=best_device(chosen),
        cause=cause,
        show_processes=processes,
        show_all=everything,
        notes=tuple(notes),
        origin=base.current_origin(),
    )


def driver_figures(backends: Collection[str]) -> dict[str, DriverFigures]:
    """Return what drivers say of the devices of some backends, such as ``{"cuda"}``, for `memory.devices`."""
    simulated = {backend for backend in backends if backend_named(backend).is_simulated}
    rows = torch_devices.simulated_rows() if simulated else []
    if set(backends) != simulated:
        build, answer = torch_build(), cards.read_cards()
        rows += _nvidia_rows(answer, build)[0]
        rows += torch_devices.torch_rows(build, known=rows, reason=_why_not_listed(answer))
    return {
        row.device: DriverFigures(row.memory_free, row.other_processes)
        for row in rows
        if row.device is not None
    }


def _why_not_listed(answer: NvmlSnapshot | NvmlFailure) -> str:
    return f"NVML: {answer.problem}" if isinstance(answer, NvmlFailure) else "NVML does not list it"


def _nvidia_rows(
    answer: NvmlSnapshot | NvmlFailure, build: TorchBuild
) -> tuple[list[GpuRow], list[str], Visibility | None]:
    if isinstance(answer, NvmlFailure):
        return [], [], None
    view = visibility.visible_cards(
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        [card.uuid for card, *_ in answer.cards],
        [instance.uuid for _, *instances in answer.cards for instance in instances],
    )
    rows = [_gpu_row(row, build) for row in visibility.with_torch_names(answer, build, view)]
    # By torch's index; instances follow their card.
    first = {row.nvml_index: _sort_key(row) for row in sorted(rows, key=_sort_key, reverse=True)}
    rows.sort(key=lambda row: first[row.nvml_index])
    return rows, _notes(rows, view), view


def _sort_key(row: GpuRow) -> tuple[bool, int, int]:
    return row.device is None, Device.parse(row.device or "").index, row.nvml_index or 0


def _gpu_row(row: GpuRow, build: TorchBuild) -> GpuRow:
    reasons = dict(row.reasons)
    if row.device is None:
        failed = row.reasons.get("all") if row.reasons.keys() == {"all"} else None
        hidden = (
            "not visible to CUDA in this process" if build.cuda else "no torch here is built for it"
        )
        reasons["device"] = failed or row.reasons.get("device") or hidden
    if row.processes is None:
        processes, others, reason = None, None, reasons.get("processes") or reasons.get("all")
    else:
        used = None if row.memory_reserved is None else row.memory_used
        processes, others, reason = attribute_processes(row.processes, used)
    if reason:
        reasons["other_processes"] = reason
    row = replace(row, reasons=reasons, processes=processes, other_processes=others)
    return torch_devices.with_kernel_memory(row)


def _notes(rows: Sequence[GpuRow], view: Visibility) -> list[str]:
    candidates = {
        "Names marked ? are predicted: until CUDA is in use in this process only it knows how it numbers these "
        "GPUs. CUDA_DEVICE_ORDER=PCI_BUS_ID numbers them as nvidia-smi does.": any(
            row.predicted for row in rows
        ),
        f"CUDA_VISIBLE_DEVICES {view.problem}.": view.problem and any(row.device for row in rows),
        "Unified memory is the host's: total is all of it, free is what the host can still give, used is what the "
        "driver charges to processes on the GPU. Until CUDA, which knows, is in use here, a GPU's name tells whether "
        "it has unified memory.": any(row.unified for row in rows),
        "In this container the driver may hide others' processes: what they use is estimated, as memory used "
        "less this kernel's.": any(row.reasons.get("other_processes") == ESTIMATED for row in rows),
    }
    return [note for note, applies in candidates.items() if applies]

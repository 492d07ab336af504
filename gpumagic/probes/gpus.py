"""The GPUs of this machine as one report: NVML's cards joined with what torch calls them and holds on them.

Nothing here initialises CUDA, imports torch or starts a process. While CUDA is not in use the torch names are
predicted from the environment; once it is, card and name are matched by UUID, the only certain key.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType

from gpumagic.errors import DeviceNotFound
from gpumagic.probes import absence, cards, other_devices
from gpumagic.probes.cards import Card, Snapshot
from gpumagic.probes.nvml import Failure
from gpumagic.probes.processes import attribute
from gpumagic.probes.torch_build import TorchBuild, torch_build
from gpumagic.probes.visibility import Visibility, visible
from gpumagic.reports import GPUReport, GpuRow

ONLY_WITH_ALL = ("bus_id", "performance_state", "fan", "clock_sm", "clock_sm_max", "clock_memory",
                 "clock_memory_max", "compute_capability")  # fmt: skip
ESTIMATED = "estimated"
READABLE = r"auto|\d+|(gpu|cuda|mps|xpu|simgpu)(:\d+)?|(GPU|MIG)-.+"
"""What can be asked for where there is no GPU: the answer is why, not that the name is wrong."""
FIGURES = tuple(field.name for field in fields(GpuRow) if field.name not in ("predicted", "simulated", "reasons"))


@dataclass(frozen=True, slots=True)
class Naming:
    """What torch calls a card or instance, and whether that is only predicted."""

    ordinal: int
    predicted: bool


def probe(devices: Sequence[str] = (), *, processes: bool = False, everything: bool = False) -> GPUReport:
    """Return the state of every GPU, or why there is none.

    Args:
        devices: show only these, written as anywhere else (``"cuda:1"``, ``"1"``, ``"cuda"``, ``"auto"``) or
            as the beginning of a UUID; all if empty.
        processes: whether the report shows the processes; they are read in any case.
        everything: whether to read and show every field: clocks, fan, bus...

    Raises:
        DeviceNotFound: one of ``devices`` is not here, or names no GPU at all. Where there is no GPU the report
            says why instead.
    """
    build = torch_build()
    answer = cards.snapshot(everything=everything)
    rows, notes, view = _nvidia_rows(answer, build)
    rows += other_devices.rows(build, known=rows, refusal=_refusal(answer))
    cause = absence.cause(answer, build, view) if not any(_is_real(row) for row in rows) else None
    rows = [explained(row) for row in (*rows, *other_devices.simulated_rows())]
    if any(row.simulated for row in rows):
        notes.append("simgpu devices are simulated: host memory with a set capacity, and no GPU behind it.")
        notes += [f"No real GPU: {cause}"] if cause else []
        cause = None
    return GPUReport(
        devices=_selected(rows, devices), torch_version=build.version, cuda_build=build.label,
        driver_version=answer.driver_version if isinstance(answer, Snapshot) else None,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"), best=best(rows), cause=cause,
        show_processes=processes, show_all=everything, notes=tuple(notes),
    )  # fmt: skip


def _refusal(answer: Snapshot | Failure) -> str:
    return f"NVML: {answer.problem}" if isinstance(answer, Failure) else "NVML does not list it"


def best(rows: Sequence[GpuRow]) -> str | None:
    """Return the torch device with most room: free by its driver, or cached by this kernel and so reusable.

    A real GPU is always before a simulated one; of equals the first is taken.
    """
    usable = [row for row in rows if row.device is not None and row.memory_free is not None]
    return max(usable, key=lambda row: (not row.simulated, _room(row)), default=_NOTHING).device


_NOTHING = GpuRow(device=None)


def _room(row: GpuRow) -> int:
    return (row.memory_free or 0) + (row.kernel_reserved or 0) - (row.kernel_allocated or 0)


def _is_real(row: GpuRow) -> bool:
    return row.device is not None and not row.simulated


def _nvidia_rows(answer: Snapshot | Failure, build: TorchBuild) -> tuple[list[GpuRow], list[str], Visibility | None]:
    if isinstance(answer, Failure):
        return [], [], None
    flat = [each for card in answer.cards for each in (card, *card.instances)]
    view = _visibility(answer)
    names = _names(answer, flat, build, view)
    rows = [_row(each, names.get(position), build) for position, each in enumerate(flat)]
    rows.sort(key=lambda row: (row.device is None, _ordinal(row.device)))
    return rows, _notes(answer, rows, view), view


def _visibility(answer: Snapshot) -> Visibility:
    instances = [instance.uuid for card in answer.cards for instance in card.instances]
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible(variable, [card.uuid for card in answer.cards], instances)


def _names(answer: Snapshot, flat: Sequence[Card], build: TorchBuild, view: Visibility) -> dict[int, Naming]:
    """Return the torch ordinal of each position in ``flat`` that torch can use."""
    if build.version is None or (build.known and build.cuda is None):
        return {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return _certain_names(torch, flat)
    return _predicted_names(answer, flat, view)


def _certain_names(torch: ModuleType, flat: Sequence[Card]) -> dict[int, Naming]:
    positions = {_bare(each.uuid): position for position, each in enumerate(flat) if each.uuid}
    names = {}
    for ordinal in range(torch.cuda.device_count()):
        uuid = _bare(str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", "")))
        if uuid in positions:
            names[positions[uuid]] = Naming(ordinal, predicted=False)
    return names


def _predicted_names(answer: Snapshot, flat: Sequence[Card], view: Visibility) -> dict[int, Naming]:
    if view.instance is not None:
        instances = [position for position, each in enumerate(flat) if each.is_instance]
        return {instances[view.instance]: Naming(0, predicted=False)}
    unsure = _order_is_unsure(answer, view)
    names = {}
    for ordinal, index in enumerate(view.cards):
        card = answer.cards[index]
        # CUDA never uses a card in MIG mode itself, but its first instance.
        target = card.instances[0] if card.mig and card.instances else card
        if not (card.mig and not card.instances):
            position = next(i for i, each in enumerate(flat) if each is target)
            names[position] = Naming(ordinal, predicted=unsure)
    return names


def _order_is_unsure(answer: Snapshot, view: Visibility) -> bool:
    """Return whether CUDA may number differently: by default it puts the fastest card first, whatever its slot."""
    if any(card.mig for card in answer.cards):
        return True
    if view.by_uuid or len(answer.cards) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    names = [card.values.get("name") for card in answer.cards]
    return None in names or len(set(names)) > 1


def _row(card: Card, naming: Naming | None, build: TorchBuild) -> GpuRow:
    listed = None if card.processes is None else attribute(card.processes, _used_apart(card))
    reasons = dict(card.reasons)
    if naming is None:
        reasons["device"] = _unnamed(card, build)
    if listed is None:
        reasons["other_processes"] = reasons.get("processes") or reasons.get("all", "")
    elif listed.reason or listed.estimated:
        reasons["other_processes"] = listed.reason or ESTIMATED
    row = GpuRow(
        device=f"cuda:{naming.ordinal}" if naming else None, nvml_index=card.index,
        predicted=naming is not None and naming.predicted, **card.values, reasons=reasons,
        processes=None if listed is None else listed.rows,
        other_processes=None if listed is None else listed.others,
    )  # fmt: skip
    return other_devices.with_kernel_figures(row)


def _used_apart(card: Card) -> int | None:
    used: int | None = card.values.get("memory_used")
    return used if "memory_reserved" in card.values else None


def _unnamed(card: Card, build: TorchBuild) -> str:
    if not card.values:
        return card.reasons.get("all", "not known")
    if card.mig:
        return "split into MIG instances"
    if build.version is None:
        return "torch is not installed"
    if build.known and build.cuda is None:
        return "torch is not built for it"
    return "CUDA uses one MIG instance a process" if card.is_instance else "not visible to CUDA in this process"


def explained(row: GpuRow) -> GpuRow:
    """Return the row with a reason for every figure it lacks, and for no other."""
    missing = [name for name in FIGURES if getattr(row, name) is None]
    return replace(row, reasons={name: _reason(name, row.reasons) for name in missing})


def _reason(name: str, known: Mapping[str, str]) -> str:
    if known.get(name) or known.get("all"):
        return known.get(name) or known["all"]
    return "only read with -a" if name in ONLY_WITH_ALL else "not known"


def _notes(answer: Snapshot, rows: Sequence[GpuRow], view: Visibility) -> list[str]:
    estimated = any(row.reasons.get("other_processes") == ESTIMATED for row in rows)
    candidates = {
        "Names marked ? are predicted: until CUDA is in use in this process only it knows how it numbers these "
        "GPUs. CUDA_DEVICE_ORDER=PCI_BUS_ID makes it number them as nvidia-smi does.": any(
            row.predicted for row in rows
        ),
        f"CUDA_VISIBLE_DEVICES {view.problem}.": view.problem and any(row.device for row in rows),
        "The old package `pynvml` hides nvidia-ml-py; repair with: pip uninstall -y pynvml; pip install "
        "--force-reinstall nvidia-ml-py": answer.shadowed,
        "In this container the driver may hide others' processes: what they use is estimated, as memory used "
        "less this kernel's.": estimated,
    }
    return [note for note, applies in candidates.items() if applies]


def _selected(rows: Sequence[GpuRow], wanted: Sequence[str]) -> tuple[GpuRow, ...]:
    chosen: list[GpuRow] = [] if wanted else list(rows)
    for name in (each.strip() for each in wanted):
        found = [row for row in rows if _means(name, row, rows)]
        readable = re.fullmatch(READABLE, name, re.IGNORECASE)
        if not found and (rows or not readable):
            here = ", ".join(row.device for row in rows if row.device) or "none that torch can use"
            wrong = "a GPU here" if readable or name in ("cpu", "meta") else "a device"
            raise DeviceNotFound(f"{name!r} is not {wrong}; there are {here}")
        chosen += [row for row in found if not any(row is each for each in chosen)]
    return tuple(chosen)


def _means(name: str, row: GpuRow, rows: Sequence[GpuRow]) -> bool:
    if name.startswith(("GPU-", "MIG-")):
        return row.uuid is not None and row.uuid.startswith(name)
    if row.device is None:
        return False
    lowered = name.lower()
    if lowered == "auto":
        return row.device == best(rows)
    if re.fullmatch(r"(gpu:)?\d+", lowered):
        return _ordinal(row.device) == int(lowered.rpartition(":")[2])
    return lowered in (row.device, row.device.partition(":")[0], "gpu")


def _ordinal(device: str | None) -> int:
    return int((device or "").partition(":")[2] or 0)


def _bare(uuid: str | None) -> str:
    return re.sub(r"^(GPU-|MIG-)", "", uuid or "").lower()

"""What NVML knows of every card, MIG instance and process at one moment, with a reason for each figure that is absent.

With unified memory NVML reports none (GB10), or the host's figures, of which "used" counts every program of the
machine (nvitop#208, nvtop PR#511). A missing figure proves nothing: WSL and old drivers lack it too. CUDA knows once it
is in use; before that the card's name tells.

In a container the driver may list the host's pids (nvidia-docker#1483), its own view of this namespace's, or none,
depending on its version. A host pid can equal a pid in here by chance, so only a process that has CUDA's device file
open is taken for the one that the driver means.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from gpumagic.gpus import nvml
from gpumagic.gpus.nvml import NvmlFailure, Readings
from gpumagic.gpus.report import FIGURES, GpuRow, ProcessRow, call
from gpumagic.gpus.torch_devices import HOST_MEMORY, bare_uuid, cuda_devices
from gpumagic.memory import devices
from gpumagic.report.base import grouped
from gpumagic.report.units import count


@dataclass(frozen=True, slots=True)
class NvmlSnapshot:
    """All cards of the machine at one moment."""

    rows: tuple[GpuRow, ...]
    """Each card, with its MIG instances behind it, without what torch knows."""
    driver_version: str | None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""

    @property
    def cards(self) -> list[list[GpuRow]]:
        """The cards in NVML's order, each with its instances behind it."""
        by_index = grouped((row.nvml_index, row) for row in self.rows)
        return list(by_index.values())


SPLIT = "split into MIG instances"
"""Why torch has no name for a card in MIG mode, whose instances CUDA uses."""
ONE_INSTANCE = "CUDA uses one MIG instance a process"
"""Why torch has no name for an instance."""


def read_cards() -> NvmlSnapshot | NvmlFailure:
    """Read every card, even if some fail; or return why NVML does not answer."""
    return nvml.within_time(_read_cards)


def _read_cards() -> NvmlSnapshot | NvmlFailure:
    answer = nvml.connect()
    if isinstance(answer, NvmlFailure):
        return answer
    binding, number = answer
    driver, _ = nvml.query(binding.nvmlSystemGetDriverVersion)
    cuda, reason = nvml.query(binding.nvmlSystemGetCudaDriverVersion_v2)
    if reason is not None:
        cuda, _ = nvml.query(binding.nvmlSystemGetCudaDriverVersion)
    rows: list[GpuRow] = []
    for index in range(number):
        handle, reason = nvml.query(partial(binding.nvmlDeviceGetHandleByIndex, index))
        if reason is not None:
            rows.append(GpuRow(None, index, reasons={"all": reason}))
        else:
            rows += _read_card(Readings(binding, handle), index)
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return NvmlSnapshot(tuple(rows), driver, newest)


def _read_card(card: Readings, index: int) -> Iterator[GpuRow]:
    """Yield a card, and behind it its MIG instances."""
    mode, _ = card.ask(*call("MigMode"))
    is_split = bool(mode and mode[0])
    for name, figure in FIGURES.items():
        if figure.read:
            card.take(name, *figure.read, to=figure.to)
    processes = list_processes(card)
    if is_unified(card):
        _use_host_memory(card, processes)
    if is_split:
        for name, reason in card.reasons.items():
            if reason == "not supported":
                card.reasons[name] = "n/a (MIG)"
        card.reasons["device"] = SPLIT
    yield GpuRow(None, index, **card.values, reasons=card.reasons, processes=processes)
    if is_split:
        yield from _read_instances(card, index)


def _read_instances(card: Readings, index: int) -> Iterator[GpuRow]:
    most, _ = card.ask(*call("MaxMigDeviceCount"))
    for number in range(int(most or 0)):
        handle, is_empty = card.ask(*call("MigDeviceHandleByIndex", number))
        if is_empty is not None:
            continue
        instance = Readings(card.binding, handle)
        for name, figure in FIGURES.items():
            if figure.of_instance:
                instance.take(name, *figure.read, to=figure.to)
        processes = list_processes(instance)
        # The driver has all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be wrong.
        reasons = {"all": "n/a (MIG)", **instance.reasons, "device": ONE_INSTANCE}
        yield GpuRow(
            None, index, **instance.values, reasons=reasons, processes=processes
        )


UNIFIED_MEMORY_NAMES = re.compile(
    r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE
)


def is_unified(card: Readings) -> bool:
    """Return whether a card has no memory of its own; before CUDA, which knows, is in use, its name says so."""
    _, properties = cuda_devices().get(bare_uuid(card.values.get("uuid")), (None, None))
    integrated = getattr(properties, "is_integrated", None)
    if integrated is not None:
        return bool(integrated)
    return UNIFIED_MEMORY_NAMES.search(card.values.get("name") or "") is not None


def _use_host_memory(card: Readings, processes: Sequence[ProcessRow] | None) -> None:
    """Replace the figures by the host's total and free memory, and by the sum that is charged to GPU processes."""
    for name in ("memory_total", "memory_used", "memory_free", "memory_reserved"):
        card.values.pop(name, None)
        card.reasons[name] = HOST_MEMORY
    card.values["unified"] = True
    if host_memory := devices.available_memory():
        card.values.update(memory_free=host_memory[0], memory_total=host_memory[1])
    used = None
    if processes is not None:
        used = total_memory([process.memory for process in processes])
    if used is None:
        card.reasons["memory_used"] = (
            "the driver does not say what the GPU's processes use"
        )
    else:
        card.values["memory_used"] = used


MAX_PID = 2**22 if sys.platform != "win32" else 2**32


def list_processes(card: Readings) -> tuple[ProcessRow, ...] | None:
    """Return the processes on a card as the driver lists them, or None and add the reason to the readings.

    Their pids may belong to another pid namespace.
    """
    total = card.values.get("memory_total")
    listed: dict[int, ProcessRow] = {}
    kinds = ["Graphics", "Compute"]
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")  # noqa: S108  # NVIDIA's choice
    if mps.exists():  # clients of the Multi-Process Service (MPS) are listed separately
        kinds.insert(1, "MPSCompute")
    for kind in kinds:
        calls = (
            *call(f"{kind}RunningProcesses_v3"),
            *call(f"{kind}RunningProcesses_v2"),
        )
        processes, reason = card.ask(*calls, to=partial(_sane_list, total))
        if reason is not None and kind == "Compute":
            card.reasons["processes"] = reason
            return None
        # One that is in several lists is charged the same memory in each.
        for pid, memory in processes or ():
            if memory is None and pid in listed:
                memory = listed[pid].memory  # noqa: PLW2901
            shown_kind = "graphics" if kind == "Graphics" else "compute"
            listed[pid] = ProcessRow(pid, None, None, memory, kind=shown_kind)
    return tuple(listed.values())


def _sane_list(
    total: int | None, listed: Sequence[Any]
) -> list[tuple[int, int | None]]:
    """Return (pid, bytes) pairs, or raise where the list was read with the wrong layout (nvitop#75, #88)."""
    pairs = []
    for process in listed:
        pid = int(process.pid)
        memory = process.usedGpuMemory
        is_too_much = total and memory is not None and memory > total
        if is_too_much or not 0 < pid < MAX_PID:
            raise ValueError("a process list of another layout")
        pairs.append((pid, memory))
    return pairs


PROC = Path("/proc")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's fixed number of the host's own pid namespace (PROC_PID_INIT_INO)."""
CUDA_FILES = ("/dev/nvidia-uvm", "/dev/dxg")
"""Opened by CUDA and not by NVML; the second is WSL's."""
HIDDEN_BY_CONTAINER = "this container hides whose they are"
ESTIMATED = "estimated"
WSL = Path("/dev/dxg")


def attribute_processes(
    listed: Sequence[ProcessRow], used: int | None
) -> tuple[tuple[ProcessRow, ...], int | None, str | None]:
    """Return the driver's list for one card with names and users, as far as they are processes of this namespace.

    With it the memory of those other than this kernel, and why that is None or an estimate, if it is: the used memory
    less this kernel's, where the list may be incomplete. ``used`` are the bytes in use on the card without those that
    the driver reserves, None if not known.
    """
    contained = in_container()
    rows = []
    outside = []
    for process in listed:
        if contained and not uses_cuda(process.pid or 0):
            outside.append(process)
        else:
            rows.append(_with_name(process))
    if outside:
        rows.append(_outside_of_container(outside))
    rows.sort(
        key=lambda row: (not row.this_kernel, row.pid is None, -(row.memory or 0))
    )
    # A list with pids from outside is the host's, and complete; any other may be limited to this container.
    is_complete = bool(outside) and not uses_cuda(os.getpid())
    if not contained or is_complete:
        others = total_memory([row.memory for row in rows if not row.this_kernel])
        return tuple(rows), others, why_memory_unknown() if others is None else None
    own = [row.memory for row in rows if row.this_kernel]
    is_missing = not own and uses_cuda(os.getpid())  # outside, or left out of the list
    if used is None or is_missing:
        return tuple(rows), None, HIDDEN_BY_CONTAINER
    held = total_memory(own)
    if held is None:
        return tuple(rows), None, why_memory_unknown()
    return tuple(rows), max(0, used - held), ESTIMATED


def _with_name(process: ProcessRow) -> ProcessRow:
    pid = process.pid or 0
    return replace(
        process,
        name=program_name(pid),
        user=_user(pid),
        this_kernel=pid == os.getpid(),
        reason=None if process.memory is not None else why_memory_unknown(),
    )


def _outside_of_container(processes: Sequence[ProcessRow]) -> ProcessRow:
    """Return the processes that are outside of this container as one."""
    memory = total_memory([process.memory for process in processes])
    return replace(
        processes[0],
        pid=None,
        name=f"{count(len(processes), 'process', 'processes')} outside this container",
        memory=memory,
        reason=None if memory is not None else why_memory_unknown(),
    )


def total_memory(figures: Sequence[int | None]) -> int | None:
    """Return the sum, None if any figure is unknown."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


def why_memory_unknown() -> str:
    """Return why the driver does not say what a process uses: Windows' driver model hides it."""
    return (
        "n/a (WDDM)"
        if sys.platform == "win32" or WSL.exists()
        else "not said by the driver"
    )


def in_container() -> bool:
    """Return whether this process is in its own pid namespace, where the driver's pids may be others."""
    try:
        return str((PROC / "self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE
    except OSError:
        return (
            sys.platform == "linux"
        )  # a sandbox that hides it is one; Windows has no namespaces


def uses_cuda(pid: int) -> bool:
    """Return whether a process in here has CUDA's device file open; False without the permission to see it."""
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(link.readlink()).startswith(CUDA_FILES):
                    return True
    return False


def program_name(pid: int) -> str | None:
    """Return a process's program and, of an interpreter, its script or module; never arguments."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes()
        if not command:
            command = (PROC / str(pid) / "comm").read_bytes().strip()
    except OSError:
        return None
    program, *words = [os.fsdecode(word) for word in command.split(b"\0") if word] or [
        ""
    ]
    name = PurePath(program).name
    if not name.startswith("python"):
        return name or None
    for place, word in enumerate(words):
        if word == "-m":
            return " ".join([name, *words[place : place + 2]])
        if word == "-c" or not word.startswith("-"):
            return f"{name} {PurePath(word).name}"
    return name


def _user(pid: int) -> str | None:
    try:
        uid = (PROC / str(pid)).stat().st_uid
    except OSError:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)

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
        return list(grouped((row.nvml_index, row) for row in self.rows).values())


SPLIT, ONE_INSTANCE = "split into MIG instances", "CUDA uses one MIG instance a process"
"""Why torch has no name for a card in MIG mode, whose instances CUDA uses, and for an instance."""


def read_cards() -> NvmlSnapshot | NvmlFailure:
    """Read every card, even if some fail; or return why NVML does not answer."""
    return nvml.within_time(_read_cards)


def _read_cards() -> NvmlSnapshot | NvmlFailure:
    answer = nvml.connect()
    if isinstance(answer, NvmlFailure):
        return answer
    binding, count = answer
    driver, _ = nvml.query(binding.nvmlSystemGetDriverVersion)
    cuda, reason = nvml.query(binding.nvmlSystemGetCudaDriverVersion_v2)
    if reason is not None:
        cuda, _ = nvml.query(binding.nvmlSystemGetCudaDriverVersion)
    handles = [
        nvml.query(partial(binding.nvmlDeviceGetHandleByIndex, index)) for index in range(count)
    ]
    rows: list[GpuRow] = []
    for index, (handle, reason) in enumerate(handles):
        if reason is not None:
            rows.append(GpuRow(None, index, reasons={"all": reason}))
        else:
            rows += _read_card(Readings(binding, handle), index)
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return NvmlSnapshot(tuple(rows), driver, newest)


def _read_card(card: Readings, index: int) -> Iterator[GpuRow]:
    mode, _ = card.ask(*call("MigMode"))
    mig = bool(mode and mode[0])
    for name, figure in FIGURES.items():
        if figure.read:
            card.take(name, *figure.read, to=figure.to)
    processes = list_processes(card)
    if is_unified(card):
        _use_host_memory(card, processes)
    if mig:
        not_of_the_card = [
            name for name, reason in card.reasons.items() if reason == "not supported"
        ]
        card.reasons.update({**dict.fromkeys(not_of_the_card, "n/a (MIG)"), "device": SPLIT})
    yield GpuRow(None, index, **card.values, reasons=card.reasons, processes=processes)
    limit = card.ask(*call("MaxMigDeviceCount"))[0] if mig else 0
    for number in range(int(limit or 0)):
        handle, empty = card.ask(*call("MigDeviceHandleByIndex", number))
        if empty is None:
            instance = Readings(card.binding, handle)
            for name, figure in FIGURES.items():
                if figure.of_instance:
                    instance.take(name, *figure.read, to=figure.to)
            processes = list_processes(instance)
            # The driver has all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be wrong.
            reasons = {"all": "n/a (MIG)", **instance.reasons, "device": ONE_INSTANCE}
            yield GpuRow(None, index, **instance.values, reasons=reasons, processes=processes)


UNIFIED_MEMORY_NAMES = re.compile(r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE)


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
    used = None if processes is None else total_memory([each.memory for each in processes])
    if used is None:
        card.reasons["memory_used"] = "the driver does not say what the GPU's processes use"
    else:
        card.values["memory_used"] = used


MAX_PID = 2**22 if sys.platform != "win32" else 2**32


def list_processes(card: Readings) -> tuple[ProcessRow, ...] | None:
    """Return the processes on a card as the driver lists them, or None and add the reason to the readings.

    Their pids may belong to another pid namespace.
    """
    total = card.values.get("memory_total")
    found: dict[int, ProcessRow] = {}
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").exists()  # noqa: S108  # NVIDIA's choice
    # Clients of the Multi-Process Service (MPS) are listed separately.
    for name in ("Graphics", *["MPSCompute"] * mps, "Compute"):
        calls = (*call(f"{name}RunningProcesses_v3"), *call(f"{name}RunningProcesses_v2"))
        processes, reason = card.ask(*calls, to=partial(_sane_list, total))
        if reason is not None and name == "Compute":
            card.reasons["processes"] = reason
            return None
        for pid, memory in (
            processes or ()
        ):  # one that is in several lists is charged the same memory in each
            known = found[pid].memory if memory is None and pid in found else memory
            found[pid] = ProcessRow(
                pid, None, None, known, kind="graphics" if name == "Graphics" else "compute"
            )
    return tuple(found.values())


def _sane_list(total: int | None, listed: Sequence[Any]) -> list[tuple[int, int | None]]:
    """Return (pid, bytes) pairs, or raise where the list was read with the wrong layout (nvitop#75, #88)."""
    pairs = [(int(each.pid), each.usedGpuMemory) for each in listed]
    for pid, memory in pairs:
        if not 0 < pid < MAX_PID or (total and memory is not None and memory > total):
            raise ValueError("a process list of another layout")
    return pairs


PROC = Path("/proc")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's fixed number of the host's own pid namespace (PROC_PID_INIT_INO)."""
CUDA_FILES = ("/dev/nvidia-uvm", "/dev/dxg")
"""Opened by CUDA and not by NVML; the second is WSL's."""
HIDDEN_BY_CONTAINER, ESTIMATED = "this container hides whose they are", "estimated"
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
    rows, outside = [], []
    for each in listed:
        pid, reason = each.pid or 0, None if each.memory is not None else why_memory_unknown()
        if contained and not uses_cuda(pid):
            outside.append(each)
            continue
        own = pid == os.getpid()
        rows.append(
            replace(each, name=program_name(pid), user=_user(pid), this_kernel=own, reason=reason)
        )
    if outside:
        memory, several = total_memory([each.memory for each in outside]), "es" * (len(outside) > 1)
        name, reason = (
            f"{len(outside)} process{several} outside this container",
            why_memory_unknown(),
        )
        rows.append(
            replace(
                outside[0],
                pid=None,
                name=name,
                memory=memory,
                reason=None if memory is not None else reason,
            )
        )
    rows.sort(key=lambda row: (not row.this_kernel, row.pid is None, -(row.memory or 0)))
    mine = [row.memory for row in rows if row.this_kernel]
    others = total_memory([row.memory for row in rows if not row.this_kernel])
    # A list with pids from outside is the host's, and complete; any other may be limited to this container.
    if contained and not (outside and not uses_cuda(os.getpid())):
        if used is None or (not mine and uses_cuda(os.getpid())):
            return (
                tuple(rows),
                None,
                HIDDEN_BY_CONTAINER,
            )  # this kernel is outside, or left out of the list
        if (held := total_memory(mine)) is not None:
            return tuple(rows), max(0, used - held), ESTIMATED
        others = None
    return tuple(rows), others, why_memory_unknown() if others is None else None


def total_memory(figures: Sequence[int | None]) -> int | None:
    """Return the sum, None if any figure is unknown."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


def why_memory_unknown() -> str:
    """Return why the driver does not say what a process uses: Windows' driver model hides it."""
    return "n/a (WDDM)" if sys.platform == "win32" or WSL.exists() else "not said by the driver"


def in_container() -> bool:
    """Return whether this process is in its own pid namespace, where the driver's pids may be others."""
    try:
        return str((PROC / "self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE
    except OSError:
        return sys.platform == "linux"  # a sandbox that hides it is one; Windows has no namespaces


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
        raw = (PROC / str(pid) / "cmdline").read_bytes() or (
            PROC / str(pid) / "comm"
        ).read_bytes().strip()
    except OSError:
        return None
    program, *words = [os.fsdecode(word) for word in raw.split(b"\0") if word] or [""]
    name = PurePath(program).name
    if not name.startswith("python"):
        return name or None
    script = next(
        (
            place
            for place, word in enumerate(words)
            if word in ("-m", "-c") or not word.startswith("-")
        ),
        None,
    )
    if script is None:
        return name
    return f"{name} {' '.join(words[script : script + 2]) if words[script] == '-m' else PurePath(words[script]).name}"


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

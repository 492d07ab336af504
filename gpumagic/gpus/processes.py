"""The processes on each card: those that the driver lists, matched with the processes of this pid namespace.

In a container the driver may list the host's pids (nvidia-docker#1483), its own view of this namespace's, or none,
depending on its version. A host pid can equal a pid in here by chance, so only a process that has CUDA's device file
open is taken for the one that the driver means.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

from gpumagic.gpus.nvml import Readings
from gpumagic.gpus.report import Call, ProcessRow, call

MAX_PID = 2**22 if sys.platform != "win32" else 2**32
MAX_SAMPLE_AGE = 1_000_000
"""Microseconds; without a limit the driver returns outdated samples (nvitop#91)."""


@dataclass(frozen=True, slots=True)
class DriverProcess:
    """A process as the driver lists it; its pid may belong to another pid namespace."""

    pid: int
    memory: int | None
    kind: str
    utilization: float | None = None
    """Percent of the last second in which its kernels ran; None without a sample."""


def list_processes(card: Readings) -> tuple[DriverProcess, ...] | None:
    """Return the processes on a card, or None and add the reason to the readings."""
    total = card.values.get("memory_total")
    found: dict[int, DriverProcess] = {}
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").exists()  # noqa: S108  # NVIDIA's choice
    # Clients of the Multi-Process Service (MPS) are listed separately.
    for name in ("Graphics", *["MPSCompute"] * mps, "Compute"):
        calls = (*call(f"{name}RunningProcesses_v3"), *call(f"{name}RunningProcesses_v2"))
        processes, reason = card.ask(*(partial(_sane_list, each, total) for each in calls))
        if reason is not None and name == "Compute":
            card.reasons["processes"] = reason
            return None
        for pid, memory in processes or ():  # one that is in several lists is charged the same memory in each
            known = found[pid].memory if memory is None and pid in found else memory
            found[pid] = DriverProcess(pid, known, "graphics" if name == "Graphics" else "compute")
    return tuple(found.values())


def _sane_list(listed: Call, total: int | None, card: Readings) -> list[tuple[int, int | None]]:
    """Return (pid, bytes) pairs, or raise where the list was read with the wrong layout (nvitop#75, #88)."""
    pairs = [(int(each.pid), each.usedGpuMemory) for each in listed(card)]
    for pid, memory in pairs:
        if not 0 < pid < MAX_PID or (total and memory is not None and memory > total):
            raise ValueError("a process list of another layout")
    return pairs


def with_utilization(processes: Iterable[DriverProcess], card: Readings) -> tuple[DriverProcess, ...]:
    """Return the processes with their share of the last second, where the driver has a sample."""
    samples, _ = card.ask(*call("ProcessUtilization", time.time_ns() // 1000 - MAX_SAMPLE_AGE))
    latest = {int(each.pid): each for each in sorted(samples or (), key=lambda each: int(each.timeStamp))}
    busy = {pid: float(each.smUtil) for pid, each in latest.items() if each.smUtil <= 100}
    return tuple(replace(each, utilization=busy.get(each.pid)) for each in processes)


PROC = Path("/proc")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's fixed number of the host's own pid namespace (PROC_PID_INIT_INO)."""
CUDA_FILES = ("/dev/nvidia-uvm", "/dev/dxg")
"""Opened by CUDA and not by NVML; the second is WSL's."""
HIDDEN_BY_CONTAINER = "this container hides whose they are"
WSL = Path("/dev/dxg")


@dataclass(frozen=True, slots=True)
class Attribution:
    """The processes on one card, and the memory of those other than this kernel."""

    rows: tuple[ProcessRow, ...]
    others: int | None
    reason: str | None = None
    """Why ``others`` is None."""
    estimated: bool = False
    """Whether ``others`` is the used memory less this kernel's, because the list may be incomplete."""


def attribute_processes(listed: Sequence[DriverProcess], used: int | None) -> Attribution:
    """Return the driver's list for one card with names and users, as far as they are processes of this namespace.

    ``used`` are the bytes in use on the card without those that the driver reserves, None if not known.
    """
    contained = in_container()
    local = {each.pid for each in listed if not contained or uses_cuda(each.pid)}
    rows = [_row(each) for each in listed if each.pid in local]
    outside = [each for each in listed if each.pid not in local]
    if outside:
        rows.append(_outside_row(outside))
    rows.sort(key=lambda row: (not row.this_kernel, row.pid is None, -(row.memory or 0)))
    # A list with pids from outside is the host's, and complete; any other may be limited to this container.
    incomplete = contained and not (outside and not uses_cuda(os.getpid()))
    own = [row.memory for row in rows if row.this_kernel]
    others, reason = total_memory([row.memory for row in rows if not row.this_kernel]), None
    if incomplete and (used is None or (not own and uses_cuda(os.getpid()))):
        others, reason = None, HIDDEN_BY_CONTAINER  # this kernel is among those outside, or left out of the list
    elif incomplete:
        mine = total_memory(own)
        others = None if mine is None or used is None else max(0, used - mine)
    if others is None and reason is None:
        reason = why_memory_unknown()
    return Attribution(tuple(rows), others, reason, estimated=incomplete and others is not None)


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
    try:
        return any(_link_target(link).startswith(CUDA_FILES) for link in (PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False


def _link_target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _row(process: DriverProcess) -> ProcessRow:
    return ProcessRow(
        pid=process.pid, name=program_name(process.pid), user=_user(process.pid), memory=process.memory,
        this_kernel=process.pid == os.getpid(), kind=process.kind,
        utilization=process.utilization, reason=why_memory_unknown() if process.memory is None else None,
    )  # fmt: skip


def _outside_row(processes: Sequence[DriverProcess]) -> ProcessRow:
    memory, several = total_memory([each.memory for each in processes]), "es" * (len(processes) > 1)
    return ProcessRow(
        pid=None, name=f"{len(processes)} process{several} outside this container", user=None, memory=memory,
        kind=processes[0].kind, reason=why_memory_unknown() if memory is None else None,
    )  # fmt: skip


def program_name(pid: int) -> str | None:
    """Return a process's program and, of an interpreter, its script or module; never arguments."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    words = [os.fsdecode(word) for word in raw.split(b"\0") if word]
    if not words:
        return _command_name(pid)
    name = PurePath(words[0]).name
    return f"{name} {script}" if name.startswith("python") and (script := _script(words[1:])) else name


def _script(words: Sequence[str]) -> str | None:
    for position, word in enumerate(words):
        if word == "-m":
            return f"-m {words[position + 1]}" if position + 1 < len(words) else None
        if word == "-c":
            return "-c"
        if not word.startswith("-"):
            return PurePath(word).name
    return None


def _command_name(pid: int) -> str | None:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None


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

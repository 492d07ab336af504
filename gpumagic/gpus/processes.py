"""The processes on each card: the driver's pids, told apart where they are another pid namespace's.

In a container the driver may list the host's pids (nvidia-docker#1483), its own view of this namespace's, or
none at all, depending on its version. A host pid can equal a pid in here by chance, so a number alone proves
nothing there: only a process that holds CUDA's device file open is taken for the one the driver means.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from gpumagic.gpus.nvml import Readings
from gpumagic.gpus.report import ProcessRow

MAX_PID = 2**22 if sys.platform != "win32" else 2**32
MAX_SAMPLE_AGE = 1_000_000
"""Microseconds: older samples say nothing of now, and without a limit the driver gives old ones (nvitop#91)."""


@dataclass(frozen=True, slots=True)
class DriverProcess:
    """A process as the driver lists it; its pid may be of another pid namespace."""

    pid: int
    memory: int | None
    kind: str
    utilization: float | None = None
    """Percent of the last second in which its kernels ran; None without a sample of it."""


def list_processes(readings: Readings, binding: ModuleType, handle: Any) -> tuple[DriverProcess, ...] | None:
    """Return the processes on a card, or None with the reason among the readings."""
    total = readings.values.get("memory_total")
    found: dict[int, DriverProcess] = {}
    kinds = [
        ("graphics", "Graphics"),
        *([("compute", "MPSCompute")] if _mps_is_running() else []),
        ("compute", "Compute"),
    ]
    for kind, name in kinds:
        ask = partial(_query_processes, binding, handle, f"nvmlDeviceGet{name}RunningProcesses", total)
        answers = Readings()
        processes = answers.take("processes", partial(ask, "_v3"), partial(ask, "_v2"))
        if processes is None and name == "Compute":
            readings.reasons["processes"] = answers.reasons["processes"]
            return None
        for process in processes or ():
            _add(found, DriverProcess(process[0], process[1], kind))
    return tuple(found.values())


def _mps_is_running() -> bool:
    """Return whether CUDA's Multi-Process Service runs here: the driver lists its clients apart."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").exists()  # noqa: S108  # NVIDIA's choice


def with_utilization(processes: Iterable[DriverProcess], binding: ModuleType, handle: Any) -> tuple[DriverProcess, ...]:
    """Return the processes with their share of the last second, where the driver has a sample."""
    since = time.time_ns() // 1000 - MAX_SAMPLE_AGE
    samples = Readings().take("samples", lambda: binding.nvmlDeviceGetProcessUtilization(handle, since))
    latest = {int(each.pid): each for each in sorted(samples or (), key=lambda each: int(each.timeStamp))}
    busy = {pid: float(each.smUtil) for pid, each in latest.items() if each.smUtil <= 100}
    return tuple(replace(each, utilization=busy.get(each.pid)) for each in processes)


def _add(found: dict[int, DriverProcess], process: DriverProcess) -> None:
    """Keep a process that is in both lists once: the driver charges it the same memory in each."""
    known = found.get(process.pid)
    if known is not None and process.memory is None:
        process = replace(process, memory=known.memory)
    found[process.pid] = process


def _query_processes(
    binding: ModuleType, handle: Any, getter: str, total: int | None, version: str
) -> list[tuple[int, int | None]]:
    """Return (pid, bytes) pairs, or raise where the list was read by the wrong layout (nvitop#75, #88)."""
    pairs = [(int(each.pid), each.usedGpuMemory) for each in getattr(binding, getter + version)(handle)]
    for pid, memory in pairs:
        if not 0 < pid < MAX_PID or (total and memory is not None and memory > total):
            raise ValueError("a process list of another layout")
    return pairs


PROC = Path("/proc")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's fixed number of the host's own pid namespace (PROC_PID_INIT_INO)."""
CUDA_FILES = ("/dev/nvidia-uvm", "/dev/dxg")
"""Opened by CUDA and not by NVML; the second is WSL's."""
HIDDEN_BY_CONTAINER = "this container hides whose they are"
WSL = Path("/dev/dxg")


@dataclass(frozen=True, slots=True)
class Attribution:
    """The processes on one card, and what those other than this kernel use."""

    rows: tuple[ProcessRow, ...]
    others: int | None
    reason: str | None = None
    """Why ``others`` is None."""
    estimated: bool = False
    """True where ``others`` is what is used less this kernel's part, because the list may be incomplete."""


def attribute_processes(listed: Sequence[DriverProcess], used: int | None) -> Attribution:
    """Return the driver's list with names and users, as far as it is about processes in here.

    Args:
        listed: the driver's list for one card.
        used: bytes in use on it, without what the driver reserves; None if that is not known apart.
    """
    contained = in_container()
    local = {each.pid for each in listed if not contained or uses_cuda(each.pid)}
    rows = [_row(each) for each in listed if each.pid in local]
    outside = [each for each in listed if each.pid not in local]
    if outside:
        rows.append(_outside_row(outside))
    rows.sort(key=lambda row: (not row.this_kernel, row.pid is None, -(row.memory or 0)))
    # A list that has pids from outside is the host's, and whole; another may be cut down to this container.
    incomplete = contained and not (outside and not uses_cuda(os.getpid()))
    others, reason = _estimate_others(rows, used) if incomplete else _sum_others(rows)
    return Attribution(tuple(rows), others, reason, estimated=incomplete and others is not None)


def _sum_others(rows: Sequence[ProcessRow]) -> tuple[int | None, str | None]:
    figures = [row.memory for row in rows if not row.this_kernel]
    total = _total(figures)
    return total, why_memory_unknown() if total is None else None


def _estimate_others(rows: Sequence[ProcessRow], used: int | None) -> tuple[int | None, str | None]:
    own = [row.memory for row in rows if row.this_kernel]
    if used is None or (not own and uses_cuda(os.getpid())):
        return None, HIDDEN_BY_CONTAINER  # this kernel is among those outside, or left out of the list
    mine = _total(own)
    return (None, why_memory_unknown()) if mine is None else (max(0, used - mine), None)


def _total(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


def why_memory_unknown() -> str:
    """Return why the driver does not say what a process uses: Windows' driver model keeps it to itself."""
    return "n/a (WDDM)" if sys.platform == "win32" or WSL.exists() else "not said by the driver"


def in_container() -> bool:
    """Return whether this process lives in a pid namespace of its own, where the driver's pids may not be ours."""
    try:
        return str((PROC / "self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE
    except OSError:
        return sys.platform == "linux"  # a sandbox that hides it is one; Windows has no namespaces


def uses_cuda(pid: int) -> bool:
    """Return whether a process in here has CUDA's device file open; False if that may not be looked at."""
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
        utilization=process.utilization, reason=_reason(process.memory),
    )  # fmt: skip


def _outside_row(processes: Sequence[DriverProcess]) -> ProcessRow:
    count, memory = len(processes), _total([each.memory for each in processes])
    name = f"{count} process{'es' if count > 1 else ''} outside this container"
    return ProcessRow(
        pid=None, name=name, user=None, memory=memory, kind=processes[0].kind, reason=_reason(memory)
    )  # fmt: skip


def _reason(memory: int | None) -> str | None:
    return why_memory_unknown() if memory is None else None


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

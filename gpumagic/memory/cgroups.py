"""The memory that control groups leave this process: those of a container, a batch job or a systemd service.

Each group from the process's own up to the root of the hierarchy may have a limit. Version 1 of the interface has a
hierarchy for memory alone, version 2 one for all; some machines have both. Where a hierarchy is mounted, and which
part of it, stands in `/proc/self/mountinfo`; which group the process is in, in `/proc/self/cgroup` (cgroups(7)).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class _Interface:
    """What one version of the interface calls its files, in the folder of a group."""

    filesystem: str
    controller: str
    """The controller of its hierarchy, as `/proc/self/cgroup` has it."""
    usual_mount: str
    """Where it is mounted if nothing tells."""
    limit: str
    used: str
    statistics: str
    reclaimable: str
    """The line of the statistics with the file cache that is given back at need."""


_INTERFACES = (
    _Interface(
        filesystem="cgroup2",
        controller="",
        usual_mount="/sys/fs/cgroup",
        limit="memory.max",
        used="memory.current",
        statistics="memory.stat",
        reclaimable="inactive_file",
    ),
    _Interface(
        filesystem="cgroup",
        controller="memory",
        usual_mount="/sys/fs/cgroup/memory",
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        statistics="memory.stat",
        reclaimable="total_inactive_file",
    ),
)


def limits(root: Path) -> list[tuple[int, int]]:
    """Return (available, limit) in bytes of each group with a limit that this process is in.

    Args:
        root: of the file system; another one in tests.
    """
    found: list[tuple[int, int]] = []
    for interface in _INTERFACES:
        for folder in _folders(root, interface):
            memory = _memory(folder, interface)
            if memory is not None:
                found.append(memory)
    return found


def _folders(root: Path, interface: _Interface) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, as far as they are mounted, the outermost first."""
    mounted, mount_point = _mount(root, interface)
    group = _own_group(root, interface)
    folder = root / mount_point.lstrip("/")
    yield folder
    # In a container the group's path may be the host's, and what is mounted the container's part of it alone.
    if group.is_relative_to(mounted):
        for name in group.relative_to(mounted).parts:
            folder /= name
            yield folder


def _mount(root: Path, interface: _Interface) -> tuple[PurePosixPath, str]:
    """Return which group is the root of the hierarchy's mount, and where that is mounted."""
    for line in read_file(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        mount_fields = mount.split()
        kind_fields = kind.split()
        if len(mount_fields) < 5 or len(kind_fields) < 3:
            continue
        filesystem, _, options = kind_fields[:3]
        is_memorys = not interface.controller or interface.controller in options.split(
            ","
        )
        if filesystem == interface.filesystem and is_memorys:
            return PurePosixPath(_unescaped(mount_fields[3])), _unescaped(
                mount_fields[4]
            )
    return PurePosixPath("/"), interface.usual_mount


def _own_group(root: Path, interface: _Interface) -> PurePosixPath:
    """Return the path of this process's group in the hierarchy; the root where it is not told."""
    for line in read_file(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and interface.controller in fields[1].split(","):
            return PurePosixPath(fields[2])
    return PurePosixPath("/")


def _memory(folder: Path, interface: _Interface) -> tuple[int, int] | None:
    """Return (available, limit) bytes of one group, or None where it has no limit."""
    limit = read_file(folder / interface.limit).strip()
    used = read_file(folder / interface.used).strip()
    if not limit.isdigit() or not used.isdigit():  # "max": no limit
        return None
    statistics = read_file(folder / interface.statistics)
    cache = re.search(rf"^{interface.reclaimable} (\d+)$", statistics, re.MULTILINE)
    held = int(used)
    if cache is not None:
        held -= int(cache[1])
    return max(0, int(limit) - held), int(limit)


def _unescaped(field: str) -> str:
    """Return a path of `mountinfo`, in which spaces and the like are octal numbers (proc(5))."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def read_file(path: Path) -> str:
    """Return what is in a file of the kernel's; nothing where there is none, as on another system than Linux."""
    try:
        return path.read_text()
    except OSError:
        return ""

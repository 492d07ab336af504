"""Lets what a process writes end with it: a private view of the file system, and Landlock (Linux).

Runs in the worker's process. Every place that has files gets an overlay whose upper layer is in memory. That needs a
mount namespace, which a kernel gives to anybody who first takes a user namespace, unless a container or the system's
rules forbid it. A network with nobody else in it, and a host's name and shared memory of the process's own, come along
where they can be had.

With Landlock (Linux 5.13) the kernel refuses what would be written elsewhere. It takes no rights, holds for C code and
for programs, and cannot be undone. A process so restricted cannot look into processes outside either (their memory,
their files through /proc), and from Linux 6.12 on it cannot signal them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from gpumagic.dryrun.effects import Effect, is_in_cache

_NEW_MOUNTS = 0x00020000
_NEW_USER = 0x10000000
_NEW_NETWORK = 0x40000000
_NEW_NAMES = 0x04000000 | 0x08000000
"""Of the host, and of System V's shared memory."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_DUMPABLE = 4
_NO_NEW_PRIVILEGES = 38
_CAPABILITIES = 0x20080522
"""The version of `capset`'s arguments."""
_OVER_FILES = 0b11111
"""The rights to change owners, to read and write whatever a file's mode, and the like."""
_READ_ONLY = 0x1
_REMOUNT = 0x20
_BIND = 0x1000
_RECURSIVE = 0x4000
_PRIVATE = 0x40000
_NO_FILES = frozenset({
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "securityfs", "debugfs", "tracefs", "bpf",
    "pstore", "configfs", "fusectl", "binfmt_misc", "hugetlbfs", "autofs", "nsfs", "rpc_pipefs", "efivarfs",
})  # fmt: skip
"""Kinds of file systems that have no files of anybody's, but show the system."""
_SYSTEM = ("/proc", "/sys", "/dev")
_STAGE = "/dev/shm"  # noqa: S108
"""The machine's shared memory. What is written is kept in memory that is mounted there, hidden by an overlay."""
_ROOT_NAME = "root"
_ROOT = f"{_STAGE}/{_ROOT_NAME}"
_ESCAPED = re.compile(r"\\(\d{3})")  # here, and so once for all forks
"""A character of a path in the system's table of mounts, by its octal code."""
_SHARE_OF_MEMORY = 8
"""One of so many parts of the memory is what written files may take."""


def enter() -> tuple[int | None, bool]:
    """Let this process, which has one thread, write to no file of anybody's.

    Return a descriptor of the folder in which `written` finds what it writes, None where it has no files of its own;
    and whether it has a network of its own.
    """
    here = os.getcwd()  # noqa: PTH109
    stage = None
    has_network = False
    with contextlib.suppress(OSError):
        has_network = _take_namespaces()
        stage = _change_root()
    try:
        os.chdir(here)
    except (
        OSError
    ):  # it would otherwise stay where it was, which may be outside of the new root
        os.chdir("/")
    return stage, has_network


def written(stage: int) -> Iterator[Effect]:
    """Yield what was done to files since `enter`, whoever did it, but for what was removed again and for caches.

    Args:
        stage: what `enter` returned.
    """
    top = f"/proc/self/fd/{stage}"
    for number in os.listdir(top):  # noqa: PTH208
        if number == _ROOT_NAME:
            continue
        place = os.readlink(f"{top}/{number}/place")  # noqa: PTH115
        for relative in _changed(f"{top}/{number}/upper"):
            path = os.path.join(place, relative)  # noqa: PTH118
            if is_in_cache(path):
                continue
            is_there = os.path.exists(path)  # noqa: PTH110
            yield Effect(f"writes the file {path}" if is_there else f"removes {path}")


def _changed(upper: str) -> Iterator[str]:
    """Yield the paths of files and empty folders in the upper layer of an overlay, relative to it."""
    for folder, folders, files in os.walk(upper):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), upper)  # noqa: PTH118
        is_empty = not files and not folders
        if is_empty and folder != upper:
            yield os.path.relpath(folder, upper)


def folders() -> list[str]:
    """Return the folders below which the process has files of its own."""
    of_files = [entry.path for entry in os.scandir("/") if entry.is_dir()]
    return [*(path for path in of_files if path not in _SYSTEM), _STAGE]


def _mounts() -> dict[str, str]:
    """Return the kind of file system that is mounted on each path."""
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        path = before.split()[4]
        kind = after.split()[0]
        kinds[_ESCAPED.sub(_unescaped, path)] = kind
    return kinds


def _unescaped(code: re.Match[str]) -> str:
    return chr(int(code[1], 8))


def _take_namespaces() -> bool:
    """Take mounts of our own, and a network where that is allowed; return whether it is.

    Whoever is not the administrator becomes it in a user namespace of its own.
    """
    user = os.getuid()
    group = os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS)
    except OSError:
        _call("unshare", _NEW_USER | _NEW_MOUNTS)
        # The kernel hides a process whose rights change from the user's other ones; but the warm one has to read in its
        # memory which program it would start.
        _call("prctl", _DUMPABLE, 1, 0, 0, 0)
        myself = Path("/proc/self")
        (myself / "setgroups").write_text("deny", encoding="ascii")
        (myself / "uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        (myself / "gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    has_network = False
    with contextlib.suppress(OSError):
        _call("unshare", _NEW_NETWORK | _NEW_NAMES)
        has_network = True
    _mount("/", _RECURSIVE | _PRIVATE)
    return has_network


def drop_rights() -> None:
    """Give up the administrator's rights for good, but for those over files, which decide what can be read.

    A process with fewer rights than another one cannot look into that, its files through /proc included. Landlock and
    seccomp ask that no program gives any rights back.
    """
    header = struct.pack("=Ii", _CAPABILITIES, 0)
    kept = struct.pack("=III", _OVER_FILES, _OVER_FILES, 0)
    with contextlib.suppress(OSError):
        _call("capset", header, kept + bytes(12))
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _change_root() -> int:
    """Take a root in which an overlay lies over each place that has files, and the system's folders are read-only.

    Return a descriptor of the folder that has what is written.
    """
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MEMORY
    folders = [
        entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)
    ]
    mounts = _mounts()
    places = {"/", _STAGE, *_SYSTEM, *folders}
    for path, kind in mounts.items():
        if _has_files(path, kind):
            places.add(path)
    lowers = {path: os.open(path, os.O_PATH) for path in sorted(places)}
    try:
        _mount(_STAGE, 0, "tmpfs", f"size={room}")
        stage = _make_root(lowers, folders)
        _mount("/", _REMOUNT | _BIND | _READ_ONLY)
        os.chroot(_ROOT)
    finally:
        for lower in lowers.values():
            os.close(lower)
    with contextlib.suppress(OSError):  # terminals of our own, none of anybody's
        _mount("/dev/pts", 0, "devpts", "newinstance,ptmxmode=0666")
    for path in mounts:
        if _is_systems(path):
            with contextlib.suppress(OSError):  # its settings are the machine's
                _mount(path, _REMOUNT | _BIND | _READ_ONLY)
    return stage


def _make_root(lowers: Mapping[str, int], folders: Collection[str]) -> int:
    """Make the new root; return a descriptor of the folder that has what is written.

    Args:
        lowers: a descriptor of each path that has a mount of its own there, the root's first.
        folders: the paths of folders in the root.
    """
    os.mkdir(_ROOT)  # noqa: PTH102
    is_whole = _lay_over("/", lowers["/"])
    stage = -1
    for path, lower in lowers.items():
        if path == "/":
            continue
        if path == _STAGE:
            # By way of the new root: from a folder elsewhere ".." leads to all files.
            stage = os.open(_ROOT + path, os.O_PATH)
        if path in _SYSTEM:
            if is_whole:
                _mount(
                    _ROOT + path, _BIND | _RECURSIVE, source=f"/proc/self/fd/{lower}"
                )
        elif path not in folders or not is_whole:
            # An overlay cannot lie over mounts of another user's. Where it could not over the root, one lies over each
            # folder of the root, most of which have none.
            _lay_over(path, lower)
    return stage


def _is_systems(path: str) -> bool:
    return path.startswith(_SYSTEM) and path != _STAGE


def _has_files(path: str, kind: str) -> bool:
    """Return whether files of somebody's lie where a file system of a kind is mounted."""
    if _is_systems(path) or kind in _NO_FILES:
        return False
    return os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK)  # noqa: PTH112


def _lay_over(path: str, lower: int) -> bool:
    """Put a folder with an overlay over it into the new root; one that takes none is read-only there.

    Args:
        path: of the folder.
        lower: a descriptor of it.
    """
    target = _ROOT + path.rstrip("/")
    number = len(os.listdir(_STAGE))  # noqa: PTH208
    store = f"{_STAGE}/{number}"
    upper = f"{store}/upper"
    work = f"{store}/work"
    for folder in store, upper, work:
        os.mkdir(folder)  # noqa: PTH102
    os.symlink(path, f"{store}/place")  # noqa: PTH211
    layers = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work}"
    with_marks_of_users = f"{layers},userxattr"  # in attributes that users may write
    for options in (with_marks_of_users, layers):
        with contextlib.suppress(OSError):
            _mount(target, 0, "overlay", options)
            return True
    _mount(target, _BIND | _RECURSIVE, source=f"/proc/self/fd/{lower}")
    _mount(target, _REMOUNT | _BIND | _READ_ONLY)
    return False


def _mount(
    path: str,
    flags: int,
    kind: str = "none",
    options: str = "",
    source: str = "none",
) -> None:
    _call(
        "mount",
        source.encode(),
        path.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        options.encode(),
    )


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# ---- Landlock

_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
"""The numbers of Landlock's system calls, the same on all processors."""
_ASK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_MAKE_AND_REMOVE = 0b1_1111_1111 << 4
"""To remove files and folders, and to make any kind of them."""
_REFER = 1 << 13
"""To move a file to another folder."""
_TRUNCATE = 1 << 14
_OF_FILES = _WRITE_FILE | _TRUNCATE
"""The rights that a rule for something other than a folder may have."""
_SCOPES = 0b11
"""Abstract sockets of the Unix family, and signals, of processes outside."""


def restrict(writable: Iterable[str]) -> bool:
    """Let this thread and all that it will start write to some places only; return whether this kernel has Landlock.

    Args:
        writable: folders, with all that is below them, and single files such as devices.
    """
    version = int(_LIBC.syscall(_CREATE, None, 0, _ASK_VERSION))
    if version < 1:
        return False
    rights = _WRITE_FILE | _MAKE_AND_REMOVE
    if version >= 2:
        rights |= _REFER
    if version >= 3:
        rights |= _TRUNCATE
    rules = struct.pack("=Q", rights)
    if version >= 6:  # a kernel takes no fields that it does not know
        of_network = 0
        rules += struct.pack("=QQ", of_network, _SCOPES)
    ruleset = _LIBC.syscall(_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        return False
    try:
        for path in writable:
            with contextlib.suppress(OSError):
                _allow(ruleset, path, rights)
        return bool(_LIBC.syscall(_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):  # noqa: PTH112
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        _LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)

"""Have what a process writes be gone with it: a private view of the file system, and Landlock (Linux).

Every place that has files gets an overlay whose upper layer is in memory. It takes a mount namespace, which a kernel
gives to anybody who first takes a user namespace, unless a container or the system's rules forbid that. A network with
nobody else in it, and a host's name and shared memory of the process's own, come along where they can be had.

Landlock (Linux 5.13) has the kernel refuse what would be written elsewhere. It takes no rights, holds for C code and
for programs, and cannot be undone. A process so restricted cannot look into processes outside either (their memory,
their files through /proc), and from Linux 6.12 on it cannot signal them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
_NEW_NAMES = 0x04000000 | 0x08000000
"""Of the host, and of System V's shared memory."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_DUMPABLE, _NO_NEW_PRIVILEGES = 4, 38
_CAPABILITIES, _OVER_FILES = 0x20080522, 0b11111
"""The version of the call's arguments; to change owners, to read and write whatever their modes, and the like."""
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_NO_FILES = frozenset({
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "securityfs", "debugfs", "tracefs", "bpf",
    "pstore", "configfs", "fusectl", "binfmt_misc", "hugetlbfs", "autofs", "nsfs", "rpc_pipefs", "efivarfs",
})  # fmt: skip
"""Kinds of file systems that are a view of the system."""
_SYSTEM = ("/proc", "/sys", "/dev")
_STAGE = "/dev/shm"  # noqa: S108
"""The machine's shared memory, where what is written is kept; an overlay hides it there from the cell."""
_ROOT_NAME = "root"
_ROOT = f"{_STAGE}/{_ROOT_NAME}"
_ESCAPED = re.compile(r"\\(\d{3})")  # here, and so once for all forks
_SHARE_OF_MEMORY = 8
"""What is written may take one of so many parts of the memory."""


def enter() -> tuple[int | None, bool]:
    """Let this process, which has one thread, write to no file of anybody's.

    Return a descriptor of where `written` finds what it writes, None where it has no files of its own; and whether its
    network is its own.
    """
    here = os.getcwd()  # noqa: PTH109
    stage, has_network = None, False
    with contextlib.suppress(OSError):
        has_network = _take_namespaces()
        stage = _change_root()
    try:
        os.chdir(here)
    except OSError:  # it would go on to be where it was, which may be outside of the new root
        os.chdir("/")
    return stage, has_network


def written(stage: int) -> Iterator[str]:
    """Yield in words what was done to files since `enter`, whoever did it, but for what was removed again."""
    top = f"/proc/self/fd/{stage}"
    for number in os.listdir(top):  # noqa: PTH208
        upper = f"{top}/{number}/upper"
        place = os.readlink(f"{top}/{number}/place") if number != _ROOT_NAME else ""  # noqa: PTH115
        for folder, folders, files in os.walk(upper):
            for name in files or ([] if folders or folder == upper else [""]):
                path = os.path.join(place, os.path.relpath(os.path.join(folder, name), upper))  # noqa: PTH118
                yield f"writes the file {path}" if os.path.exists(path) else f"removes {path}"  # noqa: PTH110


def folders() -> list[str]:
    """Return the folders below which the process has files of its own."""
    return [
        *(each.path for each in os.scandir("/") if each.is_dir() and each.path not in _SYSTEM),
        _STAGE,
    ]


def _mounts() -> dict[str, str]:
    """Return the kind of what is mounted on each place."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, kind = line.partition(" - ")
        path = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields.split()[4])
        found[path] = kind.split()[0]
    return found


def _take_namespaces() -> bool:
    """Take mounts of our own, and a network where there is one; return whether there is.

    Who is not the system's administrator becomes one of a system of users of its own.
    """
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS)
    except OSError:
        _call("unshare", _NEW_USER | _NEW_MOUNTS)
        # The kernel hides a process whose rights change from the user's others; the warm one reads its programs' names.
        _call("prctl", _DUMPABLE, 1, 0, 0, 0)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    has_network = False
    with contextlib.suppress(OSError):
        _call("unshare", _NEW_NETWORK | _NEW_NAMES)
        has_network = True
    _mount("/", _RECURSIVE | _PRIVATE)
    return has_network


def drop_rights() -> None:
    """Give up the administrator's rights but those over files, which decide what can be read, for good.

    Who has fewer than another process cannot look into it, its files through /proc included. That no program gives any
    back is what Landlock and seccomp ask for.
    """
    header, kept = (
        struct.pack("=Ii", _CAPABILITIES, 0),
        struct.pack("=III", _OVER_FILES, _OVER_FILES, 0),
    )
    with contextlib.suppress(OSError):
        _call("capset", header, kept + bytes(12))
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _change_root() -> int:
    """Take a root in which an overlay lies over each place that has files, and the system's folders are read-only.

    Return a descriptor of the folder that has what is written.
    """
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MEMORY
    folders = [each.path for each in os.scandir("/") if each.is_dir(follow_symlinks=False)]
    mounts = _mounts()
    with_files = (
        path
        for path, kind in mounts.items()
        if (not path.startswith(_SYSTEM) or path == _STAGE)
        and kind not in _NO_FILES
        and os.path.isdir(path)  # noqa: PTH112
        and os.access(path, os.R_OK | os.X_OK)
    )
    places = {"/", *with_files, _STAGE, *_SYSTEM, *folders}
    lowers = {path: os.open(path, os.O_PATH) for path in sorted(places)}
    try:
        _mount(_STAGE, 0, "tmpfs", f"size={room}")
        os.mkdir(_ROOT)  # noqa: PTH102
        is_whole = _lay_over("/", lowers["/"])
        stage = -1
        for path, lower in list(lowers.items())[1:]:
            if (
                path == _STAGE
            ):  # by way of the new root: from a folder elsewhere ".." leads to all files
                stage = os.open(_ROOT + path, os.O_PATH)
            if path in _SYSTEM and is_whole:
                _mount(_ROOT + path, _BIND | _RECURSIVE, source=f"/proc/self/fd/{lower}")
            elif path not in _SYSTEM and (path not in folders or not is_whole):
                # None lies over mounts of another user's: then over the root's folders, most of which have none.
                _lay_over(path, lower)
        _mount("/", _REMOUNT | _BIND | _READ_ONLY)
        os.chroot(_ROOT)
    finally:
        for lower in lowers.values():
            os.close(lower)
    with contextlib.suppress(OSError):
        _mount(
            "/dev/pts", 0, "devpts", "newinstance,ptmxmode=0666"
        )  # terminals of our own, none of anybody's
    for path in [path for path in mounts if path.startswith(_SYSTEM) and path != _STAGE]:
        with contextlib.suppress(OSError):  # their settings are the machine's
            _mount(path, _REMOUNT | _BIND | _READ_ONLY)
    return stage


def _lay_over(path: str, lower: int) -> bool:
    """Put a folder with an overlay over it into the new root; one that takes none is read-only there."""
    target, store = _ROOT + path.rstrip("/"), f"{_STAGE}/{len(os.listdir(_STAGE))}"  # noqa: PTH208
    upper, work = f"{store}/upper", f"{store}/work"
    for folder in store, upper, work:
        os.mkdir(folder)  # noqa: PTH102
    os.symlink(path, f"{store}/place")  # noqa: PTH211
    layers = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work}"
    for options in (
        f"{layers},userxattr",
        layers,
    ):  # its marks are in attributes that users may write
        with contextlib.suppress(OSError):
            _mount(target, 0, "overlay", options)
            return True
    _mount(target, _BIND | _RECURSIVE, source=f"/proc/self/fd/{lower}")
    _mount(target, _REMOUNT | _BIND | _READ_ONLY)
    return False


def _mount(
    path: str, flags: int, kind: str = "none", options: str = "", source: str = "none"
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

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _MAKE_AND_REMOVE, _REFER, _TRUNCATE = (
    1 << 1,
    sum(1 << bit for bit in range(4, 13)),
    1 << 13,
    1 << 14,
)
_OF_FILES = _WRITE_FILE | _TRUNCATE
"""Those that a rule for what is no folder may have."""
_SCOPES = 0b11
"""Abstract sockets of the Unix family, and signals, of processes outside."""


def restrict(writable: Iterable[str]) -> bool:
    """Let this thread and all that it will start write only there; return whether this kernel has Landlock.

    Args:
        writable: folders, with all below them, and single files such as devices.
    """
    version = int(_LIBC.syscall(_CREATE, None, 0, _ASK_VERSION))
    if version < 1:
        return False
    rights = (
        _WRITE_FILE
        | _MAKE_AND_REMOVE
        | (_REFER if version >= 2 else 0)
        | (_TRUNCATE if version >= 3 else 0)
    )
    # Of files, of the network, scopes; an older kernel takes no fields that it does not know.
    rules = struct.pack("=QQQ", rights, 0, _SCOPES) if version >= 6 else struct.pack("=Q", rights)
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
        allowed = rights if os.path.isdir(path) else rights & _OF_FILES  # noqa: PTH112
        _LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
    finally:
        os.close(descriptor)

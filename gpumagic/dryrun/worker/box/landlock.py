"""Have the kernel refuse what this process would write, but below some folders (Landlock, Linux 5.13).

It takes no rights, holds for C code and for programs, and cannot be undone. A process so restricted cannot look into
processes outside either (their memory, their files through /proc), and from Linux 6.12 on it cannot signal them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _MAKE_AND_REMOVE, _REFER, _TRUNCATE = 1 << 1, sum(1 << bit for bit in range(4, 13)), 1 << 13, 1 << 14
_OF_FILES = _WRITE_FILE | _TRUNCATE
"""Those that a rule for what is no folder may have."""
_SCOPES = 0b11
"""Abstract sockets of the Unix family, and signals, of processes outside."""


class _Rules(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def restrict(writable: Iterable[str]) -> int:
    """Let this thread and all that it will start write only there; return the version of Landlock, 0 for none.

    Args:
        writable: folders, with all below them, and single files such as devices.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = int(libc.syscall(_CREATE, None, 0, _ASK_VERSION))
    if version < 1:
        return 0
    rights = _WRITE_FILE | _MAKE_AND_REMOVE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = _Rules(rights, 0, _SCOPES if version >= 6 else 0)
    size = ctypes.sizeof(rules) if version >= 6 else 8  # an older kernel takes no fields that it does not know
    ruleset = libc.syscall(_CREATE, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return 0
    try:
        for path in writable:
            with contextlib.suppress(OSError):
                _allow(libc, ruleset, path, rights)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return version if libc.syscall(_RESTRICT, ruleset, 0) == 0 else 0
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(rights if os.path.isdir(path) else rights & _OF_FILES, descriptor)  # noqa: PTH112
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)

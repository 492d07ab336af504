"""Have the kernel refuse system calls of this process and of all that it starts (seccomp, Linux).

It takes no rights, holds for C code and for programs, and cannot be undone. Refused calls that a user should hear of go
to a listener, where the kernel has that (5.0), so that the process that watches can tell what was refused.

No library is asked for: libseccomp's bindings need the library itself, which a notebook's machine rarely has, and the
program below is forty instructions. Numbers are those of `asm/unistd_64.h` and of `asm-generic/unistd.h`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import itertools
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ALLOW = 0x7FFF0000
NOTIFY = 0x7FC00000
_REFUSE = 0x00050000
_SET_FILTER, _WITH_LISTENER = 1, 1 << 3
_NO_SPECULATION_GUARD = 1 << 2
"""The cell is the user's own; with the guard all of its memory accesses are slower on some machines."""
_ONLY_KILLED = 1 << 5
"""A call that has been received waits for its answer whatever signal comes (5.19): Python takes a `connect` that a
signal interrupts for one that goes on by itself, and this one would never have begun."""
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Which of a call's numbers is its own, `AUDIT_ARCH_*`, and the number of `seccomp` itself."""
_X32 = 0x40000000
"""Numbers from here on are x86-64's second interface, with 32-bit pointers; nothing that is alive uses it."""

_NAMESPACES = 0x7E020000
"""`CLONE_NEW*`, for `clone`."""
_DEVICE_FILE = 0o020000
"""The bit of a file's mode that block and character devices share, and nothing else has."""
_SETS_OWNER = (8, 15)
"""`F_SETOWN` and `F_SETOWN_EX`, which tell a file whom to signal."""
SETS_FLAGS = (0x40086602, 0x40046602, 0x401C5820)
"""`FS_IOC_SETFLAGS`, in 64 and 32 bits, and `FS_IOC_FSSETXATTR`: a file's flags take no right to write to it."""
_CONTROLS = (0x8901, 0x8902, *SETS_FLAGS)
"""These, and what sets the owner by `ioctl` (`FIOSETOWN`, `SIOCSPGRP`)."""
_DATAGRAMS = tuple(2 | flags for flags in (0, 0x80000, 0x800, 0x80800))
"""`SOCK_DGRAM`, also closed by exec and not waiting: either end of a pair can send to any path."""
_INTERNET = (socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_NETLINK", 16))


class Rule(NamedTuple):
    """What becomes of some calls.

    Attributes:
        answer: `NOTIFY`, or what `refuse` returns.
        calls: by name their numbers on x86-64 and on 64-bit Arm, which lacks some.
        argument: the one that decides, by its place; None: each such call gets the answer.
        allowed: values of it (32 bits) with which the call is made.
        flags: instead, bits of it of which one is enough for the answer.
        values: instead, values of it with which the call gets the answer.
    """

    answer: int
    calls: Mapping[str, tuple[int | None, int | None]]
    argument: int | None = None
    allowed: Sequence[int] = ()
    flags: int = 0
    values: Sequence[int] = ()


def refuse(error: int) -> int:
    """Return the answer to a call that fails with this error."""
    return _REFUSE | error


def rules(*, has_files: bool, has_network: bool) -> list[Rule]:
    """Return what the kernel refuses.

    Args:
        has_files: whether the process has files of its own.
        has_network: whether it has a network of its own.
    """
    own = (0, os.getpid())
    modes_and_times = {
        "chmod": (90, None),
        "fchmod": (91, 52),
        "fchmodat": (268, 53),
        "fchmodat2": (452, 452),
        "chown": (92, None),
        "lchown": (94, None),
        "fchown": (93, 55),
        "fchownat": (260, 54),
        "utime": (132, None),
        "utimes": (235, None),
        "futimesat": (261, None),
        "utimensat": (280, 88),
    }
    return [
        Rule(
            NOTIFY,
            {
                "connect": (42, 203),
                "execve": (59, 221),
                "execveat": (322, 281),
                # Other processes
                "tkill": (200, 130),
                "pidfd_send_signal": (424, 424),
                "pidfd_getfd": (438, 438),
                "ptrace": (101, 117),
                "process_vm_readv": (310, 270),
                "process_vm_writev": (311, 271),
                "process_madvise": (440, 440),
                "process_mrelease": (448, 448),
                "kcmp": (312, 272),
                "move_pages": (279, 239),
                "migrate_pages": (256, 238),
                # The machine: what takes none of the administrator's rights, which a dry run gives up
                "name_to_handle_at": (303, 264),
                "open_by_handle_at": (304, 265),
                "setns": (308, 268),
                "unshare": (272, 97),
                "clock_adjtime": (305, 266),
                "adjtimex": (159, 171),
                "syslog": (103, 116),
                "add_key": (248, 217),
                "request_key": (249, 218),
                "keyctl": (250, 219),
                "bpf": (321, 280),
                "perf_event_open": (298, 241),
                "userfaultfd": (323, 282),
                "fanotify_init": (300, 262),
                # An overlay keeps these in; Landlock does not mind them.
                **({} if has_files else modes_and_times),
            },
        ),
        # In a network of its own there is this process alone; but sockets of the Unix family reach others by a path.
        Rule(NOTIFY, {"socket": (41, 198)}, 0, allowed=_INTERNET if has_network else ()),
        Rule(NOTIFY, {"socketpair": (53, 199)}, 1, values=_DATAGRAMS),
        Rule(NOTIFY, {"sendto": (44, 206)}, 4, allowed=(0,)),
        Rule(
            NOTIFY,
            {
                "kill": (62, 129),
                "tgkill": (234, 131),
                "rt_sigqueueinfo": (129, 138),
                "rt_tgsigqueueinfo": (297, 240),
                "sched_setaffinity": (203, 122),
                "sched_setscheduler": (144, 119),
                "sched_setparam": (142, 118),
                "sched_setattr": (314, 274),
                "prlimit64": (302, 261),
            },
            0,
            allowed=own,
        ),
        Rule(NOTIFY, {"setpriority": (141, 140), "ioprio_set": (251, 30)}, 1, allowed=own),
        Rule(NOTIFY, {"fcntl": (72, 25)}, 1, values=_SETS_OWNER),
        Rule(NOTIFY, {"ioctl": (16, 29)}, 1, values=_CONTROLS),
        Rule(NOTIFY, {"mknod": (133, None)}, 1, flags=_DEVICE_FILE),
        Rule(NOTIFY, {"mknodat": (259, 33)}, 2, flags=_DEVICE_FILE),
        Rule(NOTIFY, {"clone": (56, 220)}, 0, flags=_NAMESPACES),
        # As if it were done: what ends the group ends all that the cell starts.
        Rule(refuse(0), {"setsid": (112, 157), "setpgid": (109, 154)}),
        # Memory and queues that other processes know by a number (torch's and multiprocessing's have paths); `clone3`,
        # whose flags lie in memory (the C library then takes `clone`); and what passes every filter.
        Rule(
            refuse(errno.ENOSYS),
            {
                "shmget": (29, 194),
                "shmat": (30, 196),
                "shmctl": (31, 195),
                "msgget": (68, 186),
                "semget": (64, 190),
                "mq_open": (240, 180),
                "clone3": (435, 435),
                "io_uring_setup": (425, 425),
            },
        ),
        # Neither an overlay nor Landlock minds these.
        Rule(
            refuse(errno.ENOTSUP),
            {
                "setxattr": (188, 5),
                "lsetxattr": (189, 6),
                "fsetxattr": (190, 7),
                "setxattrat": (463, 463),
                "removexattr": (197, 14),
                "lremovexattr": (198, 15),
                "fremovexattr": (199, 16),
                "removexattrat": (466, 466),
            },
        ),
    ]


def install(rules: Sequence[Rule]) -> int | None:
    """Apply rules to this thread and all that it will start; return the listener's descriptor, if there is one.

    Args:
        rules: a call without one is made. Somebody has to answer what is to `NOTIFY`; where the kernel has no
            listeners, it is refused with EPERM.

    Raises:
        OSError: this system or processor has no such filter, or this process may still be given rights.
    """
    if os.uname().machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    number = _ARCHITECTURES[os.uname().machine][2]
    listens = any(
        rule.answer == NOTIFY for rule in rules
    )  # of all filters of a process one may have a listener
    program = _Program.of(rules)
    for flags in (_WITH_LISTENER | _ONLY_KILLED, _WITH_LISTENER) if listens else ():
        descriptor = libc.syscall(
            number, _SET_FILTER, flags | _NO_SPECULATION_GUARD, ctypes.byref(program)
        )
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            return int(descriptor)
    silent = [
        rule._replace(answer=refuse(errno.EPERM)) if rule.answer == NOTIFY else rule
        for rule in rules
    ]
    if libc.syscall(number, _SET_FILTER, _NO_SPECULATION_GUARD, ctypes.byref(_Program.of(silent))):
        raise OSError(ctypes.get_errno(), "seccomp")
    return None


class Refused(NamedTuple):
    """A call that waits for its answer.

    Attributes:
        number: of this wait.
        name: of the call.
        pid: the process that made it, as the listener sees it.
        arguments: as the kernel has them, pointers too.
    """

    number: int
    name: str
    pid: int
    arguments: tuple[int, ...]


def next_refused(listener: int) -> Refused | None:
    """Return a call that waits; None where its process has ended."""
    waiting = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, waiting)
    except OSError:
        return None
    number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", waiting)
    return Refused(number, _names()[call], pid, tuple(arguments))


def answer(listener: int, call: Refused, error: int | None) -> None:
    """Have a call fail with an error, or be made where there is none."""
    flags = int(error is None)  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
    try:
        fcntl.ioctl(
            listener, _ANSWER, bytearray(struct.pack("=QqiI", call.number, 0, -(error or 0), flags))
        )
    except OSError:
        return  # its process has ended


@functools.cache
def _names() -> dict[int | None, str]:
    """Return the names of all calls that may be refused, by their numbers here."""
    column, every = _ARCHITECTURES[os.uname().machine][0], rules(has_files=False, has_network=False)
    return {numbers[column]: name for rule in every for name, numbers in rule.calls.items()}


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CALL, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where `struct seccomp_data` has them; an argument is 8 bytes, of which the lower four come first."""
_INSTRUCTION = struct.Struct("=HBBI")
"""Its code, how many instructions it leaves out if true and if false, and its value."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p))

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> _Program:
        column, architecture, _ = _ARCHITECTURES[os.uname().machine]
        code = [
            (_LOAD, 0, 0, _ARCHITECTURE),
            (_EQUAL, 1, 0, architecture),
            (_RETURN, 0, 0, refuse(errno.ENOSYS)),  # 32-bit programs have other numbers
            (_LOAD, 0, 0, _CALL),
            (_AT_LEAST, 0, 1, _X32),
            (_RETURN, 0, 0, refuse(errno.ENOSYS)),
        ]
        for rule in rules:
            block = _block(rule)
            for numbers in rule.calls.values():
                number = numbers[column]
                if number is not None:
                    code += [(_EQUAL, 0, len(block), number), *block]
        code.append((_RETURN, 0, 0, ALLOW))
        return cls(len(code), b"".join(itertools.starmap(_INSTRUCTION.pack, code)))


def _block(rule: Rule) -> list[tuple[int, int, int, int]]:
    """Return the instructions for a call that has this rule; each way through ends with an answer."""
    if rule.argument is None:
        return [(_RETURN, 0, 0, rule.answer)]
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument)
    refused, jump = (
        rule.values or ([rule.flags] if rule.flags else []),
        _ANY_BIT if rule.flags else _EQUAL,
    )
    values, on_match, otherwise = (
        (refused, rule.answer, ALLOW) if refused else (rule.allowed, ALLOW, rule.answer)
    )
    tests = [
        (jump, len(values) - place, 0, value & 0xFFFFFFFF) for place, value in enumerate(values)
    ]
    return [load, *tests, (_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, on_match)]

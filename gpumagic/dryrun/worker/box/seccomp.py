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
import itertools
import os
import platform
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
_NO_NEW_PRIVILEGES = 38
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""The column of `NUMBERS`, `AUDIT_ARCH_*`, and the number of `seccomp` itself."""
_X32 = 0x40000000
"""Numbers from here on are x86-64's second interface, with 32-bit pointers; nothing that is alive uses it."""


def refuse(error: int) -> int:
    """Return the answer to a call that fails with this error."""
    return _REFUSE | error


NUMBERS: Mapping[str, tuple[int | None, int | None]] = {
    # Other machines
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "sendto": (44, 206),
    # Programs
    "execve": (59, 221), "execveat": (322, 281),
    # Other processes
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "prlimit64": (302, 261), "ioprio_set": (251, 30),
    "setsid": (112, 157), "setpgid": (109, 154),
    "fcntl": (72, 25), "ioctl": (16, 29),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180),
    # Files: what neither an overlay nor Landlock minds
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # The machine: what takes none of the administrator's rights, which a dry run gives up
    "setns": (308, 268), "unshare": (272, 97), "clone": (56, 220), "clone3": (435, 435),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "io_uring_setup": (425, 425),
}  # fmt: skip
"""Calls by name, on x86-64 and on 64-bit Arm, which lacks some."""


class Rule(NamedTuple):
    """What becomes of some calls.

    Attributes:
        calls: their names in `NUMBERS`.
        answer: `NOTIFY`, or what `refuse` returns.
        argument: the one that decides, by its place; None: each such call gets the answer.
        allowed: values of it (32 bits) with which the call is made.
        flags: instead, bits of it of which one is enough for the answer.
        values: instead, values of it with which the call gets the answer.
    """

    calls: Sequence[str]
    answer: int
    argument: int | None = None
    allowed: Sequence[int] = ()
    flags: int = 0
    values: Sequence[int] = ()


class Refused(NamedTuple):
    """A call that waits for its answer.

    Attributes:
        name: of the call.
        pid: the process that made it, as the listener sees it.
        arguments: as the kernel has them, pointers too.
    """

    name: str
    pid: int
    arguments: tuple[int, ...]


def install(rules: Sequence[Rule]) -> int | None:
    """Apply rules to this thread and all that it will start; return the listener's descriptor, if there is one.

    Args:
        rules: of two for the same call the first holds; a call without a rule is made. Somebody has to answer what is
            to `NOTIFY`; where the kernel has no listeners, it is refused with EPERM.

    Raises:
        OSError: this system or processor has no such filter.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    number = _ARCHITECTURES[platform.machine()][2]
    listens = any(rule.answer == NOTIFY for rule in rules)  # of all filters of a process one may have a listener
    for flags in (_WITH_LISTENER | _ONLY_KILLED, _WITH_LISTENER) if listens else ():
        descriptor = libc.syscall(number, _SET_FILTER, flags | _NO_SPECULATION_GUARD, ctypes.byref(_Program.of(rules)))
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            return int(descriptor)
    silent = [rule._replace(answer=refuse(errno.EPERM)) if rule.answer == NOTIFY else rule for rule in rules]
    if libc.syscall(number, _SET_FILTER, _NO_SPECULATION_GUARD, ctypes.byref(_Program.of(silent))):
        raise OSError(ctypes.get_errno(), "seccomp")
    return None


def next_refused(listener: int) -> tuple[int, Refused] | None:
    """Return a call that waits, with its number for `answer`; None where its process has ended."""
    waiting = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, waiting)
    except OSError:
        return None
    number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", waiting)
    column = _ARCHITECTURES[platform.machine()][0]
    name = next((each for each, numbers in NUMBERS.items() if numbers[column] == call), str(call))
    return number, Refused(name, pid, tuple(arguments))


def answer(listener: int, number: int, error: int | None) -> None:
    """Have a call fail with an error, or be made where there is none."""
    flags = int(error is None)  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
    try:
        fcntl.ioctl(listener, _ANSWER, bytearray(struct.pack("=QqiI", number, 0, -(error or 0), flags)))
    except OSError:
        return  # its process has ended


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CALL, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where `struct seccomp_data` has them; an argument is 8 bytes, of which the lower four come first."""


_INSTRUCTION = struct.Struct("=HBBI")
"""Its code, how many instructions it leaves out if true and if false, and its value."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p))

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> _Program:
        column, architecture, _ = _ARCHITECTURES[platform.machine()]
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
            for name in rule.calls:
                number = NUMBERS[name][column]
                if number is not None:
                    code += [(_EQUAL, 0, len(block), number), *block]
        code.append((_RETURN, 0, 0, ALLOW))
        return cls(len(code), b"".join(itertools.starmap(_INSTRUCTION.pack, code)))


def _block(rule: Rule) -> list[tuple[int, int, int, int]]:
    """Return the instructions for a call that has this rule; each way through ends with an answer."""
    if rule.argument is None:
        return [(_RETURN, 0, 0, rule.answer)]
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument)
    if rule.flags:
        return [load, (_ANY_BIT, 0, 1, rule.flags), (_RETURN, 0, 0, rule.answer), (_RETURN, 0, 0, ALLOW)]
    values, otherwise, on_match = rule.allowed, rule.answer, ALLOW
    if rule.values:
        values, otherwise, on_match = rule.values, ALLOW, rule.answer
    count = len(values)
    tests = [(_EQUAL, count - place, 0, value & 0xFFFFFFFF) for place, value in enumerate(values)]
    return [load, *tests, (_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, on_match)]

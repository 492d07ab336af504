"""Lets the kernel refuse system calls of this process and of all that it starts (seccomp, Linux).

`install` is called in the worker's fork that will run the cell, `next_refused` and `answer` in the warm process. A
filter takes no rights, holds for C code and for programs, and cannot be undone. Refused calls that a user should hear
of go to a listener, where the kernel has that (5.0), so that the process that watches can say what was refused.

It is written without libseccomp, which a notebook's machine rarely has: the program below is forty instructions. The
numbers are those of `asm/unistd_64.h` and of `asm-generic/unistd.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ALLOW = 0x7FFF0000
NOTIFY = 0x7FC00000
_REFUSE = 0x00050000
"""Answers to a call, as a filter gives them: it is made, it waits for the listener's answer, it fails with an error."""
_SET_FILTER = 1
_WITH_LISTENER = 1 << 3
_NO_SPECULATION_GUARD = 1 << 2
"""Without the guard against reading other processes' memory by timing, which slows all memory accesses down on some
machines: the cell is the user's own."""
_ONLY_KILLED = 1 << 5
"""No signal but the one that kills interrupts a call that waits for its answer (5.19): Python takes a `connect` that
a signal interrupts for one that goes on by itself, and this one would never have begun."""
_RECEIVE = 0xC0502100
_ANSWER = 0xC0182101


class Architecture(NamedTuple):
    """A kind of processor."""

    column: int
    """Which of the numbers that a rule has of a call is this processor's."""
    audit: int
    """`AUDIT_ARCH_*`, by which a filter knows it."""
    seccomp: int
    """The number of the call `seccomp` itself."""


_ARCHITECTURES = {
    "x86_64": Architecture(column=0, audit=0xC000003E, seccomp=317),
    "aarch64": Architecture(column=1, audit=0xC00000B7, seccomp=277),
}
_X32 = 0x40000000
"""Numbers from here on are those of x86-64's second interface, with 32-bit pointers, which nothing uses any more."""

_NAMESPACES = 0x7E020000
"""`CLONE_NEW*`, for `clone`."""
_DEVICE_FILE = 0o020000
"""The bit of a file's mode that block and character devices share, and nothing else has."""
_SETS_OWNER = (8, 15)
"""`F_SETOWN` and `F_SETOWN_EX`, which tell a file whom to signal."""
SETS_FLAGS = (0x40086602, 0x40046602, 0x401C5820)
"""`FS_IOC_SETFLAGS`, in 64 and 32 bits, and `FS_IOC_FSSETXATTR`: to change a file's flags takes no right to write to
it."""
_CONTROLS = (0x8901, 0x8902, *SETS_FLAGS)
"""The same, and what sets whom a file signals by `ioctl` (`FIOSETOWN`, `SIOCSPGRP`)."""
_DATAGRAMS = (0x2, 0x80002, 0x802, 0x80802)
"""`SOCK_DGRAM`, with and without closing by exec and not waiting: either end of a pair can send to any path."""
_INTERNET = (socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_NETLINK", 16))


Numbers = tuple["int | None", "int | None"]
"""Of a call on x86-64 and on 64-bit Arm, which lacks some."""


class Rule(NamedTuple):
    """What becomes of some calls.

    Attributes:
        answer: `NOTIFY`, or what `refuse` returns.
        calls: their numbers, by name.
        argument: the place of the one that decides; None: each such call gets the answer.
        allowed: the values of it (32 bits) with which the call is made; with all others it gets the answer.
        flags: instead, bits of it of which one is enough for the answer.
        values: instead, the values of it with which the call gets the answer; with all others it is made.
    """

    answer: int
    calls: Mapping[str, Numbers]
    argument: int | None = None
    allowed: Sequence[int] = ()
    flags: int = 0
    values: Sequence[int] = ()


def refuse(error: int) -> int:
    """Return the answer by which a call fails with an error."""
    return _REFUSE | error


def rules(*, has_files: bool, has_network: bool) -> list[Rule]:
    """Return what the kernel refuses.

    Args:
        has_files: whether the process has files of its own.
        has_network: whether it has a network of its own.
    """
    own_process = (0, os.getpid())
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
        Rule(
            NOTIFY, {"socket": (41, 198)}, 0, allowed=_INTERNET if has_network else ()
        ),
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
            allowed=own_process,
        ),
        Rule(
            NOTIFY,
            {"setpriority": (141, 140), "ioprio_set": (251, 30)},
            1,
            allowed=own_process,
        ),
        Rule(NOTIFY, {"fcntl": (72, 25)}, 1, values=_SETS_OWNER),
        Rule(NOTIFY, {"ioctl": (16, 29)}, 1, values=_CONTROLS),
        Rule(NOTIFY, {"mknod": (133, None)}, 1, flags=_DEVICE_FILE),
        Rule(NOTIFY, {"mknodat": (259, 33)}, 2, flags=_DEVICE_FILE),
        Rule(NOTIFY, {"clone": (56, 220)}, 0, flags=_NAMESPACES),
        # They seem to be done, but are not: the group is what ends all that the cell starts.
        Rule(refuse(0), {"setsid": (112, 157), "setpgid": (109, 154)}),
        # Memory and queues that other processes know by a number (torch's and multiprocessing's have paths); `clone3`,
        # whose flags lie in memory (the C library then takes `clone`); and io_uring, whose calls pass no filter.
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
        rules: a call without one is made. Somebody has to answer those whose rule says `NOTIFY`; where the kernel has
            no listeners, they fail with EPERM.

    Raises:
        OSError: this system or processor has no such filter, or this process may still be given rights.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    number = _ARCHITECTURES[machine].seccomp

    def set_filter(rules: Sequence[Rule], flags: int) -> int:
        program = _Program.of(rules)
        flags |= _NO_SPECULATION_GUARD
        return int(libc.syscall(number, _SET_FILTER, flags, ctypes.byref(program)))

    notifies = any(rule.answer == NOTIFY for rule in rules)
    if notifies:  # else there is none: only one filter of a process may have a listener
        for flags in (_WITH_LISTENER | _ONLY_KILLED, _WITH_LISTENER):
            descriptor = set_filter(rules, flags)
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
                return descriptor
    if set_filter([_without_listener(rule) for rule in rules], 0):
        raise OSError(ctypes.get_errno(), "seccomp")
    return None


def _without_listener(rule: Rule) -> Rule:
    if rule.answer != NOTIFY:
        return rule
    return rule._replace(answer=refuse(errno.EPERM))


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


_CONTINUE = 1
"""SECCOMP_USER_NOTIF_FLAG_CONTINUE."""


def answer(listener: int, call: Refused, error: int | None) -> None:
    """Let a call fail with an error, or be made where there is none."""
    if error is None:
        reply = struct.pack("=QqiI", call.number, 0, 0, _CONTINUE)
    else:
        reply = struct.pack("=QqiI", call.number, 0, -error, 0)
    with contextlib.suppress(OSError):  # its process may have ended
        fcntl.ioctl(listener, _ANSWER, bytearray(reply))


@functools.cache
def _names() -> dict[int | None, str]:
    """Return the names of all calls that may be refused, by their numbers here."""
    column = _ARCHITECTURES[os.uname().machine].column
    names = {}
    for rule in rules(has_files=False, has_network=False):  # which are most
        for name, numbers in rule.calls.items():
            names[numbers[column]] = name
    return names


# ---- The filter's program (classic BPF)

_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_CALL = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
"""Where `struct seccomp_data` has them; an argument is 8 bytes, of which the lower four come first."""
_LOWER_HALF = 0xFFFFFFFF


class _Instruction(NamedTuple):
    code: int
    skip_if_true: int
    """How many of the instructions that follow are left out."""
    skip_if_false: int
    value: int

    def packed(self) -> bytes:
        return struct.pack("=HBBI", *self)


def _return(answer: int) -> _Instruction:
    return _Instruction(_RETURN, 0, 0, answer)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p))

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> _Program:
        """Return the program that gives each call the answer of its rule, and lets all others be made."""
        architecture = _ARCHITECTURES[os.uname().machine]
        program = [
            _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
            _Instruction(_EQUAL, 1, 0, architecture.audit),
            _return(refuse(errno.ENOSYS)),  # 32-bit programs have other numbers
            _Instruction(_LOAD, 0, 0, _CALL),
            _Instruction(_AT_LEAST, 0, 1, _X32),
            _return(refuse(errno.ENOSYS)),
        ]
        for rule in rules:
            block = _block(rule)
            for numbers in rule.calls.values():
                number = numbers[architecture.column]
                if number is not None:
                    program.append(_Instruction(_EQUAL, 0, len(block), number))
                    program += block
        program.append(_return(ALLOW))
        packed = b"".join([instruction.packed() for instruction in program])
        return cls(len(program), packed)


def _block(rule: Rule) -> list[_Instruction]:
    """Return the instructions for a call that has a rule; each way through them ends with an answer."""
    if rule.argument is None:
        return [_return(rule.answer)]
    on_match = rule.answer
    otherwise = ALLOW
    test = _EQUAL
    if rule.flags:
        test = _ANY_BIT
        values: Sequence[int] = [rule.flags]
    elif rule.values:
        values = rule.values
    else:
        values = rule.allowed
        on_match = ALLOW
        otherwise = rule.answer
    block = [_Instruction(_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument)]
    for place, value in enumerate(values):
        rest = len(values) - place  # the other tests, and the answer where none matches
        block.append(_Instruction(test, rest, 0, value & _LOWER_HALF))
    return [*block, _return(otherwise), _return(on_match)]

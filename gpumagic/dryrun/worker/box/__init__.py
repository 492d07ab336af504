"""What keeps a dry run from having effects: the machine's kernel, for C code and started programs as for Python.

    files.py      a private view of the file system, network and names of its own, where namespaces are allowed; and
                  no writing elsewhere, no look into other processes
    seccomp.py    no connections, signals, programs, mounts; calls that a user should hear of are told
    watch.py      the other end: what was refused, in words

`enter` is called in the fork that will run the cell, before anything of the user's runs there. Each layer holds alone;
what none of them enforces on this machine is in `Box.missing`, and the report says it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
from typing import NamedTuple

from gpumagic.dryrun.worker.box import files, seccomp, watch
from gpumagic.dryrun.worker.box.seccomp import NOTIFY, Rule, refuse

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_NAMESPACES = 0x7E020000
"""`CLONE_NEW*`, for `clone`."""
_DEVICE_FILE = 0o020000
"""The bit of a file's mode that block and character devices share, and nothing else has."""
_SETS_OWNER = (8, 15)
"""`F_SETOWN` and `F_SETOWN_EX`, which tell a file whom to signal."""
_CONTROLS = (0x8901, 0x8902, *watch.SETS_FLAGS)
"""The same by `ioctl` (`FIOSETOWN`, `SIOCSPGRP`), and a file's flags, which take no right to write to it."""
_DATAGRAMS = tuple(2 | flags for flags in (0, 0x80000, 0x800, 0x80800))
"""`SOCK_DGRAM`, also closed by exec and not waiting: either end of a pair can send to any path."""
_INTERNET = (socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_NETLINK", 16))


_FILES, _SIGNALS = "files that C code removes or renames", "signals to other processes"
_DEVICE_FILES = "device files that C code writes to"  # others than the administrator have hardly any
_CONNECTIONS = "connections that C code makes"


class Box(NamedTuple):
    """What is enforced.

    Attributes:
        stage: a descriptor of where that lies which is written; None if it has no files of its own to write to.
        has_network: whether connections can be made, within a network that has this process alone.
        listener: where `watch` hears of refused calls.
        missing: what is not enforced, in words.
    """

    stage: int | None
    has_network: bool
    listener: int | None
    missing: tuple[str, ...]

    @property
    def has_files(self) -> bool:
        """Whether what is written lies in a view of the process's own and can be read back there."""
        return self.stage is not None

    def written(self) -> list[str]:
        """Return in words what was done to the files of the process's own."""
        try:
            return [] if self.stage is None else list(files.written(self.stage))
        except OSError:  # the cell has closed descriptors that it had not opened
            return []


def enter(*, listens: bool = False) -> Box:
    """Close this process in, which has one thread, for good.

    Args:
        listens: whether the other end will watch `Box.listener`.
    """
    if sys.platform != "linux":
        _no_growing_files()
        return Box(None, has_network=False, listener=None, missing=(_FILES, _SIGNALS, _CONNECTIONS))
    stage, has_network = files.enter()
    has_files = stage is not None
    if has_network:
        _switch_loopback_on()
    files.drop_capabilities()
    writable = [*_DEVICES, *(files.folders() if has_files else ())]
    missing = []
    if not files.restrict(writable):
        if not has_files:
            _no_growing_files()
            missing.append(_FILES)
        elif os.geteuid() == 0:
            missing.append(_DEVICE_FILES)
    try:
        listener = seccomp.install(_rules(has_files=has_files, has_network=has_network), listens=listens)
    except OSError:
        listener = None
        missing += [_SIGNALS, *(() if has_network else (_CONNECTIONS,))]
    return Box(stage, has_network, listener, tuple(missing))


def _no_growing_files() -> None:
    """Let the system refuse every byte to a file (POSIX)."""
    import resource
    import signal

    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _switch_loopback_on() -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def _rules(*, has_files: bool, has_network: bool) -> list[Rule]:
    """Return what the kernel refuses; of two rules for a call the first holds."""
    missing, own = refuse(errno.ENOSYS), (0, os.getpid())
    return [
        # In a network of its own there is this process alone; but sockets of the Unix family reach others by a path.
        Rule(["socket"], NOTIFY, argument=0, allowed=_INTERNET if has_network else ()),
        Rule(["socketpair"], NOTIFY, argument=1, values=_DATAGRAMS),
        Rule(["connect"], NOTIFY),
        Rule(["sendto"], NOTIFY, argument=4, allowed=(0,)),
        Rule(["execve", "execveat"], NOTIFY),
        Rule(["kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"], NOTIFY, argument=0, allowed=own),
        Rule(["tkill", "pidfd_send_signal", "pidfd_getfd", "ptrace", "process_vm_readv", "process_vm_writev"], NOTIFY),
        Rule(["process_madvise", "process_mrelease", "kcmp", "move_pages", "migrate_pages"], NOTIFY),
        Rule(["sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "prlimit64"], NOTIFY,
             argument=0, allowed=own),
        Rule(["setpriority", "ioprio_set"], NOTIFY, argument=1, allowed=own),
        Rule(["setsid", "setpgid"], refuse(0)),  # as if it were done: what ends the group ends all that the cell starts
        Rule(["fcntl"], NOTIFY, argument=1, values=_SETS_OWNER),
        Rule(["ioctl"], NOTIFY, argument=1, values=_CONTROLS),
        # Memory and queues that other processes know by a number; torch's and multiprocessing's have paths.
        Rule(["shmget", "shmat", "shmctl", "msgget", "semget", "mq_open"], missing),
        *([] if has_files else [Rule(
            ["chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utime", "utimes",
             "futimesat", "utimensat"], NOTIFY)]),
        Rule(["setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr",
              "removexattrat"], refuse(errno.ENOTSUP)),
        Rule(["mknod"], NOTIFY, argument=1, flags=_DEVICE_FILE),
        Rule(["mknodat"], NOTIFY, argument=2, flags=_DEVICE_FILE),
        Rule(["name_to_handle_at", "open_by_handle_at"], NOTIFY),
        Rule(["mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "open_tree", "move_mount", "fsopen",
              "fsconfig", "fsmount", "fspick", "mount_setattr"], NOTIFY),
        Rule(["clone"], NOTIFY, argument=0, flags=_NAMESPACES),
        Rule(["clone3"], missing),  # its flags lie in memory; the C library then takes `clone`
        Rule(["sethostname", "setdomainname", "reboot", "swapon", "swapoff", "init_module", "finit_module",
              "delete_module", "kexec_load", "kexec_file_load", "settimeofday", "clock_settime", "clock_adjtime",
              "adjtimex", "acct", "quotactl", "quotactl_fd", "syslog", "vhangup", "add_key", "request_key", "keyctl",
              "bpf", "perf_event_open", "userfaultfd", "fanotify_init", "iopl", "ioperm"], NOTIFY),
        Rule(["io_uring_setup"], missing),  # what it does passes every filter
    ]  # fmt: skip

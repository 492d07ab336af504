"""The warm process's end of a box: it hears which calls of a dry run the kernel refused, and says them in words."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections import Counter
from pathlib import Path

from gpumagic.dryrun.effects import ASKS_THE_MACHINE, COMPILERS
from gpumagic.dryrun.worker.box import seccomp
from gpumagic.dryrun.worker.box.seccomp import Refused

_PATIENCE = 5
"""Connections to the same place that are refused before a cell is taken to wait for somebody."""
_NAMES_PORT = 53
_NAME_CACHE = (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
"""How C asks for a name, also for this host's own: a server of DNS, and before it the machine's cache (nscd)."""
SETS_FLAGS = (0x40086602, 0x40046602, 0x401C5820)
"""`FS_IOC_SETFLAGS`, in 64 and 32 bits, and `FS_IOC_FSSETXATTR`."""
_SIGNAL = frozenset({
    "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal", "fcntl", "ioctl",
})  # fmt: skip
_LOOKS = frozenset({"pidfd_getfd", "ptrace", "process_vm_readv", "process_vm_writev"})
NOT_DONE = "which a dry run does not do"
_LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""Tables of sockets, and the state of one that waits for anybody."""
_PAGE = 4096
"""What follows in memory may not be there."""


class Watch:
    """The calls of one dry run that the kernel refuses.

    Args:
        control: the socket through which the dry run hands over its listener.

    Attributes:
        effects: what was refused, in words, each once.
        waits_for: what it asks for again and again, such as a connection to another rank.
    """

    def __init__(self, control: socket.socket) -> None:
        self.effects: dict[str, None] = {}
        self.waits_for: str | None = None
        self._refused: Counter[str] = Counter()
        self._control: socket.socket | None = control
        self._listener: int | None = None

    def fileno(self) -> int:
        """Return what to wait for; -1 where there is nothing more to come."""
        if self._listener is not None:
            return self._listener
        return -1 if self._control is None else self._control.fileno()

    def hear(self) -> None:
        """Take what has come: the listener, or a call that waits for its answer."""
        if self._listener is None:
            assert self._control is not None
            _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
            self._listener = next(iter(descriptors), None)
            self._control.close()
            self._control = None
            return
        waiting = seccomp.next_refused(self._listener)
        if waiting is not None:
            number, call = waiting
            seccomp.answer(self._listener, number, self._answer(call))

    def close(self) -> None:
        """Close both."""
        if self._control is not None:
            self._control.close()
        if self._listener is not None:
            os.close(self._listener)
        self._control = self._listener = None

    def _answer(self, call: Refused) -> int | None:
        """Return the error of a call, None where it is made; what the user should hear of is noted."""
        if call.name in {"execve", "execveat"}:
            return self._start(_text_of(call.pid, call.arguments[call.name == "execveat"]))
        if call.name in {"connect", "sendto"}:
            return self._reach(call)
        if call.name in {"socket", "socketpair"}:
            if tuple(call.arguments[:2]) != _NAME_CACHE:
                self.effects["opens a connection"] = None
            return errno.EAFNOSUPPORT
        what = f"calls {call.name}"
        if call.name == "ioctl" and call.arguments[1] & 0xFFFFFFFF in SETS_FLAGS:
            what = "changes the flags of a file"
        elif call.name in _SIGNAL:
            what = "signals another process"
        elif call.name in _LOOKS:
            what = "looks into another process"
        self.effects[what] = None
        return errno.EPERM

    def _start(self, program: str) -> int | None:
        name = os.path.basename(program)  # noqa: PTH119  # it may be no path at all
        if name in ASKS_THE_MACHINE or COMPILERS.fullmatch(name):
            return None
        self.effects[f"starts a program{f' ({name})' if name else ''}"] = None
        return errno.EPERM

    def _reach(self, call: Refused) -> int | None:
        is_connection = call.name == "connect"
        family, host, port = _address_of(call.pid, call.arguments[1 if is_connection else 4])
        if family == socket.AF_NETLINK or is_listening(port, f"/proc/{call.pid}/net"):
            return None
        if port != _NAMES_PORT:
            effect = f"{'opens a connection' if is_connection else 'sends data'}{f' to {host}:{port}' if host else ''}"
            self.effects[effect] = None
            self._refused[effect] += 1
            if self._refused[effect] > _PATIENCE:
                self.waits_for = effect
        return errno.ECONNREFUSED


def is_listening(port: int, network: str = "/proc/self/net") -> bool:
    """Return whether somebody listens at a port in the network of a process."""
    for name, listens in _LISTENS.items():
        with contextlib.suppress(OSError):
            for line in Path(network, name).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == listens and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False


def _address_of(pid: int, pointer: int) -> tuple[int, str, int]:
    """Return the family, host and port of a socket's address in another process; an empty host for other families."""
    found = _bytes_of(pid, pointer, 28)
    family = int.from_bytes(found[:2], sys.byteorder)
    port = int.from_bytes(found[2:4], "big")
    if family == socket.AF_INET:
        return family, socket.inet_ntop(family, found[4:8]), port
    if family == socket.AF_INET6:
        return family, socket.inet_ntop(family, found[8:24]), port
    return family, "", 0


def _text_of(pid: int, pointer: int) -> str:
    """Return the text at an address, as long as a path can be; by pages, for the one after its last may be missing."""
    text = b""
    while b"\0" not in text and len(text) < _PAGE:  # PATH_MAX is a page
        start = pointer + len(text)
        page = _bytes_of(pid, start, _PAGE - start % _PAGE)
        if not page:
            break
        text += page
    return text.partition(b"\0")[0].decode(errors="replace")


def _bytes_of(pid: int, pointer: int, count: int) -> bytes:
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(pointer)
            return memory.read(count)
    except (OSError, ValueError, OverflowError):
        return b""

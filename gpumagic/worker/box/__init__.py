"""What keeps a dry run from having effects: the machine's kernel, for C code and started programs as for Python.

    files.py      a private view of the file system, network and names of its own, where namespaces are allowed; and
                  no writing elsewhere, no look into other processes
    seccomp.py    no connections, signals, programs; calls that a user should hear of are told

`enter` is called in the fork that will run the cell, before anything of the user's runs there. Each layer holds alone;
what none of them enforces on this machine is in `Box.missing`, and the report says it. `Watch` is the other end, in the
warm process: it hears which calls the kernel refused, and says them in words.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from gpumagic.dryrun.effects import ASKS_THE_MACHINE, COMPILERS
from gpumagic.worker.box import files, seccomp

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FILES, _SIGNALS = "files that C code removes or renames", "signals to other processes"
_DEVICE_FILES = (
    "device files that C code writes to"  # others than the administrator have hardly any
)
_CONNECTIONS = "connections that C code makes"


class Box(NamedTuple):
    """What is enforced.

    Attributes:
        stage: a descriptor of where that lies which is written; None if it has no files of its own to write to.
        listener: where `Watch` hears of refused calls.
        missing: what is not enforced, in words.
    """

    stage: int | None
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


def enter() -> Box:
    """Close this process in, which has one thread, for good; `Box.listener` is for the other end to watch."""
    if sys.platform != "linux":
        _let_no_file_grow()
        return Box(None, None, (_FILES, _SIGNALS, _CONNECTIONS))
    stage, has_network = files.enter()
    has_files = stage is not None
    if has_network:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
        ):
            fcntl.ioctl(
                any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1)
            )  # SIOCSIFFLAGS, IFF_UP
    files.drop_rights()
    writable = [*_DEVICES, *(files.folders() if has_files else ())]
    missing = []
    if not files.restrict(writable):
        if not has_files:
            _let_no_file_grow()
            missing.append(_FILES)
        elif os.geteuid() == 0:
            missing.append(_DEVICE_FILES)
    try:
        listener = seccomp.install(seccomp.rules(has_files=has_files, has_network=has_network))
    except OSError:
        listener = None
        missing += [_SIGNALS, *(() if has_network else (_CONNECTIONS,))]
    return Box(stage, listener, tuple(missing))


def _let_no_file_grow() -> None:
    """Let the system refuse every byte to a file (POSIX)."""
    import resource
    import signal

    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


# ---- The other end

_NAMES_PORT = 53
_NAME_CACHE = (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
"""How C asks for a name, also for this host's own: a server of DNS, and before it the machine's cache (nscd)."""
_IN_WORDS = {
    **dict.fromkeys(
        (
            "kill",
            "tkill",
            "tgkill",
            "rt_sigqueueinfo",
            "rt_tgsigqueueinfo",
            "pidfd_send_signal",
            "fcntl",
            "ioctl",
        ),
        "signals another process",
    ),
    **dict.fromkeys(
        ("pidfd_getfd", "ptrace", "process_vm_readv", "process_vm_writev"),
        "looks into another process",
    ),
}
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
    """

    def __init__(self, control: socket.socket) -> None:
        self.effects: dict[str, None] = {}
        self._descriptor, self._is_listener = control.detach(), False

    def fileno(self) -> int:
        """Return what to wait for; -1 where there is nothing more to come."""
        return self._descriptor

    def hear(self) -> None:
        """Take what has come: the listener, or a call that waits for its answer."""
        if not self._is_listener:
            with socket.socket(fileno=self._descriptor) as control:
                _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            self._descriptor, self._is_listener = next(iter(descriptors), -1), True
            return
        call = seccomp.next_refused(self._descriptor)
        if call is not None:
            seccomp.answer(self._descriptor, call, self._answer(call))

    def close(self) -> None:
        """Hear no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _answer(self, call: seccomp.Refused) -> int | None:
        """Return the error of a call, None where it is made; what the user should hear of is noted."""
        what = _IN_WORDS.get(call.name, f"calls {call.name}")
        if call.name in {"execve", "execveat"}:
            program = os.path.basename(_text_of(call.pid, call.arguments[call.name == "execveat"]))  # noqa: PTH119
            if program in ASKS_THE_MACHINE or COMPILERS.fullmatch(program):
                return None
            what = f"starts a program{f' ({program})' if program else ''}"
        elif call.name in {"connect", "sendto"}:
            return self._reach(call)
        elif call.name in {"socket", "socketpair"}:
            if tuple(call.arguments[:2]) != _NAME_CACHE:
                self.effects["opens a connection"] = None
            return errno.EAFNOSUPPORT
        elif call.name == "ioctl" and call.arguments[1] & 0xFFFFFFFF in seccomp.SETS_FLAGS:
            what = "changes the flags of a file"
        self.effects[what] = None
        return errno.EPERM

    def _reach(self, call: seccomp.Refused) -> int | None:
        is_connection = call.name == "connect"
        family, host, port = _address_of(call.pid, call.arguments[1 if is_connection else 4])
        if family == socket.AF_NETLINK or _is_listening(port, f"/proc/{call.pid}/net"):
            return None
        if port != _NAMES_PORT:
            effect = f"{'opens a connection' if is_connection else 'sends data'}{f' to {host}:{port}' if host else ''}"
            self.effects[effect] = None
        return errno.ECONNREFUSED


def _is_listening(port: int, network: str) -> bool:
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

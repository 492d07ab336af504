"""What keeps a dry run from having effects: the operating system's kernel, for C code and programs as for Python.

    files.py      a private view of the file system, a network and names of its own, where namespaces are allowed; and
                  no writing elsewhere, no look into other processes
    seccomp.py    no connections, signals, programs; calls that a user should hear of are reported

`enter` is called in the fork that will run the cell, before anything of the user's runs there. Each layer holds alone;
what none of them enforces on this machine is in `Box.missing`, and the report says it. `Watch` is the other end, in the
warm process of the worker: it hears which calls the kernel refused, and says them in words.
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

from gpumagic.dryrun.effects import ASKS_THE_MACHINE, COMPILERS, REACHES, Effect
from gpumagic.worker.box import files, seccomp

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""Device files that anybody may write to."""
_FILES = "files that C code removes or renames"
_DEVICE_FILES = "device files that C code writes to"
_SIGNALS = "signals to other processes"
_CONNECTIONS = "connections that C code makes"


class Box(NamedTuple):
    """What is enforced.

    Attributes:
        stage: a descriptor of the folder that keeps what is written; None if the process has no files of its own.
        listener: the descriptor from which `Watch` hears of refused calls.
        missing: what is not enforced, in words.
    """

    stage: int | None
    listener: int | None
    missing: tuple[str, ...]

    @property
    def has_files(self) -> bool:
        """Whether what is written lies in a private view of the process's own, and can be read back there."""
        return self.stage is not None

    def written(self) -> list[Effect]:
        """Return what was done to the files of the process's own."""
        if self.stage is None:
            return []
        try:
            return list(files.written(self.stage))
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
        _start_loopback()
    files.drop_rights()
    writable = [*_DEVICES]
    if has_files:
        writable += files.folders()
    missing = []
    if not files.restrict(writable):
        if not has_files:
            _let_no_file_grow()
            missing.append(_FILES)
        elif os.geteuid() == 0:  # others than the administrator may write to hardly any
            missing.append(_DEVICE_FILES)
    try:
        listener = seccomp.install(
            seccomp.rules(has_files=has_files, has_network=has_network)
        )
    except OSError:
        listener = None
        missing.append(_SIGNALS)
        if not has_network:
            missing.append(_CONNECTIONS)
    return Box(stage, listener, tuple(missing))


_SET_INTERFACE_FLAGS = 0x8914
"""SIOCSIFFLAGS."""
_IS_UP = 1
"""IFF_UP."""


def _start_loopback() -> None:
    """Let this process reach itself in a network of its own, in which nothing is up yet."""
    interface = struct.pack("16sh14x", b"lo", _IS_UP)
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
    ):
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, interface)


def _let_no_file_grow() -> None:
    """Have the system refuse every byte that is written to a file (POSIX)."""
    import resource
    import signal

    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


# ---- The other end

_NAMES_PORT = 53
_NAME_CACHE = (
    socket.AF_UNIX,
    socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
)
"""How C asks for a name, also for this host's own: a server of DNS, and before it the machine's cache (nscd)."""
_CONNECTS = Effect(REACHES["socket.connect"], reaches_others=True)
_SIGNALS_OTHERS = Effect(REACHES["os.kill"], reaches_others=True)
_LOOKS_INTO_OTHERS = Effect("looks into another process", reaches_others=True)
_SETS_FLAGS = Effect("changes the flags of a file")
_EFFECTS = {
    **dict.fromkeys(("kill", "tkill", "tgkill", "pidfd_send_signal"), _SIGNALS_OTHERS),
    **dict.fromkeys(("rt_sigqueueinfo", "rt_tgsigqueueinfo"), _SIGNALS_OTHERS),
    **dict.fromkeys(
        ("fcntl", "ioctl"), _SIGNALS_OTHERS
    ),  # which set whom a file signals
    **dict.fromkeys(("pidfd_getfd", "ptrace"), _LOOKS_INTO_OTHERS),
    **dict.fromkeys(("process_vm_readv", "process_vm_writev"), _LOOKS_INTO_OTHERS),
}
"""What system calls do that are refused, by the call's name; others are called by their names."""
_LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""The system's tables of sockets, and the state in them of one that waits for anybody."""
_PAGE = 4096


class Watch:
    """Answers the calls of one dry run that the kernel refuses, and notes them.

    Args:
        control: the socket through which the dry run hands over its listener.

    Attributes:
        effects: what was refused, each once.
    """

    def __init__(self, control: socket.socket) -> None:
        self.effects: dict[Effect, None] = {}
        self._descriptor = control.detach()
        self._is_listener = False

    def fileno(self) -> int:
        """Return what to wait for; -1 where there is nothing more to come."""
        return self._descriptor

    def hear(self) -> None:
        """Take what has come: the listener, or a call that waits for its answer."""
        if not self._is_listener:
            with socket.socket(fileno=self._descriptor) as control:
                _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            self._descriptor = descriptors[0] if descriptors else -1
            self._is_listener = True
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
        """Return the error that a call fails with, None where it is made; note what the user should hear of."""
        if call.name == "execve":
            return self._start(_text_of(call.pid, call.arguments[0]))
        if call.name == "execveat":
            return self._start(_text_of(call.pid, call.arguments[1]))
        if call.name == "connect":
            return self._reach(call.pid, call.arguments[1], "socket.connect")
        if call.name == "sendto":
            return self._reach(call.pid, call.arguments[4], "socket.sendto")
        if call.name in {"socket", "socketpair"}:
            if call.arguments[:2] != _NAME_CACHE:
                self.effects[_CONNECTS] = None
            return errno.EAFNOSUPPORT
        effect = _EFFECTS.get(call.name) or Effect(f"calls {call.name}")
        if (
            call.name == "ioctl"
            and call.arguments[1] & _LOWER_HALF in seccomp.SETS_FLAGS
        ):
            effect = _SETS_FLAGS
        self.effects[effect] = None
        return errno.EPERM

    def _start(self, path: str) -> int | None:
        """Answer the start of a program."""
        program = os.path.basename(path)  # noqa: PTH119  # it may be empty
        if program in ASKS_THE_MACHINE or COMPILERS.fullmatch(program):
            return None
        text = f"starts a program ({program})" if program else "starts a program"
        self.effects[Effect(text, reaches_others=True)] = None
        return errno.EPERM

    def _reach(self, pid: int, pointer: int, event: str) -> int | None:
        """Answer a connection, or data that is sent.

        Args:
            pid: the process that made the call.
            pointer: where in it the address is to which it goes.
            event: the same by Python's name.
        """
        address = _address_of(pid, pointer)
        if address.family == socket.AF_NETLINK or _is_listening(
            address.port, f"/proc/{pid}/net"
        ):
            return None
        if address.port != _NAMES_PORT:
            text = REACHES[event]
            if address.host:
                text += f" to {address.host}:{address.port}"
            self.effects[Effect(text, reaches_others=True)] = None
        return errno.ECONNREFUSED


_LOWER_HALF = 0xFFFFFFFF
"""Of an argument, which is all that the call itself looks at."""


def _is_listening(port: int, network: str) -> bool:
    """Return whether somebody listens at a port in the network of a process."""
    for table, listens in _LISTENS.items():
        with contextlib.suppress(OSError):
            text = Path(network, table).read_text(encoding="ascii")
            for line in text.splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                _, _, local_port = local.rpartition(":")
                if state == listens and int(local_port, 16) == port:
                    return True
    return False


class _Address(NamedTuple):
    family: int
    host: str = ""
    """Empty for families other than the internet's."""
    port: int = 0


def _address_of(pid: int, pointer: int) -> _Address:
    """Return the address of a socket at a place in the memory of another process."""
    content = _bytes_of(pid, pointer, 28)
    family = int.from_bytes(content[:2], sys.byteorder)
    port = int.from_bytes(content[2:4], "big")
    if family == socket.AF_INET:
        return _Address(family, socket.inet_ntop(family, content[4:8]), port)
    if family == socket.AF_INET6:
        return _Address(family, socket.inet_ntop(family, content[8:24]), port)
    return _Address(family)


def _text_of(pid: int, pointer: int) -> str:
    """Return the text at an address of another process, as long as a path can be, which is a page (PATH_MAX).

    It is read page by page: the one after that on which the text ends may be missing.
    """
    text = b""
    while b"\0" not in text and len(text) < _PAGE:
        start = pointer + len(text)
        left_on_page = _PAGE - start % _PAGE
        more = _bytes_of(pid, start, left_on_page)
        if not more:
            break
        text += more
    before_end, _, _ = text.partition(b"\0")
    return before_end.decode(errors="replace")


def _bytes_of(pid: int, pointer: int, count: int) -> bytes:
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(pointer)
            return memory.read(count)
    except (OSError, ValueError, OverflowError):
        return b""

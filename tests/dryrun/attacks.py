"""Cells that try to have an effect outside of their dry run, and a process that looks whether they had one.

    python tests/dryrun/attacks.py {namespaces,container,user}

dry-runs each and prints, as JSON, what got out of it and what its report says. `container` is without namespaces, as in
Docker's default profile; `user` is without the administrator's rights. What could be undone is tried for real, on files,
processes and servers of this test's own; what would change the machine is tried with the values that it has.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PRELUDE = """
import ctypes, os, signal, socket, struct, subprocess, sys, threading
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
def denied(result):
    assert result < 0, "it was done"
def quietly(call, *args):
    try:
        call(*args)
    except Exception:
        pass
at = (ctypes.c_char * 16)(*struct.pack("=H", 2), *struct.pack("!H", port), 127, 0, 0, 1)
x = torch.ones(9, device=device)
"""

ATTACKS = {
    # Other machines
    "a connection": "quietly(socket.create_connection, ('127.0.0.1', port))",
    "a connection by C": "s = libc.socket(2, 1, 0)\nlibc.connect(s, at, 16)",
    "a connection of a thread": """
t = threading.Thread(target=quietly, args=(socket.create_connection, ("127.0.0.1", port)))
t.start(); t.join()""",
    "a datagram": "quietly(lambda: socket.socket(2, 2).sendto(b'x', ('127.0.0.1', udp)))",
    "a datagram by C": """
to = (ctypes.c_char * 16)(*struct.pack("=H", 2), *struct.pack("!H", udp), 127, 0, 0, 1)
libc.sendto(libc.socket(2, 2, 0), b"x", 1, 0, to, 16)""",
    "a connection of the Unix family": "quietly(lambda: socket.socket(1).connect(path))",
    "a connection of the Unix family by C": """
at = struct.pack("=H", 1) + path.encode() + bytes(108 - len(path))
libc.connect(libc.socket(1, 1, 0), at, len(at))""",
    "a connection by libcurl, or whatever else reaches out": "quietly(__import__('urllib.request').request.urlopen, f'http://127.0.0.1:{port}')",
    "torch's store": "quietly(lambda: torch.distributed.TCPStore('127.0.0.1', port, is_master=False, timeout=__import__('datetime').timedelta(seconds=1)))",
    # Programs
    "a program": "quietly(subprocess.run, ['touch', made])",
    "a program by C": "libc.system(f'touch {made}'.encode())",
    "a program by posix_spawn": "quietly(os.posix_spawn, '/usr/bin/touch', ['touch', made], {})",
    "a program in a fork by C": """
if libc.syscall(57 if os.uname().machine == "x86_64" else 220, 17, 0, 0, 0, 0) == 0:
    libc.execl(b"/usr/bin/touch", b"touch", made.encode(), None)
    os._exit(0)
__import__("time").sleep(0.1); [None for _ in range(3_000_000)]""",
    "a process that connects": """
import multiprocessing
quietly(lambda: multiprocessing.get_context("spawn").Process(target=socket.create_connection, args=(("127.0.0.1", port),)).start())""",
    "a fork that connects": """
def child():
    pid = os.fork()
    if pid == 0:
        quietly(socket.create_connection, ("127.0.0.1", port)); os._exit(0)
    os.waitpid(pid, 0)
quietly(child)""",
    "a shell command": "quietly(os.system, f'touch {made}')",
    # Other processes
    "a signal": "quietly(os.kill, victim, 9)",
    "a signal by C": "denied(libc.kill(victim, 9))",
    "a signal to a group": "denied(libc.killpg(victim, 9))",
    "a signal to everybody": "denied(libc.kill(-victim, 9))",
    "a signal through a descriptor": """
fd = os.pidfd_open(victim)
quietly(signal.pidfd_send_signal, fd, 9)""",
    "a signal to a thread": "denied(libc.syscall(200 if os.uname().machine == 'x86_64' else 130, victim, 9))",
    "a queued signal": "denied(libc.sigqueue(victim, 9, 0))",
    "tracing": "denied(libc.ptrace(16, victim, 0, 0))",
    "reading another's memory": "denied(libc.process_vm_readv(victim, None, 0, None, 0, 0))",
    "writing another's memory": "denied(libc.process_vm_writev(victim, None, 0, None, 0, 0))",
    "another's memory as a file": "quietly(open, f'/proc/{victim}/mem', 'r+b')\nassert libc.open(f'/proc/{victim}/mem'.encode(), 2) < 0",
    "another's descriptors": """
fd = libc.open(f"/proc/{victim}/fd/1".encode(), 1)
if fd >= 0: os.write(fd, b"x")""",
    "another's descriptor, taken": "denied(libc.syscall(438, os.pidfd_open(victim), 1, 0))",
    "another's priority": "denied(libc.setpriority(0, victim, 5))",
    "another's processors": "denied(libc.sched_setaffinity(victim, 8, struct.pack('Q', 1)))",
    "another's limits": "denied(libc.prlimit(victim, 7, struct.pack('QQ', 9, 9), None))",
    "another's score when memory runs out": "quietly(Path(f'/proc/{victim}/oom_score_adj').write_text, '500')",
    # Files
    "a file": "quietly(lambda: open(made, 'w').write('x'))",
    "a file by C": "fd = libc.open(made.encode(), 0o101, 0o600)\nlibc.write(fd, b'x', 1)",
    "a file of the user's": "quietly(lambda: open(kept, 'w').write('x'))",
    "a file of the user's by C": "fd = libc.open(kept.encode(), 1)\nlibc.write(fd, b'x', 1)",
    "a file cut short": "libc.truncate(kept.encode(), 0)",
    "a file removed": "quietly(os.remove, kept)",
    "a file removed by C": "libc.unlink(kept.encode())",
    "a file renamed by C": "libc.rename(kept.encode(), made.encode())",
    "a file linked by C": "libc.link(kept.encode(), made.encode())",
    "a link by C": "libc.symlink(kept.encode(), made.encode())",
    "a folder by C": "libc.mkdir(made.encode(), 0o700)",
    "a pipe by C": "libc.mkfifo(made.encode(), 0o600)",
    "a mapped file": "quietly(lambda: torch.from_file(kept, shared=True, size=1, dtype=torch.uint8).fill_(7))",
    "a file mapped by numpy": "quietly(lambda: __import__('numpy').memmap(kept, mode='r+', dtype='uint8', shape=(1,)).fill(7))",
    "a file's mode by C": "libc.chmod(kept.encode(), 0o600)",
    "a file's time by C": "libc.utimes(kept.encode(), struct.pack('qqqq', 1, 0, 1, 0))",
    "a file's attribute": "quietly(os.setxattr, kept, 'user.x', b'1')",
    "a file by sendfile": """
def copy():
    source, target = os.open(kept, 0), libc.open(made.encode(), 0o101, 0o600)
    os.sendfile(target, source, 0, 3)
quietly(copy)""",
    "shared memory": "quietly(lambda: open(shm, 'r+').write('x'))\nfd = libc.shm_open(os.path.basename(shm).encode(), 2, 0)\nif fd >= 0: libc.write(fd, b'x', 1)",
    "torch.save": "quietly(torch.save, x, made)",
    "a pickled dataset": "quietly(lambda: __import__('pickle').dump([1], open(made, 'wb')))",
    "a database": "quietly(lambda: __import__('sqlite3').connect(made).execute('create table t (a)'))",
    "a log": """
def log():
    import logging
    logging.basicConfig(filename=made, force=True)
    logging.warning("x")
quietly(log)""",
    # The machine, with what it has
    "the host's name": "name = os.uname().nodename.encode()\ndenied(libc.sethostname(name, len(name)))",
    "a mount": "denied(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None))",
    "a namespace": "denied(libc.unshare(0x10000000))",
    "a root": "denied(libc.chroot(b'/'))",
    "a device's mode": "denied(libc.chmod(b'/dev/null', 0o666))",
    "a setting of the kernel's": "path = '/proc/sys/vm/swappiness'\nassert libc.open(path.encode(), 1) < 0",
    "a device file": "denied(libc.mknod(made.encode(), 0o060600, 0xfe00))",
    "io_uring": "denied(libc.syscall(425, 8, ctypes.create_string_buffer(120)))",
    "shared memory of System V": "denied(libc.shmget(0x6f75, 4096, 0o1600))",
    "a queue of messages": "denied(libc.mq_open(b'/gpumagic-test', 0o102, 0o600, None))",
    "the clock": "now = struct.pack('qq', int(__import__('time').time()), 0)\ndenied(libc.clock_settime(0, now))",
    "a key": "denied(libc.syscall(248 if os.uname().machine == 'x86_64' else 217, b'user', b'x', b'y', 1, -3))",
    "the descriptors of whoever": "for fd in range(3, 60):\n    quietly(os.write, fd, b'xxxxxxxxxxxxxxxx')",
}


class Outside:
    """What an attack could reach: servers, a process, files. `seen` says what has happened to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept, self.made = folder / "kept.txt", folder / "made"
        self.shm = Path("/dev/shm", f"gpumagic-test-{os.getpid()}")
        self.server, self.datagrams = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        self.renew()

    def renew(self) -> None:
        """Begin with everything in its place."""
        self.kept.write_text("precious")
        self.shm.write_text("precious")
        self.output = (self.folder / "output").open("w")
        self.victim = subprocess.Popen(["sleep", "600"], stdout=self.output, start_new_session=True)
        self.before = self._state()

    def names(self) -> dict[str, Any]:
        """Return the variables that attacks use."""
        return {
            "port": self.server.getsockname()[1], "udp": self.datagrams.getsockname()[1],
            "path": str(self.folder / "socket"), "kept": str(self.kept), "made": str(self.made), "shm": str(self.shm),
            "victim": self.victim.pid,
        }  # fmt: skip

    def seen(self) -> list[str]:
        """Return what is not as it was, and put it right."""
        sockets = {self.server: "the server", self.datagrams: "the datagram's server", self.unix: "the Unix server"}
        ready, _, _ = select.select(list(sockets), [], [], 0.02)
        told = [sockets[each] for each in ready]
        for each in ready:
            each.recv(9) if each is self.datagrams else each.accept()[0].close()
        now = self._state()
        told += [name for name, value in self.before.items() if now[name] != value]
        if told:
            if self.made.is_dir():
                self.made.rmdir()
            self.made.unlink(missing_ok=True)
            self.victim.kill()
            self.victim.wait()
            self.renew()
        return told

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.shm.unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        stat = self.kept.stat() if self.kept.exists() else None
        proc = Path(f"/proc/{self.victim.pid}")
        if self.victim.poll() is not None:
            return dict.fromkeys(self.before, "not looked at") | {"the process": self.victim.poll()}
        return {
            "the user's file": self.kept.read_text(errors="replace") if stat is not None else None,
            "its mode, time and links": stat and (stat.st_mode, stat.st_mtime_ns, stat.st_nlink),
            "its attributes": os.listxattr(self.kept) if stat is not None else None,
            "a new file": self.made.exists() or self.made.is_symlink(),
            "shared memory": self.shm.read_text(errors="replace"),
            "what the process has written": (self.folder / "output").read_text(),
            "the process": None,
            "its priority and processors": (os.getpriority(0, self.victim.pid), os.sched_getaffinity(self.victim.pid)),
            "its limits": (proc / "limits").read_text(), "its score": (proc / "oom_score_adj").read_text(),
            "the mode of /dev/null": Path("/dev/null").stat().st_ctime_ns,
        }  # fmt: skip


def without_namespaces() -> None:
    """Refuse this process what Docker's default profile refuses."""
    from gpumagic.dryrun.worker.box.seccomp import Rule, install, refuse

    install(
        [
            Rule(["unshare", "mount", "setns", "umount2", "pivot_root", "keyctl", "add_key", "bpf"], refuse(1)),
            Rule(["clone"], refuse(1), argument=0, flags=0x7E020000),
            Rule(["clone3"], refuse(38)),
        ]
    )


def without_rights() -> None:
    """Become a user that is not the administrator, in a system of users of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in ("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1"):
        Path(f"/proc/self/{name}").write_text(text)
    os.execv(sys.executable, [sys.executable, __file__, "namespaces"])  # which drops what the namespace gave


def main(how: str) -> None:
    if how == "user":
        without_rights()
    if how == "container":
        without_namespaces()
    import torch
    from device import find

    from gpumagic.dryrun import client, run, targets
    from gpumagic.dryrun.script import script_of

    device = find().name
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        outside = Outside(Path(folder))
        for name, attack in ATTACKS.items():
            namespace = {"torch": torch, "device": device, **outside.names()}
            report = run.dry_run(script_of(PRELUDE + attack), namespace, targets.choose(device, None), time_limit=60)
            print(name, file=sys.stderr, flush=True)
            results[name] = {"out": outside.seen(), "effects": report.effects, "verdict": report.verdict}
        outside.close()
        os.chdir("/")
    client.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])

"""Cells that try to have an effect outside of their dry run, and a process that looks whether they had one.

    python -m tests.dryrun.attacks {namespaces,container,user,old} [NAME ...]

dry-runs each of them, or those named, and prints, as JSON, what got out of it and what its report says. `container` is without namespaces, as in
Docker's default profile; `user` is without the administrator's rights, `old` without Landlock. What could be undone is
tried for real, on files, processes and servers of this test's own; what would change the machine is tried with the
values that it has.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pty
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    "a connection of IPv6": "quietly(socket.create_connection, ('::1', port6))",
    "a connection with the first data, by C": "libc.sendto(libc.socket(2, 1, 0), b'x', 1, 0x20000000, at, 16)",
    "a connection of asyncio": """
import asyncio
t = threading.Thread(target=quietly, args=(lambda: asyncio.run(asyncio.open_connection("127.0.0.1", port)),))
t.start(); t.join()""",
    "a connection of a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool: quietly(lambda: list(pool.map(socket.create_connection, [("127.0.0.1", port)] * 3)))""",
    "a connection to an abstract name": "quietly(lambda: socket.socket(1).connect(abstract))",
    "a datagram to an abstract name": "quietly(lambda: socket.socket(1, 2).sendto(b'x', abstract + 'd'))",
    "what sendmsg sends": "quietly(lambda: socket.socket(2, 2).sendmsg([b'x'], [], 0, ('127.0.0.1', udp)))",
    "a datagram of a pair of sockets": """
ends = socket.socketpair(1, 2)
quietly(ends[0].sendto, b"x", letters)
to = struct.pack("=H", 1) + letters.encode() + bytes(108 - len(letters))
libc.sendto(ends[0].fileno(), b"x", 1, 0, to, len(to))""",
    "a connection to the host of a virtual machine": "s = libc.socket(40, 1, 0)\nat = struct.pack('=HHIII', 40, 0, 22, 2, 0)\ndenied(libc.connect(s, at, 16))",
    "a log's server": """
import logging.handlers
handler = logging.handlers.SysLogHandler(("127.0.0.1", udp)) if os.getpid() else None
quietly(handler.emit, logging.LogRecord("x", 40, "", 1, "x", (), None))""",
    "what connects when the cell has ended": """
class Late:
    def __del__(self): quietly(socket.create_connection, ("127.0.0.1", port))
late = Late(); __import__("atexit").register(late.__del__)""",
    "a thread that stays, and connects": """
def later():
    for _ in range(20):
        quietly(socket.create_connection, ("127.0.0.1", port)); __import__("time").sleep(0.05)
threading.Thread(target=later, daemon=True).start()""",
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
    "a program of another name": "quietly(os.spawnlp, os.P_WAIT, 'touch', 'cc', made)",
    "a program by popen": "quietly(lambda: os.popen(f'touch {made}').read())",
    "a terminal of its own, and a program there": "quietly(lambda: __import__('pty').spawn(['touch', made]))",
    "a program of asyncio": """
import asyncio
async def touch(): await (await asyncio.create_subprocess_exec("touch", made)).wait()
t = threading.Thread(target=quietly, args=(lambda: asyncio.run(touch()),))
t.start(); t.join()""",
    "a program in memory": """
fd = os.memfd_create("cc")
os.write(fd, b"#!/bin/sh\\ntouch " + made.encode())
def run():
    pid = os.fork()
    if pid == 0:
        quietly(os.execve, fd, ["cc"], {}); os._exit(0)
    os.waitpid(pid, 0)
quietly(run)""",
    "a program by the loader": "quietly(subprocess.run, ['/lib64/ld-linux-x86-64.so.2', '/usr/bin/touch', made])",
    "a program that a compiler starts": "quietly(subprocess.run, ['gcc', '-wrapper', f'touch,{made}', '-c', '-x', 'c', '/dev/null', '-o', '/dev/null'])",
    "a compiler": "quietly(subprocess.run, ['gcc', '-c', '-x', 'c', '/dev/null', '-o', made])",
    "another Python": "quietly(subprocess.run, [sys.executable, '-c', f'open({made!r}, \"w\")'])",
    "a pool of processes": """
from concurrent.futures import ProcessPoolExecutor
def post():
    with ProcessPoolExecutor(1) as pool: pool.submit(os.mkdir, made).result(1)
quietly(post)""",
    "workers of a loader": """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        libc.mkdir(made.encode(), 0o700); libc.kill(victim, 9)
        quietly(socket.create_connection, ("127.0.0.1", port))
        return torch.ones(1)
quietly(lambda: list(torch.utils.data.DataLoader(Rows(), num_workers=1)))""",
    "a process that nobody waits for": """
tried, trying = os.pipe()
if libc.fork() == 0:
    os.setsid()
    for _ in range(10):
        libc.mkdir(made.encode(), 0o700); libc.kill(victim, 9)
        libc.connect(libc.socket(2, 1, 0), at, 16); os.write(trying, b"x"); __import__("time").sleep(0.05)
    os._exit(0)
os.read(tried, 1)""",
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
    "a signal to the one that started it": "denied(libc.kill(os.getppid(), 9))",
    "a signal when data arrive": """
import fcntl
ends = socket.socketpair()
quietly(fcntl.fcntl, ends[0], fcntl.F_SETOWN, victim)
quietly(fcntl.fcntl, ends[0], 10, 9)
quietly(fcntl.fcntl, ends[0], fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
ends[1].send(b"x")""",
    "a signal when data arrive, by another call": """
import fcntl
ends = socket.socketpair()
quietly(fcntl.ioctl, ends[0], 0x8901, struct.pack("i", victim))
quietly(fcntl.fcntl, ends[0], fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
ends[1].send(b"x")""",
    "a signal when a file is opened": """
import fcntl
def lease():
    fd = os.open(kept, os.O_RDONLY)
    fcntl.fcntl(fd, 15, struct.pack("ii", 1, victim)); fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    os.open(kept, os.O_WRONLY | os.O_NONBLOCK)
quietly(lease)""",
    "another's files through its root": "quietly(lambda: open(f'/proc/{victim}/root{kept}', 'w').write('x'))\nfd = libc.open(f'/proc/{victim}/root{kept}'.encode(), 1)\nif fd >= 0: libc.write(fd, b'x', 1)",
    "another's files through its folder": "fd = libc.open(f'/proc/{victim}/cwd/kept.txt'.encode(), 1)\nif fd >= 0: libc.write(fd, b'x', 1)",
    "another's group of scheduling": "fd = libc.open(f'/proc/{victim}/autogroup'.encode(), 1)\nif fd >= 0: libc.write(fd, b'5', 1)",
    "another's dump": "fd = libc.open(f'/proc/{victim}/coredump_filter'.encode(), 1)\nif fd >= 0: libc.write(fd, b'0x1', 3)",
    "another's control group": "quietly(os.mkdir, '/sys/fs/cgroup/gpumagic-test')\nassert libc.access(b'/sys/fs/cgroup/gpumagic-test', 0) < 0",
    "another's way of scheduling": "denied(libc.sched_setscheduler(victim, 3, struct.pack('i', 0)))",
    "another's turn at the disk": "denied(libc.syscall(251 if os.uname().machine == 'x86_64' else 30, 1, victim, (2 << 13) | 7))",
    "another's pages": "denied(libc.syscall(256 if os.uname().machine == 'x86_64' else 238, victim, 8, struct.pack('Q', 1), struct.pack('Q', 1)))",
    "another's namespaces": "denied(libc.setns(os.pidfd_open(victim), 0x20000))",
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
    "a file by way of any folder that is open": """
for fd in range(3, 256):
    for up in ".", "..", "../..", "../../../..":
        to = libc.openat(fd, (up + kept).encode(), 1)
        if to >= 0: libc.write(to, b"x", 1)""",
    "a file by way of the root's parents": "for to in (libc.open(b'/../../..' + kept.encode(), 1), libc.open(b'/proc/self/root/..' + kept.encode(), 1), libc.open(f'/proc/{os.getppid()}/root{kept}'.encode(), 1)):\n    if to >= 0: libc.write(to, b'x', 1)",
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
    "a file opened anew through its descriptor": "fd = os.open(kept, os.O_RDONLY)\nquietly(lambda: open(f'/proc/self/fd/{fd}', 'r+').write('x'))\nfd = libc.open(f'/proc/self/fd/{fd}'.encode(), 1)\nif fd >= 0: libc.write(fd, b'x', 1)",
    "a file mapped by C": """
fd = libc.open(kept.encode(), 2)
libc.mmap.restype = ctypes.c_void_p
to = libc.mmap(None, 4096, 3, 1, fd, 0)
if to not in (None, 2 ** 64 - 1): ctypes.memset(to, 7, 1)""",
    "a file with a hole": "fd = libc.open(kept.encode(), 2)\nlibc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4))",
    "a file copied over": "fd = libc.open(kept.encode(), 1)\nlibc.copy_file_range(os.open('/etc/hostname', 0), None, fd, None, ctypes.c_size_t(3), 0)",
    "a file exchanged": "libc.renameat2(-100, kept.encode(), -100, b'/dev/shm', 2)\nlibc.renameat2(-100, os.path.dirname(kept).encode() + b'/folder', -100, kept.encode(), 2)",
    "a file's flags": """
import fcntl
fd = os.open(kept, os.O_RDONLY)
quietly(fcntl.ioctl, fd, 0x40086602, struct.pack("l", 0x40))""",
    "a file's owner": "libc.chown(kept.encode(), 12345, 12345)",
    "a file's list of who may": "quietly(os.setxattr, kept, 'system.posix_acl_access', b'')\nlibc.fsetxattr(os.open(kept, 0), b'user.y', b'1', 1, 0)",
    "a file of no name": "fd = libc.open(os.path.dirname(made).encode(), 0o20200001 | 0o2, 0o600)\nif fd >= 0: libc.linkat(-100, f'/proc/self/fd/{fd}'.encode(), -100, made.encode(), 0x400)",
    "a folder removed": "quietly(__import__('shutil').rmtree, os.path.dirname(kept) + '/folder')\nlibc.rmdir((os.path.dirname(kept) + '/folder').encode())",
    "a folder renamed": "libc.rename((os.path.dirname(kept) + '/folder').encode(), made.encode())",
    "a socket's file": "quietly(lambda: socket.socket(1).bind(made))",
    "somebody's pipe": "fd = libc.open(fifo.encode(), 0o4001)\nif fd >= 0: libc.write(fd, b'x', 1)",
    "somebody's terminal": "fd = libc.open(terminal.encode(), 0o401)\nif fd >= 0: libc.write(fd, b'x', 1)\nquietly(lambda: open(terminal, 'w').write('x'))",
    "a terminal's mode": "libc.chmod(terminal.encode(), 0o666)",
    "shared memory of another process": "quietly(lambda: __import__('multiprocessing.shared_memory').shared_memory.SharedMemory(os.path.basename(shm)).buf.__setitem__(0, 7))",
    "shared memory removed": "quietly(os.remove, shm)\nlibc.shm_unlink(os.path.basename(shm).encode())",
    "a semaphore": "libc.sem_open(b'/gpumagic-test', 0o100, 0o600, 1)\nassert True",
    "a file of the user's home": "quietly(lambda: (Path.home() / '.gpumagic-attack').write_text('x'))\nlibc.creat(str(Path.home() / '.gpumagic-attack').encode(), 0o600)",
    "a temporary file": "quietly(__import__('tempfile').mkstemp, '', 'gpumagic-attack')",
    "numpy's file": "quietly(lambda: __import__('numpy').zeros(3).tofile(kept))",
    "a table": "quietly(lambda: __import__('pandas').DataFrame([1]).to_csv(made))",
    "a file when the cell has ended": "__import__('atexit').register(libc.mkdir, made.encode(), 0o700)",
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
    "a message to the kernel's log": "assert libc.open(b'/dev/kmsg', 1) < 0",
    "the key for emergencies": "assert libc.open(b'/proc/sysrq-trigger', 1) < 0",
    "a switch of the system's": "assert libc.open(b'/sys/kernel/mm/transparent_hugepage/enabled', 1) < 0",
    "the machine's memory": "assert libc.open(b'/dev/mem', 2) < 0",
    "a tree of mounts": "denied(libc.syscall(428, -100, b'/', 1))",
    "a file by its handle": "denied(libc.name_to_handle_at(-100, kept.encode(), struct.pack('Ii', 128, 0) + bytes(128), ctypes.byref(ctypes.c_int()), 0))",
    "a map of the kernel's": "denied(libc.syscall(321 if os.uname().machine == 'x86_64' else 280, 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(112), 128))",
    "a counter of events": "denied(libc.syscall(298 if os.uname().machine == 'x86_64' else 241, struct.pack('IIQ', 1, 128, 1) + bytes(112), 0, -1, -1, 0))",
    "watching the file system": "denied(libc.fanotify_init(0, 0))",
    "faults of memory": "denied(libc.syscall(323 if os.uname().machine == 'x86_64' else 282, 1))",
    "a semaphore of System V": "denied(libc.semget(0x6f75, 1, 0o1600))",
    "a queue of System V": "denied(libc.msgget(0x6f75, 0o1600))",
    "the clock's speed": "denied(libc.adjtimex(ctypes.create_string_buffer(256)))",
    "the domain's name": "denied(libc.setdomainname(b'(none)', 6))",
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
        self.server, self.datagrams = (
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(type=socket.SOCK_DGRAM),
        )
        self.datagrams.bind(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        self.abstract = f"\0gpumagic-test-{os.getpid()}"
        self.nameless, self.letters = (
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        )
        self.nameless.bind(self.abstract)
        self.nameless.listen()
        self.letters.bind(self.abstract + "d")
        self.box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.box.bind(str(folder / "letters"))
        self.server6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
        os.mkfifo(folder / "fifo")
        self.fifo = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        self.terminal, self.screen = pty.openpty()
        self.renew()

    def renew(self) -> None:
        """Begin with everything in its place."""
        self.kept.write_text("precious")
        (self.folder / "folder").mkdir(exist_ok=True)
        self.shm.write_text("precious")
        self.output = (self.folder / "output").open("w")
        self.victim = subprocess.Popen(["sleep", "600"], stdout=self.output, start_new_session=True)
        self.before = self._state()

    def names(self) -> dict[str, Any]:
        """Return the variables that attacks use."""
        return {
            "port": self.server.getsockname()[1], "udp": self.datagrams.getsockname()[1],
            "path": str(self.folder / "socket"), "kept": str(self.kept), "made": str(self.made), "shm": str(self.shm),
            "victim": self.victim.pid, "port6": self.server6.getsockname()[1], "abstract": self.abstract,
            "letters": str(self.folder / "letters"), "fifo": str(self.folder / "fifo"), "terminal": os.ttyname(self.screen),
        }  # fmt: skip

    def seen(self) -> list[str]:
        """Return what is not as it was, and put it right."""
        reached = {
            self.server: "the server", self.server6: "the server of IPv6", self.datagrams: "the datagram's server",
            self.unix: "the Unix server", self.nameless: "the abstract server", self.letters: "the abstract datagrams",
            self.box: "the box of letters",
            self.fifo: "the pipe", self.terminal: "the terminal",
        }  # fmt: skip
        ready, _, _ = select.select(list(reached), [], [], 0.02)
        told = [reached[each] for each in ready]
        for each in ready:
            if isinstance(each, int):
                os.read(each, 9)
            else:
                each.recv(9) if each.type == socket.SOCK_DGRAM else each.accept()[0].close()
        now = self._state()
        told += [name for name, value in self.before.items() if now[name] != value]
        if told:
            if self.made.is_dir():
                self.made.rmdir()
            self.made.unlink(missing_ok=True)
            for each in self._strays():
                each.unlink()
            self.victim.kill()
            self.victim.wait()
            self.renew()
        return told

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.shm.unlink(missing_ok=True)

    def _strays(self) -> list[Path]:
        """Return the files that attacks would leave elsewhere."""
        folders = {Path.home(), Path(tempfile.gettempdir())}
        return [
            *Path("/dev/shm").glob("sem.gpumagic-test"),
            *(f for d in folders for f in d.glob("*gpumagic-attack*")),
        ]

    def _state(self) -> dict[str, Any]:
        stat = self.kept.stat() if self.kept.exists() else None
        proc = Path(f"/proc/{self.victim.pid}")
        if self.victim.poll() is not None:
            return dict.fromkeys(self.before, "not looked at") | {"the process": self.victim.poll()}
        return {
            "the user's file": self.kept.read_text(errors="replace") if stat is not None else None,
            "its mode, time and links": stat and (stat.st_mode, stat.st_mtime_ns, stat.st_nlink, stat.st_uid),
            "its flags": stat and _flags(self.kept), "a folder": (self.folder / "folder").is_dir(),
            "files elsewhere": self._strays(),
            "its attributes": os.listxattr(self.kept) if stat is not None else None,
            "a new file": self.made.exists() or self.made.is_symlink(),
            "shared memory": self.shm.read_text(errors="replace"),
            "what the process has written": (self.folder / "output").read_text(),
            "the process": None,
            "its priority and processors": (os.getpriority(0, self.victim.pid), os.sched_getaffinity(self.victim.pid)),
            "its limits": (proc / "limits").read_text(), "its score": (proc / "oom_score_adj").read_text(),
            "its dump and group": [_text(proc / name) for name in ("coredump_filter", "autogroup", "cgroup")],
            "its way of scheduling": os.sched_getscheduler(self.victim.pid),
            "the terminal's mode": os.fstat(self.screen).st_mode,
            "the mode of /dev/null": Path("/dev/null").stat().st_ctime_ns,
        }  # fmt: skip


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _flags(path: Path) -> bytes | None:
    """Return what `chattr` sets, where the file system has it."""
    with path.open() as file:
        try:
            return fcntl.ioctl(file, 0x80086601, bytes(8))
        except OSError:
            return None


def without_namespaces() -> None:
    """Refuse this process what Docker's default profile refuses."""
    from gpumagic.worker.box.seccomp import Rule, install, refuse

    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    install(
        [
            Rule(
                refuse(1),
                {
                    "unshare": (272, 97),
                    "setns": (308, 268),
                    "keyctl": (250, 219),
                    "add_key": (248, 217),
                    "bpf": (321, 280),
                },
            ),
            Rule(refuse(1), {"clone": (56, 220)}, argument=0, flags=0x7E020000),
            Rule(refuse(38), {"clone3": (435, 435)}),
        ]
    )


def without_landlock() -> None:
    """Have no Landlock, as before Linux 5.13."""
    from gpumagic.worker.box.seccomp import Rule, install, refuse

    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    install([Rule(refuse(38), {"landlock_create_ruleset": (444, 444)})])


def without_rights(names: Sequence[str]) -> None:
    """Become a user that is not the administrator, in a system of users of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"1000 {user} 1"),
        ("gid_map", f"1000 {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)
    os.execv(
        sys.executable, [sys.executable, "-m", "tests.dryrun.attacks", "namespaces", *names]
    )  # which drops what the namespace gave


def main(how: str, *names: str) -> None:
    if how == "user":
        without_rights(names)
    if how == "container":
        without_namespaces()
    if how == "old":
        without_landlock()
    import torch

    from gpumagic.dryrun import client, run, targets
    from gpumagic.dryrun.script import script_of
    from tests.device import find

    device = find().name
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        outside = Outside(Path(folder))
        for name in names or ATTACKS:
            namespace = {"torch": torch, "device": device, **outside.names()}
            report = run.dry_run(
                script_of(PRELUDE + ATTACKS[name]),
                namespace,
                targets.choose(device, None),
                time_limit=60,
            )
            print(name, file=sys.stderr, flush=True)
            results[name] = {
                "out": outside.seen(), "effects": report.effects, "verdict": report.verdict,
                "assumed": " ".join(report.assumed),
            }  # fmt: skip
        outside.close()
        os.chdir("/")
    client.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

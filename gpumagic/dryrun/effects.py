"""What code does outside of its process, by Python's audit events.

It is asked in the worker's process while a cell is dry-run, and in the notebook's while a guarded cell runs.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

NOT_DONE = "which a dry run does not do"
PROGRAMS = frozenset(
    {
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.startfile",
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
    }
)
"""Events of starting a program or a process."""
CHANGES = frozenset(
    {
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.truncate",
        "os.link",
        "os.symlink",
    }
)
"""Events of changing a file."""
REACHES = {
    "socket.connect": "opens a connection", "socket.sendto": "sends data", "socket.sendmsg": "sends data",
    "os.kill": "signals another process", "os.killpg": "signals another process",
}  # fmt: skip
"""Events that other processes and machines hear of, in words."""
COMPILERS = re.compile(
    r"(?:[\w.-]+-)?(?:cc|gcc|g\+\+|c\+\+|clang|clang\+\+|cc1|cc1plus|collect2|ld|as|ldconfig|ptxas|nvcc|ninja)"
    r"(?:[-.](?:[\d.]+|real|wrapped))*"
)
"""Programs that torch.compile starts, and those that they start, as behind a script of the same name: what they write
is the dry run's own."""
ASKS_THE_MACHINE = frozenset({"file", "uname", "lscpu", "nvidia-smi", "rocm-smi"})
"""Programs by which Python's `platform` and libraries such as accelerate learn where they are; they change nothing."""
CACHES = ("/.cache/", "/torchinductor_", "/.triton/", "/__pycache__/", "/dev/")
"""Parts of paths that a library writes on its own account."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Effect(NamedTuple):
    """Something that code does outside of its process."""

    text: str
    """What it does, such as ``"writes the file /tmp/x"``."""
    reaches_others: bool = False
    """Whether other processes or machines may hear of it."""


def is_in_cache(path: str) -> bool:
    """Return whether a file is a library's own, in a cache."""
    return any(part in path for part in CACHES)


def of_event(event: str, args: tuple[Any, ...]) -> Effect | None:
    """Return what an audit event does to other processes, machines and files; None if nothing."""
    if event in PROGRAMS:
        return _starting(event, args)
    if event in REACHES:
        return _reaching(event, args)
    path = path_of(event, args)
    if path is None:
        return None
    if event == "open":
        return Effect(f"writes the file {path}")
    if event == "sqlite3.connect":
        return Effect(f"opens the database {path}")
    shown = [path]
    if len(args) > 1 and isinstance(args[1], str):
        shown.append(args[1])
    return Effect(f"calls {event}({', '.join(shown)})")


def _starting(event: str, args: tuple[Any, ...]) -> Effect | None:
    program = program_of(event, args)
    if program in ASKS_THE_MACHINE:
        return None
    text = "starts a process" if event.startswith("os.fork") else "starts a program"
    if program:
        text += f" ({program})"
    return Effect(text, reaches_others=True)


def _reaching(event: str, args: tuple[Any, ...]) -> Effect:
    text = REACHES[event]
    addresses = [argument for argument in args[1:] if isinstance(argument, tuple)]
    if addresses and len(addresses[0]) > 1:
        host, port, *_ = addresses[0]
        text += f" to {host}:{port}"
    return Effect(text, reaches_others=True)


def path_of(event: str, args: tuple[Any, ...]) -> str | None:
    """Return the file that an audit event changes; None where it changes none that has a name."""
    path = None
    if args and isinstance(args[0], str | bytes | os.PathLike):
        path = os.fsdecode(args[0])
    if event == "open":
        changes = isinstance(args[2], int) and bool(args[2] & _WRITES)
    elif event == "sqlite3.connect":
        changes = path not in {":memory:", ""}
    else:
        changes = event in CHANGES
    return path if changes else None


def program_of(event: str, args: tuple[Any, ...]) -> str:
    """Return the name of a program that is started, where the event has it."""
    if event == "subprocess.Popen":
        command = args[1:2]
    elif event in {"os.posix_spawn", "os.system"}:
        command = args[:1]
    else:
        command = ()
    if not command:
        return ""
    (started,) = command
    if not isinstance(
        started, str | bytes | os.PathLike
    ):  # a list of its name and its arguments
        started = next(iter(started), "")
    name = os.fsdecode(started).split(" ")[0]
    return os.path.basename(name)  # noqa: PTH119  # of bytes, too

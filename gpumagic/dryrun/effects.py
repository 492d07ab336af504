"""What code does outside of its process, by Python's audit events: asked in dry runs, and while a guarded cell runs."""

from __future__ import annotations

import os
import re
from typing import Any

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
CHANGES = frozenset(
    {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
)
REACHES = {
    "socket.connect": "opens a connection", "socket.sendto": "sends data", "socket.sendmsg": "sends data",
    "os.kill": "signals another process", "os.killpg": "signals another process",
}  # fmt: skip
OF_OTHERS = (
    "starts a program",
    "starts a process",
    "looks into another process",
    "looks up ",
    *REACHES.values(),
)
"""How sentences begin that are about other processes and machines."""
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


def of_event(event: str, args: tuple[Any, ...]) -> str | None:
    """Return what an audit event does to other processes, machines and files, in words; None if nothing."""
    if event in PROGRAMS:
        program = program_of(event, args)
        what = "process" if event.startswith("os.fork") else "program"
        return (
            None
            if program in ASKS_THE_MACHINE
            else f"starts a {what}{f' ({program})' if program else ''}"
        )
    if event in REACHES:
        to = next((each for each in args[1:] if isinstance(each, tuple)), ())
        return f"{REACHES[event]}{f' to {to[0]}:{to[1]}' if len(to) > 1 else ''}"
    path = path_of(event, args)
    if path is None:
        return None
    if event == "open":
        return f"writes the file {path}"
    if event == "sqlite3.connect":
        return f"opens the database {path}"
    return f"calls {event}({', '.join([path, *(each for each in args[1:2] if isinstance(each, str))])})"


def path_of(event: str, args: tuple[Any, ...]) -> str | None:
    """Return the file that an audit event changes; None where it changes none that has a name."""
    path = os.fsdecode(args[0]) if args and isinstance(args[0], str | bytes | os.PathLike) else None
    is_opened = event == "open" and isinstance(args[2], int) and args[2] & _WRITES
    is_database = event == "sqlite3.connect" and path not in {":memory:", ""}
    return path if is_opened or is_database or event in CHANGES else None


def program_of(event: str, args: tuple[Any, ...]) -> str:
    """Return the name of a program that is started, where the event has it."""
    command = {
        "subprocess.Popen": args[1:2],
        "os.posix_spawn": args[:1],
        "os.system": args[:1],
    }.get(event, ())
    for each in command:
        first = each if isinstance(each, str | bytes | os.PathLike) else next(iter(each), "")
        return os.path.basename(os.fsdecode(first).split(" ")[0])  # noqa: PTH119  # of bytes, too
    return ""

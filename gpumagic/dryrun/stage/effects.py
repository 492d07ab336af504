"""What the cell would do to the world outside goes nowhere in a rehearsal, and is listed.

Files opened for writing are the null device; making, moving and removing files does nothing; sending, connecting and
starting programs is refused. An audit hook refuses what comes another way.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from gpumagic.dryrun.parts import NotRehearsed

_SKIPPED = {os: ("mkdir", "makedirs", "remove", "unlink", "rename", "replace", "rmdir", "removedirs", "truncate",
                 "chmod", "chown", "symlink", "link", "utime", "mkfifo", "mknod"),
            shutil: ("rmtree", "copy", "copy2", "copyfile", "move", "copytree")}  # fmt: skip
_REFUSED = frozenset({
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.system", "os.exec",
    "os.posix_spawn", "os.startfile", "os.kill", "os.fork", "subprocess.Popen", "socket.connect", "socket.sendto",
    "socket.sendmsg", "socket.bind", "socket.getaddrinfo",
})  # fmt: skip
_PROGRAMS = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.startfile", "subprocess.Popen", "os.fork"})
_NATIVE_PROGRAMS = frozenset({"system", "popen", "fork", "vfork", "posix_spawn", "execv", "execve", "execvp", "execl"})
"""C's own ways, looked up by `ctypes`."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def block(note: Callable[[str], None]) -> None:
    """Block effects for the rest of the process.

    Args:
        note: called with a sentence for each thing that was kept from happening.
    """
    _open_nowhere(note)
    for module, names in _SKIPPED.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _skipped(f"{module.__name__}.{name}", note))
    _save_nowhere(note)
    sys.addaudithook(_refusing(note))
    _no_growing_files()
    _no_waiting()


def _open_nowhere(note: Callable[[str], None]) -> None:
    real = io.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return real(file, mode, *args, **kwargs)
        note(f"writes the file {os.fspath(file)!s}")
        return real(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    builtins.open = io.open = open_


def _save_nowhere(note: Callable[[str], None]) -> None:
    """Keep torch's own writer from opening a file: it is C++, which no hook of Python's sees."""
    import torch

    def save(_: object, f: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # torch.save's own
        note(f"writes the file {f!s}" if isinstance(f, str | os.PathLike) else "writes with torch.save")

    torch.save = save


def _skipped(name: str, note: Callable[[str], None]) -> Callable[..., None]:
    def skip(*args: Any, **_: Any) -> None:
        note(f"calls {name}({', '.join(str(each) for each in args[:2])})")

    return skip


def _refusing(note: Callable[[str], None]) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITES and args[0] != os.devnull:
            note(f"writes the file {args[0]!s}")
            raise PermissionError(f"a rehearsal writes no file, and {args[0]!s} was opened for writing")
        if event == "sqlite3.connect" and args[0] not in {":memory:", ""}:
            note(f"opens the database {args[0]!s}")
            raise NotRehearsed(f"it opens the database {args[0]!s}, which a rehearsal does not do")
        if event == "ctypes.dlsym" and args[1] in _NATIVE_PROGRAMS:
            note("starts a program")
            raise NotRehearsed("it starts a program, which a rehearsal does not do")
        if event in _REFUSED:
            what = "starts a program" if event in _PROGRAMS else f"calls {event}"
            note(what)
            raise NotRehearsed(f"it {what}, which a rehearsal does not do")

    return hook


def _no_growing_files() -> None:
    """Let the system itself refuse every byte to a file (POSIX): what C code opens is seen by no hook."""
    try:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    except (ImportError, ValueError, OSError):
        return


def _no_waiting() -> None:
    """Let nobody sleep: it takes no memory."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(float(seconds), 0.0))  # what is no duration is an error as ever

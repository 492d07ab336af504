"""What of torch around the device a dry run does another way: data loaders, pinned memory, loading, compilers.

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
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import DataLoader

from gpumagic.dryrun.parts import CannotDryRun

if TYPE_CHECKING:
    from gpumagic.dryrun.stage.backend import DeviceModule


_OF_ANY_ACCELERATOR = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache",
    "synchronize", "device_count", "reset_peak_memory_stats", "is_available",
)  # fmt: skip


def arrange(module: DeviceModule, assume: Callable[[str], None]) -> None:
    """Make the changes, for the rest of the process.

    Args:
        module: the device's module.
        assume: called with a sentence for each thing that is assumed.
    """
    refuse_compiler()
    load_in_this_process(assume)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.load = _loading(torch.load)
    for name in _OF_ANY_ACCELERATOR:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, getattr(module, name))


def refuse_compiler() -> None:
    """Refuse `torch.compile`, which starts programs and writes files."""
    torch.compile = torch.nn.Module.compile = _refuse_compiler


def load_in_this_process(assume: Callable[[str], None]) -> None:
    """Let data loaders start no worker processes."""
    DataLoader._get_iterator = _in_this_process(DataLoader._get_iterator, assume)


def _refuse_compiler(*_: object, **__: object) -> NoReturn:
    raise CannotDryRun("it uses torch.compile, whose kernels' memory is not known")


def _in_this_process(make: Callable[..., Any], assume: Callable[[str], None]) -> Callable[..., Any]:
    """Return a data loader's way to iterate without worker processes, which a dry run does not start."""

    def iterate(loader: Any) -> Any:
        if loader.num_workers:
            assume("data loaders are run without worker processes")
        for name, value in {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "timeout": 0}.items():
            object.__setattr__(loader, name, value)
        object.__setattr__(loader, "_DataLoader__multiprocessing_context", None)
        return make(loader)

    return iterate


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.load` by way of the CPU: torch would fill the device's storages from the file itself."""

    def through_the_host(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or torch.device(map_location).type == "cpu":
            return load(f, map_location, *args, **kwargs)
        return _moved(load(f, "cpu", *args, **kwargs), map_location)

    return through_the_host


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return value.to(device)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _moved(each, device)
        return value
    return type(value)(_moved(each, device) for each in value) if type(value) in {list, tuple} else value


_QUIET = frozenset({"matplotlib", "config", "load_ext", "reload_ext", "autoreload", "pip", "conda", "precision",
                    "gpuinfo", "devices", "oomguard", "who", "whos", "env", "pwd", "cd"})  # fmt: skip
_BODY = frozenset({"time", "capture"})


class Magics:
    """The shell, as far as a cell in a dry run may use it.

    Args:
        namespace: where bodies run.
        note: called with a sentence for each thing that was not done.
    """

    def __init__(self, namespace: dict[str, Any], note: Callable[[str], None]) -> None:
        self.user_ns = namespace
        self._note = note

    def run_line_magic(self, name: str, line: str, *_: object, **__: object) -> None:
        """Do nothing for a magic that moves no tensor, run the statement of `%time`."""
        if name in _BODY:
            exec(compile(line, "<magic>", "exec"), self.user_ns)  # noqa: S102  # the user's own cell
        elif name not in _QUIET:
            raise CannotDryRun(f"it uses %{name}, which a dry run does not follow")

    def run_cell_magic(self, name: str, line: str, body: str) -> None:
        """Run the body of a magic that only watches it."""
        if name not in _BODY:
            raise CannotDryRun(f"it uses %%{name}, which a dry run does not follow")
        exec(compile(body, "<magic>", "exec"), self.user_ns)  # noqa: S102  # the user's own cell

    def system(self, command: str, *_: object) -> None:
        """Run no command."""
        self._note(f"runs the command {command!r}")

    def getoutput(self, command: str, *_: object, **__: object) -> list[str]:
        """Return no output."""
        self.system(command)
        return []


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
            raise PermissionError(f"a dry run writes no file, and {args[0]!s} was opened for writing")
        if event == "sqlite3.connect" and args[0] not in {":memory:", ""}:
            note(f"opens the database {args[0]!s}")
            raise CannotDryRun(f"it opens the database {args[0]!s}, which a dry run does not do")
        if event == "ctypes.dlsym" and args[1] in _NATIVE_PROGRAMS:
            note("starts a program")
            raise CannotDryRun("it starts a program, which a dry run does not do")
        if event in _REFUSED:
            what = "starts a program" if event in _PROGRAMS else f"calls {event}"
            note(what)
            raise CannotDryRun(f"it {what}, which a dry run does not do")

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

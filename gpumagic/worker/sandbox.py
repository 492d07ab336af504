"""What of torch around the device a dry run does another way: data loaders, pinned memory, loading, compilers.

What the cell writes lies in an overlay that vanishes with the process. Where the system gives none, files opened for
writing are the null device, and making, moving and removing files does nothing. That nothing else gets out is the
machine's kernel's business (`box`); where that cannot be asked, Python's audit hook refuses what Python does.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.resource_tracker import ResourceTracker
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from gpumagic.dryrun import effects
from gpumagic.dryrun.effects import NOT_DONE
from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.worker import box
from gpumagic.worker.modules import with_storages

if TYPE_CHECKING:
    from gpumagic.simgpu._module import DeviceModule
    from gpumagic.worker.box import Box


_OF_ANY_ACCELERATOR = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache",
    "synchronize", "device_count", "reset_peak_memory_stats", "is_available", "get_memory_info",
    "reset_accumulated_memory_stats",
)  # fmt: skip


def arrange(module: DeviceModule, assume: Callable[[str], object]) -> None:
    """Make the changes, for the rest of the process.

    Args:
        module: the device's module.
        assume: called with a sentence for each thing that is assumed.
    """
    refuse_compiler()
    load_in_this_process(assume)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    load = torch.load

    def through_the_host(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load by way of the CPU: torch would fill the device's storages from the file itself."""
        if callable(map_location):
            return load(f, map_location, *args, **kwargs)

        waiting: set[int] = set()

        def on_host(storage: Any, was_on: str) -> Any:
            place = (
                map_location.get(was_on, was_on)
                if isinstance(map_location, dict)
                else map_location or was_on
            )
            if torch.device(place).type != "cpu":
                storage._dry_run_place = place
                waiting.add(storage._cdata)
            return storage

        def placed(each: Any) -> Any:
            if isinstance(each, torch.nn.Module):
                return each._apply(placed)
            storages = [one.untyped_storage() for one in with_storages(each)]
            waiting.difference_update(one._cdata for one in storages)
            places = [
                vars(one)["_dry_run_place"] for one in storages if "_dry_run_place" in vars(one)
            ]
            return each.to(places[0]) if places else each

        loaded = tree_map(placed, load(f, on_host, *args, **kwargs))
        if waiting:
            raise CannotDryRun("it loads an object whose tensors a dry run does not find")
        return loaded

    torch.load = through_the_host
    for name in _OF_ANY_ACCELERATOR:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, getattr(module, name))


def refuse_compiler() -> None:
    """Refuse `torch.compile`, which starts programs and writes files."""
    torch.compile = torch.nn.Module.compile = _refusal(
        "it uses torch.compile, whose kernels' memory is not known"
    )


_TELL_COMPILER = frozenset({"torch._compile", "torch.optim.optimizer"})
"""Modules that import torch's compiler to tell it what not to follow, also where nothing is compiled."""


class _NoCompiler:
    """Stands for torch's compiler as long as it is only told what not to follow."""

    @staticmethod
    def graph_break() -> None:
        """Break no graph."""

    @staticmethod
    def disable(fn: Any, *_: object, **__: object) -> Any:
        """Return a function as it is, with the mark by which the compiler knows it, should it come."""
        fn._torchdynamo_disable = True
        return fn

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


def do_without_compiler() -> None:
    """Let torch import its compiler only where something is compiled, for the rest of the process.

    Optimizers tell it at each step what not to follow, and to import it takes a second and 70 MiB.
    """
    import_module = builtins.__import__

    def imported(name: str, globals: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # Python's own name
        if (
            name == "torch._dynamo"
            and name not in sys.modules
            and (globals or {}).get("__name__") in _TELL_COMPILER
        ):
            return torch
        return import_module(name, globals, *args, **kwargs)

    torch._dynamo = _NoCompiler()
    builtins.__import__ = imported


def _refusal(sentence: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise CannotDryRun(sentence)

    return refuse


_OF_WORKERS = {
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": False,
    "timeout": 0,
    "persistent_workers": False,
    "_DataLoader__multiprocessing_context": None,
}
"""The attributes of a data loader that start processes or threads, as they are where none are."""


def load_in_this_process(assume: Callable[[str], object]) -> None:
    """Let data loaders start no worker processes; a dataset that asks is told that it is in the only one."""
    begin, worker = DataLoader.__iter__, torch.utils.data._utils.worker

    def iterate(loader: Any) -> Any:
        worker._worker_info = None
        if loader.num_workers:
            assume("data loaders are run without worker processes")
            if isinstance(loader.dataset, IterableDataset):
                worker._worker_info = worker.WorkerInfo(
                    id=0, num_workers=1, seed=0, dataset=loader.dataset
                )
        plain = object.__new__(type(loader))
        vars(plain).update({**vars(loader), **_OF_WORKERS})
        return begin(plain)

    DataLoader.__iter__ = iterate


_QUIET = frozenset({"matplotlib", "config", "load_ext", "reload_ext", "autoreload", "pip", "conda", "precision",
                    "gpuinfo", "devices", "oomguard", "who", "whos", "env", "pwd", "cd"})  # fmt: skip
_BODY = frozenset({"time", "capture"})
_TRAINS = re.compile(
    r"\s*(?:\w+=\S*\s+)*(?:\S*/)?(torchrun|python[\d.]*|accelerate|deepspeed|mpirun|srun)\b(?!.*(?:pip|--version))"
)
"""Commands that start a program which may use a device."""


def _compiled(text: str) -> Any:
    """Compile the text that a magic runs; there may be magics and commands in it, as in `%%capture` over `!pip`."""
    try:
        return compile(text, "<magic>", "exec")
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return compile(TransformerManager().transform_cell(text), "<magic>", "exec")


class Magics:
    """The shell, as far as a cell in a dry run may use it.

    Args:
        namespace: where bodies run.
        note: called with a sentence for each thing that was not done.
    """

    def __init__(self, namespace: dict[str, Any], note: Callable[[str], object]) -> None:
        self.user_ns = namespace
        self._note = note

    def run_line_magic(self, name: str, line: str, *_: object, **__: object) -> None:
        """Do nothing for a magic that moves no tensor, run the statement of `%time`."""
        if name in _BODY:
            exec(_compiled(line), self.user_ns)  # noqa: S102  # the user's own cell
        elif name not in _QUIET:
            raise CannotDryRun(f"it uses %{name}, which a dry run does not follow")

    def run_cell_magic(self, name: str, line: str, body: str) -> None:
        """Run the body of a magic that only watches it."""
        self.run_line_magic(name if name in _BODY else f"%{name}", body)

    def system(self, command: str, *_: object) -> None:
        """Run no command; say so of one that may train."""
        program = _TRAINS.match(command)
        if program is not None:
            raise CannotDryRun(
                f"{program[1]} is not looked into: put what the script does into a cell, and write --ranks N where "
                f"it runs on N GPUs"
            )
        self._note(f"runs the command {command!r}")

    def getoutput(self, command: str, *_: object, **__: object) -> list[str]:
        """Return no output."""
        self.system(command)
        return []


_SKIPPED = {os: ("mkdir", "makedirs", "remove", "unlink", "rename", "replace", "rmdir", "removedirs", "truncate",
                 "chmod", "chown", "symlink", "link", "utime", "mkfifo", "mknod"),
            shutil: ("rmtree", "copy", "copy2", "copyfile", "move", "copytree")}  # fmt: skip
_LARGE = 64 << 20
"""Bytes of which `torch.save` writes none."""


def block(
    note: Callable[[str], object], assume: Callable[[str], object], watcher: socket.socket
) -> Box:
    """Block effects for the rest of the process; return what the kernel enforces.

    Args:
        note: called with a sentence for each thing that was kept from happening.
        assume: called with one for each that cannot be.
        watcher: takes the listener of what the kernel refuses.
    """
    made = box.enter()
    for each in made.missing:
        assume(f"the cell has no effects by {each}, which this system does not keep in")
    if made.listener is not None:
        socket.send_fds(watcher, [b"."], [made.listener])
        os.close(made.listener)
    watcher.close()
    sys.dont_write_bytecode = True
    _save(note, made.has_files)
    if not made.has_files:
        _write_nowhere(note)
    sys.addaudithook(_hook(note, made))
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(
        min(float(seconds), 0.0)
    )  # it takes no memory; what is no duration is an error
    builtins.input = _refusal("it asks for input")
    # A lock of multiprocessing's or shared memory tells it of itself, and so starts its process.
    ResourceTracker._send = lambda *_: None  # type: ignore[attr-defined]
    return made


def _save(note: Callable[[str], object], has_files: bool) -> None:
    """Let `torch.save` write of large contents as much room as they take, and nothing where there are no own files."""
    save = torch.save

    def saved(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not has_files and isinstance(f, str | os.PathLike):
            note(
                f"writes the file {os.fspath(f)}"
            )  # what does it is C++, which no hook of Python's sees
            return
        whole = obj.state_dict() if isinstance(obj, torch.nn.Module) else obj
        large = (
            sum(each.nbytes for each in tree_leaves(whole) if isinstance(each, torch.Tensor))
            > _LARGE
        )
        is_skipped = large and hasattr(torch.serialization, "skip_data")
        # What goes to a file is nothing that the cell decides by, so no mode follows it.
        with (
            _disable_current_modes(),
            torch.serialization.skip_data() if is_skipped else nullcontext(),
        ):
            save(obj, f, *args, **kwargs)

    torch.save = saved


def _write_nowhere(note: Callable[[str], object]) -> None:
    """Let no file be written, where the process has none of its own."""
    real = io.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return real(file, mode, *args, **kwargs)
        note(f"writes the file {os.fspath(file)!s}")
        return real(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    def skip(name: str, /, *args: Any, **_: Any) -> None:
        note(f"calls {name}({', '.join(map(str, args[:2]))})")

    builtins.open = io.open = open_
    for module, names in _SKIPPED.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, functools.partial(skip, f"{module.__name__}.{name}"))


_REFUSED_HERE = frozenset({"os.fork", "os.forkpty", "os.system"})
"""What the kernel does not refuse, or refuses to a process of which the cell is told no more than a number."""


_OWN = re.compile(r"(b')?(localhost|::1?|0\.0\.0\.0|127\..*?)'?")
"""Names of this process's own network, as text or bytes."""


class _CannotConnect(CannotDryRun, ConnectionRefusedError):
    """Raised as the network would: libraries that can do without it then do, from what they have cached."""


def _hook(note: Callable[[str], object], made: Box) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses what the kernel does not, and tells it."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        path = effects.path_of(event, args)
        if path is not None and (made.has_files or path == os.devnull):
            return
        is_name = event == "socket.getaddrinfo" and not _OWN.fullmatch(str(args[0] or "localhost"))
        # Nor does the kernel refuse a name: C asks for one in the same ways as for this host's own.
        if (
            path is None
            and not is_name
            and made.listener is not None
            and event not in _REFUSED_HERE
        ):
            return
        what = f"looks up {args[0]}" if is_name else effects.of_event(event, args)
        if what is None:
            return
        note(what)
        if event == "open":
            raise PermissionError(
                f"a dry run writes no file here, and {path} was opened for writing"
            )
        raise (_CannotConnect if event.startswith("socket.") else CannotDryRun)(
            f"it {what}, {NOT_DONE}"
        )

    return hook

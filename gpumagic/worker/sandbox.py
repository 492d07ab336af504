"""What a dry run does another way than torch and Python: data loaders, pinned memory, loading, compilers, writing.

Runs in the worker's process. What the cell writes lies in an overlay that vanishes with the process. Where the system
gives none, files opened for writing are the null device, and making, moving and removing files does nothing. Nothing
else gets out because the operating system's kernel refuses it (`box`); where it does not, Python's audit hook refuses
what Python does.
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
from gpumagic.dryrun.effects import NOT_DONE, Effect
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

    def through_the_host(
        f: Any, map_location: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load by way of the CPU: torch would fill the device's storages from the file itself."""
        if callable(map_location):
            return load(f, map_location, *args, **kwargs)
        loading = _Loading(map_location)
        loaded = load(f, loading.on_host, *args, **kwargs)
        loaded = tree_map(loading.moved, loaded)
        if loading.waiting:
            raise CannotDryRun(
                "it loads an object whose tensors a dry run does not find"
            )
        return loaded

    torch.load = through_the_host
    for name in _OF_ANY_ACCELERATOR:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, getattr(module, name))


class _Loading:
    """Storages that are loaded on the host, and from there moved to their device.

    Args:
        map_location: what `torch.load` was given, other than a function.

    Attributes:
        waiting: the storages that were loaded for a device and not moved yet.
    """

    def __init__(self, map_location: Any) -> None:
        self.waiting: set[int] = set()
        self._map_location = map_location

    def on_host(self, storage: Any, was_on: str) -> Any:
        """Return a storage where it was loaded, with a note of the device that it is for."""
        if isinstance(self._map_location, dict):
            place = self._map_location.get(was_on, was_on)
        else:
            place = self._map_location or was_on
        if torch.device(place).type != "cpu":
            storage._dry_run_place = place
            self.waiting.add(storage._cdata)
        return storage

    def moved(self, loaded: Any) -> Any:
        """Return a part of what was loaded, with its tensors on the devices that they are for."""
        if isinstance(loaded, torch.nn.Module):
            return loaded._apply(self.moved)
        places = []
        for tensor in with_storages(loaded):
            storage = tensor.untyped_storage()
            self.waiting.discard(storage._cdata)
            if "_dry_run_place" in vars(storage):
                places.append(storage._dry_run_place)
        return loaded.to(places[0]) if places else loaded


def refuse_compiler() -> None:
    """Refuse `torch.compile`, which starts programs and writes files."""
    torch.compile = torch.nn.Module.compile = _refusal(
        "it uses torch.compile, whose kernels' memory is not known"
    )


_TELL_COMPILER = frozenset({"torch._compile", "torch.optim.optimizer"})
"""Modules that import torch's compiler only to say what it is not to follow, also where nothing is compiled."""


class _NoCompiler:
    """Stands for torch's compiler as long as nothing is compiled."""

    @staticmethod
    def graph_break() -> None:
        """Break no graph."""

    @staticmethod
    def disable(fn: Any, *_: object, **__: object) -> Any:
        """Return a function as it is, with the mark by which the compiler would know that it is not to follow it."""
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
        if name == "torch._dynamo" and name not in sys.modules:
            importer = (globals or {}).get("__name__")
            if importer in _TELL_COMPILER:
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
    begin = DataLoader.__iter__
    worker = torch.utils.data._utils.worker

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


# ---- The shell

_QUIET = frozenset({"matplotlib", "config", "load_ext", "reload_ext", "autoreload", "pip", "conda", "precision",
                    "gpuinfo", "devices", "oomguard", "who", "whos", "env", "pwd", "cd"})  # fmt: skip
"""Magics that move no tensor."""
_BODY = frozenset({"time", "capture"})
"""Magics that run what stands under them or behind them."""
_TRAINS = re.compile(
    r"\s*(?:\w+=\S*\s+)*(?:\S*/)?(torchrun|python[\d.]*|accelerate|deepspeed|mpirun|srun)\b(?!.*(?:pip|--version))"
)
"""Finds commands that start a program that may use a device."""


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
        note: called with what was not done.
    """

    def __init__(self, namespace: dict[str, Any], note: Note) -> None:
        self.user_ns = namespace
        self._note = note

    def run_line_magic(self, name: str, line: str, *_: object, **__: object) -> None:
        """Do nothing for a magic that moves no tensor; run the statement of `%time`."""
        if name in _BODY:
            exec(_compiled(line), self.user_ns)  # noqa: S102  # the user's own cell
        elif name not in _QUIET:
            raise CannotDryRun(f"it uses %{name}, which a dry run does not follow")

    def run_cell_magic(self, name: str, line: str, body: str) -> None:
        """Run the body of a magic that only watches it."""
        if name not in _BODY:
            name = f"%{name}"
        self.run_line_magic(name, body)

    def system(self, command: str, *_: object) -> None:
        """Run no command; refuse one that may train."""
        program = _TRAINS.match(command)
        if program is not None:
            raise CannotDryRun(
                f"{program[1]} is not looked into: put what the script does into a cell, and write --ranks N where "
                f"it runs on N GPUs"
            )
        self._note(Effect(f"runs the command {command!r}"))

    def getoutput(self, command: str, *_: object, **__: object) -> list[str]:
        """Return no output."""
        self.system(command)
        return []


# ---- Effects

_SKIPPED = {os: ("mkdir", "makedirs", "remove", "unlink", "rename", "replace", "rmdir", "removedirs", "truncate",
                 "chmod", "chown", "symlink", "link", "utime", "mkfifo", "mknod"),
            shutil: ("rmtree", "copy", "copy2", "copyfile", "move", "copytree")}  # fmt: skip
_LARGE = 64 << 20
"""Bytes of which `torch.save` writes none."""


Note = Callable[[Effect], object]
"""Is called with each effect that was kept from happening."""


def block(note: Note, assume: Callable[[str], object], watcher: socket.socket) -> Box:
    """Block effects for the rest of the process; return what the kernel enforces.

    Args:
        note: called with each effect that is kept from happening.
        assume: called with a sentence for each kind that cannot be.
        watcher: takes the listener of what the kernel refuses.
    """
    entered = box.enter()
    for missing in entered.missing:
        assume(
            f"the cell has no effects by {missing}, which this system does not keep in"
        )
    if entered.listener is not None:
        socket.send_fds(watcher, [b"."], [entered.listener])
        os.close(entered.listener)
    watcher.close()
    sys.dont_write_bytecode = True
    _save_sizes_alone(note, entered.has_files)
    if not entered.has_files:
        _write_nowhere(note)
    sys.addaudithook(_hook(note, entered))
    _do_not_sleep()
    builtins.input = _refusal("it asks for input")
    # A lock of multiprocessing's, or shared memory, registers itself there, and so would start its process.
    ResourceTracker._send = lambda *_: None  # type: ignore[attr-defined]
    return entered


def _do_not_sleep() -> None:
    """Let waiting take no time, which takes no memory either; what is no duration is still an error."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(float(seconds), 0.0))


def _save_sizes_alone(note: Note, has_files: bool) -> None:
    """Let `torch.save` leave as much room as large contents take and not write them; nothing without own files."""
    save = torch.save

    def saved(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not has_files and isinstance(f, str | os.PathLike):
            # By C++, which no hook of Python's sees.
            note(Effect(f"writes the file {os.fspath(f)}"))
            return
        skipping = nullcontext()
        if _tensor_bytes(obj) > _LARGE and hasattr(torch.serialization, "skip_data"):
            skipping = torch.serialization.skip_data()
        # The cell decides nothing by what goes to a file, so no mode follows it.
        with _disable_current_modes(), skipping:
            save(obj, f, *args, **kwargs)

    torch.save = saved


def _tensor_bytes(obj: object) -> int:
    """Return the bytes of the tensors in what is saved."""
    whole = obj.state_dict() if isinstance(obj, torch.nn.Module) else obj
    nbytes = 0
    for leaf in tree_leaves(whole):
        if isinstance(leaf, torch.Tensor):
            nbytes += leaf.nbytes
    return nbytes


def _write_nowhere(note: Note) -> None:
    """Let no file be written, where the process has none of its own."""
    real = io.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = not set(mode).isdisjoint("wax+")
        if isinstance(file, int) or not writes:
            return real(file, mode, *args, **kwargs)
        note(Effect(f"writes the file {os.fspath(file)!s}"))
        mode = mode.replace("x", "w")
        return real(os.devnull, mode, *args, **kwargs)

    def skip(name: str, /, *args: Any, **_: Any) -> None:
        shown = ", ".join([str(argument) for argument in args[:2]])
        note(Effect(f"calls {name}({shown})"))

    builtins.open = io.open = open_
    for module, names in _SKIPPED.items():
        for name in names:
            if hasattr(module, name):
                skipped = functools.partial(skip, f"{module.__name__}.{name}")
                setattr(module, name, skipped)


_REFUSED_HERE = frozenset({"os.fork", "os.forkpty", "os.system"})
"""Events of what the kernel does not refuse, or refuses to a process of which the cell learns no more than a number."""


_OWN = re.compile(r"(b')?(localhost|::1?|0\.0\.0\.0|127\..*?)'?")
"""Names of this process's own network, as text or bytes."""


class _CannotConnect(CannotDryRun, ConnectionRefusedError):
    """Raised as a network that is down would: libraries then do without it if they can, from what they have cached."""


Hook = Callable[[str, tuple[Any, ...]], None]


def _hook(note: Note, entered: Box) -> Hook:
    """Return an audit hook that notes and refuses what the kernel does not refuse."""
    kernel_refuses = entered.listener is not None

    def hook(event: str, args: tuple[Any, ...]) -> None:
        path = effects.path_of(event, args)
        if path is not None and (entered.has_files or path == os.devnull):
            return
        if _looks_up_other(event, args):
            # The kernel does not refuse it: C asks for another host's name in the same ways as for this one's.
            effect: Effect | None = Effect(f"looks up {args[0]}", reaches_others=True)
        elif path is None and kernel_refuses and event not in _REFUSED_HERE:
            return
        else:
            effect = effects.of_event(event, args)
        if effect is None:
            return
        note(effect)
        if event == "open":
            raise PermissionError(
                f"a dry run writes no file here, and {path} was opened for writing"
            )
        error = _CannotConnect if event.startswith("socket.") else CannotDryRun
        raise error(f"it {effect.text}, {NOT_DONE}")

    return hook


def _looks_up_other(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether an event asks for the address of another host."""
    if event != "socket.getaddrinfo":
        return False
    return not _OWN.fullmatch(str(args[0] or "localhost"))

"""What is watched while a guarded cell runs: what it does outside of its process, and what CUDA's allocator refuses.

A cell that does something outside is not run again to try advice. An error's text rounds its figures, and those of the
allocator are others once frames unwind; torch calls observers before that, without the allocator's lock
(`torch._C._cuda_attach_out_of_memory_observer`, since 2.0).

Neither Python's audit hooks nor such observers can be removed, so one of each is added, and looks only while a guard
is open. The observer is attached only once CUDA is up (before, old versions crash: pytorch#107330), and only to torch's
own allocator: cudaMallocAsync calls none. It has run on torch's CUDA build over `fakecuda`, not on a real GPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from gpumagic._compat import torch_frames, torch_private
from gpumagic.dryrun import effects
from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.source import frames
from gpumagic.source.frames import CellLineFinder

_FILLS_CACHES = ("huggingface_hub.", "torch.hub", torch_frames.INDUCTOR, "triton.")
"""Modules that fetch or compile what a dry run finds in a cache."""
_SHARES = ("multiprocessing.", "torch.multiprocessing.")
"""Modules whose connections lead to processes of the cell's own."""
_SPAWNS = (".popen_spawn_posix", ".popen_forkserver", ".popen_loky_posix")
"""Modules that start Python by a call that is not audited, and then write to it through a pipe."""
_COMMANDS = frozenset({"system_piped", "system_raw", "getoutput"})
"""IPython's functions for what begins with `!`, of which a dry run does none."""
_NAMES_FOLDER = effects.CHANGES - {"os.truncate"}
"""Events whose last argument is the descriptor of the folder that the path is in, -1 for none."""
_of_cells: set[str] = set()
"""Files that guarded cells have made: what they do to these is their own business."""


class Refusal(NamedTuple):
    """What torch's allocator said when it gave up."""

    requested: int
    """Bytes."""
    figures: AllocatorStats
    """As they were at that instant."""


class CellWatch:
    """What one cell does to other processes, machines and files that no guarded cell has made, and is refused.

    Args:
        namespace: the notebook's variables.
        is_running: whether the cell runs already when this opens.

    Attributes:
        effects: each in words, with the line of the cell that has it; None in a thread.
        refusals: the last one of each device in the latest run. Some are of what torch recovers from by itself, such as
            cuDNN's trials.
    """

    def __init__(
        self, namespace: Mapping[str, object], *, is_running: bool = False
    ) -> None:
        self.effects: dict[str, int | None] = {}
        self.refusals: dict[str, Refusal] = {}
        self._namespace = namespace
        self._is_running = is_running

    def open(self) -> None:
        """Begin to look, also at a further run of the cell."""
        self._finder = CellLineFinder(self._namespace, is_running=self._is_running)
        self._threads = frozenset(sys._current_frames())
        self.refusals = {}
        if not _hooks:
            _hooks.append(_hook)
            sys.addaudithook(_hook)
        _attach_observer()
        _watching.append(self)

    def close(self) -> None:
        """Look no more; idempotent."""
        if self in _watching:
            _watching.remove(self)

    def sentence(self) -> str:
        """Return why the cell is not run again; empty where it may be."""
        if not self.effects:
            return ""
        first, line = next(iter(self.effects.items()))
        where = f"in line {line}" if line else "in a thread"
        rest = len(self.effects) - 1
        more = f", and {rest} more things outside," if rest else ""
        return f"the cell {first} {where}{more} and is not run again unasked (%%dryrun runs it, with no effect outside)"

    def see(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """Note an audit event that is the cell's, or of a thread that began with it."""
        what = _effect(event, args, frame)
        if what is None or what in self.effects:
            return
        line = self._finder.line(frame)
        is_in_new_thread = threading.get_ident() not in self._threads
        if line is not None or is_in_new_thread:
            self.effects[what] = line


def _effect(event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
    """Return in words what an event changes outside of the cell's own processes and files; None if nothing."""
    effect = effects.of_event(event, args)
    what = None if effect is None else effect.text
    if effects.path_of(event, args) is not None:
        return what if _changes_others(event, args) else None
    if event == "open" and isinstance(args[0], int):
        what = "starts a process" if _module_of(frame).endswith(_SPAWNS) else None
    if what is None or effects.COMPILERS.fullmatch(effects.program_of(event, args)):
        return None
    has_address = any(isinstance(argument, tuple) for argument in args)
    is_local = event.startswith("socket.") and not has_address
    for caller in frames.stack(frame):
        if _is_harmless(caller, is_local=is_local):
            return None
    return what


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _is_harmless(frame: FrameType, *, is_local: bool) -> bool:
    """Return whether what happens below a frame is no effect, or one that a dry run leaves out by itself."""
    module = _module_of(frame)
    function = frame.f_code.co_name
    if module.startswith(_FILLS_CACHES):
        return True
    if is_local and module.startswith(_SHARES):
        return True
    if module == "torch.utils.data.dataloader":
        return function == "__init__"  # starts its workers
    return module.startswith(("IPython.", "ipykernel.")) and function in _COMMANDS


def _changes_others(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether an event changes a file that was there and that no guarded cell has made."""
    is_in_folder = event in _NAMES_FOLDER and args[-1] != -1
    if is_in_folder:  # a part of what `rmtree` removes, which has an event of its own
        return False
    if event == "os.rename":
        named = args[:2]
    elif event in ("os.link", "os.symlink"):
        named = args[1:2]
    else:
        named = args[:1]
    changes = False
    for name in named:
        path = os.path.abspath(os.fsdecode(name))  # noqa: PTH100  # Path.absolute() leaves `..`
        if effects.is_in_cache(path):
            continue
        if not os.path.lexists(path):
            _of_cells.add(path)
        elif path not in _of_cells:
            changes = True
    return changes and event != "os.mkdir"  # which fails where there is one


_watching: list[CellWatch] = []
"""The innermost last."""
_hooks: list[object] = []
"""What has been added to Python and to torch."""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in _EVENTS:
        _watching[-1].see(event, args, sys._getframe(1))


_EVENTS = (
    {"open", "sqlite3.connect"}
    | effects.PROGRAMS
    | effects.CHANGES
    | effects.REACHES.keys()
)


def _attach_observer() -> None:
    torch = sys.modules.get("torch")
    if torch is None or _observe in _hooks or not torch.cuda.is_initialized():
        return
    observer = torch_private.OUT_OF_MEMORY_OBSERVER
    if observer.is_there() and torch.cuda.memory.get_allocator_backend() == "native":
        _hooks.append(_observe)
        observer.get()(_observe)


def _observe(index: int, requested: int, _total: int, _free: int) -> None:
    """Note a refusal of torch's allocator; it must not allocate, and torch would raise what it raises in its place."""
    with contextlib.suppress(Exception):
        device = f"cuda:{index}"
        refusals = _watching[-1].refusals
        refusals.pop(device, None)
        figures = allocator.device_stats(device)
        if figures is not None:
            refusals[device] = Refusal(requested, figures)

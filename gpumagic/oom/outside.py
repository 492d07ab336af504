"""What a guarded cell does outside of its process: such a cell is not run again to try advice.

Python's audit hooks cannot be removed, so one is added with the first guard, and looks only while one is open.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from gpumagic.dryrun import effects
from gpumagic.source import frames
from gpumagic.source.lines import CellLineFinder

_FILLS_CACHES = ("huggingface_hub.", "torch.hub", "torch._inductor.", "triton.")
"""Modules that fetch or compile what a dry run finds in a cache."""
_SHARES = ("multiprocessing.", "torch.multiprocessing.")
"""Modules whose connections lead to processes of the cell's own."""
_SPAWNS = (".popen_spawn_posix", ".popen_forkserver", ".popen_loky_posix")
"""Modules that start Python by a call that is not audited, and then write to it through a pipe."""
_COMMANDS = frozenset({"system_piped", "system_raw", "getoutput"})
"""IPython's functions for what begins with `!`, of which a dry run does none."""
_of_cells: set[str] = set()
"""Files that guarded cells have made: what they do to these is their own business."""


class Outside:
    """What one cell does to other processes, machines and files that no guarded cell has made.

    Args:
        namespace: the notebook's variables.
        is_running: whether the cell runs already when this opens.

    Attributes:
        effects: each in words, with the line of the cell that has it; None in a thread.
    """

    def __init__(self, namespace: Mapping[str, object], *, is_running: bool = False) -> None:
        self.effects: dict[str, int | None] = {}
        self._namespace, self._is_running = namespace, is_running

    def open(self) -> None:
        """Begin to look, also at a further run of the cell."""
        self._finder = CellLineFinder(self._namespace, is_running=self._is_running)
        self._threads = frozenset(sys._current_frames())
        if not _is_added:
            _is_added.append(True)
            sys.addaudithook(_hook)
        _watching.append(self)

    def close(self) -> None:
        """Look no more; idempotent."""
        if self in _watching:
            _watching.remove(self)

    def sentence(self) -> str:
        """Return why the cell is not run again; empty where it may be."""
        told = [f"{what} in line {line}" if line else f"{what} in a thread" for what, line in self.effects.items()]
        if not told:
            return ""
        more = f", and {len(told) - 1} more things outside," if len(told) > 1 else ""
        return f"the cell {told[0]}{more} and is not run again unasked (%%dryrun runs it, with no effect outside)"

    def see(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """Note an audit event that is the cell's, or of a thread that began with it."""
        what = _effect(event, args, frame)
        if what is not None and what not in self.effects:
            line = self._finder.line(frame)
            if line is not None or threading.get_ident() not in self._threads:
                self.effects[what] = line


def _effect(event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
    """Return in words what an event changes outside of the cell's own processes and files; None if nothing."""
    if event == "open" and isinstance(args[0], int):
        what = "starts a process" if frame.f_globals.get("__name__", "").endswith(_SPAWNS) else None
    elif effects.path_of(event, args) is not None:
        return effects.of_event(event, args) if any(list(_changed(event, args))) else None
    else:
        what = effects.of_event(event, args)
    program = effects.program_of(event, args)
    if what is None or program in effects.ASKS_THE_MACHINE or effects.COMPILERS.fullmatch(program):
        return None
    is_local = event.startswith("socket.") and not any(isinstance(each, tuple) for each in args)
    return None if any(_is_harmless(each, is_local=is_local) for each in frames.stack(frame)) else what


def _is_harmless(frame: FrameType, *, is_local: bool) -> bool:
    """Return whether what happens below a frame is no effect, or one that a dry run leaves out by itself."""
    module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    return (
        module.startswith((*_FILLS_CACHES, *_SHARES) if is_local else _FILLS_CACHES)
        or (module == "torch.utils.data.dataloader" and function == "__init__")  # starts its workers
        or (module.startswith(("IPython.", "ipykernel.")) and function in _COMMANDS)
    )


def _changed(event: str, args: tuple[Any, ...]) -> Iterator[bool]:
    """Yield for each file of an event that was there whether no guarded cell has made it."""
    is_in_folder = event in effects.CHANGES - {"os.truncate"} and args[-1] != -1  # `rmtree`, which names that as well
    for each in {"os.rename": args[:2], "os.link": args[1:2], "os.symlink": args[1:2]}.get(event, args[:1]):
        path = os.path.abspath(os.fsdecode(each))  # noqa: PTH100
        if is_in_folder or any(part in path for part in effects.CACHES):
            continue
        if not os.path.lexists(path):
            _of_cells.add(path)
        elif event != "os.mkdir":  # which fails then
            yield path not in _of_cells


_watching: list[Outside] = []
"""The innermost last."""
_is_added: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in _EVENTS:
        _watching[-1].see(event, args, sys._getframe(1))


_EVENTS = {"open", "sqlite3.connect"} | effects.PROGRAMS | effects.CHANGES | effects.REACHES.keys()

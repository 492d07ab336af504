"""`%gpuinfo --each-cell on`: a line after every cell, from exact counters read before and after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpumagic.probes import allocator
from gpumagic.reports import CellUse

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

_KEY = "gpumagic_each_cell"


class EachCell:
    """Reads the allocators around each cell of a shell; cells inside cells have their own line."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._open: list[tuple[ExecutionInfo, float, dict[str, allocator.AllocatorFigures]]] = []

    def install(self) -> None:
        """Follow the cells that start from now on."""
        self._shell.events.register("pre_run_cell", self._starts)
        self._shell.events.register("post_run_cell", self._ended)

    def uninstall(self) -> None:
        """Undo `install`."""
        self._shell.events.unregister("pre_run_cell", self._starts)
        self._shell.events.unregister("post_run_cell", self._ended)

    def _starts(self, info: ExecutionInfo) -> None:
        self._open.append((info, time.perf_counter(), allocator.all_figures()))

    def _ended(self, result: ExecutionResult | None) -> None:
        now = time.perf_counter()
        places = [place for place, each in enumerate(self._open) if result is None or each[0] is result.info]
        if not places:
            return
        info, started, before = self._open[places[-1]]
        del self._open[places[-1] :]
        if not info.silent:
            from gpumagic.render.cell_line import line

            print(line(now - started, used(before, allocator.all_figures())))  # noqa: T201  # the line asked for


def used(
    before: Mapping[str, allocator.AllocatorFigures], after: Mapping[str, allocator.AllocatorFigures]
) -> tuple[CellUse, ...]:
    """Return what was done on each device that anything was done on.

    The peak is the cell's own only where its counter rose above all there was before; nobody resets it here.
    """
    nothing = allocator.AllocatorFigures(0, 0, 0)
    pairs = {device: (before.get(device, nothing), now) for device, now in after.items()}
    return tuple(
        CellUse(device, then.allocated, now.allocated, now.peak if (now.peak or 0) > (then.peak or 0) else None)
        for device, (then, now) in pairs.items()
        if now != then
    )


def switch(shell: InteractiveShell, state: str) -> None:
    """Turn the lines of a shell ``"on"`` or ``"off"``; doing so twice changes nothing."""
    if state == "off":
        off(shell)
    elif _KEY not in shell.meta:
        each = EachCell(shell)
        each.install()
        shell.meta[_KEY] = each


def off(shell: InteractiveShell) -> None:
    """Print no more lines."""
    each = shell.meta.pop(_KEY, None)
    if each is not None:
        each.uninstall()

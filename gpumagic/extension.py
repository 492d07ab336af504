"""What `%load_ext gpumagic` adds to a shell, and its exact inverse."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuMagicError
from gpumagic.gpus import device_names
from gpumagic.notebook import completion
from gpumagic.notebook.cells import CellSessions, PromoteCellMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics

# In `shell.meta`, the place for the state of extensions.
_KEY = "gpumagic_unload"
_BACKGROUND_MODULES = ("gpumagic.gpus.live", "gpumagic.gpus.each_cell", "gpumagic.oom.every_cell", "gpumagic.oom.guard")
"""What the user may have started in a shell, imported only then; each has an ``off``."""


def load(shell: InteractiveShell) -> None:
    """Add the magics, the cell hooks and the completion to a shell; idempotent."""
    from gpumagic.magics import DiffBaseline, GPUMagic
    from gpumagic.options import letting_run, needing_body

    if _KEY not in shell.meta:
        baseline = DiffBaseline(shell)
        attach(shell, functools.partial(GPUMagic, baseline=baseline), needing_body(), letting_run())
        baseline.install()
        shell.meta[_KEY].callback(baseline.uninstall)
    if os.environ.get("GPUMAGIC_SIMGPU"):
        try:
            _enable_simgpu()
        except BaseException:  # Ctrl-C while it compiles: IPython takes the extension for not loaded
            unload(shell)
            raise


def is_loaded(shell: InteractiveShell) -> bool:
    """Return whether a shell has the magics."""
    return _KEY in shell.meta


def unload(shell: InteractiveShell) -> None:
    """Undo `load`; idempotent."""
    undo = shell.meta.pop(_KEY, None)
    if undo is not None:
        for name in _BACKGROUND_MODULES:
            if name in sys.modules:
                sys.modules[name].off(shell)
        if "gpumagic.report.units" in sys.modules:
            sys.modules["gpumagic.report.units"].use_system("binary")  # whatever `%config GPUMagic.units` said
        if "gpumagic.dryrun.client" in sys.modules:
            sys.modules["gpumagic.dryrun.client"].close()
        undo.close()


def attach(
    shell: InteractiveShell,
    magics: Callable[[InteractiveShell, CellSessions], Magics],
    needs_body: Mapping[str, Collection[str]],
    lets_run: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Wire a class of magics into a shell, unless one is wired already.

    Args:
        shell: where.
        magics: makes the magics for a shell and its cell sessions.
        needs_body: the cell magics to promote, each with the options for which it needs the cell's text.
        lets_run: those to promote only with some options; see `PromoteCellMagics`.
    """
    if _KEY in shell.meta:
        return
    sessions = CellSessions(shell)
    transformer = PromoteCellMagics(needs_body, lets_run)
    with ExitStack() as undo:
        undo.callback(_register(shell, magics(shell, sessions)))
        shell.input_transformers_cleanup.append(transformer)
        undo.callback(shell.input_transformers_cleanup.remove, transformer)
        undo.callback(completion.install(shell, device_names.completions))
        sessions.install()
        undo.callback(sessions.uninstall)
        shell.meta[_KEY] = undo.pop_all()


def _register(shell: InteractiveShell, magics: Magics) -> Callable[[], None]:
    """Register magics, and return what restores those that had their names before."""
    registered = shell.magics_manager
    before = {kind: dict(registered.magics[kind]) for kind in magics.magics}
    registered.register(magics)

    def undo() -> None:
        for kind, ours in magics.magics.items():
            for name, method in ours.items():
                _restore(registered.magics[kind], name, method, before[kind])
        registered.registry.pop(type(magics).__name__, None)
        shell.configurables.remove(magics)

    return undo


def _restore(table: dict[str, Any], name: str, ours: Any, before: dict[str, Any]) -> None:
    if table.get(name) != ours:  # someone took the name since
        return
    if name in before:
        table[name] = before[name]
    else:
        del table[name]


def _enable_simgpu() -> None:
    from gpumagic import simgpu

    try:
        simgpu.enable_from_environment()
    except GpuMagicError as error:
        print(f"gpumagic: {error}", file=sys.stderr)  # noqa: T201  # a cell is there to read it

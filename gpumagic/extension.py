"""What `%load_ext gpumagic` adds to a shell, and its exact inverse."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuMagicError
from gpumagic.memory import devices
from gpumagic.notebook import completion
from gpumagic.notebook.cells import CellSessions, PromoteCellMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics

# In `shell.meta`, the place for the state of extensions.
_KEY = "gpumagic_unload"
_BACKGROUND_MODULES = ("gpumagic.gpus.live", "gpumagic.oom.shell")
"""What the user may have started in a shell, imported only then; each has an ``off``."""


@dataclass
class _Wiring:
    """What was added to a shell, and how it is removed: step by step, so that after Ctrl-C it can go on."""

    undo: list[Callable[[], object]] = field(default_factory=list)
    """The last first; each is put here before what it undoes, and may be called more than once."""
    is_whole: bool = False


def load(shell: InteractiveShell) -> None:
    """Add the magics, the cell hooks and the completion to a shell; idempotent."""
    from gpumagic.magics import GPUMagic
    from gpumagic.options import LETTING_RUN, NEEDING_BODY

    attach(shell, GPUMagic, NEEDING_BODY, LETTING_RUN)
    if os.environ.get("GPUMAGIC_SIMGPU"):
        try:
            from gpumagic import simgpu

            simgpu.enable_from_environment()
        except GpuMagicError as error:
            print(f"gpumagic: {error}", file=sys.stderr)  # noqa: T201  # a cell is there to read it
        except (
            BaseException
        ):  # Ctrl-C while it compiles: IPython takes the extension for not loaded
            unload(shell)
            raise


def unload(shell: InteractiveShell) -> None:
    """Undo `load`; idempotent, and again after an interrupt anywhere."""
    wiring = shell.meta.get(_KEY)
    if wiring is None:
        return
    wiring.is_whole = False
    for name in _BACKGROUND_MODULES:
        if name in sys.modules:
            sys.modules[name].off(shell)
    if "gpumagic.dryrun.client" in sys.modules:
        sys.modules["gpumagic.dryrun.client"].close()
    while wiring.undo:
        wiring.undo[-1]()
        wiring.undo.pop()
    shell.meta.pop(_KEY, None)


def attach(
    shell: InteractiveShell,
    magics: Callable[[InteractiveShell, CellSessions], Magics],
    needs_body: Mapping[str, Collection[str]],
    lets_run: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Wire a class of magics into a shell, unless one is wired already; for the rest see `PromoteCellMagics`."""
    earlier = shell.meta.get(_KEY)
    if earlier is not None and earlier.is_whole:
        return
    unload(shell)  # what an interrupt has left of it
    wiring = shell.meta[_KEY] = _Wiring()
    configurables = len(shell.configurables)
    try:
        sessions = CellSessions(shell)
        _register(shell, magics(shell, sessions), wiring.undo)
        promote = PromoteCellMagics(needs_body, lets_run)
        wiring.undo.append(lambda: _remove(shell.input_transformers_cleanup, promote))
        shell.input_transformers_cleanup.append(promote)
        completion.install(shell, devices.completions, wiring.undo)
        wiring.undo.append(sessions.uninstall)
        sessions.install()
    except BaseException:
        unload(shell)
        del shell.configurables[
            configurables:
        ]  # magics enter themselves when they are made
        raise
    wiring.is_whole = True


def _remove(members: list[Any], unwanted: object) -> None:
    if any(member is unwanted for member in members):
        members.remove(unwanted)


def _register(
    shell: InteractiveShell, magics: Magics, undo: list[Callable[[], object]]
) -> None:
    """Register magics; undone, those are back that had their names before."""
    registered = shell.magics_manager
    before = {kind: dict(registered.magics[kind]) for kind in magics.magics}

    def restore() -> None:
        for kind, ours in magics.magics.items():
            table = registered.magics[kind]
            for name, method in ours.items():
                if table.get(name) != method:
                    continue  # somebody has taken the name since
                if name in before[kind]:
                    table[name] = before[kind][name]
                else:
                    del table[name]
        registered.registry.pop(type(magics).__name__, None)
        _remove(shell.configurables, magics)

    undo.append(restore)
    registered.register(magics)

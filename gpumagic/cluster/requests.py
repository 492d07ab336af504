"""What an engine does for the client: functions that `engine_side` calls with plain data.

Simgpu is enabled here where the engine's environment asks for it, as when the extension is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumagic import simgpu
from gpumagic.errors import OptionError
from gpumagic.memory.devices import resolve
from gpumagic.notebook import session
from gpumagic.report.base import Origin, current_origin

if TYPE_CHECKING:
    from gpumagic.gpus.report import GPUReport
    from gpumagic.tensors.report import TensorReport

_LOADED_FOR_CELL = "gpumagic_of_engine_cell"


def serve(request: str, arguments: Mapping[str, Any]) -> tuple[Origin, Any]:
    """Return where this engine runs, and what one of the functions below returns."""
    return current_origin(), globals()[request](**arguments)


def gpuinfo(names: Sequence[str], *, processes: bool, everything: bool) -> GPUReport:
    """Return the GPUs of this engine."""
    from gpumagic.gpus import probe

    simgpu.enable_from_environment()
    return probe.read_gpus(names, processes=processes, everything=everything)


def devices(names: Sequence[str], *, by: str | None, limit: int | None) -> TensorReport:
    """Return the live tensors of this engine, under the names of its notebook."""
    from gpumagic.tensors import scan

    simgpu.enable_from_environment()
    shell = session.shell()
    only = [resolve(name) for name in names]
    return scan.scan(session.user_variables(shell), devices=only, group_by=by, limit=limit, shell=shell)


def prepare() -> None:
    """Prepare for a cell under a cell magic."""
    shell = session.shell()
    if shell is None:
        raise OptionError("this engine runs no IPython")
    if shell.find_line_magic("oomguard") is None:
        shell.meta[_LOADED_FOR_CELL] = True
        shell.extension_manager.load_extension("gpumagic")


def resolve_device(name: str, fallback: str | None, local_rank: int) -> str:
    """Return the full name of a device of this engine; ``auto`` deals out the host's GPUs by local rank."""
    from gpumagic.memory import allocator

    accelerators = allocator.accelerators()
    if name.lower() == "auto" and accelerators:
        name = accelerators[local_rank % len(accelerators)]
    return resolve(name, fallback)


def collect(name: str) -> Any:
    """Return the report that a cell left in a variable, and undo `prepare`."""
    shell = session.shell()
    assert shell is not None
    report = shell.user_ns.pop(name, None)
    shell.user_ns_hidden.pop(name, None)
    if shell.meta.pop(_LOADED_FOR_CELL, False):
        shell.extension_manager.unload_extension("gpumagic")
    return report

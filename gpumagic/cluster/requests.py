"""What an engine does for the client: functions that `engine_side` calls with plain data.

Simgpu is enabled here where the engine's environment asks for it, as when the extension is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpumagic import simgpu
from gpumagic.errors import OptionError
from gpumagic.memory.devices import resolve
from gpumagic.notebook import session
from gpumagic.report.base import Origin, current_origin

if TYPE_CHECKING:
    from gpumagic.gpus.report import GPUReport
    from gpumagic.tensors.report import TensorReport

Response = tuple[Origin, Any]
"""Where the request was served, and its result."""
_LOADED_FOR_CELL = "gpumagic_of_engine_cell"


def gpuinfo(names: Sequence[str], *, processes: bool, everything: bool) -> Response:
    """Return the GPUs of this engine."""
    from gpumagic.gpus import probe

    simgpu.enable_from_environment()
    report: GPUReport = probe.read_gpus(names, processes=processes, everything=everything)
    return report.origin, report


def devices(names: Sequence[str], *, by: str | None, limit: int | None) -> Response:
    """Return the live tensors of this engine, under the names of its notebook."""
    from gpumagic.tensors import scan

    simgpu.enable_from_environment()
    shell = session.shell()
    only = [resolve(name) for name in names]
    report: TensorReport = scan.scan(session.user_variables(shell), devices=only, group_by=by, limit=limit, shell=shell)
    return report.origin, report


def prepare() -> Response:
    """Prepare for a cell under a cell magic."""
    shell = session.shell()
    if shell is None:
        raise OptionError("this engine runs no IPython")
    if shell.find_line_magic("oomguard") is None:
        shell.meta[_LOADED_FOR_CELL] = True
        shell.extension_manager.load_extension("gpumagic")
    return current_origin(), None


def resolve_device(name: str, fallback: str | None, local_rank: int) -> Response:
    """Return the full name of a device of this engine; ``auto`` deals out the host's GPUs by local rank."""
    from gpumagic.memory import allocator

    accelerators = allocator.accelerators()
    if name.lower() == "auto" and accelerators:
        name = accelerators[local_rank % len(accelerators)]
    return current_origin(), resolve(name, fallback)


def collect(name: str) -> Response:
    """Return the report that a cell left in a variable, and undo `prepare`."""
    shell = session.shell()
    assert shell is not None
    report = shell.user_ns.pop(name, None)
    shell.user_ns_hidden.pop(name, None)
    if shell.meta.pop(_LOADED_FOR_CELL, False):
        shell.extension_manager.unload_extension("gpumagic")
    return current_origin(), report

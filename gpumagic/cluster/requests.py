"""What an engine does for the client: `answer`, which is sent to it as text, and the functions that it calls here.

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


def answer(request: str, arguments: dict[str, Any], version: str) -> dict[str, Any]:
    """Call one of the functions above, and return the state, the report and any error, as plain data.

    It is sent to the engine as text and stands alone: the engine may have no gpumagic, or another version.

    Args:
        request: the name of the function.
        arguments: its keyword arguments, plain data.
        version: the gpumagic of the client; nothing is called in another version.
    """
    import importlib
    import importlib.util
    import os
    import pickle
    import socket
    import time
    import zlib

    def is_installed(package: str) -> bool:
        try:
            return importlib.util.find_spec(package) is not None
        except ImportError:
            return False

    facts = {"state": "answered", "host": socket.gethostname(), "pid": os.getpid()}
    started = time.perf_counter()
    try:
        if not is_installed("gpumagic"):
            return {**facts, "state": "no gpumagic"}
        here = str(importlib.import_module("gpumagic").__version__)
        if here != version:
            return {**facts, "state": "other version", "detail": here}
        found = importlib.import_module("gpumagic.cluster.requests").serve(request, arguments)
        facts["answer"] = zlib.compress(pickle.dumps(found, protocol=5), 1)
    except Exception as error:  # reported by the client
        facts.update(state="failed", detail=f"{type(error).__name__}: {error}")
    facts["seconds"] = time.perf_counter() - started
    if not is_installed("torch") and facts["state"] == "answered":
        facts["state"] = "no torch"
    return facts

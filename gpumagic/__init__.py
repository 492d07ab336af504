"""See and steer your GPUs from a notebook.

`%load_ext gpumagic` adds five magics: `%gpuinfo`, `%devices`, `%%ondevice`, `%%oomguard` and `%%dryrun`. The same
engine is a plain Python API:

    gpumagic.gpuinfo()                      the GPUs, who uses them, or why there is none
    gpumagic.devices()                      the live tensors and what holds them
    gpumagic.why("model.fc.weight")         every holder of one tensor
    gpumagic.free_leaks()                   release tensors that only outputs or the last error hold
    with gpumagic.ondevice("cuda:1") as run: ...     new tensors land there; run.report has the copies
    with gpumagic.oomguard() as guard: ...           out-of-memory is explained, its memory freed; guard.report
    gpumagic.dry_run("...code...")          the peak memory that code would need, without running it
    gpumagic.cluster.use(client)            the ipyparallel client whose engines `--engines` means
    gpumagic.merge([...])                   reports of several processes as one

Importing this package imports none of torch, pandas and pynvml, and does no work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumagic.memory import devices as _devices

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from IPython.core.interactiveshell import InteractiveShell

    # What type checkers and editors know of the names below: `as` says that they are public.
    from gpumagic import cluster as cluster
    from gpumagic import simgpu as simgpu
    from gpumagic.api import devices as devices
    from gpumagic.api import dry_run as dry_run
    from gpumagic.api import free_leaks as free_leaks
    from gpumagic.api import gpuinfo as gpuinfo
    from gpumagic.api import ondevice as ondevice
    from gpumagic.api import oomguard as oomguard
    from gpumagic.api import why as why
    from gpumagic.cluster.report import ClusterReport as ClusterReport
    from gpumagic.cluster.report import merge as merge
    from gpumagic.dryrun.report import DryRunReport as DryRunReport
    from gpumagic.errors import DeviceNotFound as DeviceNotFound
    from gpumagic.errors import DryRunUnavailable as DryRunUnavailable
    from gpumagic.errors import GpuMagicError as GpuMagicError
    from gpumagic.errors import OptionError as OptionError
    from gpumagic.errors import SimgpuUnavailable as SimgpuUnavailable
    from gpumagic.gpus.report import GPUReport as GPUReport
    from gpumagic.oom.recognition import OutOfMemory as OutOfMemory
    from gpumagic.oom.report import OomReport as OomReport
    from gpumagic.tensors.report import DiffReport as DiffReport
    from gpumagic.tensors.report import FreedReport as FreedReport
    from gpumagic.tensors.report import LeakReport as LeakReport
    from gpumagic.tensors.report import TensorReport as TensorReport
    from gpumagic.tensors.report import WhyReport as WhyReport
    from gpumagic.transfers.report import TransferReport as TransferReport

    __version__: str

_HOMES = {
    "ClusterReport": "gpumagic.cluster.report",
    "DeviceNotFound": "gpumagic.errors",
    "DiffReport": "gpumagic.tensors.report",
    "DryRunReport": "gpumagic.dryrun.report",
    "DryRunUnavailable": "gpumagic.errors",
    "FreedReport": "gpumagic.tensors.report",
    "GPUReport": "gpumagic.gpus.report",
    "GpuMagicError": "gpumagic.errors",
    "LeakReport": "gpumagic.tensors.report",
    "OomReport": "gpumagic.oom.report",
    "OptionError": "gpumagic.errors",
    "OutOfMemory": "gpumagic.oom.recognition",
    "SimgpuUnavailable": "gpumagic.errors",
    "TensorReport": "gpumagic.tensors.report",
    "TransferReport": "gpumagic.transfers.report",
    "WhyReport": "gpumagic.tensors.report",
    "devices": "gpumagic.api",
    "dry_run": "gpumagic.api",
    "free_leaks": "gpumagic.api",
    "gpuinfo": "gpumagic.api",
    "merge": "gpumagic.cluster.report",
    "ondevice": "gpumagic.api",
    "oomguard": "gpumagic.api",
    "why": "gpumagic.api",
}
"""The module of each public name, which is imported when the name is first asked for."""
_SUBPACKAGES = ("cluster", "simgpu")
__all__ = [*_HOMES, *_SUBPACKAGES]  # noqa: PLE0604  # names, all of them


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics to a shell; called by `%load_ext gpumagic`."""
    from gpumagic import extension

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Undo `load_ipython_extension`; called by `%unload_ext gpumagic`."""
    from gpumagic import extension

    extension.unload(shell)


def _driver_figures(backends: Collection[str]) -> Mapping[str, _devices.DriverFigures]:
    from gpumagic.gpus import probe

    return probe.driver_figures(backends)


_devices.driver_figures = _driver_figures


def __getattr__(name: str) -> object:
    import importlib

    if name == "__version__":
        from gpumagic import _compat

        return _compat.installed_version()
    if name in _SUBPACKAGES:
        return importlib.import_module(f"gpumagic.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gpumagic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

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

    from gpumagic import cluster, simgpu
    from gpumagic.api import devices, dry_run, free_leaks, gpuinfo, ondevice, oomguard, why
    from gpumagic.cluster.report import ClusterReport, merge
    from gpumagic.dryrun.report import DryRunReport
    from gpumagic.errors import (
        DeviceNotFound,
        DryRunUnavailable,
        GpuMagicError,
        OptionError,
        SimgpuUnavailable,
    )
    from gpumagic.gpus.report import GPUReport
    from gpumagic.oom.recognition import OutOfMemory
    from gpumagic.oom.report import OomReport
    from gpumagic.tensors.report import DiffReport, FreedReport, LeakReport, TensorReport, WhyReport
    from gpumagic.transfers.report import TransferReport

    __version__: str

__all__ = [
    "ClusterReport", "DeviceNotFound", "DiffReport", "DryRunReport", "DryRunUnavailable", "FreedReport", "GPUReport",
    "GpuMagicError", "LeakReport", "OomReport", "OptionError", "OutOfMemory", "SimgpuUnavailable", "TensorReport",
    "TransferReport", "WhyReport", "cluster", "devices", "dry_run", "free_leaks", "gpuinfo", "merge", "ondevice",
    "oomguard", "simgpu", "why",
]  # fmt: skip

_HOMES = {
    "gpumagic.api": ("devices", "gpuinfo", "ondevice", "oomguard", "dry_run", "free_leaks", "why"),
    "gpumagic.cluster.report": ("ClusterReport", "merge"),
    "gpumagic.dryrun.report": ("DryRunReport",),
    "gpumagic.errors": (
        "DeviceNotFound",
        "GpuMagicError",
        "OptionError",
        "DryRunUnavailable",
        "SimgpuUnavailable",
    ),
    "gpumagic.gpus.report": ("GPUReport",),
    "gpumagic.oom.recognition": ("OutOfMemory",),
    "gpumagic.oom.report": ("OomReport",),
    "gpumagic.tensors.report": (
        "DiffReport",
        "FreedReport",
        "LeakReport",
        "TensorReport",
        "WhyReport",
    ),
    "gpumagic.transfers.report": ("TransferReport",),
}


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
    if name in {"cluster", "simgpu"}:
        return importlib.import_module(f"gpumagic.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'gpumagic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

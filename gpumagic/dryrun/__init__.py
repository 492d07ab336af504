"""Predict a cell's peak memory without touching the device: it is run in another process, on a device of no bytes.

In that process torch knows the device, its tensors are plain ones, its optimizers, autocast and checkpointing are
torch's own; only the kernels are answered by shape. The CPU is real, so data loaders, shuffling and `.tolist()` do
what they do. Nothing of the notebook changes.

    targets.py     which devices, and what of them can be had
    parcel.py      the notebook as code and metadata; sendable.py is how its odder parts go, shelf.py large data
    client.py      the parent's end of the worker process; worker.py is the other
    stage/         what runs in there
    forecast.py    the order for the worker, and what its answer means
    fitting.py     the largest value with which a cell fits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumagic.dryrun.fitting import fit

__all__ = ["fit"]


def __getattr__(name: str) -> object:
    if name == "fit":
        from gpumagic.dryrun.fitting import fit

        return fit
    raise AttributeError(f"module 'gpumagic.dryrun' has no attribute {name!r}")

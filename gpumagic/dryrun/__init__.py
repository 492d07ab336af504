"""Predict a cell's peak memory without touching the device: it runs in another process, on a device of no bytes.

This is the notebook's side. What runs in the other process is `gpumagic.worker`.

In that process torch knows the device, its tensors are plain ones, its optimizers, autocast and checkpointing are
torch's own; only the kernels are answered by shape. The CPU is real, so data loaders, shuffling and `.tolist()` do
what they do. Nothing of the notebook changes.

    script.py      what runs; `targets.py` says on which devices, and what answers
    run.py         the request to the worker, of one rank or of those of many that may differ, and its answer
    scenarios.py   the same with other values in place of those that are not known
    fitting.py     the largest value of a setting with which a cell fits
    payload.py     the notebook as code and metadata; `sendable.py` decides how each object goes, `parts.py` as what
    client.py      the parent's end of the worker process
    report.py      the records; `view.py` shows them
    effects.py     what a cell does outside its process, and which of that a dry run leaves out
"""

from __future__ import annotations

"""Predict a cell's peak memory without touching the device: it runs in another process, on a device of no bytes.

This is the notebook's side. What runs in the other process is `gpumagic.worker`.

In that process torch knows the device, its tensors are plain ones, its optimizers, autocast and checkpointing are
torch's own; only the kernels are answered by shape. The CPU is real, so data loaders, shuffling and `.tolist()` do
what they do. Nothing of the notebook changes.

    script.py      what runs; `targets.py` says on which devices, and what answers
    run.py         one dry run, or those of the ranks of many that may differ, and the report; `request.py` is sent
    explore.py     further runs, with other values in place of those that are not known: which are made
    scenarios.py   those runs, and what they have in common; `judge.py` says what they come to
    fitting.py     the largest value of a setting with which a cell fits; `number_search.py` says where to look
    payload.py     the notebook as code and metadata; `sendable.py` decides how each object goes, `parts.py` as what
    client.py      this process's end of the worker
    wire.py        the records that both sides speak in, which `typed_json.py` checks
    report.py      the records; `view.py` shows them
    effects.py     what a cell does outside its process, and which of that a dry run leaves out
"""

from __future__ import annotations

"""What is sent to the worker for a dry run: code, variables, devices, and whatever else of this process it needs."""

from __future__ import annotations

import linecache
import os
import random
import sys

from gpumagic.backends import backend_named
from gpumagic.dryrun import payload, wire
from gpumagic.dryrun.script import Script
from gpumagic.dryrun.targets import Target
from gpumagic.heap.workspaces import find_workspaces
from gpumagic.source.frames import is_library

_PRELOADED = frozenset({
    "torch", "numpy", "pandas", "matplotlib", "scipy", "sklearn", "PIL", "torchvision", "transformers", "timm",
    "einops", "accelerate", "peft", "diffusers", "lightning", "pytorch_lightning", "torchmetrics", "safetensors",
})  # fmt: skip
"""Packages of which the worker imports once what the notebook has imported; private modules come with the others."""


def request_of(
    what: Script,
    packed: payload.Payload,
    target: Target,
    values: dict[str, object],
    time_limit: float,
) -> wire.Request:
    """Return what the worker needs for a dry run of some code.

    Args:
        what: the code.
        packed: the notebook's variables that it uses.
        target: the devices.
        values: other values for some of these variables.
        time_limit: seconds after which the dry run is given up.
    """
    sources = {}
    for filename in packed.files:
        text = "" if is_library("", filename) else "".join(linecache.getlines(filename))
        if text:
            sources[filename] = text
    if what.source:
        sources[what.filename] = what.source
    return wire.Request(
        code=wire.Code(what.source, what.filename, sources),
        notebook=wire.Notebook(
            data=packed.buffer.getvalue(),
            shared=packed.shared.path,
            slots=packed.shared.slots,
            scopes=len(packed.scopes),
            values=values,
        ),
        devices=_devices(packed, target),
        imports=_imports(),
        random=_random_states(),
        time_limit=time_limit,
    )


def _devices(packed: payload.Payload, target: Target) -> wire.Devices:
    """Return the devices of a dry run, with what the notebook holds there besides what is sent."""
    base = []
    for name, held, its_segments in zip(
        target.names, target.allocated, target.segments, strict=True
    ):
        is_laid_out = its_segments is not None
        base.append(0 if is_laid_out else max(0, held - packed.device_bytes[name]))
    # Where torch keeps workspaces for cuBLAS: on an imagined device nowhere.
    is_imagined = target.is_imagined or target.ranks is not None
    found = [] if is_imagined else find_workspaces()
    workspaces = [
        [(block.address, block.size) for block in found if block.device == name]
        for name in target.names
    ]
    _, most = target.extra
    capacities = [
        None if capacity is None else max(0, capacity - most)
        for capacity in target.capacities
    ]
    return wire.Devices(
        engine=target.engine,
        backend=target.backend,
        gpu=target.gpu,
        gpus=target.gpus,
        capacities=capacities,
        base=base,
        segments=target.segments,
        workspaces=workspaces,
        cuts_to_size=backend_named(target.backend).is_simulated,
    )


def _imports() -> wire.Imports:
    """Return where this process imports from, and what the worker is to import before it forks."""
    preload = []
    installed = []
    for name, module in list(sys.modules.items()):
        package, _, inner = name.partition(".")
        if package in _PRELOADED and "._" not in name:
            preload.append(name)
        if not inner and is_library(name, getattr(module, "__file__", None) or ""):
            installed.append(name)
    folder = os.getcwd()  # noqa: PTH109
    return wire.Imports(list(sys.path), folder, preload, installed)


def _random_states() -> wire.RandomStates:
    import torch

    numpy = sys.modules.get("numpy")
    return wire.RandomStates(
        python=random.getstate(),
        torch=bytes(torch.get_rng_state().tolist()),
        numpy=None if numpy is None else numpy.random.get_state(),
    )

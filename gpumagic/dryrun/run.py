"""A dry run from the parent's side: what to send to the worker, and which engine answers."""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gpumagic.dryrun import courses, engine, parcel, verdict
from gpumagic.dryrun.engine import Engine
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import Script
from gpumagic.dryrun.targets import Target
from gpumagic.errors import DryRunUnavailable
from gpumagic.memory import workspaces
from gpumagic.source.frames import is_library

TIME_LIMIT = 60.0
_PRELOADED = frozenset({"torch", "numpy", "pandas", "matplotlib", "torchvision", "transformers", "timm", "einops"})
"""Packages of which the worker imports once what the notebook has imported."""


def dry_run(
    what: Script,
    namespace: Mapping[str, Any],
    target: Target,
    *,
    values: Mapping[str, object] | None = None,
    time_limit: float = TIME_LIMIT,
    note: Callable[[dict[str, Any]], object] | None = None,
) -> DryRunReport:
    """Return what running the code would need.

    Args:
        what: the code.
        namespace: the names it sees; they are read and not changed.
        target: the devices.
        values: other values for some of the names.
        time_limit: seconds after which the dry run is given up.
        note: called with the worker's account, where it gave one.

    Raises:
        DryRunUnavailable: this torch or system cannot.
    """
    chosen = engine.choose(target)
    target = chosen.target
    if chosen.name == engine.FAKE:
        _check_torch()
    sent = parcel.pack(
        namespace, what.names(), what.function, with_graphs=target.tells_segments(), only_used=not target.is_here
    )  # fmt: skip
    with contextlib.closing(sent) as parts:
        order = _order(what, parts, chosen, dict(values or {}), time_limit)
        told = courses.run(order)
        if "ended" in told:
            return verdict.report_of_nothing(chosen, told["ended"])
        if note is not None:
            note(told)
        return verdict.report_of(told, chosen, parts)


def _check_torch() -> None:
    import torch

    if not hasattr(torch._C, "_acc"):
        raise DryRunUnavailable(
            f"a dry run needs a torch that takes backends written in Python (2.10 or newer), and this is "
            f"{torch.__version__}"
        )


def _order(
    what: Script, parts: parcel.Parcel, chosen: Engine, values: dict[str, object], time_limit: float
) -> dict[str, Any]:
    import torch

    target = chosen.target
    base = [
        max(0, held - parts.device_bytes.get(name, 0)) if segments is None else 0
        for name, held, segments in zip(target.names, target.allocated, target.segments, strict=True)
    ]
    numpy = sys.modules.get("numpy")
    sources = {name: "".join(linecache.getlines(name)) for name in parts.files if not is_library("", name)}
    if what.source is not None:
        sources[what.filename] = what.source
    return {
        "engine": chosen.name, "is_brief": False, "gpus": chosen.gpus, "workspaces": _workspaces(target),
        "source": what.source, "filename": what.filename, "data": parts.data, "shelf": parts.shelf.path,
        "scopes": parts.scopes,
        "sources": {name: text for name, text in sources.items() if text}, "values": values,
        "backend": target.backend, "chosen": target.chosen, "base": base, "cuts_to_size": target.cuts_to_size,
        "capacities": [
            None if each is None else max(0, each - target.extra[1]) for each in target.capacities
        ],
        "pinned": target.pinned, "segments": target.segments, "guess": 0, "others": {}, "follows": False,
        "time_limit": time_limit, "path": list(sys.path), "folder": os.getcwd(),  # noqa: PTH109
        "preload": [name for name in list(sys.modules) if name.partition(".")[0] in _PRELOADED],
        "random": random.getstate(), "torch_random": bytes(torch.get_rng_state().tolist()),
        "numpy_random": None if numpy is None else numpy.random.get_state(),
    }  # fmt: skip


def _workspaces(target: Target) -> list[list[tuple[int, int]]]:
    """Return where torch keeps workspaces for cuBLAS, and their bytes, for each device; none on an imagined one."""
    found = [] if target.is_imagined else workspaces.find_workspaces()
    return [[(each.address, each.nbytes) for each in found if each.device == name] for name in target.names]

"""Dry-runs every cell and then really runs it, on cards of its own; prints what both say as JSON.

A process of its own: the cards' capacity is set anew for every cell.
"""

from __future__ import annotations

import gc
import importlib
import json
import linecache
import sys
import time

import torch

from gpumagic import simgpu
from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.script import script_of
from tests.dryrun.dryrun_cells import CELLS, COMMON, TRANSFORMERS

AMPLE = 1 << 30
KNOWN = {**CELLS, **TRANSFORMERS}


def notebook(name: str, capacity: int) -> dict[str, object]:
    """Return the namespace after the earlier cells, on empty cards of this capacity."""
    _let_go()
    simgpu.enable(devices=2, memory=capacity)
    torch.simgpu.empty_cache()
    namespace: dict[str, object] = {"__name__": "__main__"}
    for label, source in (("<common>", COMMON), (f"<before {name}>", KNOWN[name][0])):
        linecache.cache[label] = (len(source), None, source.splitlines(True), label)
        exec(compile(source, label, "exec"), namespace)
    return namespace


def _let_go() -> None:
    """Collect until the cards are empty: autograd's threads keep a graph, or an error, longer than the cell runs."""
    for _ in range(100):
        gc.collect()
        if not simgpu.is_enabled() or not any(map(torch.simgpu.memory_allocated, range(2))):
            return


def really(name: str, capacity: int) -> dict[str, object]:
    """Run the cell, and return its peaks; ``fits`` tells whether it ended."""
    namespace = notebook(name, capacity)
    for index in range(2):
        torch.simgpu.reset_peak_memory_stats(index)
    fits = True
    try:
        exec(compile(KNOWN[name][1], "<cell>", "exec"), namespace)
    except torch.OutOfMemoryError:
        fits = False
    stats = [torch.simgpu.memory_stats(index) for index in range(2)]
    namespace.clear()
    gc.collect()
    return {
        "fits": fits,
        "peak": [each["allocated_bytes.all.peak"] for each in stats],
        "reserved": [each["reserved_bytes.all.peak"] for each in stats],
    }


def dry_run(name: str, capacity: int) -> dict[str, object]:
    namespace = notebook(name, capacity)
    start = time.perf_counter()
    report = run.dry_run(script_of(KNOWN[name][1]), namespace, targets.choose("simgpu:0", None))
    told = {
        "fits": report.fits,
        "peak": list(report.peak.values()),
        "reserved": list(report.reserved.values()),
        "verdict": report.verdict,
        "seconds": time.perf_counter() - start,
        "operators": report.operators,
        "unknown": report.unknown,
        "assumed": report.assumed,
        "breakdown": report.breakdown,
        "adds_up": all(sum(point.parts.values()) == point.allocated for point in report.timeline),
        "highest": [
            max(p.allocated for p in report.timeline if p.device == device)
            for device in report.peak
        ],
    }
    namespace.clear()
    return told


def tight(name: str, capacity: int) -> list[object]:
    """Return what both say on cards of this capacity; nothing where not even the earlier cells fit."""
    try:
        return [dry_run(name, capacity), really(name, capacity)]
    except torch.OutOfMemoryError:
        return []


def main(names: list[str]) -> None:
    importlib.import_module("torch._dynamo")  # as optimizers do at their first step
    gc.freeze()  # modules are never garbage: the collections after each cell need not look at them
    results = {}
    for name in names or CELLS:
        results[name] = found = {
            "dry_run": dry_run(name, AMPLE),
            "real": really(name, AMPLE),
            "tight": [],
        }
        if name in CELLS:
            need = max(found["real"]["reserved"])
            found["tight"] = [
                each
                for each in (tight(name, need), tight(name, max(2 << 20, need - (2 << 20))))
                if each
            ]
    client.close()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

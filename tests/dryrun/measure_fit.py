"""Finds the largest batch of every training cell by dry runs, and tries by really running whether it is; as JSON."""

from __future__ import annotations

import json
import re
import sys
import time

import gpumagic
from gpumagic.dryrun import client
from tests.dryrun.dryrun_cells import TRAINING
from tests.dryrun.measure import KNOWN, notebook, really

CAPACITY = 64 << 20


def runs(name: str, batch: int) -> bool:
    """Return whether the cell really runs with a batch."""
    before, cell = TRAINING[name]
    changed = re.sub(r"batch = \d+", f"batch = {batch}", cell, count=1)
    KNOWN["tried"] = (before, changed)
    return bool(really("tried", CAPACITY)["fits"])


def main(names: list[str]) -> None:
    results = {}
    for name in names or TRAINING:
        namespace = notebook(name, CAPACITY)
        start = time.perf_counter()
        found = gpumagic.dry_run(TRAINING[name][1], namespace, device="simgpu:0", fit="batch")
        seconds = time.perf_counter() - start
        namespace.clear()
        largest = found.largest or 0
        results[name] = {
            "largest": largest, "seconds": seconds, "tried": len(found.search.trials),
            "reason": found.search.reason,
            "fits": runs(name, largest), "more": runs(name, max(largest + 1, int(largest * 1.02) + 1)),
        }  # fmt: skip
        print(name, results[name], file=sys.stderr, flush=True)
    client.close()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

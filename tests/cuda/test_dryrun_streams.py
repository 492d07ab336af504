"""Dry runs beside streams of earlier cells: what lies in their part of the cache, and cuBLAS's workspaces of theirs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.dryrun import client

EARLIER = {
    "a product on a stream": "s = torch.cuda.Stream()\nwith torch.cuda.stream(s):\n    y = a @ a",
    "a training step on a stream": """
s = torch.cuda.Stream()
w = torch.ones(512, 512, device="cuda", requires_grad=True)
with torch.cuda.stream(s):
    (w @ a).sum().backward()
""",
    "products on both": "b = a @ a\ns = torch.cuda.Stream()\nwith torch.cuda.stream(s):\n    y = a @ a",
    "tensors of a stream": """
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    kept = [a * each for each in range(5)]
del kept[2]
""",
    "a thread that is gone": """
import threading
s = torch.cuda.Stream()
w = torch.ones(512, 512, device="cuda", requires_grad=True)
(w @ a).sum().backward()
thread = threading.Thread(target=lambda: a @ a)
thread.start()
thread.join()
del thread
""",
}
CELLS = {
    "on the default stream": "z = a @ a\nz = (z * 2).sum()",
    "on the stream": "with torch.cuda.stream(s):\n    z = a @ a\n    z = (z * 2).sum()",
    "with an event": "done = torch.cuda.Event()\n"
    "with torch.cuda.stream(s):\n    z = a @ a\n    done.record()\nz = z @ z",
}


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    client.close()


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)
def test_the_peak_beside_a_stream_is_the_allocators(earlier: str, cell: str) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec('import torch\na = torch.ones(512, 512, device="cuda")\n' + earlier, names)
    report = gpumagic.dry_run(cell, names, device="cuda:0")
    torch.cuda.reset_peak_memory_stats()
    exec(cell, names)
    assert (report.fits, report.peak["cuda:0"]) == (True, torch.cuda.max_memory_allocated())
    assert report.reserved["cuda:0"] == torch.cuda.max_memory_reserved()

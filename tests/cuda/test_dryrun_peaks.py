"""The dry run on torch's CUDA build: its peak is that of torch's own allocator, and streams and events run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gpumagic
from gpumagic._compat import torch_private
from gpumagic.dryrun import client

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(
        not torch_private.BACKENDS_IN_PYTHON.is_there(),
        reason="a dry run needs torch 2.10 or newer",
    ),
]

SETUP = """
import torch
from torch import nn
x = torch.ones(1024, 256, device="cuda")
table = nn.Embedding(1000, 64).cuda()
lazy = nn.LazyLinear(64).cuda()
"""
CELLS = {
    "new tensors and an operator": "y = torch.empty(1000, 1000, device='cuda')\nz = (y + 1).relu()",
    "a graph": "a = x.clone().requires_grad_()\nloss = a.sin().exp().sum()\nloss.backward()",
    "an embedding": "found = table(torch.zeros(64, 32, dtype=torch.long, device='cuda')).tanh()",
    "a lazy module": "y = lazy(x)\ny.sum().backward()",
    "a loop": "kept = []\nfor _ in range(5):\n    kept.append(x * 2)",
    "a stream": """
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    y = x + 1
    y.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(s)
""",
    "a generator": "g = torch.Generator('cuda')\nnoise = torch.randn(100, 100, device='cuda', generator=g)",
    "events": "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\na.record()\ny = x + 1\nb.record()\n"
    "b.synchronize()\nms = a.elapsed_time(b)",
}


@pytest.fixture
def variables() -> Iterator[dict[str, object]]:
    found: dict[str, object] = {}
    exec(SETUP, found)
    yield found
    found.clear()


@pytest.fixture(scope="module", autouse=True)
def _one_worker() -> Iterator[None]:
    yield
    client.close()


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_told_is_that_of_torchs_allocator(variables, name) -> None:
    report = gpumagic.dry_run(CELLS[name], variables, device="cuda:0")
    torch.cuda.reset_peak_memory_stats()
    exec(CELLS[name], dict(variables))
    assert (report.fits, report.peak["cuda:0"]) == (True, torch.cuda.max_memory_allocated(0))

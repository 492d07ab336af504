"""Code that says ``cuda`` is dry-run on a machine without CUDA, and needs what it needs on the simulated card.

Nothing here was compared with a real GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
from dryrun_cells import CELLS, COMMON
from stages import sample

import gpumagic
from gpumagic.dryrun import run, targets
from gpumagic.dryrun.script import script_of

pytestmark = pytest.mark.usefixtures("two_devices")
SAME = (
    "adamw, its default", "adamw, fused", "autocast, bfloat16", "a model made on the device", "a data loader, shuffled",
    "a convolutional network", "two devices", "moves", "checkpointing, reentrant", "lengths read back",
)  # fmt: skip


def dry_run(name, backend):
    source = (COMMON + "\n".join(CELLS[name])).replace("simgpu", backend)
    target = dataclasses.replace(targets.choose(None, 1 << 30), backend=backend, extra=(0, 0), cuts_to_size=True)
    empty = dataclasses.replace(target, allocated=[0, 0], pinned=[0, 0], segments=[None, None])
    return run.dry_run(script_of(source), {}, empty)


@pytest.mark.parametrize("name", sample(SAME, 4))
def test_the_peak_is_that_of_the_simulated_card(name) -> None:
    told, expected = dry_run(name, "cuda"), dry_run(name, "simgpu")
    assert told.error is None
    assert list(told.peak.values()) == list(expected.peak.values())
    assert told.breakdown == expected.breakdown


def test_code_that_asks_gets_cudas_answers() -> None:
    cell = """
import torch
x = torch.ones(4, device="cuda")
assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and x.is_cuda
assert x.device == torch.device("cuda:0") and str(x.device) == "cuda:0" and x.cuda() is x
layer = torch.nn.Linear(4, 4)
weight = layer.weight
optimizer = torch.optim.AdamW(layer.parameters())
layer.cuda()
assert layer.weight is weight and weight.is_cuda
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert layer(x).dtype == torch.bfloat16
layer(x).sum().backward()
optimizer.step()
assert optimizer.state[weight]["exp_avg"].device.type == "cuda"
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
"""
    report = gpumagic.dry_run(cell, {}, device="cuda", capacity="16GiB")
    assert report.error is None, report.error
    assert report.fits
    assert "an estimate" in report.unknown[-1]


def test_a_large_attention_matrix_is_not_made() -> None:
    """CUDA has kernels for attention that never hold it; so has the dry run."""
    cell = """
import torch
q = torch.empty(1, 8, 4096, 64, dtype={}, device="cuda", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
"""
    for dtype in ("torch.float16", "torch.float32"):
        assert gpumagic.dry_run(cell.format(dtype), {}, device="cuda", capacity="16GiB").peak["cuda:0"] < 100 << 20


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("torch.nn.LSTM(4, 4).cuda()(torch.ones(2, 3, 4, device='cuda'))", "lstm"),
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
    ],
)
def test_what_cuda_does_otherwise_is_refused_by_name(cell, word) -> None:
    report = gpumagic.dry_run("import torch\n" + cell, {}, device="cuda", capacity="16GiB")
    assert report.fits is None
    assert word in report.error


def test_streams_events_and_generators_run_as_if_there_were_one_stream() -> None:
    cell = """
import torch
x = torch.ones(1000, device="cuda")
s, e = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(s):
    y = x + 1
    y.record_stream(torch.cuda.current_stream())
e.record(s)
s.wait_stream(torch.cuda.default_stream())
ms = e.elapsed_time(torch.cuda.Event(enable_timing=True))
g = torch.Generator("cuda").manual_seed(1)
assert isinstance(g, torch.Generator)
z = torch.rand(1000, device="cuda", generator=g).normal_(generator=g)
"""
    report = gpumagic.dry_run(cell, {}, device="cuda", capacity="16GiB")
    assert (report.fits, report.peak["cuda:0"]) == (True, 3 * 4096)

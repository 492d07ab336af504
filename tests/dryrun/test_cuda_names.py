"""Code that says ``cuda`` is dry-run on a machine without CUDA, and needs what torch's CUDA allocator has for it.

Nothing here was compared with a real GPU.
"""

from __future__ import annotations

import dataclasses

import pytest

import gpumagic
from gpumagic.dryrun import run, targets
from gpumagic.dryrun.script import script_of
from tests.dryrun.dryrun_cells import CELLS, COMMON
from tests.stages import sample

pytestmark = pytest.mark.usefixtures("two_devices")
ALLOCATED = {
    "adamw, its default": [6_810_112, 0], "adamw, fused": [6_813_184, 0], "autocast, bfloat16": [20_152_832, 0],
    "a model made on the device": [15_443_456, 0], "a data loader, shuffled": [6_041_088, 0],
    "a convolutional network": [10_865_664, 0], "two devices": [11_545_600, 8_205_312],
    "moves": [14_001_152, 4_000_256], "checkpointing, reentrant": [23_855_616, 0],
    "a gpt, checkpointed": [5_278_208, 0], "a scheduler and clipping": [6_802_432, 0],
    "bfloat16 weights": [8_611_328, 0], "gradient accumulation": [3_591_168, 0],
    "autocast, float16, with a gradient scaler": [7_130_112, 0],
}  # fmt: skip
"""What torch 2.13's CUDA allocator has at the peak of these cells over the fake runtime, cuBLAS without workspaces."""


def dry_run(name, backend):
    source = (COMMON + "\n".join(CELLS[name])).replace("simgpu", backend)
    target = dataclasses.replace(targets.choose(None, 1 << 30), backend=backend, extra=(0, 0))
    empty = dataclasses.replace(target, allocated=[0, 0], segments=[None, None])
    return run.dry_run(script_of(source), {}, empty)


@pytest.mark.parametrize("name", sample(ALLOCATED, 4))
def test_the_peak_is_that_of_torchs_cuda_allocator(name) -> None:
    told = dry_run(name, "cuda")
    assert told.error is None
    assert list(told.peak.values()) == ALLOCATED[name]


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
assert (layer(x).sum().bfloat16() * 0.5).dtype == torch.bfloat16
lazy = torch.nn.LazyLinear(2)
lazy.weight.tag = "mine"
assert lazy.to("cuda")(x).is_cuda and lazy.weight.shape == (2, 4) and lazy.weight.tag == "mine"
assert optimizer.state[weight]["exp_avg"].device.type == "cuda"
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
"""
    report = gpumagic.dry_run(cell, {}, device="cuda", capacity="16GiB")
    assert report.error is None, report.error
    assert report.fits
    assert report.overhead == (0, 64 << 20), (
        "torch may have 16 GiB; cuBLAS's workspaces lie in it and are not modelled"
    )


def test_cuda_without_a_number_is_the_current_device() -> None:
    cell = """
import torch
with torch.cuda.device(1):
    made = [torch.ones(4, device="cuda"), torch.ones(4).cuda(), torch.ones(4).to("cuda")]
assert all(each.device.index == 1 for each in made)
assert torch.ones(4).cuda(device=0, non_blocking=True).device.index == 0
"""
    report = gpumagic.dry_run(cell, {}, device="cuda:1", capacity="16GiB")
    assert report.error is None, report.error
    assert report.peak == {"cuda:0": 512, "cuda:1": 3 * 512}


@pytest.mark.parametrize(
    "line",
    [
        "torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()",
        "with torch.autocast('cuda', dtype=torch.bfloat16): torch.utils.checkpoint.checkpoint(net, x).sum().backward()",
        "torch.func.vmap(torch.func.grad(lambda row: net[0](row).sum()))(x)",
        "kept = copy.deepcopy(net.state_dict())",
        "worker = threading.Thread(target=lambda: net(torch.ones(4, 8).cuda())); worker.start(); worker.join()",
        "with torch.autograd.graph.save_on_cpu(): net(x).sum().backward()",
    ],
)  # fmt: skip
def test_what_runs_past_the_cells_own_frames_knows_cuda(line) -> None:
    cell = (
        "import copy, threading, torch, torch.utils.checkpoint\n"
        "net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 8)).cuda()\n"
        "x = torch.ones(4, 8, device='cuda', requires_grad=True)\n"
    )
    report = gpumagic.dry_run(cell + line, {}, device="cuda", capacity="16GiB", time_limit=20)
    assert report.error is None, report.error
    assert report.fits


def test_a_large_attention_matrix_is_not_made() -> None:
    """CUDA has kernels for attention that never hold it; so has the dry run."""
    cell = """
import torch
q = torch.empty(1, 8, 4096, 64, dtype={}, device="cuda", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
"""
    for dtype in ("torch.float16", "torch.float32"):
        assert (
            gpumagic.dry_run(cell.format(dtype), {}, device="cuda", capacity="16GiB").peak["cuda:0"]
            < 100 << 20
        )


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("torch.nn.LSTM(4, 4).cuda()(torch.ones(2, 3, 4, device='cuda'))", "lstm"),
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
        (
            "net = torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda(), [0, 1])\nnet(torch.ones(4, 4).cuda())",
            "DataParallel",
        ),
    ],
)
def test_what_cuda_does_otherwise_is_refused_by_name(cell, word) -> None:
    report = gpumagic.dry_run("import torch\n" + cell, {}, device="cuda:1", capacity="16GiB")
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


def _with_a_million(expression):
    cell = f"import torch\nx = torch.ones(1000, 1000, device='cuda')\ny = {expression}"
    return gpumagic.dry_run(cell, {}, gpu="T4")


@pytest.mark.parametrize(
    ("expression", "operator"),
    [
        ("x.sort()", "sort"),
        ("x.topk(5)", "topk"),
        ("x.median()", "median"),
        ("x.count_nonzero()", "count_nonzero"),
        ("x.multinomial(1)", "multinomial"),
        ("torch.bernoulli(x)", "bernoulli_"),
    ],
)
def test_what_rare_kernels_take_is_said_to_be_unknown_and_makes_the_answer_uncertain(
    expression, operator
) -> None:
    report = _with_a_million(expression)
    assert not report.certain
    assert report.unknown == (f"what CUDA's kernels take for themselves in {operator}",)


@pytest.mark.parametrize("expression", ["x.exp()", "x.cumsum(0)", "x[[1, 2]]", "x.bernoulli_(0.1)"])
def test_what_common_kernels_take_is_known(expression) -> None:
    assert _with_a_million(expression).certain

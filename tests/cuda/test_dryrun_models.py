"""A model that a dry run builds costs the host no memory, whatever its size, and takes on the device what it takes.

What the host pays is read from /proc in the process of the dry run itself.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumagic.dryrun import client, fitting, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from tests.dryrun.dryrun_outcomes import kept_outcomes

transformers = pytest.importorskip("transformers")

MIB = 1 << 20
ROOM = 300 * MIB  # of which what the first run imports, and later ones find, is 140
"""What a model of any size may cost the host, the import of its library included."""

MEASURED = """
import resource

def _resident():
    words = open("/proc/self/smaps_rollup").read().split()
    return int(words[words.index("Rss:") + 1]) * 1024

_before = _resident()
{cell}
raise RuntimeError(f"[{{_before}}, {{_resident()}}, {{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}}]")
"""
LLAMA = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
cfg = LlamaConfig(vocab_size=128256, hidden_size={}, intermediate_size={}, num_hidden_layers={},
                  num_attention_heads={}, num_key_value_heads=8)
"""
LLAMA_70B, LLAMA_8B = LLAMA.format(8192, 28672, 80, 64), LLAMA.format(4096, 14336, 32, 32)
SMALL = LLAMA.format(1024, 2048, 2, 16).replace("128256", "4000")

WAYS = {
    "on the host": "m = AutoModelForCausalLM.from_config(cfg)",
    "cast on the way": "m = AutoModelForCausalLM.from_config(cfg).to('cuda', torch.bfloat16)",
    "halved, then moved": "m = AutoModelForCausalLM.from_config(cfg).half().cuda()",
    "in bfloat16": "m = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16).cuda()",
    "on meta": "with torch.device('meta'):\n    m = AutoModelForCausalLM.from_config(cfg)\n"
    "m = m.to_empty(device='cuda')",
    "on the device": "with torch.device('cuda'):\n    m = AutoModelForCausalLM.from_config(cfg)",
    "accelerate": "import accelerate\nwith accelerate.init_empty_weights():\n"
    "    m = AutoModelForCausalLM.from_config(cfg)\nm = m.to_empty(device='cuda')",
    "its state copied": "import copy\nm = AutoModelForCausalLM.from_config(cfg)\n"
    "kept = {name: each.clone() for name, each in m.state_dict().items()}\nm.load_state_dict(kept)\n"
    "twin = copy.deepcopy(m)\ntwin.load_state_dict(kept, assign=True)\nm.cuda()",
    "taken back to the host": "m = AutoModelForCausalLM.from_config(cfg).cuda()\nm = m.cpu()",
    "pinned": "m = AutoModelForCausalLM.from_config(cfg)\nfor each in m.parameters():\n"
    "    each.data = each.data.pin_memory().to('cuda', non_blocking=True)",
}


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture(autouse=True)
def _empty_device() -> None:
    """Begin without what earlier tests of the process have left, such as cuBLAS's workspaces."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def dry_run(cell: str, capacity: int | None = None) -> DryRunReport:
    return run.dry_run(script_of(cell), {}, targets.choose("cuda:0", capacity))


def resident(cell: str) -> tuple[int, DryRunReport]:
    """Return by how many bytes the process of the dry run grew at most, and the report."""
    report = dry_run(MEASURED.format(cell=cell), 1 << 40)
    assert report.error is not None
    before, after, most = json.loads(report.error[report.error.index("[") :])
    return max(after, most) - before, report


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_70_billion_weights_costs_the_host_nothing(way: str) -> None:
    grown, report = resident(LLAMA_70B + WAYS[way])
    assert grown < ROOM
    weights = 70_553_706_496  # as its authors count them
    on_device = {
        "on the host": 0,
        "cast on the way": 2,
        "halved, then moved": 2,
        "in bfloat16": 2,
    }.get(way, 4)
    assert on_device * weights <= report.peak["cuda:0"] <= on_device * weights + MIB


@pytest.mark.parametrize("way", WAYS)
def test_on_the_device_it_takes_what_it_takes_to_the_byte(way: str) -> None:
    report = dry_run(SMALL + WAYS[way])
    assert report.error is None
    assert report.peak["cuda:0"] == really(SMALL + WAYS[way])


def really(cell: str) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    names: dict[str, Any] = {}
    exec(cell, names)
    names.clear()
    gc.collect()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=1, num_attention_heads=32,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("asked", ["dtype=torch.float32", "dtype=torch.float32, device_map='cuda'"])
def test_a_checkpoint_is_not_read_to_be_cast_and_moved(asked: str, checkpoint: Path) -> None:
    load = f"transformers.AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, {asked}).cuda()"
    cell = f"import torch, transformers, transformers.models.llama.modeling_llama\nMARK\nm = {load}"
    grown, report = resident(cell.replace("MARK", "_before = _resident()"))
    assert grown < 32 * MIB
    assert report.peak["cuda:0"] == really(cell.replace("MARK", ""))


def test_what_the_host_looks_at_is_drawn_and_said_on_its_line() -> None:
    build = (
        "import torch\nlarge = torch.nn.Linear(16384, 16384)\nlayer = torch.nn.Linear(1024, 1024)\n"
    )
    cell = build + "mask = layer.weight > 0\nx = layer.weight[mask].cuda()"
    with kept_outcomes() as told:
        report = dry_run(cell)
    assert (4, "layer.weight > 0") in [tuple(place[:2]) for place, _, _ in told[0].decisions]
    assert report.peak["cuda:0"] > MIB


def test_weights_that_come_to_the_host_are_not_read_until_it_looks_at_one() -> None:
    cell = """
import copy, torch
model = torch.nn.Linear(1024, 1024).cuda()
best = {name: each.cpu().clone() for name, each in model.state_dict().items() if each.dim() > 1}
twin = copy.deepcopy(model).cpu()
model.load_state_dict({**model.state_dict(), **best})
"""
    with kept_outcomes() as told:
        dry_run(cell)
        dry_run(cell + "large = best['weight'].abs().max().item() > 2")
    assert told[0].decisions == ()
    assert [(place[0], kind) for place, kind, _ in told[1].decisions] == [(7, "truth")]


def test_what_the_cell_computes_on_the_host_stays_true() -> None:
    cell = """
import torch
x = torch.arange(2_000_000.0).view(2000, 1000)
layer = torch.nn.Linear(1000, 4)
chosen = x[x > 1_500_000].mul_(2).clone()
kept = torch.empty(int(chosen.numel()), device="cuda")
rows = torch.ones(int(chosen[0].item()) // 1000, device="cuda")
"""
    with kept_outcomes() as told:
        report = dry_run(cell)
    assert told[0].decisions == ()
    assert report.peak["cuda:0"] == -(-499_999 * 4 // 512) * 512 + -(-3000 * 4 // 512) * 512


def test_a_large_copy_to_the_device_is_counted_and_not_made() -> None:
    cell = (
        "import torch\nx = torch.ones(2**26)\nMARK\ny = x.cuda()\nz = [y.cpu() for _ in range(3)]"
    )
    grown, report = resident(cell.replace("MARK", "_before = _resident()"))
    assert report.peak["cuda:0"] == 1 << 28
    assert grown < 32 * MIB


def test_a_model_that_stays_on_the_host_leaves_a_training_loop_as_it_is() -> None:
    cell = """
import torch
from torch import nn
teacher = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8))
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.ones(64, 1024, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    report = dry_run(cell)
    assert report.error is None
    assert report.peak["cuda:0"] == really(cell)


MADE = {
    "ones": "torch.ones(6000, 1000, 1000)",
    "full": "torch.full((6000, 1000, 1000), 2.0)",
    "random": "torch.randn(6000, 1000, 1000)",
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_the_host_only_makes_and_moves_takes_no_memory_of_it(make: str) -> None:
    cell = f"import torch\n_before = _resident()\nx = {make}.cuda()"
    grown, report = resident(cell)
    assert grown < 32 * MIB
    assert report.peak["cuda:0"] == 6000 * 1000 * 1000 * 4


def test_what_the_host_makes_large_and_looks_at_is_its_own() -> None:
    cell = """
import torch
ones, some = torch.full((80, 1000, 1000), 2.0), torch.randn(80, 1000, 1000)
assert ones[5].sum().item() == 2e6 and abs(some[5].mean().item()) < 0.01 < some[5].std().item()
with torch.device("cuda"):
    there = torch.ones(80, 1000, 1000)
assert there.is_cuda
"""
    report = dry_run(cell)
    assert (report.error, report.runs) == (None, 1)


def test_fit_goes_beyond_what_the_host_has_where_it_only_moves() -> None:
    script = script_of("import torch\nn = 8\nx = torch.ones(n, 1 << 28).cuda()")
    report = fitting.largest(script, "n", {}, targets.choose("cuda:0", 60 << 30), 60.0)
    assert report.largest in {59, 60}

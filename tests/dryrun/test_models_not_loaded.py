"""Models that a dry run builds where torch is a CPU build: no memory of the host."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gpumagic.dryrun import run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from tests.dryrun.dryrun_outcomes import kept_outcomes

MIB = 1 << 20

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

def build(layers, width):
    return nn.Sequential(nn.Embedding(128_000, width), *(Block(width) for _ in range(layers)))
"""
MEASURED = """
import resource

def _resident():
    words = open("/proc/self/smaps_rollup").read().split()
    return int(words[words.index("Rss:") + 1]) * 1024

_before = _resident()
{cell}
raise RuntimeError(f"[{{_before}}, {{_resident()}}, {{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}}]")
"""
COPIED = """
m = build(80, 8192)
kept = {name: each.clone() for name, each in m.state_dict().items()}
m.load_state_dict(kept)
m.load_state_dict(kept, assign=True)
m.cuda()
"""
LARGE = 128_000 * 8192 + 80 * (2 * 4 * 8192 * 8192 + 4 * 8192 + 8192 + 2 * 8192)
"""Parameters of 80 blocks."""


def dry_run(cell: str, capacity: int = 1 << 40) -> DryRunReport:
    return run.dry_run(script_of(cell), {}, targets.choose("cuda:0", capacity))


def test_of_layers_that_are_copies_of_one_the_host_has_the_first_few() -> None:
    """A layer of 256 MiB, 80 times: `nn.TransformerEncoder` makes its layers so."""
    cell = "import copy, torch\nlayer = torch.nn.Linear(8192, 8192)\nm = [copy.deepcopy(layer) for _ in range(80)]"
    report = dry_run(MEASURED.format(cell=cell))
    assert report.error is not None
    before, after, most = json.loads(report.error[report.error.index("[") :])
    assert max(after, most) - before < 1024 * MIB


@pytest.mark.parametrize(
    ("way", "itemsize"),
    [
        ("m = build(80, 8192)", 0),
        ("m = build(80, 8192).to('cuda', torch.bfloat16)", 2),
        ("m = build(80, 8192).half().cuda()", 2),
        ("with torch.device('meta'):\n    m = build(80, 8192)\nm = m.to_empty(device='cuda')", 4),
        (COPIED, 4),
    ],
)  # fmt: skip
def test_a_model_of_44_billion_weights_costs_the_host_nothing(way: str, itemsize: int) -> None:
    report = dry_run(MEASURED.format(cell=MODEL + way))
    assert report.error is not None
    before, after, most = json.loads(report.error[report.error.index("[") :])
    assert max(after, most) - before < 100 * MIB
    assert itemsize * LARGE <= report.peak["cuda:0"] <= itemsize * LARGE + MIB


def test_what_the_host_looks_at_is_drawn_and_decides_nothing_where_it_is_only_shown() -> None:
    build = "from torch import nn\nm = nn.Linear(16384, 16384), nn.Linear(1024, 1024)\n"
    cell = build + "share = (m[1].weight > 0).float().mean().item()\n"
    tell = "raise RuntimeError(str(share))"
    with kept_outcomes() as told:
        run.dry_run(script_of(cell + tell), {}, targets.choose("cuda:0", 1 << 30))
    assert told[0].failure.kind == "RuntimeError"
    assert 0.45 < float(told[0].failure.text) < 0.55
    assert told[0].decisions == ()


def test_what_a_small_model_draws_and_what_is_drawn_after_it_are_the_cells_own() -> None:
    cell = """
import torch
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Embedding(3000, 512, padding_idx=0), torch.nn.Linear(1024, 1024))
torch.nn.init.trunc_normal_(model[1].weight)
drawn = (torch.rand(3).sum() + model[1].weight.sum()).item()
"""
    tell = "raise RuntimeError(repr(drawn))"
    with kept_outcomes() as told:
        run.dry_run(script_of(cell + tell), {}, targets.choose("cuda:0", 1 << 30))
    names: dict[str, Any] = {}
    state = torch.get_rng_state()
    exec(cell, names)
    torch.set_rng_state(state)
    assert (told[0].failure.text, told[0].decisions) == (repr(names["drawn"]), ())


def test_that_random_numbers_are_others_after_a_large_model_is_said() -> None:
    said = "random numbers that the cell draws on the host after its large weights are others than its own"
    build = "import torch\nm = torch.nn.Linear(16384, 16384)\n"
    assert [said in dry_run(build + more).assumed for more in ("n = 1", "n = torch.rand(3)")] == [
        False,
        True,
    ]


def test_a_model_that_a_function_returns_is_its_parameters() -> None:
    def build() -> object:
        from torch import nn

        return nn.Linear(1024, 1024, bias=False).cuda()

    report = run.dry_run(script_of(build), {}, targets.choose("cuda:0", 1 << 30))
    assert report.breakdown == {"parameters": 4 * MIB}

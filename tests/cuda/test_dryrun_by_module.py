"""At the peak, every byte is told by the module that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.script import script_of

MIB = 1 << 20
SETUP = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([Block(256, 1024), Block(256, 4096)])
        self.head = nn.Linear(256, 1024, bias=False)
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)
"""
STEP = "loss = model(x).sum()\nloss.backward()\nopt.step()\n"
NEW = "model = Net().cuda()\nopt = torch.optim.AdamW(model.parameters())\nx = torch.ones(1024, 256, device='cuda')\n"


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture(autouse=True, params=["cuda", "fake"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines tell it."""
    monkeypatch.setenv("GPUMAGIC_DRYRUN_ENGINE", request.param)


def by_module(cell: str, earlier: str = NEW) -> tuple[dict[str, dict[str, int]], int]:
    """Return the bytes by module and kind, and the peak."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP + earlier, names)
    report = run.dry_run(script_of(cell), names, targets.choose("cuda:0", None))
    assert report.error is None
    return dict(report.modules), report.peak["cuda:0"]


def test_the_sum_is_the_peak_and_the_names_are_the_notebooks() -> None:
    found, peak = by_module(STEP)
    assert sum(sum(parts.values()) for parts in found.values()) == peak
    assert {"model.blocks.0.up", "model.blocks.1.down", "model.head"} <= found.keys()


def test_parameters_gradients_and_state_are_their_modules() -> None:
    found, _ = by_module(STEP + STEP)
    weights = 256 * 4096 * 4
    assert found["model.blocks.1.up"]["parameters"] == weights
    assert found["model.blocks.1.up"]["gradients"] == weights
    assert found["model.blocks.1.down"]["optimizer state"] // weights == 2


def test_activations_are_of_the_module_whose_forward_made_them() -> None:
    found, _ = by_module("out = model(x)\nout.sum().backward()")
    assert (
        found["model.blocks.1"]["activations"] >= 1024 * 4096 * 4
    )  # of relu, in the block's own forward
    assert found["model.head"]["activations"] == 1024 * 1024 * 4


def test_what_a_backward_makes_is_of_the_module_whose_forward_it_belongs_to() -> None:
    cell = "out = model(x)\nout.sum().backward()"
    found, _ = by_module(cell, NEW.replace("1024, 256", "65536, 256"))
    temporaries = {name: parts.get("temporaries", 0) for name, parts in found.items()}
    assert max(temporaries, key=temporaries.__getitem__).startswith("model.blocks.1")


def test_what_is_computed_again_under_checkpointing_is_its_modules() -> None:
    found, peak = by_module(
        "model(x).sum().backward()",
        NEW.replace("Net()", "Net(True)").replace("1024, 256", "65536, 256"),
    )
    assert sum(sum(parts.values()) for parts in found.values()) == peak
    of_block = sum(
        sum(parts.values()) for name, parts in found.items() if name.startswith("model.blocks.1")
    )
    assert of_block > peak // 2


def test_modules_that_no_variable_leads_to_go_by_their_class() -> None:
    found, peak = by_module(
        "def f():\n    net = Net().cuda()\n    net(x).sum().backward()\nf()",
        "x = torch.ones(1024, 256, device='cuda')",
    )
    assert sum(sum(parts.values()) for parts in found.values()) == peak
    assert found["Net.blocks.1.up"]["parameters"] == 256 * 4096 * 4


def test_a_model_in_another_object_is_named_by_the_way_to_it() -> None:
    cell = "class Holder: pass\nholder = Holder()\nholder.net = Net().cuda()\nout = holder.net(x)"
    found, _ = by_module(cell, "x = torch.ones(1024, 256, device='cuda')")
    assert "holder.net.head" in found


def test_gradients_of_each_sample_by_vmap_are_told_as_well() -> None:
    """Its parameters and inputs are wrapped, and have no memory of their own."""
    found, peak = by_module(
        "from torch.func import functional_call, grad, vmap\n"
        "weights = {name: each.detach() for name, each in model.named_parameters()}\n"
        "def loss(weights, x): return functional_call(model, weights, (x.unsqueeze(0),)).sum()\n"
        "each = vmap(grad(loss), in_dims=(None, 0))(weights, x[:4])"
    )
    assert sum(sum(parts.values()) for parts in found.values()) == peak

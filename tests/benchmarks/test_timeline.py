"""What following the memory of a cell adds to its processor time, on a simulated device: `pytest -m benchmark -s`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumagic.memory import sampler

pytestmark = pytest.mark.benchmark

SETUP = """
import torch
torch.set_num_threads(1)
linear, relu = torch.nn.Linear, torch.nn.ReLU
net = torch.nn.Sequential(linear(16, 32), relu(), linear(32, 16), relu(), linear(16, 4)).to("simgpu:0")
opt = torch.optim.AdamW(net.parameters(), foreach=False)
x, y = torch.randn(8, 16, device="simgpu:0"), torch.randn(8, 4, device="simgpu:0")
"""
STEPS = """
for _ in range(300):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
ROUNDS = 11


@pytest.fixture(autouse=True)
def training(two_devices: list[str], shell: InteractiveShell) -> None:
    shell.run_cell(SETUP)


@pytest.mark.parametrize("magic", ["%%ondevice 0 -q"])
def test_looking_at_the_memory_of_a_cell_costs_next_to_nothing(
    seconds: Callable[[str], float], magic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a look costs, from cells with hundreds and with none, times how many looks a cell has."""
    looks = 0
    look = sampler.sample_all

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()

    def spent(first: float, pause: float, share: float) -> tuple[float, int]:
        nonlocal looks
        looks = 0
        monkeypatch.setattr(sampler, "FIRST_DELAY", first)
        monkeypatch.setattr(sampler, "MIN_INTERVAL", pause)
        monkeypatch.setattr(sampler, "INTERVAL_PER_COST", share)
        return seconds(magic + STEPS), looks

    usual = sampler.FIRST_DELAY, sampler.MIN_INTERVAL, sampler.INTERVAL_PER_COST
    monkeypatch.setattr(sampler, "sample_all", counted)
    spent(*usual)
    rounds = [(spent(9.0, 0.4, 0), spent(0.002, 0.002, 0), spent(*usual)) for _ in range(ROUNDS)]
    none, many, some = (min(each) for each in zip(*rounds, strict=True))
    each = max(0.0, many[0] - none[0]) / max(1, many[1] - none[1])
    usually = statistics.median(found for _, _, (_, found) in rounds)
    share = each * usually / none[0]
    print(f"\n{magic}: {1e6 * each:.0f} us a look, {usually:.0f} looks in {1e3 * some[0]:.0f} ms: {share:.2%} (bar 2%)")
    assert share < 0.02

"""What a cell costs under the cell magics, as ratios within one run; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.benchmark

SETUP = """
import torch
torch.set_num_threads(1)
linear, relu = torch.nn.Linear, torch.nn.ReLU
net = torch.nn.Sequential(linear(16, 32), relu(), linear(32, 16), relu(), linear(16, 4))
opt = torch.optim.AdamW(net.parameters(), foreach=False)
x, y = torch.randn(8, 16), torch.randn(8, 4)
"""
STEPS = """
for _ in range(300):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.fixture(autouse=True)
def training(shell: InteractiveShell) -> None:
    shell.run_cell(SETUP)


def least_over_bare(rounds: list[tuple[float, float]]) -> float:
    """Return the least time of a guarded cell over that of the bare one: what else the machine does only ever adds."""
    bare, guarded = (min(each) for each in zip(*rounds, strict=True))
    return guarded / bare


def test_oomguard_costs_nothing_when_nothing_goes_wrong(seconds: Callable[[str], float]) -> None:
    empty = statistics.median(seconds("%%oomguard\npass") - seconds("pass") for _ in range(21))
    found = least_over_bare([(seconds(STEPS), seconds("%%oomguard\n" + STEPS)) for _ in range(15)])
    print(f"\n%%oomguard: {found:.3f}x the bare cell (bar 1.02), {1e3 * empty:.2f} ms a cell (bar 5)")
    assert found < 1.02
    assert empty < 0.005


def test_guarding_every_cell_costs_nothing_when_nothing_goes_wrong(
    shell: InteractiveShell, seconds: Callable[[str], float]
) -> None:
    def guarded(cell: str) -> float:
        shell.run_line_magic("oomguard", "on")
        spent = seconds(cell)
        shell.run_line_magic("oomguard", "off")
        return spent

    empty = statistics.median(guarded("pass") - seconds("pass") for _ in range(21))
    found = least_over_bare([(seconds(STEPS), guarded(STEPS)) for _ in range(15)])
    print(f"\n%oomguard on: {found:.3f}x the bare cell (bar 1.02), {1e3 * empty:.2f} ms a cell (bar 5)")
    assert found < 1.02
    assert empty < 0.005

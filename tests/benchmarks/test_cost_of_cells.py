"""What a cell costs under the cell magics, as ratios within one run; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.benchmark

SETUP = """
import torch
torch.set_num_threads(1)
linear, relu = torch.nn.Linear, torch.nn.ReLU
net = torch.nn.Sequential(linear(16, 32), relu(), linear(32, 16), relu(), linear(16, 4))
opt = torch.optim.AdamW(net.parameters(), foreach=False)
net.to(DEVICE)
x, y = torch.randn(8, 16).to(DEVICE), torch.randn(8, 4).to(DEVICE)
""".replace("DEVICE", repr("cuda:0" if torch.cuda.is_available() else "cpu"))
STEPS = """
for _ in range(300):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
ROUNDS = 40


@pytest.fixture(autouse=True)
def training(shell: InteractiveShell) -> None:
    shell.run_cell(SETUP)


def least_over_bare(bare: Callable[[], float], guarded: Callable[[], float]) -> float:
    """Return the least time of a guarded cell over that of the bare one: what else the machine does only ever adds.

    Each goes first in every other round. With 15 rounds a cell differed from itself by up to a tenth, with 40 by one
    percent.
    """
    spent: dict[Callable[[], float], list[float]] = {bare: [], guarded: []}
    for number in range(ROUNDS):
        for cell in (bare, guarded) if number % 2 else (guarded, bare):
            spent[cell].append(cell())
    return min(spent[guarded]) / min(spent[bare])


def test_oomguard_costs_nothing_when_nothing_goes_wrong(seconds: Callable[[str], float]) -> None:
    empty = statistics.median(seconds("%%oomguard\npass") - seconds("pass") for _ in range(21))
    found = least_over_bare(lambda: seconds(STEPS), lambda: seconds("%%oomguard\n" + STEPS))
    print(
        f"\n%%oomguard: {found:.3f}x the bare cell (bar 1.02), {1e3 * empty:.2f} ms a cell (bar 5)"
    )
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
    found = least_over_bare(lambda: seconds(STEPS), lambda: guarded(STEPS))
    print(
        f"\n%oomguard on: {found:.3f}x the bare cell (bar 1.02), {1e3 * empty:.2f} ms a cell (bar 5)"
    )
    assert found < 1.02
    assert empty < 0.005

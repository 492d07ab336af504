"""What a cell costs under `%%ondevice`, as ratios to the bare cell within one run: `pytest -m benchmark -s`.

The bars are ratios to the cell under `with torch.device(...)`, which gives the default device. They are the same
in a notebook that has imported transformers: `GPUMAGIC_BENCHMARK_IMPORTS=transformers,accelerate pytest ...`.

Over the fake CUDA runtime (`python -m gpumagic.fakecuda -- ...`) the cells are on `cuda:0`, where kernels cost nothing:
that is the host's time alone, the worst case.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumagic import fakecuda

pytestmark = pytest.mark.benchmark

DEVICE = "cuda:0" if fakecuda.is_enabled() else "cpu"
SETUP = """
import torch
torch.set_num_threads(1)
linear, relu = torch.nn.Linear, torch.nn.ReLU
net = torch.nn.Sequential(linear(16, 32), relu(), linear(32, 16), relu(), linear(16, 4))
opt = torch.optim.AdamW(net.parameters(), foreach=False)
x, y = torch.randn(8, 16), torch.randn(8, 4)
wide = torch.nn.Sequential(linear(1024, 1024), relu(), linear(1024, 1024))
slow = torch.optim.SGD(wide.parameters(), lr=1e-9)
many, aims = torch.randn(512, 1024), torch.randn(512, 1024)
net.to(DEVICE), wide.to(DEVICE)
x, y, many, aims = x.to(DEVICE), y.to(DEVICE), many.to(DEVICE), aims.to(DEVICE)
""".replace("DEVICE", repr(DEVICE))
CELLS = {
    "small-operator training step": (1.15, """
for _ in range(100):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    "loop of 10,000 operators": (1.15, """
z = x
for _ in range(5000):
    z = (z + 1).relu()
"""),
    "training step of large operators": (1.08, """
for _ in range(2):
    loss = torch.nn.functional.mse_loss(wide(many), aims)
    slow.zero_grad()
    loss.backward()
    slow.step()
"""),
    "10,000 factory calls": (2.0, """
for _ in range(10000):
    torch.zeros(3)
"""),
    "10,000 .item() of a host tensor": (1.6, """
one = x[0, 0]
for _ in range(10000):
    one.item()
"""),
    "10,000 views by a number": (1.6, """
for _ in range(10000):
    x[5]
"""),
}  # fmt: skip
ROUNDS = 15


@pytest.fixture(autouse=True)
def training(shell: InteractiveShell) -> None:
    for name in filter(None, os.environ.get("GPUMAGIC_BENCHMARK_IMPORTS", "").split(",")):
        assert shell.run_cell(f"import {name}").success
    shell.run_cell(SETUP)


@pytest.mark.parametrize("what", CELLS)
def test_ondevice_costs_what_torchs_own_context_costs(seconds: Callable[[str], float], what: str) -> None:
    """By the least of interleaved rounds or by their median: a busy machine moves one of them, and ours both."""
    bar, body = CELLS[what]
    ways = {
        "bare": body,
        "ondevice": f"%%ondevice {DEVICE} -q\n" + body,
        "torch.device": f"with torch.device('{DEVICE}'):" + body.replace("\n", "\n    "),
        "trace": f"%%ondevice {DEVICE} -q --trace\n" + body,
    }
    seconds(ways["ondevice"])  # imports its modules
    rounds = [{name: seconds(cell) for name, cell in ways.items()} for _ in range(ROUNDS)]
    least = {name: min(each[name] for each in rounds) for name in ways}
    ratios = {name: least[name] / least["bare"] for name in ways if name != "bare"}
    middle = statistics.median(each["ondevice"] / each["torch.device"] for each in rounds)
    said = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
    print(
        f"\n{what}: least: bare {1e3 * least['bare']:.1f} ms; {said}; "
        f"median of ondevice {middle:.3f} times torch.device (bar {bar})"
    )
    assert min(middle, ratios["ondevice"] / ratios["torch.device"]) < bar


def test_a_cell_under_ondevice_starts_and_ends_fast(seconds: Callable[[str], float]) -> None:
    guarded = f"%%ondevice {DEVICE} -q\npass"
    seconds(guarded)
    least = {cell: min(seconds(cell) for _ in range(50)) for cell in ("pass", guarded)}
    bare, under = least.values()
    print(f"\nan empty cell: {1e3 * bare:.2f} ms bare, {1e3 * under:.2f} ms under %%ondevice")
    assert under - bare < 0.005

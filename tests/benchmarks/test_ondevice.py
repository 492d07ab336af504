"""What a cell costs under `%%ondevice`, as ratios to the bare cell within one run: `pytest -m benchmark -s`.

Over the fake CUDA runtime (`python -m gpumagic.fakecuda -- ...`) the cells are on `cuda:0`, where kernels cost nothing:
that is the host's time alone, the worst case.
"""

from __future__ import annotations

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
    "small-operator training step": (1.10, """
for _ in range(100):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""),
    "loop of 10,000 operators": (1.10, """
z = x
for _ in range(5000):
    z = (z + 1).relu()
"""),
    "training step of large operators": (1.02, """
for _ in range(2):
    loss = torch.nn.functional.mse_loss(wide(many), aims)
    slow.zero_grad()
    loss.backward()
    slow.step()
"""),
    "10,000 factory calls": (None, """
for _ in range(10000):
    torch.zeros(3)
"""),
    "10,000 .item() of a host tensor": (None, """
one = x[0, 0]
for _ in range(10000):
    one.item()
"""),
    "10,000 views by a number": (None, """
for _ in range(10000):
    x[5]
"""),
}  # fmt: skip
ROUNDS = 15


@pytest.fixture(autouse=True)
def training(shell: InteractiveShell) -> None:
    shell.run_cell(SETUP)


@pytest.mark.parametrize("what", CELLS)
def test_ondevice_costs_next_to_nothing(seconds: Callable[[str], float], what: str) -> None:
    """The least of interleaved rounds: what else the machine does only ever adds."""
    bar, body = CELLS[what]
    ways = {
        "bare": body,
        "ondevice": f"%%ondevice {DEVICE} -q\n" + body,
        "torch.device": f"with torch.device('{DEVICE}'):" + body.replace("\n", "\n    "),
        "trace": f"%%ondevice {DEVICE} -q --trace\n" + body,
    }
    seconds(ways["ondevice"])  # looks once for whoever holds torch's functions
    rounds = [{name: seconds(cell) for name, cell in ways.items()} for _ in range(ROUNDS)]
    least = {name: min(each[name] for each in rounds) for name in ways}
    ratios = {name: least[name] / least["bare"] for name in ways if name != "bare"}
    middle = statistics.median(each["ondevice"] / each["bare"] for each in rounds)
    said = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
    print(
        f"\n{what}: median {middle:.3f}x; least: bare {1e3 * least['bare']:.1f} ms; {said}"
        + (f" (bar of ondevice {bar})" if bar else "")
    )
    assert bar is None or ratios["ondevice"] < bar


def test_a_cell_under_ondevice_starts_and_ends_fast(seconds: Callable[[str], float]) -> None:
    guarded = f"%%ondevice {DEVICE} -q\npass"
    seconds(guarded)
    least = {cell: min(seconds(cell) for _ in range(50)) for cell in ("pass", guarded)}
    bare, under = least.values()
    print(f"\nan empty cell: {1e3 * bare:.2f} ms bare, {1e3 * under:.2f} ms under %%ondevice")
    assert under - bare < 0.005

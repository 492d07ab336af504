"""What `%%ondevice` costs over `with torch.device(...)`, which gives the default device: `pytest -m benchmark -s`.

Two bars: a copy, a read or a new tensor at most 5 us more, and an epoch of a loader or a training step of small
operators at most 1.02 times as long.

The cells take turns. Each measures short parts of itself, of a few hundred microseconds, and what counts is the time
that one part in twenty stays below. So other work on the machine does not show: it makes some parts longer, not all.
Processor time would not do: where a machine is shared, the least of it may be less than what was spent.

On a GPU and over the fake CUDA runtime (`python -m gpumagic.fakecuda -- ...`) the cells are on `cuda:0`, else on a
simulated device; the fakes do their work on the host, so nothing hides what is spent there.
"""

from __future__ import annotations

import statistics
import textwrap
from time import perf_counter

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from gpumagic import simgpu

pytestmark = pytest.mark.benchmark

DEVICE = "cuda:0" if torch.cuda.is_available() else "simgpu:1"
ROUNDS = 15
SETUP = f"""
import torch
from time import perf_counter
from torch.nn import Linear, ReLU, Sequential, functional
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
h = torch.randn(16)
g = torch.randn(16, device="{DEVICE}")
v, mask, order = g[0], g > 0, [2, 0]
data = TensorDataset(torch.randn(64 * 40, 16), torch.randint(0, 4, (64 * 40,)))
loader = DataLoader(data, batch_size=64)
net = Sequential(Linear(16, 32), ReLU(), Linear(32, 16), ReLU(), Linear(16, 4)).to("{DEVICE}")
opt = torch.optim.AdamW(net.parameters(), foreach=False)
x, y = torch.randn(8, 16, device="{DEVICE}"), torch.randn(8, 4, device="{DEVICE}")
"""
CALLS = {
    "v.item()": "a value read",
    "float(v)": "a value read by a conversion",
    "g[mask]": "a number of elements read",
    f"h.to('{DEVICE}')": "a copy to the device",
    "g.cpu()": "a copy to the host",
    "g[order]": "a copy of an index",
    "torch.tensor([1.0, 2.0])": "a new tensor and a copy",
    "torch.zeros(3)": "a new tensor",
    "h.dim()": "nothing",
    "h[5]": "nothing",
    "h[5].item()": "nothing",
}
LOOPS = {
    "a batch of an epoch": ("batches = iter(loader)", 40, f"""
a, b = next(batches)
a, b = a.to("{DEVICE}"), b.to("{DEVICE}")
"""),
    "a training step of small operators": ("", 40, """
loss = functional.mse_loss(net(x), y)
opt.zero_grad()
loss.backward()
opt.step()
"""),
}  # fmt: skip


def least(
    shell: InteractiveShell, body: str, before: str = "", parts: int = 20
) -> dict[str, float]:
    """Return the microseconds that a part takes bare, under `torch.device` and under `%%ondevice`."""
    timed = "start = perf_counter()\n" + body.strip() + "\ntimes.append(perf_counter() - start)\n"
    cell = f"{before}\nfor _ in range({parts}):\n" + textwrap.indent(timed, "    ")
    ways = {
        "bare": cell,
        "torch.device": f"with torch.device('{DEVICE}'):\n" + textwrap.indent(cell, "    "),
        "ondevice": f"%%ondevice {DEVICE} -q\n" + cell,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, each in ways.items():
            shell.user_ns["times"] = []
            assert shell.run_cell(each).success
            found[name] += shell.user_ns["times"]
    return {name: 1e6 * statistics.quantiles(times, n=20)[0] for name, times in found.items()}


@pytest.fixture(autouse=True)
def prepared(shell: InteractiveShell) -> None:
    if not torch.cuda.is_available():
        simgpu.enable()
    assert shell.run_cell(SETUP).success


@pytest.mark.parametrize("call", CALLS)
def test_a_copy_a_read_or_a_new_tensor_costs_at_most_5_us_more(
    shell: InteractiveShell, call: str
) -> None:
    took = {
        name: each / 50 for name, each in least(shell, f"for _ in range(50):\n    {call}").items()
    }
    over = took["ondevice"] - took["torch.device"]
    print(
        f"\n{call}, {CALLS[call]}: {', '.join(f'{name} {each:.2f}' for name, each in took.items())} us; {over:+.2f}"
    )
    assert over < (0.1 if CALLS[call] == "nothing" else 5)


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop_takes_at_most_1_02_times_as_long(shell: InteractiveShell, what: str) -> None:
    before, parts, body = LOOPS[what]
    took = least(shell, body, before, parts)
    ratio = took["ondevice"] / took["torch.device"]
    print(
        f"\n{what}: {', '.join(f'{name} {each:.0f}' for name, each in took.items())} us; {ratio:.3f} times"
    )
    assert ratio < 1.02


def test_a_cell_under_ondevice_starts_and_ends_fast(shell: InteractiveShell) -> None:
    took: dict[str, list[float]] = {"pass": [], f"%%ondevice {DEVICE} -q\npass": []}
    for _ in range(50):
        for cell, times in took.items():
            start = perf_counter()
            assert shell.run_cell(cell).success
            times.append(perf_counter() - start)
    bare, under = (min(times) for times in took.values())
    print(f"\nan empty cell: {1e3 * bare:.2f} ms bare, {1e3 * under:.2f} ms under %%ondevice")
    assert under - bare < 0.005

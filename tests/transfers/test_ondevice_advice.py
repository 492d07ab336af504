"""What real cells are told to change, and what cells that only look alike are not."""

from __future__ import annotations

import pytest
import torch

from gpumagic.backends import Backend
from gpumagic.heap import storages
from gpumagic.transfers import log
from gpumagic.transfers.log import TransferHistory, is_pageable
from tests.transfers.ondevice_corpus import run

pytestmark = pytest.mark.usefixtures("two_devices")

STREAM = "for i in range(20):\n    y = torch.ones(1 << 20, device='cpu').add(i).to('simgpu:0')"
FIRES = {
    "for _ in range(10):\n    y = x.to('simgpu:0')":
        "39.1 KiB copied to simgpu:0 10 times by line 2: move x before the loop",
    "batches = list(x.chunk(4))\nfor _ in range(3):\n    for b in batches:\n        y = b.to('simgpu:0')":
        "copied to simgpu:0 by line 4 had been copied before: keep the copies",
    "total = 0\nfor i in range(200):\n    total += g[i % 8, 0].item()": "200 syncs by .item() in a loop, line 3: ",
    "values = [\n    float(g[i % 8, 0])\n    for i in range(150)\n]": "150 syncs by float() in a loop, line 2: ",
    "i = torch.zeros(())\nwhile i < 150:\n    i += 1": "151 syncs by a condition on the device in a loop, line 2: ",
    "m = torch.zeros(9, device='cpu')\ny = m.to('simgpu:0')": "m created on cpu by line 1, copied by line 2: create it",
    "y = torch.zeros(9).to('simgpu:1')": 'created on simgpu:0 and copied by line 1: create it with device="simgpu:1"',
    "for i in range(200):\n    if g[i % 8, 0].item() < -100:\n        break":
        "200 syncs by .item() in a loop, line 2: test it less often",
    "import numpy\nfrom torch.utils.data import DataLoader\nrows = [(numpy.ones(9), 1)] * 120\n"
    "for b, _ in DataLoader(rows, batch_size=60):\n    b.sum()":
        '120 copies of 72 B each to simgpu:0 by line 4: collate on the host, in with torch.device("cpu"), and copy',
    "rows = [torch.ones(9, device='cpu') for _ in range(120)]\ny = [row.to('simgpu:0') for row in rows]":
        "120 copies of 36 B each to simgpu:0 by line 2: join them on the host and copy once",
    "s = 0\nfor _ in range(130):\n    c = torch.distributions.Categorical(logits=g[0] + s)\n    s = c.probs[0]":
        "line 3: torch.distributions.Distribution.set_default_validate_args(False)",
}  # fmt: skip
ALIKE = {
    "new batches each turn": "for i in range(10):\n    b = x[i:i + 10].clone()\n    y = b.to('simgpu:0')",
    "a loader": (
        "data = torch.utils.data.TensorDataset(x)\n"
        "for (b,) in torch.utils.data.DataLoader(data, batch_size=10):\n    y = b.to('simgpu:0')"
    ),
    "changed in place each turn": "for i in range(10):\n    x.add_(1)\n    y = x.to('simgpu:0')",
    "bound anew each turn": "for i in range(10):\n    x = x + 1\n    y = x.to('simgpu:0')",
    "there already": "for i in range(10):\n    y = g.to('simgpu:0')",
    "a few reads": "for i in range(10):\n    y = g[0, 0].item()",
    "filled on the host": "m = torch.zeros(9, device='cpu')\nm[0] = 1\ny = m.to('simgpu:0')",
    "a module": "for _ in range(5):\n    model.to('simgpu:0')\n    model.to('cpu')",
    "pageable where it does not matter": STREAM,
    "a value that decides what comes next": (
        "def step(action):\n    return torch.ones(4, device='cpu') * action\n"
        "state = step(1)\nfor _ in range(130):\n    scores = g[0] + torch.as_tensor(state, device='simgpu:0')\n"
        "    state = step(int(scores.argmax()))"
    ),
    "a library that reads and copies by itself": (
        "from torch.optim.lr_scheduler import LambdaLR\nw = torch.ones(3, requires_grad=True)\n"
        "opt = torch.optim.LBFGS([w], max_iter=60, tolerance_change=0, tolerance_grad=0)\n"
        "def loss():\n    opt.zero_grad()\n    l = (w ** 4).sum()\n    l.backward()\n    return l\n"
        "for _ in range(9): opt.step(loss)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("cell", FIRES)
def test_a_cell_that_wastes_is_told_so(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile switches the checks of distributions off for the rest of the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    report, _, _ = run(cell)
    assert any(FIRES[cell] in str(each) for each in report.advice), report.advice


def test_what_is_advised_for_a_loader_of_many_small_copies_leaves_one_per_batch() -> None:
    rows = "import numpy\nrows = [(numpy.ones(9), 1)] * 120\n"
    loop = (
        "for b, _ in torch.utils.data.DataLoader(rows, batch_size=60):\n    b = b.to('simgpu:0')\n"
    )
    followed, _, _ = run(
        rows
        + 'with torch.device("cpu"):\n'
        + "".join(f"    {line}\n" for line in loop.splitlines())
    )
    assert [row.count for row in followed] == [2]


@pytest.mark.parametrize("name", ALIKE)
def test_a_cell_that_only_looks_alike_is_not(name: str) -> None:
    report, _, _ = run(ALIKE[name])
    assert report.advice == ()


def test_pageable_copies_are_counted_where_pinning_makes_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(1 << 20)
    assert is_pageable(x, "simgpu:0") is None
    monkeypatch.setattr(log, "backend_named", lambda name: Backend(name, copies_pinned=True))
    assert is_pageable(x, "simgpu:0") is True
    report, _, _ = run(STREAM)
    assert report[0].pageable == 20 * 4 << 20
    assert report.advice == ()
    report, _, _ = run("loader = torch.utils.data.DataLoader([])\n" + STREAM)
    assert "pin_memory=True" in str(report.advice[0])


def test_what_was_moved_is_remembered_without_keeping_it() -> None:
    seen = TransferHistory()
    for _ in range(5000):
        assert not seen.is_repeat("here", torch.ones(1))
    assert len(seen._before) < 1500


def test_of_what_was_copied_and_is_gone_no_record_stays() -> None:
    before = len(storages.numbers_in_use())
    run("for _ in range(300):\n    y = (x + 1).to('simgpu:0')")
    assert len(storages.numbers_in_use()) < before + 100


def test_a_module_that_swaps_its_tensors_can_do_so() -> None:
    """`torch.utils.swap_tensors` refuses a tensor to which somebody has a weak reference."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        report, _, _ = run("model.to('simgpu:0')\nmodel.to('simgpu:1')")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert sum(row.count for row in report) == 4

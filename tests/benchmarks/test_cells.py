"""What a cell costs under the cell magics, as ratios within one run; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

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
x, y = torch.randn(8, 16), torch.randn(8, 4)
"""
STEPS = """
for _ in range(300):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")
    shell.run_cell(SETUP)
    yield shell
    shell.run_line_magic("unload_ext", "gpumagic")
    InteractiveShell.clear_instance()


def seconds(shell: InteractiveShell, cell: str) -> float:
    start = time.perf_counter()
    assert shell.run_cell(cell).success
    return time.perf_counter() - start


def ratios(shell: InteractiveShell, **cells: str) -> dict[str, float]:
    """Return the median over 9 interleaved rounds of each cell's time over the bare cell's in the same round."""
    rounds = [{name: seconds(shell, cell) for name, cell in {"bare": STEPS, **cells}.items()} for _ in range(9)]
    return {name: statistics.median(each[name] / each["bare"] for each in rounds) for name in cells}


def test_oomguard_costs_nothing_when_nothing_goes_wrong(shell: InteractiveShell) -> None:
    empty = statistics.median(seconds(shell, "%%oomguard\npass") - seconds(shell, "pass") for _ in range(21))
    found = ratios(shell, oomguard="%%oomguard\n" + STEPS)
    print(f"\n%%oomguard: {found['oomguard']:.3f}x the bare cell (bar 1.02), {1e3 * empty:.2f} ms a cell (bar 5)")
    assert found["oomguard"] < 1.02
    assert empty < 0.005


def test_guarding_every_cell_costs_nothing_when_nothing_goes_wrong(shell: InteractiveShell) -> None:
    def guarded(cell: str) -> float:
        shell.run_line_magic("oomguard", "on")
        spent = seconds(shell, cell)
        shell.run_line_magic("oomguard", "off")
        return spent

    empty = statistics.median(guarded("pass") - seconds(shell, "pass") for _ in range(21))
    # Each between two bare cells, so that a machine that slows down or speeds up favours neither.
    rounds = [(seconds(shell, STEPS), guarded(STEPS), seconds(shell, STEPS)) for _ in range(15)]
    found = statistics.median(2 * each / (before + after) for before, each, after in rounds)
    print(f"\n%oomguard on: {found:.3f}x the bare cell (bar 1.02), {1e3 * empty:.2f} ms a cell (bar 5)")
    assert found < 1.02
    assert empty < 0.005


def test_devices_is_near_the_cost_of_looking_at_every_object() -> None:
    import gc

    from gpumagic.probes import tensors

    heap = [[i] for i in range(1_000_000)]
    names = {f"t{i}": torch.ones(16, 16) for i in range(5000)}
    kinds = {torch.Tensor, torch.nn.Parameter}

    def floor() -> int:
        return sum(type(each) in kinds for each in gc.get_objects())

    def spent(call: object) -> float:
        start = time.perf_counter()
        call()  # type: ignore[operator]
        return time.perf_counter() - start

    tensors.probe(names)
    rounds = [(spent(floor), spent(lambda: tensors.probe(names)), spent(lambda: tensors.probe({}))) for _ in range(7)]
    named = statistics.median(with_names / low for low, with_names, _ in rounds)
    bare = statistics.median(without / low for low, _, without in rounds)
    print(f"\n%devices, {len(heap) + 5000:,} objects: {named:.2f}x the floor with names (bar 2.5), {bare:.2f}x without")
    assert named < 2.5

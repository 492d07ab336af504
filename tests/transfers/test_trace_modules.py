"""With `--trace` each module has its time and memory; together they are what the simulated device's allocator has."""

from __future__ import annotations

import sys

import ondevice_corpus as corpus
import pytest
import torch
import traced_modules
from torch.nn.modules import module as hooks

import gpumagic
from gpumagic.report.base import to_html, to_text
from gpumagic.report.tree import tree_of
from gpumagic.transfers.trace.report import BACKWARD

pytestmark = pytest.mark.usefixtures("two_devices")


def test_modules_that_are_checkpointed_add_up_to_the_allocators_sums_and_peak_too() -> None:
    report, grown = traced_modules.traced_training("simgpu", checkpointed=True)
    traced_modules.check_sums(report, grown)
    assert report.by_module is not None
    (up,) = (row for row in report.by_module if row.module == "net.blocks.0.up")
    # Two in each of three steps; before Python 3.12 threads of autograd's, which run the second, are not traced.
    assert up.calls == (6 if sys.version_info >= (3, 12) else 3)


def test_modules_and_graphs_have_no_hooks_while_a_cell_is_traced() -> None:
    net = traced_modules.Net().to("simgpu:0")
    batch = torch.ones(8, traced_modules.WIDTH, device="simgpu:0")
    cell = "loss = net(batch).sum()\nseen = [*hooks._global_forward_hooks, *hooks._global_forward_pre_hooks]"
    report, _, names = corpus.run(cell, trace=True, names={"net": net, "batch": batch, "hooks": hooks})
    assert report.by_module is not None
    assert names["seen"] == []
    assert names["loss"].grad_fn.metadata == {}


def test_a_module_that_fails_and_one_that_runs_another_again_are_told_apart() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(x.shape)

    cell = """
        for _ in range(3):
            try:
                fails(batch)
            except ValueError:
                a = torch.ones(1 << 10)
        b = twice(twice(batch))
        """
    twice = torch.nn.ReLU().to("simgpu:0")
    names = {"fails": Fails(), "twice": twice, "batch": torch.ones(1 << 12, device="simgpu:0")}
    report, _, _ = corpus.run(cell, trace=True, names=names)
    rows = {row.module: row for row in report.by_module}
    assert (rows["fails"].calls, rows["fails"].allocated) == (3, 0)
    assert (rows["twice"].calls, rows["twice"].allocated) == (2, 2 * (4 << 12))
    assert rows[""].allocated == 3 * (4 << 10)


def test_the_tree_sums_its_branches_and_folds_all_of_them() -> None:
    found = {f"net.blocks.{number}.{name}": {"parameters": 10} for number in range(12) for name in ("up", "down")}
    net, *below = tree_of(found)
    assert (net.name, net.depth, net.parts) == ("net.blocks", 0, {"parameters": 240})
    assert [each.name for each in below if each.depth == 1] == [str(number) for number in range(12)]
    assert [tuple(each) for each in tree_of({"": {"a": 1}, "m": {"b": 2}, "m.k": {"a": 0}, "m.i.w": {"b": 3}})] == [
        ("m", 0, {"b": 5, "a": 0}), ("i.w", 1, {"b": 3}), ("k", 1, {"a": 0}), ("(no module)", 0, {"a": 1})
    ]  # fmt: skip
    report = traced_modules.traced_training("simgpu")[0].by_module
    assert report is not None
    assert "net.blocks" in to_text(report, 80)
    assert max(map(len, to_text(report, 80).splitlines())) <= 80
    assert "<details" in to_html(report)


def test_a_scripted_module_is_a_tree_too(monkeypatch) -> None:
    net = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(64, 512))).to("simgpu:0")
    monkeypatch.setitem(globals(), "net", net)
    with gpumagic.ondevice("simgpu:0", trace=True) as run:
        net(torch.ones(8, 64))
    held = {row.module: row.parameters for row in run.report.by_module.rows}
    assert held["net.0"] == 64 * 512 * 4 + 512 * 4


def test_each_backward_pass_counts_once() -> None:
    cell = "x = torch.ones(4, requires_grad=True)\n(x * x).sum().backward()\ntorch.autograd.grad((x * x).sum(), x)"
    report, _, _ = corpus.run(cell, trace=True)
    assert {row.module: row.calls for row in report.by_module}[BACKWARD] == 2

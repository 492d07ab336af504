"""With `--trace` each module has its time and memory; together they are what the simulated device's allocator has."""

from __future__ import annotations

import ondevice_corpus as corpus
import pytest
import torch
import traced_modules
from torch.nn.modules import module as hooks

import gpumagic
from gpumagic.report.base import to_html, to_text
from gpumagic.report.tree import tree_of

pytestmark = pytest.mark.usefixtures("two_devices")


def test_modules_that_are_checkpointed_add_up_to_the_allocators_sums_and_peak_too() -> None:
    report = traced_modules.traced_training("simgpu", checkpointed=True)
    traced_modules.check_sums(report)
    assert report.by_module is not None
    (up,) = (row for row in report.by_module if row.module == "net.blocks.0.up")
    assert up.calls == 6, "two in each of three steps"


def test_no_hook_is_left_on_modules_or_on_graphs_that_stay() -> None:
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    report = traced_modules.traced_training("simgpu")
    assert report.by_module is not None
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before


def test_a_graph_that_outlives_the_cell_runs_backward_without_the_trace() -> None:
    net = traced_modules.Net().to("simgpu:0")
    batch = torch.ones(8, traced_modules.WIDTH, device="simgpu:0")
    report, _, names = corpus.run("loss = net(batch).sum()", trace=True, names={"net": net, "batch": batch})
    told = report.by_module.to_dict() if report.by_module else {}
    names["loss"].backward()
    assert report.by_module is not None
    assert report.by_module.to_dict() == told
    assert net.blocks[0].up.weight.grad is not None  # type: ignore[union-attr]


def test_the_tree_sums_its_branches_and_folds_all_of_them() -> None:
    found = {f"net.blocks.{number}.{name}": {"parameters": 10} for number in range(12) for name in ("up", "down")}
    (net,) = tree_of(found)
    assert (net.name, net.nbytes, list(net.below)[9:]) == ("net.blocks", 240, ["9", "10", "11"])
    report = traced_modules.traced_training("simgpu").by_module
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

"""What autograd graphs keep: to the byte, by whose graph, and without unpacking anything."""

from __future__ import annotations

import gc
import types

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gpumagic._compat import torch_private
from gpumagic.heap import kinds
from gpumagic.memory import allocator, devices
from gpumagic.tensors.scan import scan

pytestmark = [
    pytest.mark.versions,
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.skipif(
        not hasattr(torch._C._autograd.SavedTensor, "data"),
        reason="torch before 2.9 does not show what graphs keep",
    ),
]


def allocated():
    """Return what the first device's allocator has handed out."""
    return torch.simgpu.memory_allocated(0)


def sums(report, device="simgpu:0"):
    """Return what the report says of a device."""
    return next(row for row in report.by_device if row.device == device)


def named(report, name):
    """Return the row with a name."""
    return next(row for row in report if row.name == name)


@pytest.fixture
def model(two_devices):
    """A small network on the first device."""
    layers = [
        torch.nn.Linear(64, 256),
        torch.nn.GELU(),
        torch.nn.LayerNorm(256),
        torch.nn.Linear(256, 1),
    ]
    return torch.nn.Sequential(*layers).to(two_devices[0])


def batch():
    """Return some input on the first device."""
    return torch.ones(32, 64, device="simgpu:0")


def test_a_graph_keeps_exactly_what_detaching_gives_back(model) -> None:
    namespace = {"model": model, "x": batch()}
    namespace["loss"] = model(namespace["x"]).sum()
    row = named(scan(namespace), "loss")
    before = allocated()
    namespace["loss"] = namespace["loss"].detach()
    assert row.graph_nbytes == before - allocated() > 0
    assert named(scan(namespace), "loss").graph_nbytes is None


def test_losses_that_are_collected_keep_the_sum_of_their_graphs(model) -> None:
    losses = []
    for _ in range(5):
        x = batch()
        losses.append(model(x).sum())
    del x
    namespace = {"model": model, "losses": losses}
    del losses
    line = "losses[:] = [each.detach() for each in losses]"
    promised = sum(row.nbytes for row in scan(namespace) if row.frees == line)
    before = allocated()
    exec(line, namespace)
    assert 0 < promised == before - allocated()


def on_the_way(model):
    """Return a result with some activations behind it."""
    return model(batch()).sum()


def with_a_leaf_that_has_a_gradient():
    """Return a result that alone keeps what it was made of, and the gradient of that."""
    result = batch().requires_grad_().sin()
    result.sum().backward()
    return result


LINES = {
    "loss = loss.detach()": lambda model: {"loss": on_the_way(model)},
    "y = y.detach()": lambda _: {"y": with_a_leaf_that_has_a_gradient()},
    "losses[:] = [each.detach() for each in losses]": lambda model: {
        "losses": [on_the_way(model) for _ in range(5)]
    },
    "history['loss'][:] = [each.detach() for each in history['loss']]": lambda model: {
        "history": {"loss": [on_the_way(model), on_the_way(model)]}
    },
    "mixed[1] = mixed[1].detach()": lambda model: {"mixed": ["first", on_the_way(model)]},
    "run.best = run.best.detach()": lambda model: {
        "run": types.SimpleNamespace(best=on_the_way(model))
    },
    "best = best.detach(); loss = loss.detach()": lambda model: dict.fromkeys(
        ["best", "loss"], on_the_way(model)
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_given_for_a_graph_frees_what_it_says_to_the_byte(model, line) -> None:
    namespace = {"model": model, **LINES[line](model)}
    held = [row for row in scan(namespace).leaks() if row.frees == line]
    before = allocated()
    exec(line, namespace)
    assert before - allocated() == sum(row.nbytes for row in held) > 0


@pytest.mark.parametrize("kept", [lambda loss: {"pair": (loss, 0)}, lambda loss: {"some": {loss}}])
def test_no_line_is_given_for_a_graph_where_none_is_known(model, kept) -> None:
    rows = [
        row
        for row in scan({"model": model, **kept(on_the_way(model))}).leaks()
        if "graph of" in (row.holder or "")
    ]
    assert {row.frees for row in rows} == {None}


def test_a_result_that_an_output_keeps_too_is_not_freed_by_detaching_its_name(model) -> None:
    namespace: dict[str, object] = {"model": model, "loss": on_the_way(model)}
    namespace["_oh"] = {4: namespace["loss"]}
    shell = types.SimpleNamespace(user_ns_hidden={"_oh": namespace["_oh"]})
    report = scan(namespace, shell=shell)
    graph = {
        (row.holder, row.frees, row.releasable)
        for row in report
        if row.in_graph and row.device == "simgpu:0"
    }
    assert graph == {("graph of loss and Out[4]", None, False)}
    assert {(row.holder_kind, row.graph_of) for row in report if row.in_graph} == {
        ("graph", "loss")
    }


def test_what_two_graphs_share_counts_for_each_of_them_and_once_in_the_sum(model) -> None:
    earlier = sums(scan({})).graph
    hidden = model[:2](batch())
    namespace = {"model": model, "one": hidden.sin().sum(), "two": hidden.cos().sum()}
    del hidden
    report = scan(namespace)
    one, two = named(report, "one").graph_nbytes, named(report, "two").graph_nbytes
    assert one == two == sums(report).graph - earlier


def test_every_byte_on_the_device_is_named_or_in_a_graph(model) -> None:
    earlier = sums(scan({"model": model}))
    namespace = {"model": model, "loss": model(batch()).sum()}
    row = sums(scan(namespace))
    assert row.graph > earlier.graph
    assert (row.held, row.unexplained) == (earlier.held, 0)
    assert row.named + row.held + row.graph == row.allocated == allocated()


def test_rows_of_a_graph_say_whose_it_is(model) -> None:
    namespace = {"model": model, "loss": model(batch()).sum()}
    rows = [row for row in scan(namespace) if row.holder == "graph of loss"]
    assert sum(row.nbytes for row in rows) == named(scan(namespace), "loss").graph_nbytes > 0
    assert {(row.kind, row.in_graph, row.releasable) for row in rows} == {
        ("activation", True, False)
    }


def test_backward_leaves_nothing_in_the_graph(model) -> None:
    loss = model(batch()).sum()
    loss.backward()
    report = scan({"model": model, "loss": loss})
    assert named(report, "loss").graph_nbytes == 0


@pytest.mark.usefixtures("two_devices")
def test_weights_that_only_a_graph_keeps_are_its() -> None:
    namespace = {"loss": torch.nn.Linear(64, 64).to("simgpu:0")(batch()).sum()}
    rows = [row for row in scan(namespace) if row.holder == "graph of loss"]
    assert {(row.kind, row.shape) for row in rows} >= {
        ("parameter", (64,)),
        ("activation", (32, 64)),
    }


def test_looking_twice_says_the_same(model) -> None:
    namespace = {"model": model, "loss": model(batch()).sum(), "out": model(batch())}
    assert scan(namespace) == scan(namespace)


def test_what_hooks_packed_is_counted_where_it_lies_and_no_hook_fires(model) -> None:
    fired = []

    def unpack(packed):
        fired.append(packed)
        return packed["copy"]

    weight = model[0].weight
    with saved_tensors_hooks(lambda tensor: {"copy": tensor.clone()}, unpack):
        loss = (weight * weight).sum()
    row = named(scan({"model": model, "loss": loss}), "loss")
    assert (row.graph_nbytes, fired) == (2 * weight.nbytes, [])


def test_a_graph_offloaded_to_the_cpu_keeps_its_bytes_there(model) -> None:
    with save_on_cpu():
        loss = (model[0].weight * 2).exp().sum()
    kept = [row for row in scan({"model": model, "loss": loss}) if row.holder == "graph of loss"]
    assert {row.device for row in kept} == {"cpu"}
    assert sum(row.nbytes for row in kept) >= model[0].weight.nbytes


def test_a_checkpoint_is_not_computed_again(model) -> None:
    runs = []

    def segment(x):
        runs.append(1)
        return model(x)

    loss = checkpoint(segment, batch(), use_reentrant=False).sum()
    report = scan({"model": model, "loss": loss})
    assert (len(runs), sums(report).unexplained) == (1, 0)
    loss.backward()
    assert len(runs) == 2


class Doubles(torch.autograd.Function):
    """A function of the user's that saves by the book and on the side."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        ctx.aside = [x * 3]
        return x * 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_of_the_user_keeps_what_it_saved_and_what_its_ctx_has(two_devices) -> None:
    x = torch.ones(128, device=two_devices[0], requires_grad=True)
    row = named(scan({"x": x, "y": Doubles.apply(x)}), "y")
    assert row.graph_nbytes == 2 * 512


def test_a_graph_that_an_output_keeps_goes_with_it(model) -> None:
    namespace: dict[str, object] = {"model": model}
    shell = types.SimpleNamespace(user_ns_hidden={})
    namespace["_oh"] = {4: model(batch()).sum()}
    shell.user_ns_hidden["_oh"] = namespace["_oh"]
    rows = {(row.holder, row.releasable) for row in scan(namespace, shell=shell) if row.in_graph}
    assert ("graph of Out[4]", True) in rows


def test_a_node_that_hides_what_it_saved_is_named_in_a_note(model) -> None:
    y = torch.zeros(4, 64, device="simgpu:0")
    y[0] = model[0].weight[0] * 2
    report = scan({"model": model, "y": y})
    assert any("CopySlices" in note for note in report.notes)


def test_a_torch_without_handles_says_so(model, monkeypatch) -> None:
    monkeypatch.setattr(torch_private, "SAVED", "_none_such")
    monkeypatch.setattr(kinds.Graphs, "_handles_of", lambda *_: [object()])
    report = scan({"model": model, "loss": model(batch()).sum()})
    assert named(report, "loss").graph_nbytes is None
    assert any("does not show what autograd graphs keep" in note for note in report.notes)
    assert sums(report).unexplained > 0


def test_a_graph_too_large_to_follow_is_not_known(model, monkeypatch) -> None:
    monkeypatch.setattr(kinds, "MAX_NODES", 3)
    monkeypatch.setattr(kinds.Graphs.__init__, "__defaults__", (3,))
    report = scan({"model": model, "loss": model(batch()).sum()})
    assert named(report, "loss").graph_nbytes is None
    assert any("large" in note for note in report.notes)


def test_a_graph_lives_no_longer_for_having_been_looked_at(model) -> None:
    namespace = {"model": model}
    before = allocated()
    namespace["loss"] = model(batch()).sum()
    scan(namespace)
    gc.disable()
    try:
        del namespace["loss"]
        assert allocated() == before
    finally:
        gc.enable()


def test_what_other_processes_hold_of_a_device_is_the_driver_s_figure(monkeypatch) -> None:
    figures = {"cuda:0": allocator.AllocatorStats(512, 1024, None)}
    monkeypatch.setattr(allocator, "all_device_stats", lambda: figures)
    driver = {"cuda:0": devices.DriverFigures(None, 7 << 30)}
    monkeypatch.setattr(devices, "driver_figures", lambda _: driver)
    assert sums(scan({}), "cuda:0").other_processes == 7 << 30

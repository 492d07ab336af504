"""Lines to type that do what is said: gradients that accumulate, rows a part at a time, models without a graph.

What a cell computes with the lines is what it computed without them, on the CPU, where there is room for both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from gpumagic.advice.facts import Collection, Facts, Loader, Model, Optimizer, TensorFact
from gpumagic.advice.records import Advice
from gpumagic.advice.rules import batch, collected, kept, rows, training
from gpumagic.advice.rules.proposal import Choice
from gpumagic.oom import ownership, stack
from gpumagic.report.base import Holder
from gpumagic.source import cell_code
from gpumagic.source import text as texts
from gpumagic.source.cell_code import BatchSize
from tests.oom.made_facts import changed, made_facts

MIB = 2**20


def facts(code: str, line: int, **more) -> Facts:
    """Return the facts of a cell that failed on a line, with `net` and an optimizer over it."""
    net, other = (
        Model(name, 8 * MIB, 8 * MIB, training=True, checkpoints=None) for name in ("net", "other")
    )
    optimizer = Optimizer("opt", "SGD", 8 * MIB, models=frozenset({"net"}))
    return made_facts(
        "cuda allocator", device="cpu", requested=64 * MIB, line=line, source=code, calls_backward=True,
        functions=frozenset({"forward", "_call_impl"}), cell=cell_code.read_cell(code),
        failing_text=texts.parse(code, "", line), models=(net, other), models_alive=(net, other),
        optimizers=(optimizer,), optimizers_alive=(optimizer,), **more,
    )  # fmt: skip


def edited(code: str, advice: Advice) -> str:
    return "\n".join(filter(None, (advice.first, advice.apply(code))))


def only(proposals) -> Advice | Choice:
    (found,) = proposals
    return found


STEPS = """    opt.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    opt.step()
"""
LOOPS = {
    "slices": "for start in range(0, len(data), batch_size):\n    x = data[start : start + batch_size]\n"
    + STEPS,
    "split": "for x in data.split(batch_size):\n" + STEPS,
    "split, zero_grad last": "for x in data.split(batch_size):\n    loss = net(x).square().mean()\n"
    "    loss.backward()\n    opt.step()\n    opt.zero_grad()\n",
    "a loader": "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=batch_size)\n"
    "for n, (x,) in enumerate(loader):\n" + STEPS,
    "a loader without numbers": "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), "
    "batch_size=batch_size)\nfor (x,) in loader:\n" + STEPS,
    "a fixed number of steps": "rest = data\nfor step in range(2):\n"
    "    x, rest = rest[:batch_size], rest[batch_size:]\n" + STEPS,
    "a mean beside a sum": "positive = 0\nfor x in data.split(batch_size):\n    positive += (x > 0).sum()\n"
    + STEPS,
    "a sum": "for x in data.split(batch_size):\n" + STEPS.replace("mean()", "sum()"),
}


CRITERION = "net(x), torch.zeros(len(x), 3, dtype=torch.double)"


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_criterion_of_an_earlier_cell_says_itself_whether_it_adds_up(reduction) -> None:
    """What it was made with decides on the division, and is read where the cell fails."""
    names: dict[str, object] = {"criterion": torch.nn.MSELoss(reduction=reduction), "torch": torch}
    with pytest.raises(ZeroDivisionError) as failed:
        exec("1 / 0", names)
    sums = stack.read_frames(failed.value, "cpu", names).summing_criteria
    assert sums == ({"criterion"} if reduction == "sum" else set())
    loop = LOOPS["split"].replace("net(x).square().mean()", f"criterion({CRITERION})")
    code = f"batch_size = 8\n{loop}"
    found = changed(
        facts(code, 4, summing_criteria=sums), batch_sizes=(BatchSize("batch_size", 8, 1),)
    )
    advice = only(batch.smaller(found)).finish(2)
    assert ("loss / 4" in advice.edit) is (reduction == "mean")
    made = f"criterion = torch.nn.MSELoss(reduction={reduction!r})\n"
    before, after = trained(made + code), trained(made + edited(code, advice))
    assert all(map(torch.allclose, before, after))


def trained(code: str) -> list[torch.Tensor]:
    """Return the weights after a cell, from the same start and on the same data each time."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3).double()
    names = {
        "torch": torch,
        "net": net,
        "opt": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    }
    names["data"] = torch.randn(16, 4, dtype=torch.double)
    exec(code, names)
    return [each.detach() for each in net.parameters()]


@pytest.mark.parametrize("name", LOOPS)
def test_a_smaller_batch_that_accumulates_trains_the_same_weights(name) -> None:
    code = f"batch_size = 8\n{LOOPS[name]}"
    line = next(i for i, each in enumerate(code.splitlines(), 1) if "net(x)" in each)
    found = changed(facts(code, line), batch_sizes=(BatchSize("batch_size", 8, 1),))
    choice = only(batch.smaller(found))
    advice = choice.finish(3)
    assert advice.title == "Lower batch_size from 8 to 2 and accumulate 4 passes a step"
    assert "up to 3 fits" in advice.evidence
    before, after = trained(code), trained(edited(code, advice))
    assert not torch.equal(before[0], trained("pass")[0])
    assert all(map(torch.allclose, before, after))


@pytest.mark.parametrize(
    "code",
    [
        "for x in stream:\n" + STEPS,  # nobody knows whether it has more passes then
        "for x in data.split(batch_size):\n" + STEPS + "    scheduler.step()\n",
        "for step in range(2):\n    x = data[step:]\n" + STEPS,
    ],
)
def test_where_it_is_unclear_how_passes_add_up_the_batch_is_only_lowered(code) -> None:
    code = f"batch_size = 8\n{code}"
    found = changed(facts(code, 4), batch_sizes=(BatchSize("batch_size", 8, 1),))
    choice = only(batch.smaller(found))
    assert choice.finish(3) is None
    assert "unless several passes make a step" in choice.make(3).cost


def test_a_loader_that_an_earlier_cell_made_is_told_and_accumulates() -> None:
    code = "for (x,) in loader:\n" + STEPS
    found = changed(
        facts(code, 3),
        batch_sizes=(BatchSize("loader", 8, loader=True),),
        loaders=(Loader("loader", 8),),
    )
    advice = only(batch.smaller(found)).finish(4)
    assert advice.first == "loader.batch_sampler.batch_size = 4"
    assert "for i, (x,) in enumerate(loader):" in advice.edit


TENSORS = {
    "q": torch.randn(40, 6), "k": torch.randn(30, 6), "d": torch.randn(20, 20), "w": torch.randn(20, 20),
    "v": torch.rand(20),
}  # fmt: skip
BY_ROWS = [
    "out = (q @ k.T).topk(3).indices",
    "out = (q @ k.T).softmax(-1).argmax(dim=1)",
    "scores = q @ k.T\nout, index = scores.topk(3, dim=1)",
    "scores = q @ k.T\nout = (scores / 4).logsumexp(-1)",
    "out = (d[:, :, None] - d[:, None, :]).relu().mean()",
    "pairs = d[:, :, None] - d[:, None, :] + 0.2\nkept = pairs.abs()\nout = kept.sum()",
    "error = (d - w @ w.T) * w\nout = (error ** 2).sum() / w.sum() + v.norm()",  # the rows of two tensors
    "out = (v[:, None] + v[None, :] - 2 * d @ d.T).argmin(1)",
    "low = torch.min(d[:, None, :2], d[None, :, :2])\nout = (low - v[:, None, None]).clamp(min=0).prod(dim=2)",
    "both = torch.cat([d, w], dim=1)\nwith torch.no_grad():\n    out = (both > 0).sum(1) < 3",
    "made = d.unfold(0, 4, 1).contiguous()\nout = made.amax(2)",
    "out = torch.exp(-0.5 * torch.cdist(q, k) ** 2).mean()\nother = (q @ k.T).mean()\nboth = other - out",
    "out = (d * v).argmax(1)",  # of a vector beside each row
]


def tensor_facts(**graph: bool) -> dict[str, TensorFact]:
    return {
        name: TensorFact(
            tuple(each.shape), "float32", each.nbytes, "cpu", requires_grad=graph.get(name, False)
        )
        for name, each in TENSORS.items()
    }


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "with a gradient"])
@pytest.mark.parametrize("code", BY_ROWS)
def test_rows_computed_a_part_at_a_time_are_the_same(code, watched) -> None:
    name = "q" if "q" in code else "d"
    choice = only(rows.by_rows(facts(code, 1, tensors=tensor_facts(**{name: watched}))))
    advice = choice.make(17)
    assert ("checkpoint(" in advice.edit) is watched
    outs, gradients = [], []
    for text in (code, edited(code, advice)):
        names = {"torch": torch, **TENSORS, name: TENSORS[name].clone().requires_grad_(watched)}
        exec(text, names)
        outs.append(names["out"])
        if watched and names["out"].is_floating_point():
            gradients.append(torch.autograd.grad(names["out"].sum(), names[name])[0])
    assert torch.allclose(*outs)
    assert not gradients or torch.allclose(*gradients, atol=1e-6)


def test_what_is_true_of_all_rows_is_counted_a_part_at_a_time_beside_them() -> None:
    """Torch makes integers of all booleans before it adds them up."""
    mask = TENSORS["d"] > 0
    code = "error = (d - w @ w.T) * mask\nout = (error ** 2).sum() / mask.sum()"
    there = {**tensor_facts(), "mask": TensorFact((20, 20), "bool", 400, "cpu")}
    advice = only(rows.by_rows(facts(code, 1, tensors=there))).make(7)
    assert "/ sum(part.sum() for part in mask.split(7))" in advice.edit
    outs = []
    for text in (code, edited(code, advice)):
        exec(text, names := {"torch": torch, "mask": mask, **TENSORS})
        outs.append(names["out"])
    assert torch.allclose(*outs)


def test_layers_in_place_are_told_not_to_be_where_their_input_is_needed_again() -> None:
    net = torch.nn.Sequential(
        *(layer for _ in range(3) for layer in (torch.nn.Linear(4, 4), torch.nn.ReLU(True)))
    )
    (model,), _ = ownership.find_models_and_optimizers([ownership.Variable("net", net)], "cpu")
    code = "net(x).sum().backward()"
    found = changed(facts(code, 1), models=(model,))
    exec(
        edited(code, only(training.checkpoint(found))),
        {"net": net, "torch": torch, "x": torch.ones(2, 4)},
    )
    assert net[0].weight.grad is not None


def test_a_name_that_is_bound_twice_and_read_twice_after_that_keeps_its_statement() -> None:
    code = "b = d.relu()\nb = d.abs()\nc = b + 1\nout = b.softmax(-1).amax(1)"
    for choice in rows.by_rows(facts(code, 4, tensors=tensor_facts())):
        assert "b = d.abs()" in edited(code, choice.make(7))


def test_blocks_are_named_as_the_modules_that_they_are_in_take_it() -> None:
    """Torchvision's backbones for segmentation are a `ModuleDict` with numbers for keys."""
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3)))
    net = torch.nn.ModuleDict(
        {"backbone": torch.nn.ModuleDict({"4": torch.nn.ModuleList([blocks])})}
    )
    (model,), _ = ownership.find_models_and_optimizers([ownership.Variable("net", net)], "cpu")
    assert model.blocks is not None
    assert eval(model.blocks) is blocks


@pytest.mark.parametrize(
    "code",
    [
        "out = (q @ k.T).softmax(0).argmax(dim=1)",  # over the rows
        "out = (q @ k.T).topk(3, 0).indices",
        "out = (d - d.T).abs().mean()",  # each row with a column
        "out = (d + w.T).argmax(-1)",
        "out = torch.cat([d, w]).argmax(-1)",
        "out = (q @ k.T).relu()",  # as large as what it is made of
        "out = q.topk(3).indices",
    ],
)
def test_rows_that_depend_on_one_another_are_left_alone(code) -> None:
    found = changed(
        facts(code, 1, tensors=tensor_facts()),
        requested=400 if code == "out = q.topk(3).indices" else 64 * MIB,
    )
    assert not list(rows.by_rows(found))


@pytest.mark.parametrize(("dtype", "number"), [("int64", 0), ("float32", 1)])
def test_what_a_graph_network_trains_on_is_not_divided(dtype, number) -> None:
    """Its edges are of all nodes; a hidden state beside the data is no obstacle."""
    code = "loss = net(x, other_input).square().mean()\nloss.backward()\nopt.step()"
    there = {
        "x": TensorFact((64, 4), "float32", MIB, "cpu"),
        "other_input": TensorFact((2, 512), dtype, MIB, "cpu"),
    }
    assert len(list(batch.accumulate(facts(code, 1, tensors=there)))) == number


@pytest.mark.parametrize(
    "loss",
    [
        "net(x).square().mean()", "net(x).square().sum(-1).mean()", "net(x).square().sum()", "net(x).abs().sum() * 2",
        "net(x).square().mean().sqrt()", "torch.log(net(x).square().mean())", "net(x).square().sum() / len(x)",
        "(net(x).mean() - 1).square()", "(net(x).softmax(0) * x[:, :3]).sum()", "net(x).softmax(1).square().mean()",
        "net(x).square().mean() + sum(p.square().sum() for p in net.parameters())", "net(x).std()", "1 / net(x).mean()",
        "torch.nn.functional.mse_loss(net(x), x[:, :3]) ** 0.5", "net(x[:8]).square().mean()", "-net(x).mean()",
        "net(x).square().mean() * net(x).mean()", "(net(x) @ net(x).T).logsumexp(1).mean()",
        "net(x).square().sum(1).mean() + 0.1 * net(x).abs().mean()", "(net(x) - net(x).mean()).abs().mean()",
        "torch.autograd.grad(net(x.requires_grad_()).sum(), x, create_graph=True)[0].square().mean() + net(x).mean()",
        "torch.autograd.grad(net(x.requires_grad_()).mean(), x, create_graph=True)[0].square().mean() + net(x).mean()",
        "sum(net(x).square().mean() for _ in range(2))",
        "torch.nn.functional.mse_loss(net(x), x[:, :3], reduction='sum') + net(x).abs().mean()", "net(x).norm()",
    ],
)  # fmt: skip
def test_the_gradient_is_the_same_whatever_the_loss_or_nothing_is_offered(loss) -> None:
    whole = f"x = data\nopt.zero_grad()\nloss = {loss}\nloss.backward()\nopt.step()"
    there = {"x": TensorFact((16, 4), "float64", MIB, "cpu")}
    loop = f"batch_size = 8\n{LOOPS['split'].replace('net(x).square().mean()', loss)}"
    found = changed(facts(loop, 4), batch_sizes=(BatchSize("batch_size", 8, 1),))
    offered = [
        (whole, each.make(each.now - 1))
        for each in batch.accumulate(facts(whole, 3, tensors=there))
    ]
    offered += [
        (loop, better) for each in batch.smaller(found) if (better := each.finish(4)) is not None
    ]
    for code, advice in offered:
        assert all(map(torch.allclose, trained(code), trained(edited(code, advice)))), advice.edit
    plain = ("net(x).square().mean()", "net(x).square().sum()", "-net(x).mean()")
    assert len(offered) == 2 or loss not in plain


def test_a_hidden_state_is_not_handed_from_one_part_of_the_rows_to_the_next() -> None:
    code = "out, state = net(x, state)\nloss = out.square().mean()\nloss.backward()"
    there = {"x": TensorFact((16, 4), "float64", MIB, "cpu")}
    assert not list(batch.accumulate(facts(code, 1, tensors=there)))


def test_a_loss_that_something_else_calls_backward_with_is_divided() -> None:
    code = "loss = net(x).square().mean()\naccelerator.backward(loss)\nopt.step()"
    there = {"x": TensorFact((64, 4), "float32", MIB, "cpu")}
    choice = only(batch.accumulate(facts(code, 1, tensors=there)))
    assert "accelerator.backward((loss / 2))" in choice.make(choice.now - 1).edit


LARGE_ONES = "a = torch.ones(1024, 1024)\n"


def test_data_of_which_a_loop_takes_parts_stay_on_the_host() -> None:
    code = "x = x.to('cuda')\nx = x[order]\nfor i in range(0, len(x), 8):\n    net(x[i : i + 8]).sum().backward()"
    (advice,) = collected.data_taken_in_parts(
        facts(code, 1, tensors={"x": TensorFact((64, 4), "float32", 4 * MIB, "cpu")})
    )
    assert edited(code, advice) == (
        "x = x.cpu()\nx = x[order.cpu()]\nfor i in range(0, len(x), 8):\n"
        "    net(x[i : i + 8].to('cuda')).sum().backward()"
    )


def test_what_is_read_no_more_is_deleted_before_the_line_that_failed() -> None:
    code = f"{LARGE_ONES}b = a * 2\nc = torch.linalg.solve(b, b)\nd = b + c"
    there = {name: TensorFact((1024, 1024), "float32", 4 * MIB, "cpu") for name in "ab"}
    (advice,) = kept.read_no_more(facts(code, 3, tensors=there))
    assert edited(code, advice).splitlines()[2] == "del a"
    assert not list(kept.read_no_more(facts(code.replace("b + c", "a + b + c"), 3, tensors=there)))
    within = f"{LARGE_ONES}with torch.no_grad():\n    b = a * 2\n    c = torch.linalg.solve(b, b)\nd = b + c"
    assert "    del a\n    c =" in edited(
        within, only(kept.read_no_more(facts(within, 4, tensors=there)))
    )
    assert not list(kept.read_no_more(facts(code.removeprefix(LARGE_ONES), 2, tensors=there))), (
        "of an earlier cell"
    )


def test_a_model_that_no_optimizer_updates_is_frozen() -> None:
    code = "loss = (net(x) - other(x)).square().mean()\nloss.backward()\nopt.step()"
    found = facts(code, 1)
    assert only(kept.frozen_model(found)).first == "other.requires_grad_(False)"
    beside = facts("data = 1; other = make()\nloss = net(other(x))\nloss.backward()", 2)
    assert only(kept.frozen_model(beside)).first, "no line of its own makes it"
    both = replace(found.notebook.optimizers[0], models=frozenset({"net", "other"}))
    assert not list(kept.frozen_model(changed(found, optimizers_alive=(both,))))
    assert not list(kept.frozen_model(changed(found, optimizers_alive=()))), (
        "who knows what trains here"
    )
    there = tuple(replace(each, frozen=True) for each in found.notebook.models)
    assert not list(kept.frozen_model(changed(found, models=there))), "it is frozen"


@pytest.mark.parametrize(
    "added", ["saved.append(copy.deepcopy(net))", "saved[epoch] = copy.deepcopy(net)"]
)
def test_models_that_a_loop_keeps_are_collected_in_the_hosts_memory(two_devices, added) -> None:
    net = torch.nn.Linear(1024, 1024, device=two_devices[0])
    collections = stack._collections({"saved": {0: net} if "=" in added else [net]}, two_devices[0])
    assert (collections["saved"].tensors, collections["saved"].nbytes) == (2, 4 * 1024 * 1025)
    code = f"for epoch in range(9):\n    {added}"
    advice = only(collected.results(facts(code, 2, collections=collections)))
    assert advice.edit == added.replace("deepcopy(net)", "deepcopy(net).cpu()")


def test_the_state_of_optimizers_in_a_list_counts_and_has_no_method_that_moves_it(
    two_devices,
) -> None:
    opt = torch.optim.Adam([torch.nn.Parameter(torch.ones(MIB, device=two_devices[0]))])
    opt.param_groups[0]["params"][0].grad = torch.ones(MIB, device=two_devices[0])
    opt.step()
    collections = stack._collections({"runs": [opt]}, two_devices[0])
    assert collections["runs"].nbytes == 8 * MIB
    assert not list(
        collected.results(
            facts("for lr in rates:\n    runs.append(opt)", 2, collections=collections)
        )
    )


@pytest.mark.parametrize(
    ("function", "target", "grows"),
    [
        ("def step(x):\n    history['out'].append(net(x))", "history['out']", True),
        ("def forward(self, x):\n    self.maps.append(net(x))\n    return x", "self.maps", True),
        ("def step(x):\n    outs = []\n    outs.append(net(x))\n    return outs", "outs", False),
    ],
)
def test_what_a_function_adds_to_and_does_not_make_itself_grows_with_each_call(
    function, target, grows
) -> None:
    there = {target: Collection(9, 64 * MIB)}
    found = changed(
        facts("step(x)", 1, collections=there), failing_text=texts.parse(function, "In [2]", 2)
    )
    advised = list(collected.results(found))
    assert [(each.edit, each.frees) for each in advised] == (
        [(f"{target}.append(net(x).cpu())", None)] if grows else []
    )  # fmt: skip


def test_a_sum_of_losses_is_one_however_it_is_written() -> None:
    number = TensorFact((), "float32", 4, "cpu", has_graph=True)
    code = "for x in data:\n    total = total + net(x).sum()"
    assert only(collected.graphs(facts(code, 2, tensors={"total": number}))).edit == (
        "total = total + net(x).sum().item()"
    )
    layers = facts(code.replace(".sum()", ""), 2, tensors={"total": replace(number, shape=(64, 8))})
    assert not list(collected.graphs(layers)), "a residual connection"


def test_what_a_function_returns_keeps_its_graph_where_its_caller_trains() -> None:
    dense = "def forward(self, x):\n    feats = [x]\n    for layer in self.layers:\n        feats.append(layer(x))"
    dense += "\n    return torch.cat(feats, 1)"
    found = facts(
        "net(x).sum().backward()", 1, collections={"feats": Collection(9, 64 * MIB, graphs=8)}
    )
    inside = changed(found, failing_text=texts.parse(dense, "In [2]", 4))
    assert not list(collected.graphs(inside))
    evaluating = changed(inside, cell=cell_code.read_cell("net(x).sum()"), calls_backward=False)
    assert only(collected.graphs(evaluating)).edit.strip() == "feats.append(layer(x).detach())"


@pytest.mark.parametrize("dim", ["", ", dim=0"])
def test_a_tensor_that_gets_longer_is_collected_in_the_hosts_memory(dim) -> None:
    code = f"for x in data:\n    feats = torch.cat((feats, net(x)){dim})"
    found = facts(code, 2, tensors={"feats": TensorFact((9, 4), "float32", 64 * MIB, "cpu")})
    assert (
        only(collected.results(found)).edit
        == f"feats = torch.cat((feats.cpu(), net(x).cpu()){dim})"
    )


def test_a_list_that_is_joined_is_collected_in_the_hosts_memory_with_or_without_what_is_joined() -> (
    None
):
    code = "outs = [net(x) for x in data]\nall = torch.cat(outs)"
    joined, not_joined = collected.results(
        facts(code, 2, collections={"outs": Collection(9, 64 * MIB)})
    )
    assert joined.edit == 'outs = [net(x).cpu() for x in data]\nall = torch.cat(outs).to("cpu")'
    assert not_joined.edit == "outs = [net(x).cpu() for x in data]"


def test_copies_of_a_model_go_to_the_host_once() -> None:
    (advice,) = collected.comprehension(
        facts("averages = [copy.deepcopy(net) for _ in range(3)]", 1)
    )
    assert advice.edit == "averages = [copy.deepcopy(net).cpu() for _ in range(3)]"
    assert not list(collected.comprehension(facts(advice.edit, 1)))


def test_what_helps_an_optimizers_step_comes_in_the_order_of_what_it_changes() -> None:
    code = "opt = torch.optim.AdamW(net.parameters(), lr=1e-3)\nopt.step()"
    adam = Optimizer("opt", "AdamW", 8 * MIB, state_nbytes=4 * MIB, models=frozenset({"net"}))
    found = changed(
        facts(code, 2),
        device="cuda:0",
        optimizers=(adam,),
        line=2,
        functions=frozenset({"_init_group"}),
    )
    titles = [each.title for each in training.leaner(found)]
    assert titles == ["Replace AdamW by Adafactor", "Replace AdamW by SGD"]


class Pair(NamedTuple):
    x: torch.Tensor
    n: str


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, x + 1], lambda x: deque([x], maxlen=3), lambda x: {"a": x}, lambda x: [(x, 1), (x, 2)],
        lambda x: deque([Pair(x, "n")], maxlen=3), lambda x: [{"x": x, "n": 1}], lambda x: {"a": [x, x], "b": [x]},
        lambda x: [torch.nn.ParameterList([x])],
    ],
)  # fmt: skip
def test_what_a_collection_holds_already_goes_to_the_host_and_stays_what_it_was(
    two_devices, make
) -> None:
    device = two_devices[0]
    kept = make(torch.ones(MIB, device=device))
    collections = stack._collections({"kept": kept}, device)
    code = "for step in range(3):\n    batch = torch.stack([each[0] for each in random.sample(kept, 2)])"
    found = changed(
        facts(
            code,
            2,
            collections=collections,
            variables_on_device=(Holder("kept", device, 8 * MIB, "list"),),
        ),
        device=device,
    )
    names = {"kept": kept, "torch": torch}
    exec(only(collected.results(found)).first, names)
    expected = make(torch.ones(MIB))
    assert (type(kept), getattr(kept, "maxlen", None)) == (
        type(expected),
        getattr(expected, "maxlen", None),
    )
    assert str(kept) == str(expected)

"""What `%devices` says can be typed: every name is that very tensor, every line frees exactly the bytes it promises."""

from __future__ import annotations

import gc
import textwrap

import pytest
import torch

import gpumagic
from gpumagic.memory.segments import CLEAR_WORKSPACES
from gpumagic.report.base import to_text
from gpumagic.tensors.leaks_view import promises

pytestmark = [
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.skipif(
        not hasattr(torch._C._autograd.SavedTensor, "data"),
        reason="this torch does not show what graphs keep",
    ),
]

PRELUDE = """
import collections, contextvars, dataclasses, functools, itertools, threading, types, weakref
import numpy as np, pandas as pd, torch
from torch import nn
torch.backends.cudnn.enabled = False
def made(n):
    return torch.ones(n, 256, device="cuda")
"""

STATES = {
    "a hook that closes over its own tensor": """
        def hooked():
            w = made(3).requires_grad_()
            w.register_hook(lambda gradient: gradient * w.mean())
        hooked()
        """,
    "a module whose weight has a hook that closes over the module, made twice": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(300, 300, device="cuda")
                self.fc.weight.register_hook(lambda gradient: gradient * self.fc.weight.norm())
        m = Net()
        m.fc(torch.ones(2, 300, device="cuda")).sum().backward()
        m = Net()
        """,
    "the optimizer's step in the backward pass": """
        everything = []
        def train():
            model = nn.Linear(300, 300, device="cuda")
            everything.append(weakref.ref(model.weight))
            everything.append(weakref.ref(model.bias))
            optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}
            def step(p):
                optimizers[p].step()
                optimizers[p].zero_grad()
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
            for _ in range(2):
                model(torch.ones(2, 300, device="cuda")).sum().backward()
        train()
        train()
        """,
    "a ring with a loss, its graph and gradients": """
        class Run:
            pass
        def run():
            it = Run()
            it.me, it.model = it, nn.Linear(300, 300, device="cuda")
            (it.model(torch.ones(5, 300, device="cuda")) ** 2).sum().backward()
            it.loss = (it.model(torch.ones(7, 300, device="cuda")) ** 2).exp().sum()
        run()
        """,
    "a class that is gone, and one that is there": """
        class Gone:
            cache = {"k": made(3)}
        class Kept:
            tensor, table = made(4), [made(5)]
            @staticmethod
            def make(t=made(6)):
                pass
        kept = Kept()
        del Gone
        """,
    "two results of one graph": """
        attention = nn.MultiheadAttention(256, 4, device="cuda")
        out, weights = attention(made(6), made(6), made(6))
        third = out * 2
        """,
    "losses in a list, one more beside it, and a node of a graph": """
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))).cuda()
        losses = [net(made(8)).softmax(-1).sum() for _ in range(3)]
        total = sum(losses)
        node = net(made(9)).exp().sum().grad_fn
        """,
    "losses in a frozen dataclass and in a tuple": """
        @dataclasses.dataclass(frozen=True)
        class Result:
            loss: torch.Tensor
        net = nn.Linear(256, 256, device="cuda")
        result, pair = Result(net(made(8)).exp().sum()), (net(made(9)).exp().sum(), 1)
        """,
    "a model and its optimizer, under several names": """
        model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 4)).cuda()
        opt = torch.optim.AdamW(model.parameters())
        model(made(4)).sum().backward()
        opt.step()
        head, weights = model[1:], [*model.parameters()]
        model.cache = {"k": made(3)}
        """,
    "holders of every kind": """
        p = nn.Parameter(made(2)); p.old = made(3)
        frame = pd.DataFrame({"n": [1, 2], "emb": [made(4), made(5)]})
        column, array = pd.Series([made(6)]), np.empty((1, 2), dtype=object); array[0, 1] = made(7)
        mine = threading.local(); mine.batch = made(8)
        var = contextvars.ContextVar("var"); token = var.set([made(9)])
        cell, keyword = types.CellType(made(10)), lambda *, k=made(11): None
        some, counts = {made(13)}, {made(14): 1}
        copies = itertools.tee([made(15)]); next(copies[0])
        sums = itertools.accumulate([made(16)]); next(sums)
        calls = functools.lru_cache(lambda: made(17)); calls()
        slow = functools.partial(print, made(20), end=made(21))
        def stream():
            hidden = made(22); yield
        gen = stream(); next(gen)
        """,
}
"""Cells, after each of which everything that `%devices` shows is typed."""
LINES = {
    "a hook that closes over its own tensor": 1,
    "a module whose weight has a hook that closes over the module, made twice": 1,
    "a ring with a loss, its graph and gradients": 1,
    "a class that is gone, and one that is there": 1,
    "two results of one graph": 1,
    "losses in a list, one more beside it, and a node of a graph": 2,
    "losses in a frozen dataclass and in a tuple": 0,
}
"""How many lines are offered for what is held."""
WHYS = (
    "a class that is gone, and one that is there",
    "a model and its optimizer, under several names",
    "holders of every kind",
)


@pytest.fixture
def variables():
    """Return what makes the variables of a state, in an empty notebook."""
    made: list[dict[str, object]] = []

    def make(state: str) -> dict[str, object]:
        for names in made:
            names.clear()
        clear()
        made.append({"__name__": "my_cells"})
        exec(PRELUDE + textwrap.dedent(STATES[state]), made[-1])
        return made[-1]

    yield make
    for names in made:
        for reference in names.get(
            "everything", ()
        ):  # torch never frees what such a hook leads back to
            reference()._post_accumulate_grad_hooks.clear()
        names.clear()
    clear()


def clear() -> None:
    """Free what earlier tests left."""
    gc.collect()
    eval(CLEAR_WORKSPACES, {"torch": torch})


@pytest.fixture(autouse=True)
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    _empty_what_is_left()


def _empty_what_is_left() -> None:
    """Take the memory of the tensors that torch never frees: after an optimizer's step in the backward pass, C++ keeps
    the hook, and the hook its parameter."""
    gc.collect()
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.is_cuda:
            each.untyped_storage().resize_(0)


def allocated() -> int:
    """Return the bytes in use."""
    return torch.cuda.memory_allocated()


def on_cuda(rows):
    """Return the rows of the device."""
    return [row for row in rows if row.device == "cuda:0"]


@pytest.mark.parametrize("state", STATES)
def test_names_are_tensors_and_the_sums_are_the_allocator_s(variables, state) -> None:
    names = variables(state)
    report = gpumagic.devices("cuda", namespace=names)
    (device,) = [row for row in report.by_device if row.device == "cuda:0"]
    assert (device.unexplained, device.allocated) == (0, allocated())
    for row in report:
        for name in row.names:
            found = eval(name, names)
            assert any(
                block == row.nbytes for block in blocks(found.untyped_storage().data_ptr())
            ), name
        assert row.is_reached() or row.holder is not None or "everything" in names, row
    to_text(report)
    to_text(report.leaks())
    assert {row.variable for row in report if row.variable} <= names.keys()


def blocks(address: int) -> list[int]:
    """Return the size of the allocator's block at an address."""
    found = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
    return [
        block["size"]
        for block in found
        if block["address"] <= address < block["address"] + block["size"]
    ]


@pytest.mark.parametrize("state", LINES)
def test_each_line_of_what_is_held_frees_exactly_what_it_promises(variables, state) -> None:
    told = promises(on_cuda(gpumagic.devices("cuda", namespace=variables(state)).leaks()))
    assert len(told) == LINES[state]
    for place in range(len(told)):
        names = variables(state)
        promise = promises(on_cuda(gpumagic.devices("cuda", namespace=names).leaks()))[place]
        line = "\n".join(promise.lines())
        promised, before = sum(row.nbytes for row in promise.rows), allocated()
        exec(line.replace("%devices --free", "import gpumagic; gpumagic.free_leaks()"), names)
        assert (line, before - allocated()) == (line, promised)


@pytest.mark.parametrize("state", WHYS)
def test_what_is_told_to_free_a_tensor_frees_exactly_what_it_promises(variables, state) -> None:
    found = on_cuda(gpumagic.devices("cuda", namespace=variables(state)))
    for name in [row.name for row in found if row.name]:
        names = variables(state)
        why = gpumagic.why(name, namespace=names)
        to_text(why)
        before = allocated()
        (line,) = why.lines()
        exec(line, names)
        assert (line, before - allocated()) == (line, why.frees)
        assert why.frees >= why.tensor.nbytes
        assert all(each is not None for each in names.get("weights", ()))


def test_a_weight_is_never_taken_out_of_its_model(variables) -> None:
    names = variables("a model and its optimizer, under several names")
    why = gpumagic.why("model[0].weight", namespace=names)
    assert why.lines() == ("del weights[0]; del model; del opt",)

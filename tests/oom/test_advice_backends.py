"""What no simulated device has: the rules for CUDA, XPU and MPS, on facts written by hand and numbers on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpumagic.advice.facts import Loader, TensorFact
from gpumagic.advice.rules import expressions, limits, rows, verdict
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.source import cell_code, text
from tests.oom.made_facts import changed, made_facts

MIB, GIB = 2**20, 2**30
SHORTAGE = made_facts(
    "cuda allocator", device="cuda:0", requested=2 * GIB, capacity=8 * GIB, free=GIB, from_allocator=True,
    before=AllocatorStats(GIB, GIB, GIB), at_failure=AllocatorStats(7 * GIB, 7 * GIB, 7 * GIB),
    after=AllocatorStats(GIB, GIB, GIB),
)  # fmt: skip


def one(rule, facts):
    (advice,) = rule(facts)
    return advice


def failing(source, tensors, **changes):
    """Return facts of a cell of one line that failed, with these tensors at work."""
    at = text.parse(source, line=1)
    return changed(
        SHORTAGE, cell=cell_code.read_cell(source), failing_text=at, tensors=tensors, **changes
    )


@pytest.mark.parametrize(
    "code",
    [
        "((q @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ v",
        "torch.softmax(q @ k.mT / 4, dim=-1) @ v",
        "F.softmax(q @ k.transpose(-1, -2), -1) @ v",
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_attention_has_the_same_values_fused_and_in_parts(code, fused) -> None:
    q, k, v = torch.randn(3, 2, 2, 300, 16).double()
    fact = TensorFact((2, 2, 300, 16), "float64", q.nbytes, "cuda:0")
    asked = 2 * 2 * 300 * 300 * 8
    facts = failing(
        f"out = {code}",
        {"q": fact, "k": fact, "v": fact},
        requested=asked,
        has_fused_attention=fused,
    )
    advice = one(expressions.rewritten, facts)
    assert ("scaled_dot_product_attention" in advice.edit) is fused
    names = {"torch": torch, "F": torch.nn.functional, "q": q, "k": k, "v": v}
    edited = advice.apply(f"out = {code}")
    assert not list(expressions.rewritten(failing(edited, {"q": fact, "k": fact, "v": fact}))), (
        "it was done"
    )
    exec(edited, names)
    torch.testing.assert_close(names["out"], eval(code, names))


def test_attention_that_is_masked_by_hand_is_masked_where_it_is_fused() -> None:
    q, k, v = torch.randn(3, 2, 2, 300, 16)
    fact = TensorFact((2, 2, 300, 16), "float32", q.nbytes, "cuda:0")
    code = 'out = ((q @ k.mT) / 4).masked_fill(past == 0, float("-inf")).softmax(-1) @ v'
    facts = failing(
        code,
        {"q": fact, "k": fact, "v": fact},
        requested=4 * 4 * 300 * 300,
        has_fused_attention=True,
    )
    names = {"torch": torch, "q": q, "k": k, "v": v, "past": torch.ones(300, 300).tril()}
    outs = []
    for text_ in (code, one(expressions.rewritten, facts).apply(code)):
        exec(text_, names)
        outs.append(names["out"])
    torch.testing.assert_close(*outs)


def test_attention_without_a_dimension_of_heads_has_no_fused_kernel_and_goes_in_parts() -> None:
    fact, asked = TensorFact((2, 300, 16), "float32", 4 * 2 * 300 * 16, "cuda:0"), 4 * 2 * 300 * 300
    code = "out = (q @ k.transpose(-2, -1)).softmax(-1) @ v"
    facts = failing(
        code, {"q": fact, "k": fact, "v": fact}, requested=asked, has_fused_attention=True
    )
    assert one(expressions.rewritten, facts).title == "Attend with 128 queries at a time"


@pytest.mark.parametrize(
    "code", ["(q @ k.transpose(-2, -1)).softmax(0) @ v", "(q @ k).softmax(-1) @ v", "q @ k @ v"]
)
def test_what_only_looks_like_attention_is_left_alone(code) -> None:
    fact = TensorFact((2, 2, 300, 16), "float32", 4 * 2 * 2 * 300 * 16, "cuda:0")
    facts = failing(
        f"out = {code}", {"q": fact, "k": fact, "v": fact}, requested=4 * 2 * 2 * 300 * 300
    )
    assert not list(expressions.rewritten(facts))


@pytest.mark.parametrize("trains", [True, False])
def test_the_loss_in_parts_is_the_loss(trains) -> None:
    """The mean over the labels that count, ignored ones left out, and the same gradient."""
    hidden, table = torch.randn(24, 8).double(), torch.randn(8, 1200).double().requires_grad_()
    labels = torch.arange(24)
    labels[3] = -100
    source = "loss = F.cross_entropy(hidden @ table, labels)"
    there = {
        "hidden": TensorFact((24, 8), "float64", hidden.nbytes, "cuda:0"),
        "labels": TensorFact((24,), "int64", labels.nbytes, "cuda:0"),
    }
    facts = failing(source, there, requested=24 * 1200 * 8)
    facts = changed(
        facts, line=1, calls_backward=trains,
    )  # fmt: skip
    (choice,) = rows.by_rows(facts)
    advice = choice.make(7)
    assert ("checkpoint" in advice.edit) is trains
    names = {
        "torch": torch,
        "F": torch.nn.functional,
        "hidden": hidden,
        "table": table,
        "labels": labels,
    }
    exec("import torch.utils.checkpoint\n" + advice.apply(source), names)
    expected = torch.nn.functional.cross_entropy(hidden @ table, labels)
    torch.testing.assert_close(names["loss"], expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, table)[0] for each in (names["loss"], expected))
    )


def test_a_cap_on_the_process_is_lifted_not_worked_around() -> None:
    advice = one(limits.fraction, changed(SHORTAGE, kind="memory fraction"))
    assert advice.first == "torch.cuda.set_per_process_memory_fraction(1.0)"
    assert not list(limits.fraction(SHORTAGE))


def test_several_devices_take_parts_of_a_model_that_is_too_large_alone() -> None:
    facts = changed(
        SHORTAGE, cell=cell_code.read_cell("net(x).backward()"), free_elsewhere={"cuda:1": GIB}
    )
    assert not list(limits.divided(facts))
    stepping = changed(facts, functions=frozenset({"_multi_tensor_adamw"}))
    assert "fully_shard" in one(limits.divided, stepping).title
    assert not list(limits.divided(changed(facts, free_elsewhere={})))


def test_workers_are_blamed_only_for_what_failed_in_them() -> None:
    loader = Loader("loader", 8, workers=4)
    killed = changed(SHORTAGE, kind="dataloader killed", memory="host", loaders=(loader,))
    assert one(limits.workers, killed).first == "loader.num_workers = 0"
    assert not list(limits.workers(changed(killed, kind="numpy")))
    assert not list(limits.workers(changed(killed, loaders=(replace(loader, workers=0),))))


def test_a_smaller_batch_is_denied_where_the_step_failed() -> None:
    facts = changed(
        SHORTAGE, functions=frozenset({"_single_tensor_adam"}), loaders=(Loader("l", 8),)
    )
    assert any("A smaller batch cannot help" in each for each in verdict.sentences(facts))
    assert not any("A smaller batch" in each for each in verdict.sentences(SHORTAGE))

"""What the device was full of at the instant of the failure, and which operation asked for more, as reported."""

from __future__ import annotations

import sys

import pytest
from oom_cells import GIB

pytestmark = pytest.mark.usefixtures("few_objects")

MIB = 2**20
LAYERS = "net = torch.nn.Linear(4096, 4096).to('simgpu:0')\nopt = torch.optim.AdamW(net.parameters())"


@pytest.fixture
def report_of(guarded, bare_shell):
    """Return a function that runs a cell that fails, and gives its report."""

    def run(cell, *earlier):
        for each in earlier:
            bare_shell.run_cell(each, store_history=True)
        guarded(cell)
        return bare_shell.user_ns["report"]

    return run


def shares(report):
    return {share.what: share.nbytes for share in report.instant.shares}


def test_the_parts_add_up_to_what_was_reserved(report_of) -> None:
    report = report_of(
        "mine = take(0.5)\nx = torch.ones(64, 4096, device='simgpu:0')\n"
        "net(x).sum().backward()\nopt.step()\nloss = net(x).relu().relu().sum()\nfail()",
        LAYERS, "old = take(0.25)", "take(0.125)",
    )  # fmt: skip
    found = shares(report)
    assert sum(found.values()) == report.reserved_at_failure
    assert found["outputs"] == GIB // 8
    assert found["variables of failed functions"] == 2 * GIB
    assert found["names of earlier cells"] == GIB // 4
    assert found["names of this cell"] == GIB // 2 + MIB
    assert found["parameters"] == found["gradients"] == 64 * MIB + 4096 * 4
    assert found["optimizer state"] == 2 * found["parameters"]
    # Which of them Python sees depends on who has looked at the graph before.
    assert found.get("activations", 0) + found.get("without a name (graphs, C++, unfinished lists)", 0) >= 2 * MIB


def test_every_part_says_its_largest_names(report_of) -> None:
    report = report_of("mine = take(0.5)\nfail()", "old = [take(0.25)]")
    names = {share.what: share.names for share in report.instant.shares}
    assert names["names of this cell"] == ("mine",)
    assert names["names of earlier cells"] == ("old",)
    assert names["variables of failed functions"] == ()
    shown = " ".join(str(report).split())
    assert "At the failure: variables of failed functions 2.0 of 2.8 GiB" in shown


@pytest.mark.parametrize(
    ("cell", "operator", "operands"),
    [
        ("def work(u, v):\n    return (u - v).sum()\nwork(a, b)", "-", ["u [60000, 1] float32", "v [60000] float32"]),
        ("c = a @ d", "@", ["a [60000, 1] float32", "d [1, 60000] float32"]),
        ("torch.outer(b, b)", "torch.outer", ["b [60000] float32"]),
        ("a.expand(60000, 60000).contiguous()", "a.expand(60000, 60000).contiguous", []),
        ("torch.nn.functional.one_hot(b.long(), 60000)", "torch.nn.functional.one_hot", []),
    ],
)
def test_the_operation_and_its_operands_are_named(report_of, cell, operator, operands) -> None:
    a, b = "torch.zeros(60000, 1, device='simgpu:0')", "torch.zeros(60000, device='simgpu:0')"
    report = report_of(cell, f"a = {a}; b = {b}; d = a.T.contiguous()")
    shown = [f"{each.name} [{', '.join(map(str, each.shape))}] {each.dtype}" for each in report.instant.operands]
    if sys.version_info >= (3, 11):  # before, Python does not say which part of a line failed
        assert report.instant.operator == operator
        assert shown == operands
    if operator == "-":
        assert "u [60000, 1] float32 - v [60000] float32" in str(report)


def test_a_function_of_torchs_own_is_the_operation(report_of) -> None:
    report = report_of(
        "torch.nn.functional.layer_norm(x, (2**14,))", "x = torch.zeros(2**15, 2**14, device='simgpu:0')"
    )
    assert report.instant.operator == "layer_norm"
    assert [each.shape for each in report.instant.operands] == [(2**15, 2**14)]


def test_outputs_go_with_the_names_that_earlier_cells_left(report_of, bare_shell) -> None:
    report = report_of("take(3.5)", "old = take(0.5)", "take(0.25)")
    (advice,) = [each for each in report.advice if each.first]
    assert advice.title == "Delete 2 names that earlier cells left"
    assert str(report).count("| del old") == 1
    bare_shell.run_cell(advice.first, store_history=True)
    assert shares(report_of("fail()")) == {"variables of failed functions": 2 * GIB}


def test_a_fault_in_looking_costs_neither_the_release_nor_the_report(report_of, monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.oom.ownership.find_shares", lambda *_: 1 / 0)
    report = report_of("fail()")
    assert report.allocated_after == 0
    assert report.instant.shares == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_tensor_without_one_shape_hides_nothing_of_the_failure(report_of, layout) -> None:
    parts = f"[torch.ones(3), torch.ones(5)], layout=torch.{layout}"
    report = report_of(f"z = torch.nested.nested_tensor({parts})\nmine = take(0.5)\ny = z, fail()")
    assert report.line == 4
    assert shares(report)["names of this cell"] == GIB // 2
    assert not [note for note in report.notes if "could not be read" in note]

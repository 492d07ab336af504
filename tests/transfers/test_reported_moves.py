"""`%%ondevice` puts new tensors where it says and reports what happened; `test_ondevice_corpus.py` has how exactly."""

from __future__ import annotations

import pickle

import pytest
import torch

import gpumagic
from gpumagic.transfers.placed import bytes_by_device
from tests.transfers.ondevice_corpus import run

pytestmark = pytest.mark.usefixtures("two_devices")


def test_a_move_is_told_with_its_line_its_variable_and_its_cause() -> None:
    report, _, _ = run("a = 1\ny = x.to('simgpu:0')\nmodel.to('simgpu:1')")
    rows = {row.line: row for row in report}
    assert (rows[2].name, rows[2].cause, rows[2].nbytes) == ("x", ".to", 4000)
    assert (rows[3].name, rows[3].cause, rows[3].nbytes) == ("model", "Module.to", 60)


def test_moves_of_one_line_are_one_row_and_a_loop_is_called_one() -> None:
    report, _, _ = run("for _ in range(10):\n    y = x.to('simgpu:0')")
    (row,) = report
    assert (row.count, row.nbytes, row.line) == (10, 40_000, 2)
    assert (row.repeats, row.pageable) == (9, None)


def test_a_function_of_the_cell_is_told_by_its_own_line() -> None:
    report, _, _ = run("def load():\n    return x.to('simgpu:0')\nload()")
    assert [row.line for row in report] == [2]


def test_what_the_cell_names_elsewhere_is_told_with_its_bytes() -> None:
    report, _, _ = run("y = g + 1\nz = x.to('simgpu:0')\nw = far.sum()")
    assert [(each.name, each.device, each.nbytes) for each in report.elsewhere] == [
        ("x", "cpu", 4000), ("far", "simgpu:1", 100), ("w", "simgpu:1", 4),
    ]  # fmt: skip


def test_containers_of_tensors_are_told_too() -> None:
    report, _, _ = run(
        "kept = [g, x, x]\npair = {'a': far}\ntexts = ['a'] * 5\nlast = g[0, 0].item()"
    )
    assert {(each.name, each.device, each.nbytes) for each in report.elsewhere} == {
        ("kept", "cpu", 4000), ("x", "cpu", 4000), ("pair", "simgpu:1", 100), ("far", "simgpu:1", 100),
    }  # fmt: skip


@pytest.mark.parametrize(
    "odd",
    [
        "odd = torch.nn.LazyLinear(3, device='cpu')",
        "class Odd(torch.nn.Module):\n    def parameters(self, recurse=True): raise RuntimeError('no')\nodd = Odd()",
    ],
)
def test_a_module_that_cannot_say_what_it_holds_costs_not_the_report(odd: str) -> None:
    report, _, _ = run(f"{odd}\ny = x.to('simgpu:0')")
    assert [each.name for each in report.elsewhere] == ["x"]


def test_what_a_module_holds_elsewhere_is_read_as_it_is_stored() -> None:
    odd = "class Odd(torch.nn.Linear):\n    def parameters(self, recurse=True): raise RuntimeError('no')\n"
    report, _, _ = run(f"{odd}odd = Odd(3, 2, device='cpu')\ny = x.to('simgpu:0')")
    assert ("odd", "cpu", 32) in [
        (each.name, each.device, each.nbytes) for each in report.elsewhere
    ]


@pytest.mark.parametrize("trace", [False, True])
def test_a_sparse_tensor_is_created_with_the_bytes_of_its_parts(trace: bool) -> None:
    with gpumagic.ondevice("cpu", trace=trace) as on:
        made = torch.sparse_coo_tensor(
            [[0, 1], [1, 0]], [1.0, 2.0], (500, 500), check_invariants=True
        )
    assert on.report.created == {"cpu": (1, 40)}
    assert bytes_by_device(made, "tensor") == {"cpu": 40}


def test_a_name_that_the_move_rebinds_is_not_left_behind() -> None:
    report, _, _ = run("x = x.to('simgpu:0')")
    assert report.elsewhere == report.advice == ()


@pytest.mark.parametrize(
    "made",
    [
        "torch.zeros(3)", "torch.tensor([1, 2])", "torch.arange(4)", "torch.randn(2)", "torch.nn.Linear(2, 2).weight",
        "torch.randperm(5)", "torch.zeros(2).new_ones(2)", "torch.empty(())",
    ],
)  # fmt: skip
def test_new_tensors_land_on_the_device(made: str) -> None:
    report, _, namespace = run(f"made = {made}", device="simgpu:1")
    assert str(namespace["made"].device) == "simgpu:1"
    assert report.created["simgpu:1"][0] >= 1


def test_an_explicit_device_and_a_generators_device_win() -> None:
    _, _, names = run(
        "a = torch.zeros(3, device='cpu')\nb = torch.rand(3, generator=torch.Generator('cpu'))"
    )
    assert names["a"].device.type == names["b"].device.type == "cpu"


def test_a_shuffling_data_loader_works() -> None:
    _, _, names = run(
        """
        data = torch.utils.data.TensorDataset(torch.arange(6.0, device='cpu'))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        seen = sorted(value.item() for (batch,) in loader for value in batch)
        """
    )
    assert names["seen"] == [0, 1, 2, 3, 4, 5]


def test_created_counts_and_bytes_are_those_of_the_factory_calls() -> None:
    report, _, _ = run(
        "a = torch.zeros(10)\nb = torch.ones(3, device='cpu')\nc = torch.zeros_like(a)\nd = a + 1"
    )
    assert report.created == {"cpu": (1, 12), "simgpu:0": (2, 80)}


def test_the_peak_is_told_only_if_the_cell_raised_it() -> None:
    torch.simgpu.reset_peak_memory_stats(0)  # an earlier test may have filled the device
    at = torch.simgpu.max_memory_allocated(0)
    nbytes = at + 2**20
    report, _, _ = run(f"big = torch.empty({nbytes}, dtype=torch.uint8)\ndel big")
    assert report.peak["simgpu:0"] == torch.simgpu.max_memory_allocated(0) > at
    report, _, _ = run("small = torch.empty(10)")
    assert "simgpu:0" not in report.peak


@pytest.mark.parametrize("outer", [None, "cpu", "simgpu:1"])
def test_an_outer_default_and_the_current_device_are_restored_after_an_error(
    outer: str | None,
) -> None:
    torch.set_default_device(outer)
    torch.simgpu.set_device(0)
    try:
        with pytest.raises(ZeroDivisionError), gpumagic.ondevice("simgpu:1"):
            torch.simgpu.current_device() / 0
        assert str(torch.zeros(1).device) == (outer or "cpu")
        assert torch.simgpu.current_device() == 0
    finally:
        torch.set_default_device(None)


def test_runs_nest_and_each_counts_its_own() -> None:
    with gpumagic.ondevice("simgpu:0") as outer:
        with gpumagic.ondevice("simgpu:1") as inner:
            assert str(torch.zeros(1).device) == "simgpu:1"
        assert str(torch.zeros(1).device) == "simgpu:0"
    assert outer.report is not None
    assert inner.report is not None
    assert set(inner.report.created) == {"simgpu:1"}
    assert set(outer.report.created) == {"simgpu:0"}


def test_the_context_manager_tells_the_lines_of_its_own_file() -> None:
    x = torch.ones(10)
    with gpumagic.ondevice("simgpu:0") as run:
        x.to("simgpu:0")
    assert run.report is not None
    (row,) = run.report
    assert row.code == 'x.to("simgpu:0")'


def test_a_decorated_function_runs_on_the_device_each_time() -> None:
    @gpumagic.ondevice("simgpu:1")
    def make() -> torch.Tensor:
        return torch.zeros(1)

    assert [str(make().device) for _ in range(2)] == ["simgpu:1"] * 2


def test_a_report_is_plain_data_that_keeps_no_tensor_alive() -> None:
    report, _, names = run("y = x.to('simgpu:0')")
    before = torch.simgpu.memory_allocated(0)
    kept = pickle.loads(pickle.dumps(report))
    names.clear()
    assert torch.simgpu.memory_allocated(0) < before
    assert kept.to_dict() == report.to_dict()
    assert list(report.to_pandas().columns) == [
        "direction", "source", "target", "count", "nbytes", "seconds", "line", "code", "name", "cause",
        "repeats", "pageable",
    ]  # fmt: skip

"""A `with` block and a decorated function have a cell's report: their lines, their names, what stayed behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.errors import OptionError
from gpumagic.source import frames

pytestmark = pytest.mark.usefixtures("two_devices")

mine = torch.ones(10)


def elsewhere(report: Any) -> list[tuple[str, str, int]]:
    return [(each.name, each.device, each.nbytes) for each in report.elsewhere]


def test_a_blocks_own_variables_and_globals_that_stayed_elsewhere_are_told() -> None:
    x = torch.ones(100)
    unused = torch.ones(1000)
    with gpumagic.ondevice("simgpu:0") as run:
        y = x.to("simgpu:0") + mine.sum().item()
    assert elsewhere(run.report) == [("x", "cpu", 400), ("mine", "cpu", 40)]
    assert str(y.device) == "simgpu:0"
    del unused


def test_a_functions_own_variables_are_named() -> None:
    x = torch.ones(100)

    def inner() -> torch.Tensor:
        return x.to("simgpu:0")

    with gpumagic.ondevice("simgpu:0") as run:
        for batch in x.chunk(2):
            batch.to("simgpu:0")
        inner()
        mine.to("simgpu:0")
    assert [(row.name, row.count) for row in run.report] == [("batch", 2), ("x", 1), ("mine", 1)]


def test_a_name_is_found_without_touching_the_variables() -> None:
    def work() -> dict[str, object]:
        x, y = torch.ones(3), 5
        before = locals()
        with gpumagic.ondevice("simgpu:0"):
            z = x.to("simgpu:0")
        assert (y, tuple(z.shape), before["y"]) == (5, (3,), 5)
        return before

    assert work()["y"] == 5


def test_only_the_lines_of_the_block_are_shown() -> None:
    x = torch.ones(100)
    # not this
    with gpumagic.ondevice("simgpu:0") as run:
        if True:
            x.to("simgpu:0")
    # nor this
    assert run.report is not None
    assert [code for _, code in run.report.lines] == [
        'with gpumagic.ondevice("simgpu:0") as run:', "    if True:", '        x.to("simgpu:0")',
    ]  # fmt: skip
    (row,) = run.report
    assert row.line == run.report.lines[-1][0]


def test_of_blocks_inside_one_another_each_has_its_own_lines() -> None:
    with (
        gpumagic.ondevice("simgpu:0") as outer,
    ):
        a = torch.zeros(1)
        with gpumagic.ondevice("simgpu:1") as inner:
            b = torch.zeros(1)
    assert outer.report is not None
    assert inner.report is not None
    assert [code for _, code in inner.report.lines][1] == "    b = torch.zeros(1)"
    assert len(outer.report.lines) == 6
    assert elsewhere(outer.report) == [("b", "simgpu:1", 4)]
    assert elsewhere(inner.report) == []
    del a, b


def test_looking_at_a_blocks_variables_keeps_none_of_them() -> None:
    def work() -> weakref.ref[Any]:
        x = torch.ones(100)
        with gpumagic.ondevice("simgpu:0"):
            x.to("simgpu:0")
        gone = weakref.ref(x)
        del x
        gc.collect()
        return gone

    assert work()() is None


def test_a_decorated_function_keeps_the_report_of_its_last_call() -> None:
    kept = []

    @gpumagic.ondevice("simgpu:0")
    def work(n: int) -> torch.Tensor:
        """Return a moved copy."""
        kept.append(n)
        return mine.to("simgpu:0")

    assert work.run.report is None
    for n in range(2):
        assert str(work(n).device) == "simgpu:0"
    report = work.run.report
    assert (work.__name__, work.__doc__) == ("work", "Return a moved copy.")
    assert [(row.name, row.count, row.code) for row in report] == [
        ("mine", 1, 'return mine.to("simgpu:0")')
    ]
    assert elsewhere(report) == [("mine", "cpu", 40)]
    assert report.lines[0][1] == '@gpumagic.ondevice("simgpu:0")'
    assert report.lines[-1][1] == '    return mine.to("simgpu:0")'


def test_a_function_whose_body_runs_later_cannot_be_decorated() -> None:
    def generate() -> Any:
        yield torch.zeros(1)

    async def wait() -> None:
        pass

    for func in (generate, wait):
        with pytest.raises(OptionError, match=r"with gpumagic.ondevice\(...\)` inside"):
            gpumagic.ondevice("simgpu:0")(func)


@pytest.mark.parametrize(
    ("code", "number", "written"),
    [
        ("get_ipython().run_line_magic('ondevice', '0 -o r')", 1, "%%ondevice 0 -o r"),
        ("get_ipython().run_line_magic('ondevice', '0')", 3, "%ondevice 0"),
        ("get_ipython().run_cell_magic('time', '', '%%ondevice 0\\nx + 1\\n')", 1, "%%time"),
        ("x = get_ipython().user_ns", 1, "x = get_ipython().user_ns"),
    ],
)
def test_magics_are_shown_as_they_were_written(code: str, number: int, written: str) -> None:
    assert frames.as_typed("x = 1\n" * (number - 1) + code)[number - 1] == written

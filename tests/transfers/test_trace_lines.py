"""With `--trace` each line has its runs, time and memory, as the simulated device counts them."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.errors import OptionError
from gpumagic.options import PARSERS
from tests.transfers import ondevice_corpus as corpus

pytestmark = pytest.mark.usefixtures("two_devices")
MONITORING = sys.version_info >= (3, 12)


def lines_of(cell: str, **options: Any) -> dict[int, Any]:
    report, _, _ = corpus.run(cell, trace=True, **options)
    return {row.line: row for row in report.by_line}


def test_a_peak_is_known_below_an_earlier_one_and_the_counter_is_not_reset() -> None:
    big = torch.ones(8 << 20, device="simgpu:0")
    del big
    high = torch.simgpu.max_memory_allocated(0)
    rows = lines_of("a = torch.ones(1 << 18)\nb = a + a\ndel a, b")
    assert rows[2].peak - rows[1].peak == 4 << 18
    assert torch.simgpu.max_memory_allocated(0) == high


def test_runs_of_loops_recursion_generators_and_comprehensions() -> None:
    rows = lines_of(
        """
        def down(n):
            if n == 0:
                return 0
            return 1 + down(n - 1)
        def numbers():
            for n in range(3):
                yield n
        found = [down(n) for n in range(3)]
        total = sum(numbers())
        for n in numbers():
            total += n
        pick = lambda n: n + 1
        pick(1); pick(2)
        """
    )
    hits = {line: row.hits for line, row in rows.items()}
    assert hits == {
        1: 1,
        2: 6,
        3: 3,
        4: 3,
        5: 1,
        6: 8,
        7: 6,
        8: hits[8],
        9: 1,
        10: 4,
        11: 3,
        12: hits[12],
        13: 1,
    }
    assert hits[12] == 3  # the lambda's body stands on the line that makes it


def test_what_recursion_allocates_counts_once_for_a_line() -> None:
    rows = lines_of(
        """
        def nested(n):
            t = torch.ones(1024)
            return t if n == 0 else nested(n - 1)
        last = nested(4)
        """
    )
    assert (rows[2].allocated, rows[2].hits) == (5 * 4096, 5)
    assert (rows[3].allocated, rows[4].allocated) == (4 * 4096, 5 * 4096)


def test_time_within_a_line_includes_its_calls_and_not_what_runs_while_a_generator_waits() -> None:
    rows = lines_of(
        """
        import time
        def ticks():
            yield 1
            yield 2
        for each in ticks():
            time.sleep(0.02)
        def slow():
            time.sleep(0.02)
        slow()
        """
    )
    assert rows[6].seconds >= 0.04 > rows[3].seconds + rows[4].seconds
    assert rows[9].seconds >= rows[8].seconds >= 0.02


def test_a_thread_has_lines_of_its_own_without_memory() -> None:
    rows = lines_of(
        """
        import threading
        def work():
            for _ in range(4):
                torch.ones(1024, device="simgpu:0")
        thread = threading.Thread(target=work)
        thread.start(); thread.join()
        """
    )
    assert (rows[3].hits, rows[4].hits) == (5, 4)
    assert rows[4].allocated is None
    assert rows[4].peak is None
    assert rows[6].allocated == 4 * 4096


def test_coroutines_that_take_turns_each_have_what_their_own_lines_allocate() -> None:
    def small() -> torch.Tensor:
        return torch.ones(1024, device="simgpu:0")

    async def first() -> None:
        for _ in range(3):
            small()
            await asyncio.sleep(0)

    async def second() -> None:
        for _ in range(2):
            torch.ones(2048, device="simgpu:0")
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(first(), second())

    with gpumagic.ondevice("simgpu:0", trace=True) as run:
        asyncio.run(both())
    assert run.report is not None
    run.report.by_line.to_pandas()
    names = {"first": first, "second": second, "asyncio": asyncio, "torch": torch, "small": small}
    report, _, _ = corpus.run(
        "asyncio.run(both())", trace=["first", "second"], names={**names, "both": both}
    )
    allocated = {row.code.strip(): row.allocated for row in report.by_line if row.function}
    assert allocated["small()"] == 3 * 4096
    assert allocated['torch.ones(2048, device="simgpu:0")'] == 2 * 8192
    assert allocated["await asyncio.sleep(0)"] == 0


def test_a_line_that_fails_has_its_figures_and_so_has_the_line_that_called_it() -> None:
    rows = lines_of(
        """
        def fails():
            t = torch.ones(1024)
            raise ValueError(t.shape)
        try:
            fails()
        except ValueError:
            pass
        after = torch.ones(512)
        """
    )
    assert (rows[2].allocated, rows[5].allocated, rows[8].allocated) == (4096, 4096, 2048)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h * 2


def test_named_functions_have_their_lines_in_libraries_too() -> None:
    model, x = Net().to("simgpu:0"), torch.ones(64, 32, device="simgpu:0")
    report, _, _ = corpus.run(
        "for _ in range(3):\n    y = model(x)",
        trace=["model.forward", "torch.nn.Linear.forward"],
        names={"model": model, "x": x},
    )
    found = {(row.function, row.code.strip()): (row.hits, row.allocated) for row in report.by_line}
    assert found["model.forward", "h = self.linear(x)"] == (3, 3 * 8192)
    assert found["model.forward", "return h * 2"] == (3, 3 * 8192)
    assert found["torch.nn.Linear.forward", "return F.linear(input, self.weight, self.bias)"] == (
        3,
        3 * 8192,
    )
    assert found[None, "y = model(x)"] == (3, 6 * 8192)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "there is no nothing"),
        ("torch.nn.nothing", "torch.nn has no nothing"),
        ("torch.ones", "torch.ones is no function written in Python"),
        ("torch.nn.Linear", "name a method, such as torch.nn.Linear.forward"),
    ],
)
def test_a_function_that_cannot_be_traced_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        gpumagic.ondevice("simgpu:0", trace=name)


def test_the_option_takes_functions_behind_an_equals_sign_and_no_device() -> None:
    assert PARSERS["ondevice"].parse_line("--trace simgpu:0").trace is True
    assert PARSERS["ondevice"].parse_line("simgpu:0 --trace=model.forward,step").trace == [
        "model.forward",
        "step",
    ]
    assert PARSERS["ondevice"].parse_line("simgpu:0").trace is False
    with pytest.raises(OptionError, match=r"'a\.1' is not a function name"):
        PARSERS["ondevice"].parse_line("simgpu:0 --trace=a.1")


def test_a_debugger_or_coverage_keeps_its_trace_function() -> None:
    seen = []

    def tracer(frame: Any, event: str, _: object) -> Any:
        seen.append(event)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        report, _, _ = corpus.run("a = torch.ones(4)", trace=True)
        kept = sys.gettrace()
    finally:
        sys.settrace(before)
    assert kept is tracer
    assert seen
    assert report.by_line.reason == (
        "" if MONITORING else "a debugger or coverage traces this code"
    )
    assert bool(report.by_line.rows) is MONITORING


def test_nothing_is_left_of_a_trace() -> None:
    tools = [sys.monitoring.get_tool(each) for each in range(6)] if MONITORING else []  # type: ignore[attr-defined]
    with gpumagic.ondevice("simgpu:0", trace="gpumagic.simgpu.copies"):
        torch.ones(3)
    assert sys.gettrace() is None
    assert threading.gettrace() is None
    assert sys._getframe().f_trace is None
    assert not MONITORING or tools == [sys.monitoring.get_tool(each) for each in range(6)]  # type: ignore[attr-defined]

"""%%oomguard in a real kernel: what the front end gets, and whether Run All stops."""

from __future__ import annotations

import pytest

SETUP = """
%load_ext gpumagic
import torch, gpumagic
gpumagic.simgpu.enable(devices=2, memory="4GiB")
def take(gib): return torch.empty(int(gib * 2**30), dtype=torch.uint8, device="simgpu:0")
def fail():
    kept = take(2)
    return take(9)
"""
ALLOCATED = "torch.simgpu.memory_allocated(0)"


@pytest.fixture(scope="module")
def guarded_kernel(start_kernel):
    kernel = start_kernel()
    cell = kernel.run(SETUP)
    assert cell.status == "ok", cell.evalue
    kernel.run("%config GPUMagic.advice_seconds = 0")
    return kernel


def let_it_settle(kernel) -> None:
    """Send cells until one is run: after an error a kernel drops what is already on its way."""
    for _ in range(20):
        if kernel.run("pass").status == "ok":
            return
    raise AssertionError("the kernel runs nothing any more")


def test_the_report_comes_first_then_the_traceback_and_run_all_stops(guarded_kernel) -> None:
    failed, after = guarded_kernel.run_all("%%oomguard -o report\nfail()", "ran_on = True")
    assert [kind for kind, _ in failed.seen if kind in {"error", "display_data"}] == [
        "display_data",
        "error",
    ]
    assert "OutOfMemoryError: simgpu out of memory." in failed.tracebacks[0]
    assert failed.reports[0].startswith("Out of memory on simgpu:0")
    assert (failed.status, failed.ename) == ("error", "OutOfMemory")
    assert after.status == "aborted"
    let_it_settle(guarded_kernel)
    assert guarded_kernel.value(ALLOCATED) == "0"
    assert guarded_kernel.value("report.allocated_at_failure") == str(2 * 2**30)


def test_keep_going_lets_run_all_go_on(guarded_kernel) -> None:
    failed, after = guarded_kernel.run_all("%%oomguard --keep-going\nfail()", "40 + 2")
    assert failed.status == "ok"
    assert after.value == "42"
    assert failed.tracebacks == []  # papermill stops at an output of that type
    assert "out of memory. Tried to allocate 9.00 GiB" in failed.stdout


def test_what_keep_going_does_not_go_on_after_is_an_error_as_ever(guarded_kernel) -> None:
    for cell in ("%%oomguard --keep-going\n1 / 0", "%%oomguard --keep-going\nfail()\n", "1 / 0"):
        last = guarded_kernel.run(cell)
    assert "ZeroDivisionError" in last.tracebacks[0]
    assert "ZeroDivisionError" in guarded_kernel.run("%%oomguard --keep-going\n1 / 0").tracebacks[0]


def test_an_interrupt_while_the_guard_opens_leaves_the_traceback_function_in_its_place(
    guarded_kernel,
) -> None:
    guarded_kernel.run(
        "shell = get_ipython()\nmine = shell._showtraceback = lambda *_: print('mine')"
    )
    tear = """
from unittest import mock
from gpumagic.oom import guard
with mock.patch.object(guard, "CellWatch", side_effect=KeyboardInterrupt):
    try: shell.run_line_magic("oomguard", "--keep-going")
    except KeyboardInterrupt: print("torn")
"""
    try:
        assert guarded_kernel.run(tear).stdout == "torn\n"
        assert guarded_kernel.value("shell._showtraceback is mine") == "True"
    finally:
        guarded_kernel.run("del shell._showtraceback")


def test_keep_going_leaves_a_traceback_function_of_somebody_elses_in_its_place(
    guarded_kernel,
) -> None:
    guarded_kernel.run(
        "shell = get_ipython()\nmine = shell._showtraceback = lambda *_: print('mine')"
    )
    try:
        assert "mine" not in guarded_kernel.run("%%oomguard --keep-going\nfail()").stdout
        assert guarded_kernel.run("%%oomguard --keep-going\n1 / 0").stdout == "mine\n"
        assert guarded_kernel.value("shell._showtraceback is mine") == "True"
    finally:
        guarded_kernel.run("del shell._showtraceback")


def test_awaited_code_is_released_too(guarded_kernel) -> None:
    body = "async def work():\n    held = take(1)\n    await asyncio.sleep(0)\n    fail()"
    assert (
        guarded_kernel.run(f"%%oomguard\nimport asyncio\n{body}\nawait work()").ename
        == "OutOfMemory"
    )
    assert guarded_kernel.value(ALLOCATED) == "0"


def test_a_further_run_that_fails_shows_one_line_and_the_report(guarded_kernel) -> None:
    cell = guarded_kernel.run("%%oomguard --shrink n\nn = 2\nfail()")
    assert cell.ename == "OutOfMemory"
    assert len(cell.tracebacks) == 1
    assert cell.tracebacks[0].startswith("OutOfMemory: simgpu:0 ran out of memory in line ")
    assert "\n" not in cell.tracebacks[0].strip()
    assert cell.reports[0].startswith("Out of memory on simgpu:0, line 3, also with n = 1. ")
    assert "Freed 2.0 GiB." in cell.reports[0]
    assert guarded_kernel.value(ALLOCATED) == "0"


def test_the_next_cell_has_the_memory(guarded_kernel) -> None:
    guarded_kernel.run("%%oomguard\nfail()")
    assert guarded_kernel.value("take(4).nbytes") == str(4 * 2**30)


def test_what_the_unwinding_freed_is_counted_at_the_failure_all_the_same(start_kernel):
    """A comprehension's list is gone before anybody can look; the allocator's text still tells of it."""
    kernel = start_kernel()
    kernel.run(
        "%load_ext gpumagic\nimport torch, gpumagic\ngpumagic.simgpu.enable(devices=1, memory='1GiB')"
    )
    kernel.run("%config GPUMagic.advice_seconds = 0")
    kernel.run(
        "%%oomguard --keep-going -o report\nchunks = [torch.ones(2**25, device='simgpu:0') for _ in range(9)]"
    )
    figures = "report.allocated_before, report.allocated_at_failure, report.allocated_after"
    assert kernel.value(figures) == f"(0, {2**30}, 0)"


def test_a_cell_that_is_shrunk_lets_run_all_go_on(guarded_kernel) -> None:
    shrunk, after = guarded_kernel.run_all(
        "%%oomguard --shrink n\nn = 40\nx = take(n / 8)\nn", "n, x.nbytes / 2**30"
    )  # fmt: skip
    assert (shrunk.status, shrunk.value, after.value) == ("ok", "20", "(20, 2.5)")
    assert shrunk.stdout == "%%oomguard: n = 40 ran out of memory in line 3; now n = 20.\n"
    assert any("passed with n = 20" in each for each in shrunk.reports)  # or a line of progress
    guarded_kernel.run("del x")


def test_a_cell_that_fits_nowhere_stops_run_all_with_one_line(guarded_kernel) -> None:
    failed, after = guarded_kernel.run_all("%%oomguard --shrink n\nn = 2\nfail()", "ran_on = True")
    assert (failed.status, failed.ename, after.status) == ("error", "OutOfMemory", "aborted")
    assert len(failed.tracebacks[0].strip().splitlines()) == 1
    let_it_settle(guarded_kernel)
    assert guarded_kernel.value(ALLOCATED) == "0"


def test_an_interrupt_in_the_search_for_a_size_ends_it_and_gives_all_back(guarded_kernel) -> None:
    guarded_kernel.run("n = 16")
    cell, *_ = guarded_kernel.interrupt(
        "%%oomguard --shrink n\nimport time\ndef work():\n    kept = take(n / 8)\n    if n < 16:\n"
        "        print('ready')\n        time.sleep(60)\n    return take(9)\nwork()"
    )
    assert cell.ename == "KeyboardInterrupt"
    let_it_settle(guarded_kernel)
    assert guarded_kernel.value("n") == "16"
    guarded_kernel.run(
        "1 / 0"
    )  # the interrupt's traceback is IPython's own, and goes with the next error
    assert guarded_kernel.value(f"__import__('gc').collect() and {ALLOCATED}") == "0"


def test_every_cell_of_a_kernel_is_guarded_until_off(guarded_kernel) -> None:
    assert guarded_kernel.run("%oomguard on").stdout.startswith(
        "From the next cell on, every cell is guarded"
    )
    failed, after = guarded_kernel.run_all("fail()", "ran_on = True")
    assert [kind for kind, _ in failed.seen if kind in {"error", "display_data"}] == [
        "display_data",
        "error",
    ]
    assert (failed.ename, after.status) == ("OutOfMemory", "aborted")
    let_it_settle(guarded_kernel)
    assert guarded_kernel.value(ALLOCATED) == "0"
    guarded_kernel.run("%oomguard off")
    assert guarded_kernel.run("fail()").ename == "OutOfMemoryError"
    let_it_settle(guarded_kernel)
    guarded_kernel.run("%%oomguard\nfail()")

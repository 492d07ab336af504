"""`%gpuinfo --each-cell on` in a real shell, with the simulated devices' exact counters."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
import torch

from gpumagic.report.units import size as size_in_words

MIB = 1024**2


@pytest.fixture
def cells(bare_shell, two_devices, capsys):
    """Return a function that runs a cell in a shell with lines on, and gives what it printed."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch")
    bare_shell.run_cell("%gpuinfo --each-cell on")
    capsys.readouterr()

    def run(code, **options):
        bare_shell.run_cell(code, **options)
        return capsys.readouterr().out

    yield run
    bare_shell.reset()
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def peak(index: int) -> int:
    return torch.simgpu.max_memory_allocated(index)


def test_what_a_cell_allocates_is_told_to_the_byte_it_was_rounded_to(cells) -> None:
    now = torch.simgpu.memory_allocated(0)
    shown = cells("kept = torch.zeros(40 * 2**20, dtype=torch.uint8, device='simgpu:0')")
    assert torch.simgpu.memory_allocated(0) == now + 40 * MIB
    assert re.match(r"\d.* · simgpu:0 \+40\.0 MiB to \d", shown)
    assert "simgpu:1" not in shown
    assert cells("del kept").count("simgpu:0 -40.0 MiB") == 1


def test_a_peak_is_told_where_the_cell_raised_the_counter_and_claimed_nowhere_else(cells) -> None:
    """The counter is the user's: nobody else resets it."""
    torch.simgpu.reset_peak_memory_stats(0)  # another test may have filled the device
    size = peak(0) + 8 * MIB
    cell = f"temporary = torch.zeros({size}, dtype=torch.uint8, device='simgpu:0'); del temporary"
    first, highest = cells(cell), peak(0)
    assert highest >= size
    assert "simgpu:0 ±0 B to" in first
    assert f"peak {size_in_words(highest)}" in first
    again = cells(cell)
    assert "simgpu:0 ±0 B to" in again, "it was used, although nothing is left of it"
    assert "peak" not in again
    assert peak(0) == highest


def test_a_cell_that_uses_no_device_says_so(cells) -> None:
    assert re.fullmatch(r"\S+ \w+ · no device memory used\n", cells("x = 1"))


def test_a_cell_that_fails_has_its_line(cells) -> None:
    assert "simgpu:1 +" in cells("kept = torch.zeros(1000, device='simgpu:1'); 1 / 0")


def test_silent_cells_print_nothing_and_cells_inside_cells_their_own(cells) -> None:
    assert cells("x = 1", silent=True) == ""
    assert cells("get_ipython().run_cell('x = 1')").count("no device memory used") == 2


def test_off_ends_it_and_on_twice_is_once(cells) -> None:
    assert cells("%gpuinfo --each-cell on").count("\n") == 1
    assert cells("x = 1").count("\n") == 1
    assert cells("%gpuinfo --each-cell off") == ""
    assert cells("x = 1") == ""


def test_unloading_ends_it(bare_shell, capsys) -> None:
    before = {event: list(found) for event, found in bare_shell.events.callbacks.items()}
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("%gpuinfo --each-cell on")
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    capsys.readouterr()
    bare_shell.run_cell("x = 1")
    assert capsys.readouterr().out == ""
    assert {event: list(found) for event, found in bare_shell.events.callbacks.items()} == before


def test_cells_of_subshells_have_their_own_lines(cells, bare_shell) -> None:
    """They run in threads: one that ends does not take along one that has begun after it."""
    has_begun, may_end = threading.Event(), threading.Event()

    def in_subshell() -> None:
        info = SimpleNamespace(silent=False)
        bare_shell.events.trigger("pre_run_cell", info)
        has_begun.set()
        may_end.wait(10)
        bare_shell.events.trigger("post_run_cell", SimpleNamespace(info=info))

    thread = threading.Thread(target=in_subshell)
    bare_shell.user_ns |= {"thread": thread, "has_begun": has_begun}
    shown = cells("thread.start(); has_begun.wait(10)")
    may_end.set()
    thread.join()
    assert shown.count("no device memory used") == 1
    assert cells("").count("no device memory used") == 1

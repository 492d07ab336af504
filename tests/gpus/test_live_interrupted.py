"""Ctrl-C at any line while `%gpuinfo -w` starts or stops leaves no hook, no thread and no handler of it behind."""

from __future__ import annotations

import threading
from itertools import count
from types import SimpleNamespace

import pytest
from interrupts import Interrupt

from gpumagic.gpus import live

CELLS = {"starts": "arm()\n%gpuinfo -w 1000", "stops": "%gpuinfo -w 1000\narm()\n%gpuinfo -w off"}


@pytest.fixture
def shell(bare_shell):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.kernel = SimpleNamespace(saved_sigint_handler="ipykernel's own")  # without one it waits for Ctrl-C
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    del bare_shell.kernel


def state(shell) -> tuple[object, ...]:
    threads = [each.name for each in threading.enumerate() if "gpumagic" in each.name]
    hooks = [each.__qualname__ for each in shell.events.callbacks["post_run_cell"]]
    return hooks, threads, shell.kernel.saved_sigint_handler


@pytest.mark.parametrize("when", CELLS)
def test_nothing_is_left(shell, when) -> None:
    shell.run_cell("%gpuinfo -w 1000\n%gpuinfo -w off")  # what is made once for a process
    before, places = state(shell), []
    for line in count():
        interrupt = Interrupt({live.__file__}, line)
        interrupt.run(shell, CELLS[when])
        if not interrupt.where:
            break
        places.append(interrupt.where)
        if interrupt.where.startswith("cell_has_run"):  # after the cell: it watches on
            shell.run_cell("%gpuinfo -w off")
        assert state(shell) == before, interrupt.where
    shell.run_cell("%gpuinfo -w off")
    assert state(shell) == before
    assert len(places) > 10

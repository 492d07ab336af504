"""Ctrl-C while a guard opens, closes or holds a traceback back leaves the shell's own way to show one."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from gpumagic.oom import conclusion, shell
from gpumagic.oom.guard import OomGuard
from gpumagic.transfers.run import DeviceRun
from tests.interrupts import Interrupt

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.mark.deep
def test_the_next_cell_finds_the_shells_own(guarded, bare_shell) -> None:
    guarded("fail()")  # what is made once for a process
    before, places = vars(bare_shell).get("_showtraceback"), []
    for line in count():
        interrupt = Interrupt({shell.__file__}, line)
        interrupt.run(bare_shell, "%%oomguard\narm()\nfail()")
        if not interrupt.where:
            break
        places.append(interrupt.where)
        bare_shell.run_cell("1")
        assert vars(bare_shell).get("_showtraceback") == before, interrupt.where
    assert len(places) > 15


@pytest.mark.parametrize("step", ["open", "close"])
@pytest.mark.parametrize(
    "cell", ["%%oomguard\n1", "%%oomguard --fallback cpu\n1", "%%ondevice 1\n1"]
)
def test_an_interrupt_right_after_a_guard_has_opened_or_closed_leaves_nothing(
    bare_shell, two_devices, monkeypatch, cell, step
) -> None:
    """Python looks for signals as a call returns: nothing that follows the call has begun."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    for guard in (OomGuard, DeviceRun):
        monkeypatch.setattr(guard, step, interrupted_after(getattr(guard, step)))
    before = bare_shell._showtraceback, torch.get_default_device(), torch.simgpu.current_device()
    assert isinstance(bare_shell.run_cell(cell).error_in_exec, (KeyboardInterrupt, type(None)))
    monkeypatch.undo()
    bare_shell.run_cell("1")
    assert (
        bare_shell._showtraceback,
        torch.get_default_device(),
        torch.simgpu.current_device(),
    ) == before
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def interrupted_after(function):
    def interrupted(*args):
        function(*args)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("options", ["", "--fallback cpu", "--shrink n"])
def test_a_cell_whose_report_is_cut_short_has_failed_and_shows_its_traceback(
    guarded, bare_shell, monkeypatch, capsys, options, error
) -> None:
    def conclude(*_, **__):
        raise error("no report today")

    guarded("1")  # loads the extension
    monkeypatch.setattr(conclusion, "conclude", conclude)
    result = bare_shell.run_cell(f"%%oomguard {options}\nn = 2\nfail()  # here")
    assert not result.success
    assert "fail()  # here" in capsys.readouterr().out

"""`%oomguard on`: every cell of the session is guarded, with IPython's own traceback, until `%oomguard off`."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

import gpumagic
from tests.oom.oom_cells import GIB, allocated

pytestmark = pytest.mark.usefixtures("few_objects", "warm_worker")


@pytest.fixture
def cell(guarded, bare_shell):
    """Return a function that runs a cell as it is, with every cell guarded."""
    bare_shell.run_cell("%oomguard on -o report", store_history=True)
    return lambda code, **options: bare_shell.run_cell(code, **{"store_history": True, **options})


def callbacks(shell):
    return {event: list(each) for event, each in shell.events.callbacks.items()}


def test_a_cell_that_runs_out_gets_its_memory_back_and_a_report_before_its_traceback(
    cell, shown, capsys
) -> None:
    result = cell("fail()")
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert allocated() == 0
    out = capsys.readouterr().out
    assert out.count("Traceback (most recent call last)") == 1
    assert "OutOfMemoryError: simgpu out of memory" in out
    report = shown()[-1]
    assert report.startswith("Out of memory on simgpu:0, line 1. ")
    assert "Freed 2.0 GiB." in report


def test_other_cells_are_as_without(cell, bare_shell, shown) -> None:
    assert cell("6 * 7").result == 42
    error = cell("1 / 0").error_in_exec
    assert isinstance(error, ZeroDivisionError)
    assert error.__traceback__ is not None
    assert shown() == []
    assert bare_shell.custom_exceptions == ()


def test_off_undoes_exactly_and_both_say_how_it_stands_when_asked_twice(
    guarded, bare_shell, capsys
) -> None:
    def say(line):
        bare_shell.run_cell(line, store_history=True)
        return capsys.readouterr().out.strip().splitlines()[-1]

    before = callbacks(bare_shell)
    assert say("%oomguard off") == "Cells are not guarded."
    assert say("%oomguard on") == (
        "From the next cell on, every cell is guarded against running out of memory. %oomguard off ends it."
    )
    bare_shell.run_cell("fail()", store_history=True)
    capsys.readouterr()
    assert say("%oomguard on") == ("Every cell is guarded already. %oomguard off ends it.")
    assert say("%oomguard off") == "Cells are no longer guarded."
    assert callbacks(bare_shell) == before
    result = bare_shell.run_cell("fail()", store_history=True)
    assert not isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert allocated() == 2 * GIB


def test_unloading_undoes_it_too(guarded, bare_shell) -> None:
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    before = callbacks(bare_shell)
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("%oomguard on", store_history=True)
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert callbacks(bare_shell) == before
    assert not isinstance(bare_shell.run_cell("fail()").error_in_exec, gpumagic.OutOfMemory)


def test_off_in_a_cell_that_then_fails_leaves_that_cell_alone(cell) -> None:
    assert not isinstance(cell("%oomguard off\nfail()").error_in_exec, gpumagic.OutOfMemory)


def test_a_guard_of_the_cells_own_wins(cell, bare_shell, shown) -> None:
    assert cell("%%oomguard --keep-going -o mine\nfail()").success
    assert len(shown()) == 1
    assert "mine" in bare_shell.user_ns
    assert "report" not in bare_shell.user_ns
    assert cell("%%oomguard --shrink n -o mine\nn = 40\nx = take(n / 8)").success
    assert len(shown()) == 2
    assert "report" not in bare_shell.user_ns


def test_a_cell_in_a_cell_is_guarded_by_itself(cell, bare_shell, shown) -> None:
    cell("get_ipython().run_cell('fail()')\nthen = torch.simgpu.memory_allocated(0)")
    assert (
        bare_shell.user_ns["then"] == allocated() == 0
    )  # given back at the inner cell's end, not the outer one's
    assert len(shown()) == 1


def notebook(path, *cells):
    written = [
        {
            "cell_type": "code",
            "source": each,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for each in cells
    ]
    path.write_text(
        json.dumps({"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 4})
    )
    return path


def test_a_notebook_that_is_run_gets_the_release(cell, bare_shell, tmp_path) -> None:
    path = notebook(tmp_path / "a.ipynb", "kept = 1", "fail()")
    result = cell(f"%run {path}")
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert allocated() == 0
    assert bare_shell.user_ns["kept"] == 1


def test_a_guarded_cell_of_a_notebook_that_is_run_gets_the_release(
    guarded, bare_shell, tmp_path
) -> None:
    path = notebook(tmp_path / "a.ipynb", "%%oomguard -o inner\nfail()")
    result = bare_shell.run_cell(f"%run {path}", store_history=True)
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert allocated() == 0
    assert bare_shell.user_ns["inner"].requested == 9 * GIB


def test_keep_going_goes_for_every_cell(guarded, bare_shell) -> None:
    bare_shell.run_cell("%oomguard on --keep-going", store_history=True)
    assert bare_shell.run_cell("fail()").success


def test_it_may_stand_on_the_first_line_of_a_cell_but_not_run_it_again(
    guarded, bare_shell, capsys
) -> None:
    bare_shell.run_cell("%%oomguard on --shrink n\nran = True", store_history=True)
    assert "on is for every cell, not for this one" in capsys.readouterr().err
    assert "ran" not in bare_shell.user_ns


def test_what_colabs_variables_pane_still_holds_is_freed_by_a_second_look(
    guarded, bare_shell, monkeypatch
) -> None:
    held: dict = {}

    def copy_anew(seconds):
        """Do what the pane's thread does five times a second."""
        assert seconds > 0.2
        held.clear()
        held.update(bare_shell.user_ns)

    monkeypatch.setitem(sys.modules, "google.colab._variable_inspector", ModuleType("inspector"))
    monkeypatch.setattr("gpumagic.heap.release.time", SimpleNamespace(sleep=copy_anew))
    bare_shell.run_cell("x = take(1)", store_history=True)
    held.update(bare_shell.user_ns)
    guarded("del x\nfail()")
    assert bare_shell.user_ns["report"].allocated_after == allocated() == 0
    held.clear()

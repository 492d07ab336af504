"""`%%oomguard --shrink` and `--fallback`: the cell runs again from where it began."""

from __future__ import annotations

import re

import pytest
import torch
from IPython.core.error import UsageError

import gpumagic
from tests.oom.oom_cells import GIB, allocated

pytestmark = pytest.mark.usefixtures("few_objects", "warm_worker")

ROWS = "batch_size = 40\nx = take(batch_size / 8)\nbatch_size"


@pytest.fixture
def ns(bare_shell):
    return bare_shell.user_ns


def test_shrink_halves_a_number_of_the_text_until_the_cell_fits(guarded, ns, capsys) -> None:
    result = guarded(ROWS, "--shrink batch_size")
    assert result.success
    assert result.result == ns["batch_size"] == 20
    assert ns["x"].nbytes == 2.5 * GIB
    assert capsys.readouterr().out.splitlines()[0] == (
        "%%oomguard: batch_size = 40 ran out of memory in line 3; now batch_size = 20."
    )
    report = ns["report"]
    assert [(each.size, each.fits, each.line) for each in report.tries] == [
        (40, False, 3),
        (20, True, None),
    ]
    assert " ".join(str(report).split()).startswith(
        "Out of memory on simgpu:0, line 3; passed with batch_size = 20. To keep it: line 2: batch_size = 20 "
    )


def test_shrink_halves_a_variable_and_leaves_it_at_what_fits(guarded, ns, bare_shell) -> None:
    bare_shell.run_cell("n = 40\ndef make(): return take(n / 8)", store_history=True)
    assert guarded("x = make()", "--shrink n").success
    assert ns["n"] == 20


def test_where_nothing_fits_the_variable_is_as_before_and_the_cell_fails_once(
    guarded, ns, bare_shell, shown
) -> None:
    bare_shell.run_cell("n = 4", store_history=True)
    before = allocated()
    result = guarded("x = n\nfail()", "--shrink n")
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert ns["n"] == 4
    assert [each.size for each in ns["report"].tries] == [4, 2, 1]
    assert allocated() == before
    assert (
        shown()[-1]
        .splitlines()[0]
        .startswith("Out of memory on simgpu:0, line 3, also with n = 1. ")
    )


def test_a_cell_that_fits_at_once_runs_once(guarded, ns) -> None:
    ns["runs"] = runs = []
    assert guarded("runs.append(1)\nbatch_size = 8\nbatch_size", "--shrink batch_size").result == 8
    assert runs == [1]
    assert "report" not in ns


def test_each_try_begins_where_the_first_began(guarded, ns, bare_shell) -> None:
    bare_shell.run_cell("seen, total = [], 10", store_history=True)
    result = guarded(
        "batch_size = 64\n"
        "total = total + 1\nseen.append(total)\nnumber = torch.rand(1, device='simgpu:0').item()\n"
        "first = take(1)\n"
        "x = take(batch_size / 16)\n"
        "total, len(seen)",
        "--shrink batch_size",
    )
    assert result.result == (11, 1)
    assert ns["first"].nbytes + ns["x"].nbytes == allocated() == 3 * GIB


def test_steps_taken_by_a_failed_try_are_said_before_the_next(
    guarded, ns, bare_shell, capsys
) -> None:
    bare_shell.run_cell(
        "net = torch.nn.Linear(8, 8).to('simgpu:0')\nopt = torch.optim.AdamW(net.parameters())",
        store_history=True,
    )
    guarded(
        """
batch_size = 16
for step in range(3):
    print("step")
    hungry = take(batch_size / 8 * step)
    net(torch.ones(4, 8, device="simgpu:0")).sum().backward()
    opt.step()
    del hungry""",
        "--shrink batch_size",
    )
    said = capsys.readouterr().out.splitlines()
    line = "%%oomguard: batch_size = 16 ran out of memory in line 6; now batch_size = 8. Cannot be undone: "
    changes = ("changes in place of net", "changes in place of opt")
    assert said[:4] == ["step", "step", "step", f"{line}{', '.join(changes)}."]
    assert ns["report"].tries[0].lost == changes


def test_where_a_change_would_not_be_noticed_is_said_before_the_next_try(
    guarded, ns, bare_shell, capsys
) -> None:
    bare_shell.run_cell(
        "loader = torch.utils.data.DataLoader(range(4))\nhistory = {'loss': []}\nn = 16",
        store_history=True,
    )
    cell = "for x in loader:\n    history['loss'].append(x)\n    big = take(n / 2)"
    guarded(cell, "--shrink n")
    assert capsys.readouterr().out.splitlines()[0] == (
        "%%oomguard: n = 16 ran out of memory in line 4; now n = 8. "
        "Cannot be undone: changes in place of history. Changes inside loader would not be noticed."
    )
    assert ns["report"].tries[0].unseen == ("loader",)


def test_another_error_ends_the_tries_and_is_the_cells(guarded, ns, bare_shell) -> None:
    bare_shell.run_cell("n = 16", store_history=True)
    result = guarded("x = take(n / 2)\n1 / 0", "--shrink n")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert ns["n"] == 16


def test_an_interrupt_ends_the_tries_and_changes_no_number(guarded, ns, bare_shell) -> None:
    bare_shell.run_cell("n = 16", store_history=True)
    result = guarded("x = take(n / 2)\nraise KeyboardInterrupt", "--shrink n")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert ns["n"] == 16


def test_an_interrupt_between_two_tries_changes_no_number_either(
    guarded, ns, bare_shell, monkeypatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    bare_shell.run_cell("n = 16", store_history=True)
    monkeypatch.setattr("gpumagic.heap.release.reclaim", interrupted)
    result = guarded("x = take(n / 2)", "--shrink n")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert ns["n"] == 16


def test_smaller_sizes_come_before_another_device(guarded, ns, bare_shell) -> None:
    bare_shell.run_cell("n = 2", store_history=True)
    tried = []
    ns["mark"] = lambda n, device: tried.append((n, device))
    result = guarded(
        "here = torch.empty(0).device\nmark(n, str(here))\ntake(9) if here.type == 'cpu' else n",
        "--shrink n --fallback simgpu:1",
    )
    assert tried == [(2, "cpu"), (1, "cpu"), (2, "simgpu:1")]
    assert result.result == 2
    assert ns["n"] == 2


def test_fallback_runs_the_cell_elsewhere(guarded, bare_shell, capsys, shown) -> None:
    bare_shell.run_cell("torch.set_default_device('simgpu:0')\nw = take(3)", store_history=True)
    try:
        result = guarded(
            "n = w.nbytes\ny = torch.empty(2 * 2**30, dtype=torch.uint8)\ny.device",
            "--fallback auto",
        )
    finally:
        torch.set_default_device(None)
    assert str(result.result) == "simgpu:1"
    assert (
        "%%oomguard: the cell ran out of memory in line 3; now on simgpu:1."
        in capsys.readouterr().out
    )
    texts = shown()
    assert any("simgpu:1, " in text.splitlines()[1] for text in texts)
    assert any("passed on simgpu:1" in text for text in texts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shrink bs", "the cell has no int called bs; it has batch_size"),
        ("--fit batch_size", "%%oomguard has no option '--fit'; it has --shrink"),
        ("--fallback simgpu:9", "'simgpu:9' is not a device here"),
        (
            "--shrink 3",
            "'3' cannot be a variable; write a Python name, such as report or batch_size",
        ),
        ("--shrink", "expected one argument"),
    ],
)
def test_a_bad_option_is_one_line_and_runs_nothing(guarded, ns, capsys, options, words) -> None:
    result = guarded("ran = True\nbatch_size = 3", options)
    assert isinstance(result.error_in_exec, UsageError)
    assert words in capsys.readouterr().err
    assert "ran" not in ns


def test_the_line_form_says_that_it_needs_the_cell(guarded, bare_shell, capsys) -> None:
    bare_shell.run_cell("x = 1\n%oomguard --shrink x\ny = 1", store_history=True)
    assert "they need all of it: write %%oomguard on its first line" in capsys.readouterr().err


def test_other_magics_may_stand_in_the_cell(guarded, ns) -> None:
    assert guarded(
        "where = %pwd\nbatch_size = 40\nx = take(batch_size / 8)", "--shrink batch_size"
    ).success
    assert ns["batch_size"] == 20


def test_a_function_of_the_cell_has_the_source_that_ran(guarded, bare_shell) -> None:
    guarded(
        "def f():\n    batch_size = 40\n    return take(batch_size / 8)\nf().nbytes",
        "--shrink batch_size",
    )
    shown = bare_shell.run_cell("import inspect; inspect.getsource(f)", store_history=True).result
    assert "batch_size = 20" in shown


def test_after_out_of_memory_the_advice_names_a_batch_that_was_dry_run(
    guarded, ns, bare_shell
) -> None:
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 120")
    one = "torch.empty(batch_size, 1 << 18, device='simgpu:0')"
    guarded(f"batch_size = 3000\nx = {one}\ndel x\ny = {one}\nz = {one}")
    advice = next(each for each in ns["report"].advice if "batch_size" in each.title)
    assert re.fullmatch(r"Lower batch_size from 3000 to 1\d\d\d", advice.title)
    assert (advice.covers, advice.trial.fits, advice.frees > GIB) == (True, True, True)


def test_where_nothing_fits_what_would_help_is_tried_all_the_same(guarded, ns, bare_shell) -> None:
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 120")
    guarded(
        "n = 2\nx = torch.empty(n + 8, 1 << 30, dtype=torch.uint8, device='simgpu:0')", "--shrink n"
    )
    assert ns["report"].untried == ""
    assert ns["report"].need.fits is False

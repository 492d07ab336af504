"""%%oomguard in a real shell over the simulated allocator: what a failure pins comes back to the byte."""

from __future__ import annotations

import gc
import pickle
import sys

import pytest
import torch

import gpumagic
from gpumagic.oom.report import OomReport
from tests.oom.oom_cells import FREED, GIB, allocated

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.mark.parametrize("cell", FREED.values(), ids=FREED)
def test_a_failed_cell_leaves_nothing_on_the_device(guarded, bare_shell, cell) -> None:
    before = allocated()
    result = guarded(cell)
    assert allocated() == before
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    report = bare_shell.user_ns["report"]
    assert report.allocated_after == report.allocated_before == before
    assert report.allocated_at_failure > before


@pytest.mark.parametrize(
    "request_", ["torch.empty(2**60, dtype=torch.uint8)", "numpy.empty(2**56)"]
)
def test_a_failure_of_the_host_releases_the_device_too(guarded, request_) -> None:
    before = allocated()
    result = guarded(f"import numpy\ndef wrap():\n    mine = take(1)\n    {request_}\nwrap()")
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert allocated() == before


def test_an_error_is_recognised_once_also_where_another_was_shown_before(
    guarded, bare_shell, monkeypatch
) -> None:
    from gpumagic.oom import recognition

    recognise, recognised = recognition.recognise, []

    def counted(error, *args):
        recognised.append(type(error))
        return recognise(error, *args)

    monkeypatch.setattr(recognition, "recognise", counted)
    guarded("fail()")
    assert len(recognised) == 1
    guarded("try:\n    take(9)\nexcept RuntimeError:\n    get_ipython().showtraceback()\ntake(7)")
    assert len(recognised) == 3
    report = bare_shell.user_ns["report"]
    assert (report.requested, report.line) == (7 * GIB, 6)


def test_what_the_cell_itself_names_stays_and_is_said_to(guarded, bare_shell) -> None:
    before = allocated()
    guarded("x = take(1)\nfail()")
    report = bare_shell.user_ns["report"]
    assert allocated() - before == GIB
    assert [(holder.name, holder.nbytes) for holder in report.holders] == [("x", GIB)]


def test_what_a_functions_cache_holds_stays_and_is_named(guarded, bare_shell) -> None:
    before = allocated()
    guarded("import functools\nkeep = functools.lru_cache(take)\nkeep(1)\nfail()")
    assert allocated() - before == GIB
    assert [(holder.name, holder.nbytes) for holder in bare_shell.user_ns["report"].holders] == [
        ("keep", GIB)
    ]


def test_what_a_cell_displayed_stays_and_is_named_as_an_output(guarded, bare_shell) -> None:
    bare_shell.run_cell("take(1)", store_history=True)
    number = bare_shell.execution_count - 1
    guarded("fail()")
    assert bare_shell.user_ns["report"].holders[0].name == f"Out[{number}]"


def test_the_memory_is_back_before_the_next_cell_even_after_debug(
    guarded, bare_shell, monkeypatch
) -> None:
    before = allocated()
    monkeypatch.setattr("builtins.input", lambda prompt="": "q")
    guarded("fail()", "--debug")
    bare_shell.run_cell("%debug", store_history=True)
    assert allocated() > before
    guarded("fail(2)")
    assert allocated() == before


def test_debug_itself_is_no_obstacle(guarded, bare_shell, monkeypatch) -> None:
    from gpumagic.heap import release

    before = allocated()
    monkeypatch.setattr("builtins.input", lambda prompt="": "q")
    error = bare_shell.run_cell("fail()", store_history=True).error_in_exec
    bare_shell.run_cell("%debug", store_history=True)
    assert allocated() > before
    release.clear_exception(error, bare_shell)
    release.reclaim()
    assert allocated() == before


def test_ten_failures_in_a_row_leave_no_trace(guarded) -> None:
    before = allocated(), torch.simgpu.memory_reserved(0)
    for _ in range(10):
        guarded("fail(2)")
        assert allocated() == before[0]
    assert torch.simgpu.memory_reserved(0) <= before[1]


def test_the_user_sees_the_own_traceback_once_and_the_report_after_it(
    guarded, bare_shell, capsys
) -> None:
    guarded("y = 1\nfail()")
    out = capsys.readouterr().out
    assert out.count("Traceback (most recent call last)") == 1
    assert "OutOfMemoryError" in out
    shown = bare_shell.display_pub.outputs[-1]["data"]["text/plain"]
    assert shown.startswith("Out of memory on simgpu:0")


def test_the_report_names_the_line_of_the_cell_and_the_code_below_it(guarded, bare_shell) -> None:
    guarded("y = 1\nz = take(9)")
    report = bare_shell.user_ns["report"]
    assert (report.line, report.code) == (3, "z = take(9)")
    assert report.requested == 9 * GIB
    assert any("take()" in note for note in report.notes)


def test_any_other_exception_passes_untouched(guarded, bare_shell) -> None:
    result = guarded("def f():\n    local = take(1)\n    raise KeyError('lost')\nf()")
    assert type(result.error_in_exec) is KeyError
    assert result.error_in_exec.__traceback__ is not None
    assert sys.last_value is result.error_in_exec
    assert "report" not in bare_shell.user_ns


def test_a_cell_that_passes_is_left_alone(guarded, bare_shell, monkeypatch) -> None:
    def never(*_):
        raise AssertionError("a side effect")

    monkeypatch.setattr(gc, "collect", never)
    monkeypatch.setattr("gpumagic.memory.allocator.empty_caches", never)
    peak = torch.simgpu.max_memory_allocated(0)
    result = guarded("v = take(1)\ndel v\n6 * 7")
    assert result.result == 42
    assert result.error_in_exec is None
    assert "report" not in bare_shell.user_ns
    assert torch.simgpu.max_memory_allocated(0) >= peak


def test_keep_going_lets_the_next_cell_run(guarded, bare_shell) -> None:
    before = allocated()
    result = guarded("fail()", "--keep-going")
    assert result.success
    assert allocated() == before
    assert isinstance(bare_shell.user_ns["report"], OomReport)


def test_debug_leaves_the_frames_and_says_what_they_hold(guarded, bare_shell) -> None:
    before = allocated()
    result = guarded("fail()", "--debug")
    assert type(result.error_in_exec) is torch.OutOfMemoryError
    assert allocated() - before == 2 * GIB
    assert any("at most 2.0 GiB" in note for note in bare_shell.user_ns["report"].notes)


def test_a_further_run_has_the_memory_of_the_failed_one(guarded, bare_shell) -> None:
    bare_shell.run_cell("n = 2", store_history=True)
    result = guarded(
        "def work():\n    first = take(2)\n    return take(9 if n > 1 else 1.5).nbytes\nwork()",
        "--shrink n",
    )
    report = bare_shell.user_ns["report"]
    assert result.error_in_exec is None
    assert (report.retries, report.recovered) == (1, True)
    assert result.result == int(1.5 * GIB)


def test_runs_that_all_fail_end_in_one_report(guarded, bare_shell) -> None:
    before = allocated()
    bare_shell.run_cell("n = 2", store_history=True)
    result = guarded("n\nfail()", "--shrink n")
    report = bare_shell.user_ns["report"]
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert (report.retries, report.recovered) == (1, False)
    assert allocated() == before


def test_the_cell_does_not_run_again_after_another_error(guarded, bare_shell) -> None:
    bare_shell.run_cell("n, tries = 4, []", store_history=True)
    result = guarded("tries.append(n)\n1 / 0", "--shrink n")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert bare_shell.user_ns["tries"] == [4]


def test_deleting_what_the_advice_names_frees_what_it_says(guarded, bare_shell) -> None:
    bare_shell.run_cell(
        "a = take(1)\nb = a\nbig = {'one': [take(0.5)]}\nused = take(0.25)", store_history=True
    )
    bare_shell.run_cell("take(0.125)", store_history=True)
    bare_shell.run_cell("seen = take(0.125)\nseen", store_history=True)
    bare_shell.run_cell("whole = take(0.125)\nwhole[:2]", store_history=True)
    guarded("used.sum()\nfail()")
    advice = next(
        each for each in bare_shell.user_ns["report"].advice if "earlier cells left" in each.title
    )
    before = allocated()
    bare_shell.run_cell(advice.edit, store_history=True)
    gc.collect()
    assert before - allocated() == advice.frees == int(1.875 * GIB)


def test_leftovers_that_suffice_are_the_verdict(guarded, bare_shell) -> None:
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 120")
    bare_shell.run_cell("old = take(2)", store_history=True)
    guarded("new = take(3)")
    report = bare_shell.user_ns["report"]
    assert report.verdict.startswith(
        "Earlier cells left 2.0 GiB on simgpu:0 that this cell does not use"
    )
    assert (report.advice[0].edit, report.advice[0].covers) == ("del old", True)


def test_a_name_that_a_called_function_needs_is_not_a_leftover(guarded, bare_shell) -> None:
    bare_shell.run_cell(
        "table = take(2)\ndef look(): return table.nbytes + take(3).nbytes", store_history=True
    )
    guarded("look()")
    assert not [
        each for each in bare_shell.user_ns["report"].advice if "earlier cells left" in each.title
    ]


def test_running_a_cell_twice_names_the_old_value_that_stood_in_the_way(
    guarded, bare_shell
) -> None:
    bare_shell.run_cell("cache = take(2.5)", store_history=True)
    guarded("cache = take(2.5)\ncache.nbytes")
    first = bare_shell.user_ns["report"].advice[0]
    assert (first.edit, first.frees) == ("del cache", int(2.5 * GIB))


def test_the_other_device_is_named_when_all_fits_there(guarded, bare_shell) -> None:
    bare_shell.run_cell("old = take(2)", store_history=True)
    guarded("new = take(3)")
    edits = [each.edit for each in bare_shell.user_ns["report"].advice]
    assert "%%ondevice simgpu:1" in edits


def test_a_growing_list_of_losses_is_named_with_its_line(guarded, bare_shell) -> None:
    guarded("""
w = torch.zeros(1024, 1024, requires_grad=True, device="simgpu:0")
losses, total = [], 0
for step in range(3):
    loss = (w * w).sum()
    total += loss
    losses.append(loss)
    done = total.item()
take(9)""")
    edits = [each.edit for each in bare_shell.user_ns["report"].advice]
    assert "total += loss.item()" in edits
    assert "losses.append(loss.item())" in edits


def test_a_sum_of_numbers_is_not_advised_against(guarded, bare_shell) -> None:
    guarded("""
w = torch.zeros(64, requires_grad=True, device="simgpu:0")
total = 0
for step in range(3):
    total += (w * w).sum().item()
take(9)""")
    assert not [each for each in bare_shell.user_ns["report"].advice if "graph" in each.title]


MODEL = "net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).to('simgpu:0')"


def test_evaluating_with_a_graph_is_named(guarded, bare_shell) -> None:
    bare_shell.run_cell(MODEL, store_history=True)
    guarded(
        "net.eval()\nbatch_size = 64\nout = net(torch.empty(batch_size, 4096, device='simgpu:0'))\ntake(3.9)"
    )
    edits = [each.edit for each in bare_shell.user_ns["report"].advice]
    assert (
        "with torch.no_grad():\n    out = net(torch.empty(batch_size, 4096, device='simgpu:0'))\n    take(3.9)"
        in edits
    )
    assert not any(edit and "batch_size = " in edit for edit in edits), (
        "what failed had nothing to do with the batch"
    )


def test_evaluating_without_a_graph_is_not(guarded, bare_shell) -> None:
    bare_shell.run_cell(MODEL, store_history=True)
    guarded(
        "net.eval()\nwith torch.no_grad():\n    out = net(torch.empty(64, 4096, device='simgpu:0'))\ntake(3.9)"
    )
    edits = [each.edit for each in bare_shell.user_ns["report"].advice]
    assert not any(edit and edit.startswith("with torch.no_grad") for edit in edits)


def test_a_training_step_that_fails_in_forward_gives_the_activations_back(
    guarded, bare_shell
) -> None:
    bare_shell.run_cell(MODEL, store_history=True)
    before = allocated()
    guarded("""
class Hungry(torch.nn.Module):
    def forward(self, x):
        for _ in range(100):
            x = (x * x).relu() + x
        return x
def step():
    small = net(torch.ones(1, 4096, device="simgpu:0"))
    loss = Hungry()(small.expand(8192, 4096) + 0).sum()
    loss.backward()
step()""")
    report = bare_shell.user_ns["report"]
    assert allocated() == before
    assert report.allocated_at_failure > 3 * GIB
    titles = " ".join(each.title for each in report.advice)
    assert "bfloat16" in titles
    assert "Recompute activations" in titles


def test_a_request_larger_than_the_device_is_told_apart_from_a_shortage(
    guarded, bare_shell
) -> None:
    guarded("take(9)")
    report = bare_shell.user_ns["report"]
    assert "larger than all of simgpu:0 (4.0 GiB)" in report.verdict
    assert report.cause == "one request"
    assert not report.advice, "nothing is known of it that a line would change"


def test_host_memory_is_not_blamed_on_the_device(guarded, bare_shell) -> None:
    guarded("torch.empty(2**60, dtype=torch.uint8)")
    report = bare_shell.user_ns["report"]
    assert (report.kind, report.device, report.requested) == ("host allocator", "cpu", 2**60)
    assert report.verdict.startswith("Host memory (RAM) ran out, not a GPU's.")


def test_the_report_is_plain(guarded, bare_shell) -> None:
    guarded("x = take(1)\nfail()")
    report = bare_shell.user_ns["report"]
    assert pickle.loads(pickle.dumps(report)) == report
    assert list(report.to_pandas().columns)[:5] == ["title", "frees", "covers", "edit", "evidence"]
    assert report.to_dict()["device"] == "simgpu:0"


def test_the_line_form_guards_the_rest_of_the_cell(guarded, bare_shell) -> None:
    before = allocated()
    result = bare_shell.run_cell("x = 1\n%oomguard\nfail()", store_history=True)
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert allocated() == before

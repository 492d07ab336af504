"""`%%oomguard` says "fits" only of what a dry run of the edited cell has shown, and what is missing in one figure."""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpumagic import simgpu
from gpumagic.advice import runs
from gpumagic.dryrun import run
from tests.oom.oom_cells import allocated, forget_everything

MIB = 2**20
pytestmark = pytest.mark.usefixtures("few_objects", "warm_worker")


def interrupting(function):
    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize("moment", ["oom.failure.examine", "heap.release.reclaim", "oom.ownership.by_names",
                                    "report.text.render", "report.html.render"])  # fmt: skip
def test_ctrl_c_before_the_first_dry_run_or_while_it_is_shown_leaves_the_report(
    report_of, monkeypatch, shown, moment
) -> None:
    place = f"gpumagic.{moment}"
    monkeypatch.setattr(place, interrupting(pkgutil.resolve_name(place)))
    report = report_of("x = torch.ones(100 << 20, device='simgpu:0')")
    assert report.holders is not None
    assert [each.partition(",")[0] for each in shown()] == ["Out of memory on simgpu:0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (report.untried == "interrupted") == moment.endswith(("reclaim", "by_names"))


@pytest.fixture
def report_of(bare_shell, empty_devices):
    """Return a function that runs cells on two devices of 256 MiB, the last one guarded, and returns its report."""
    simgpu.enable(devices=2, memory="256MiB")
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 120")
    bare_shell.run_cell("import torch", store_history=True)

    def run(*cells: str):
        for cell in cells[:-1]:
            bare_shell.run_cell(cell, store_history=True)
        bare_shell.run_cell(f"%%oomguard -o report\n{cells[-1]}", store_history=True)
        return bare_shell.user_ns["report"]

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    forget_everything(bare_shell)
    torch.simgpu.empty_cache()
    simgpu.enable(devices=2, memory="4GiB")  # as the other tests have them


NET_WITH_AN_ATTRIBUTE = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Identity()
    def forward(self, x):
        for _ in range(8):
            x = x.sin()
        return {"logits": self.out(x).sum()}
net = Net()
weights = torch.ones(4 << 20, device="simgpu:0", requires_grad=True)"""


def test_graphs_that_the_failed_cell_has_left_are_not_counted_twice(report_of) -> None:
    """They hang on a number in a dict, whose name the network has for an attribute."""
    report = report_of(
        NET_WITH_AN_ATTRIBUTE, "out = net(weights)\nlarge = torch.ones(48 << 20, device='simgpu:0')"
    )
    assert report.allocated_after > 128 * MIB
    assert report.need.parts["earlier cells"] <= 16 * MIB
    assert all(each.first.startswith("del out") for each in report.advice if each.changes)


def test_what_is_deleted_before_the_cell_does_not_count_in_what_it_needs(report_of) -> None:
    """The peak of such a dry run is what stands before the deletion; the cell itself needs less."""
    first = report_of(
        "old = torch.ones(40 << 20, device='simgpu:0')", "x = torch.ones(30 << 20, device='simgpu:0')"
    ).advice[0]  # fmt: skip
    assert first.first == "del old"
    assert (first.trial.fits, first.trial.needs, first.trial.saves) == (True, 120 * MIB, 160 * MIB)


def test_what_the_failed_cell_has_left_does_not_count_in_what_an_edit_needs(report_of) -> None:
    report = report_of(
        "made = []\nfor _ in range(9):\n    made.append(torch.ones(8 << 20, device='simgpu:0'))"
    )
    assert report.allocated_after > 200 * MIB
    needs = {each.title: each.trial.needs for each in report.advice if each.covers}
    assert needs["Collect made in the host's memory"] == 32 * MIB


def test_a_cell_that_failed_on_the_other_device_too_is_tried_there(
    report_of, bare_shell, shown
) -> None:
    bare_shell.run_cell("torch.set_default_device('simgpu:0')")
    code = "n = 40\nx = torch.ones(n, 1 << 20).relu()"
    bare_shell.run_cell(f"%%oomguard --fallback simgpu:1 -o report\n{code}", store_history=True)
    bare_shell.run_cell("torch.set_default_device(None)")
    report = bare_shell.user_ns["report"]
    assert report.device == "simgpu:1"
    assert (report.need.needed, report.need.fits) == (320 * MIB, False)
    assert any(each.edit for each in report.advice if each.covers)
    there, last = shown()
    assert "simgpu:1, " in there
    assert last.startswith("Out of memory on simgpu:1, line 3, also on simgpu:1.")


NINE_CHUNKS = """
def fill(device):
    free, total = torch.accelerator.get_memory_info(device)
    return tuple(torch.ones(total // 32, device=f"simgpu:{device}") for _ in range(9))
chunks = fill(0)"""


def test_nothing_is_said_to_fit_that_does_not(report_of) -> None:
    """The cell wants nine eighths of any device: to delete names or to take the other one is no help."""
    report = report_of("x = torch.ones(10 << 20, device='simgpu:0')", NINE_CHUNKS)
    assert (report.need.needed, report.need.available, report.need.fits) == (
        328 * MIB,
        256 * MIB,
        False,
    )
    assert report.verdict == (
        "Not enough memory: the cell needs 328.0 MiB of simgpu:0, which has 256.0 MiB for it: 72.0 MiB missing."
    )
    assert [each.title for each in report.advice if each.covers] == []
    (delete,) = [each for each in report.advice if each.first == "del x"]
    assert (delete.frees, delete.covers) == (40 * MIB, False)
    text = " ".join(str(report).split())
    assert "Nothing that was tried fits on simgpu:0" in text
    assert "saves 40.0 MiB, does not fit alone" in text


@pytest.mark.deep
def test_what_saves_next_to_nothing_is_not_advised(report_of) -> None:
    report = report_of("x = torch.ones(1 << 19, device='simgpu:0')", NINE_CHUNKS)
    assert not [each for each in report.advice if "Delete" in each.title], (
        "2 MiB of the 34 that are missing"
    )


@pytest.mark.deep
def test_results_that_are_collected_count_to_the_end_of_the_loop(report_of) -> None:
    report = report_of(
        "net = torch.nn.Linear(64, 1024).to('simgpu:0').eval()\ndata = torch.randn(80, 1024, 64)",
        "preds = []\nwith torch.no_grad():\n    for x in data:\n        preds.append(net(x.to('simgpu:0')))",
    )
    assert report.need.needed > 320 * MIB
    assert report.advice[0].title == "Collect preds in the host's memory"
    assert report.advice[0].covers


SCOPES = {
    "an executor": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(1) as pool:\n    pool.submit(work, {}).result()",
    "a coroutine": "async def main(n):\n    work(n)\nawait main({})",
    "another thread that is awaited": "import asyncio\nawait asyncio.to_thread(work, {})",
}


@pytest.mark.deep
def test_advice_is_the_same_wherever_the_code_runs(report_of) -> None:
    work = "def work(batch_size):\n    return torch.ones(batch_size, 1 << 18, device='simgpu:0').relu()"
    plain = report_of(work, "batch_size = 200\nwork(batch_size)")
    assert plain.advice[0].covers
    for scope, code in SCOPES.items():
        there = report_of(f"batch_size = 200\n{code.format('batch_size')}")
        assert [(each.title, each.trial) for each in there.advice] == [
            (each.title, each.trial) for each in plain.advice
        ], scope


def test_what_an_earlier_failure_held_is_told_and_the_cell_said_to_fit(
    report_of, bare_shell
) -> None:
    """Most people meet the tool after a failure without it, whose traceback still holds what its frames did."""
    cell = "def work(n):\n    kept = torch.ones(40 << 20, device='simgpu:0')\n    return torch.ones(n, device='simgpu:0')"  # noqa: E501
    bare_shell.run_cell(f"{cell}\nwork(30 << 20)", store_history=True)
    assert allocated() == 160 * MIB
    report = report_of("y = torch.ones(30 << 20, device='simgpu:0')")
    gc.collect()
    assert allocated() == 0
    assert report.cause == "earlier failure"
    assert report.verdict.startswith(
        "160.0 MiB of simgpu:0 was kept by the traceback of an earlier failure"
    )
    assert (report.need.needed, report.need.fits) == (120 * MIB, True)
    assert [(each.title, each.covers) for each in report.advice] == [("Run the cell again", True)]
    assert bare_shell.run_cell("y = torch.ones(30 << 20, device='simgpu:0')").success


def test_time_that_is_up_leaves_a_report_with_what_is_known(report_of, bare_shell) -> None:
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 0.000001")
    report = report_of("x = torch.ones(10 << 20, device='simgpu:0')", NINE_CHUNKS)
    assert report.need.missing == 72 * MIB
    assert {each.covers for each in report.advice} == {None}
    assert any("Not all advice was tried: there was no time" in note for note in report.notes)


def test_ctrl_c_ends_the_tries_and_not_the_report(report_of, monkeypatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpumagic.dryrun.run.dry_run", interrupted)
    report = report_of("x = torch.ones(10 << 20, device='simgpu:0')", NINE_CHUNKS)
    assert report.need is None
    assert report.untried == "interrupted"
    assert "None of it was tried: interrupted." in str(report)
    assert any(each.first == "del x" for each in report.advice)


def test_a_fault_of_our_own_in_trying_costs_the_tries_and_not_the_report(
    report_of, monkeypatch
) -> None:
    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr("gpumagic.advice.runs.script_of", broken)
    report = report_of("x = torch.ones(10 << 20, device='simgpu:0')", NINE_CHUNKS)
    assert report.untried == "RuntimeError: broken"


def test_the_traceback_comes_after_the_report_and_has_the_users_frames_only(
    report_of, bare_shell, capsys
) -> None:
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 0")
    net = "net = torch.nn.Sequential(torch.nn.Linear(1 << 12, 1 << 12)).to('simgpu:0')"
    report_of(
        net, "def step(x):\n    return net(x)\nstep(torch.ones(7000, 1 << 12, device='simgpu:0'))"
    )
    short = capsys.readouterr().out
    assert "return net(x)" in short
    assert "torch/nn/modules" not in short
    assert short.count("OutOfMemoryError: simgpu out of memory") == 1
    bare_shell.run_cell("%tb", store_history=True)
    whole = capsys.readouterr().out
    assert "return net(x)" in whole
    assert "torch/nn/modules/linear.py" in whole


def test_another_error_is_shown_as_ever(report_of, bare_shell, capsys) -> None:
    bare_shell.run_cell("%%oomguard\ntorch.nn.Linear(2, 3)(torch.ones(5))", store_history=True)
    assert "torch/nn/modules/linear.py" in capsys.readouterr().out
    assert "_showtraceback" not in vars(bare_shell)


def test_a_number_that_saves_nothing_is_not_searched_for(report_of, monkeypatch) -> None:
    """The run of the cell as it is counts as the search's first, and one more shows that it is not it; then the CPU."""
    counted: list[int] = []
    edited = runs.EditedRuns.run
    monkeypatch.setattr(runs.EditedRuns, "run", lambda *args: counted.append(1) or edited(*args))
    report = report_of(
        "batch_size = 64\nx = torch.ones((80 << 20) + 0 * batch_size, device='simgpu:0')"
    )
    assert report.need.needed == 320 * MIB
    assert len(counted) == 3
    assert not [each for each in report.advice if each.title.startswith("Lower")]


LATE = """\
batch_size = 64
kept = torch.ones(36 << 20, device='simgpu:0')
x = torch.ones(batch_size, 1 << 19, device='simgpu:0').relu()"""


def test_time_that_other_processes_take_ends_no_search(report_of, bare_shell, monkeypatch) -> None:
    """Each dry run seems to take an hour, in which the cores had other work for all but a moment of it."""
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 4000")
    clock, whole = iter(range(0, 10**8, 3600)), run.dry_run
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    now = [next(clock)]

    def dry_run(*args, **more):
        now[0] = next(clock)
        return replace(whole(*args, **more), seconds=3600.0, worked=0.1)

    monkeypatch.setattr(run, "dry_run", dry_run)
    report = report_of(LATE)
    assert report.advice[0].covers
    assert not any("no time" in note for note in report.notes)


def test_a_set_that_was_tried_is_not_run_again(report_of, monkeypatch) -> None:
    seen, whole = [], run.dry_run

    def dry_run(script, *args, **more):
        seen.append(script.source)
        return whole(script, *args, **more)

    monkeypatch.setattr(run, "dry_run", dry_run)
    report_of("x = torch.ones(10 << 20, device='simgpu:0')", NINE_CHUNKS)
    assert len(seen) == len(set(seen)) > 1

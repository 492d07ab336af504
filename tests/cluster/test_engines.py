"""`--engines` on a real cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest

import gpumagic
from gpumagic.cluster.report import shared_gpus
from tests.cluster.engines import PATIENCE, Gate, look, states, text_of

ipyparallel = pytest.importorskip("ipyparallel")
psutil = pytest.importorskip("psutil")


def test_one_report_has_the_devices_of_every_engine(here, machine) -> None:
    report = look(here, "gpuinfo --engines")
    frame = report.to_pandas()
    assert list(frame.columns[:5]) == ["host", "engine", "rank", "state", "device"]
    assert list(zip(frame["engine"], frame["device"], strict=True)) == [
        (engine, f"simgpu:{index}") for engine in machine.plain for index in (0, 1)
    ]
    assert set(frame["memory_total"]) == {256 << 20}
    assert text_of(report).startswith("8 simulated GPUs: simgpu:")
    assert "4 engines on " in text_of(report)


def test_an_engine_that_lacks_something_is_a_line_that_says_what(here, machine) -> None:
    found = states(look(here, "gpuinfo --engines all"))
    assert {found[engine] for engine in machine.plain} == {"answered"}
    assert found[machine.of("old")] == "other version"
    assert found[machine.of("no gpumagic")] == "no gpumagic"
    text = text_of(look(here, "devices --engines all"))
    assert f"{machine.of('old')} other version → No module named 'gpumagic.cluster' there, " in text
    assert f"{machine.of('no gpumagic')} no gpumagic → No module named 'gpumagic' there, " in text
    assert f"{gpumagic.__version__} here: install the same in its environment" in text


def test_a_gpu_that_two_engines_see_is_one(here, machine) -> None:
    """Two engines beside one driver, which is a stand-in."""
    engines = [machine.of("no torch"), machine.of("victim")]
    report = look(here, f"gpuinfo --engines {engines[0]},{engines[1]}")
    gpus = shared_gpus(report)
    assert [gpu.row.nvml_index for gpu in gpus] == [0, 1]
    assert [[each.engine for each in gpu.engines] for gpu in gpus] == [engines, engines]
    assert text_of(report).startswith("2 GPUs 2 engines on ")
    assert len(report.to_pandas()) == 4


def test_the_engine_with_the_memory_stands_out_from_replicas(here, machine) -> None:
    """Engines whose reports begin alike are one row; no tensor travels."""
    culprit = machine.plain[2]
    here.run_cell("%px import torch; model = torch.nn.Linear(64, 64)")
    code = "from gpumagic import simgpu; simgpu.enable_from_environment(); hoard = torch.ones(1 << 22, device='simgpu:1')"  # noqa: E501
    machine.client[culprit].execute(code, block=True)
    report = look(here, "devices --engines")
    assert str(report).startswith(f"Engine {culprit} holds most: 16.0 of 16.1 MiB, mostly hoard")
    assert str(report).splitlines()[4].split()[:3] == [str(culprit), "16.0", "MiB"]
    assert f"{machine.plain[0]}, " in text_of(report) or f"{machine.plain[0]}-" in text_of(report)
    frame = report.to_pandas()
    assert list(frame.loc[frame["name"] == "hoard", "engine"]) == [culprit]
    assert frame.loc[frame["name"] == "hoard", "nbytes"].sum() == 1 << 24
    assert len(pickle.dumps(report)) < 20_000


def test_a_busy_engine_is_a_line_within_the_time_limit_and_is_not_asked_later(
    here, machine, gate
) -> None:
    report = look(here, "devices --engines", 2)
    assert states(report) == {
        machine.plain[0]: "busy",
        **dict.fromkeys(machine.plain[1:], "answered"),
    }
    assert f"{machine.plain[0]} busy → no answer within 2 s: it is in a cell" in text_of(report)
    gate.open()
    assert machine.client[machine.plain[0]].pull("ran", block=True) == []
    assert states(look(here, "devices --engines"))[machine.plain[0]] == "answered"


def test_ctrl_c_ends_the_waiting_and_the_engines_are_not_asked_later(here, machine, gate) -> None:
    pressed = threading.Timer(
        0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
    )
    pressed.start()
    result = here.run_cell("%devices --engines")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    gate.open()
    assert machine.client[machine.plain[0]].pull("ran", block=True) == []


def test_an_engine_killed_while_it_is_asked_is_told_of_from_then_on(
    here, machine, tmp_path
) -> None:
    victim = machine.of("victim")
    pid = machine.client[victim].apply_sync(os.getpid)
    Gate(tmp_path / "never", machine.client[victim])
    killed = threading.Timer(0.5, os.kill, [pid, signal.SIGKILL])
    killed.start()
    gpumagic.cluster.use(machine.client[[machine.plain[0], victim]])
    report = look(here, "devices --engines")
    assert states(report) == {machine.plain[0]: "answered", victim: "dead"}
    again = look(here, "devices --engines")
    assert f"{victim} dead → it is gone" in text_of(again)
    assert list(again.to_pandas()["engine"]) == [machine.plain[0], victim]


def test_engines_are_those_of_px_or_of_use(here, machine) -> None:
    first, second = machine.plain[:2]
    here.run_cell(f"%pxconfig --targets {second}")
    assert list(states(look(here, "gpuinfo --engines"))) == [second]
    here.user_ns["view"] = machine.client[[first]]
    here.run_cell("import gpumagic; gpumagic.cluster.use(view)")
    assert list(states(look(here, "gpuinfo --engines"))) == [first]
    assert list(states(look(here, f"gpuinfo --engines {first},{second}"))) == [first, second]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("devices --engines simgpu:1", "'simgpu:1' names no engines; write all, 0,2 or 1:3"),
        ("devices --engines 99", "there is no engine 99; there are 0, 1"),
        ("devices --engines 50:60", "there is no engine 50:60; there are 0, 1"),
        ("devices simgpu:9 --engines", "on the engines: 'simgpu:9' is not a device here"),
        ("devices --engines --diff", "--diff is about one process: %px %devices --diff"),
        ("gpuinfo --engines -w", "--watch is about one process: %px %gpuinfo --watch"),
        (
            "ondevice auto --engines",
            "--engines takes all of a cell: write %%ondevice on its first line",
        ),
    ],
)
def test_a_line_that_cannot_be_is_one_sentence(here, capsys, line, said) -> None:
    here.run_cell(f"%{line}")
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("UsageError: ")
    assert said in error


def test_without_a_client_the_line_says_how_to_get_one(bare_shell, capsys) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("%gpuinfo --engines")
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert "no engines: connect an ipyparallel client" in capsys.readouterr().err


def test_px_runs_each_of_the_magics_as_it_is(here, machine, capsys) -> None:
    here.run_cell(f"%pxconfig --targets {machine.plain[1]}")
    here.run_cell("%px %load_ext gpumagic\n%px import torch")
    for cell in (
        "%gpuinfo",
        "%devices",
        "%%ondevice simgpu:1 -o run\nx = torch.ones(8)",
        "%%oomguard -o oom --keep-going\ny = torch.ones(1 << 30, device='simgpu:0')",
    ):
        assert here.run_cell(f"%%px\n{cell}").success, cell
    run, oom = machine.client[machine.plain[1]].pull(["run", "oom"], block=True)
    assert (run.created, oom.device) == ({"simgpu:1": (1, 32)}, "simgpu:0")
    assert run.origin.pid in machine.pids
    here.run_cell("%px %unload_ext gpumagic")


def test_each_engine_works_on_a_device_of_its_own_and_is_left_as_it_was(
    here, machine, capsys
) -> None:
    two = machine.plain[:2]
    cell = "import torch\nx = torch.ones(1000)\ny = x.cpu()\nprint('on', x.device)"
    targets = ",".join(map(str, two))
    assert here.run_cell(f"%%ondevice simgpu --engines {targets} -o run\n{cell}").success
    run = here.user_ns["run"]
    assert {engine: report.device for engine, report in run.reports.items()} == {
        two[0]: "simgpu:0",
        two[1]: "simgpu:1",
    }
    moves = run.to_pandas()
    assert list(zip(moves["engine"], moves["source"], moves["nbytes"], strict=True)) == [
        (two[0], "simgpu:0", 4000), (two[1], "simgpu:1", 4000)
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert f"[stdout:{two[1]}] \non simgpu:1" in out
    machine.client[two].execute("left = [name for name in dir() if 'gpumagic' in name]", block=True)
    assert machine.client[two].pull("left", block=True) == [[], []]


def test_out_of_memory_on_one_engine_keeps_what_the_others_made(here, machine, shown) -> None:
    culprit = machine.plain[2]
    machine.client[culprit].execute(
        "%load_ext gpumagic\n%config GPUMagic.advice_seconds = 0", block=True
    )
    cell = f"""import torch, os
done = True
if get_ipython().kernel.engine_id == {culprit}:
    big = [torch.ones(1 << 24, device="simgpu:1") for _ in range(10)]"""
    result = here.run_cell(f"%%oomguard --engines -o oom\nimport gpumagic\n{cell}")
    assert isinstance(result.error_in_exec, gpumagic.OutOfMemory)
    assert str(result.error_in_exec) == f"engine {culprit} ran out of memory: simgpu:1 in line 6"
    assert states(here.user_ns["oom"]) == {
        engine: "out of memory" if engine == culprit else "answered" for engine in machine.plain
    }
    assert here.user_ns["oom"].reports[culprit].allocated_after == 0
    assert machine.client[machine.plain].pull("done", block=True) == [True] * 4
    assert "Out of memory on simgpu:1, line 6. " in shown()[-1]
    assert f"(engine {culprit})" in shown()[-1]
    assert here.run_cell(f"%%oomguard --engines --keep-going\n{cell}").success


def test_progress_of_an_engine_leaves_no_output_with_its_client(machine) -> None:
    code = """
from gpumagic.report import progress
progress.DELAY = 0.0
with progress.counted(2, "trying") as tell:
    tell("one"); tell("two")
progress.DELAY = 1.0
"""
    (outputs,) = machine.client[machine.plain[:1]].execute(code, block=True).outputs
    assert outputs == []


def test_an_error_of_an_engine_is_raised_as_px_raises_it(here, machine, capsys) -> None:
    cell = f"if get_ipython().kernel.engine_id == {machine.plain[1]}:\n    1 / 0"
    result = here.run_cell(f"%%oomguard --engines\n{cell}")
    # The whole error where it came too early to be streamed; either way it is seen.
    assert type(result.error_in_exec).__name__ in {"AlreadyDisplayedError", "CompositeError"}
    seen = capsys.readouterr()
    assert "ZeroDivisionError" in seen.out + seen.err


def test_an_error_that_was_not_streamed_is_raised_whole(here, machine, capsys, monkeypatch) -> None:
    from ipyparallel import AsyncResult

    monkeypatch.setattr(AsyncResult, "stream_output", stream_nothing)
    cell = f"if get_ipython().kernel.engine_id == {machine.plain[1]}:\n    1 / 0"
    result = here.run_cell(f"%%oomguard --engines\n{cell}")
    assert type(result.error_in_exec).__name__ == "CompositeError"
    assert "ZeroDivisionError" in capsys.readouterr().out


@contextlib.contextmanager
def stream_nothing(result):
    """Stand in for the streaming of outputs where all of them came before it began."""
    result._streamed_errors = 0
    yield


def press_ctrl_c(when: Path) -> None:
    """Interrupt the main thread as soon as a file is there."""

    def press() -> None:
        while not when.exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_ctrl_c_interrupts_the_cells_of_the_engines(here, machine, tmp_path) -> None:
    slow = machine.plain[0]
    cell = f"""import pathlib, time
if get_ipython().kernel.engine_id == {slow}:
    pathlib.Path({str(tmp_path / "begun")!r}).touch()
    time.sleep({PATIENCE})"""
    press_ctrl_c(tmp_path / "begun")
    result = here.run_cell(f"%%ondevice auto --engines -o run\n{cell}")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    found = states(here.user_ns["run"])
    assert found[slow] == "interrupted", "and has not slept to its end"
    assert set(found.values()) <= {"interrupted", "answered"}, "the others may have been through"
    assert machine.client[machine.plain].apply_async(os.getpid).get(PATIENCE), (
        "and all are free again"
    )


def test_ctrl_c_while_the_cell_is_sent_interrupts_the_engines_that_have_it(
    here, machine, monkeypatch
) -> None:
    execute, first = ipyparallel.DirectView.execute, machine.plain[0]

    def interrupted(view, *arguments, **options):
        if view.targets != first:
            raise KeyboardInterrupt
        return execute(view, *arguments, **options)

    monkeypatch.setattr(ipyparallel.DirectView, "execute", interrupted)
    code = f"%%ondevice auto --engines -o run\n__import__('time').sleep({PATIENCE})"
    assert isinstance(here.run_cell(code).error_in_exec, KeyboardInterrupt)
    assert states(here.user_ns["run"]) == {first: "interrupted"}
    assert machine.client[machine.plain].apply_async(os.getpid).get(PATIENCE), (
        "and all are free again"
    )


def test_a_cell_runs_nowhere_where_one_engine_cannot_run_it(here, machine, gate, capsys) -> None:
    here.run_cell("%config GPUMagic.engine_timeout = 0.7")
    here.run_cell("%%ondevice auto --engines\nmark = 1")
    said = capsys.readouterr().err
    free = ",".join(map(str, machine.plain[1:]))
    assert f"the cell ran nowhere: engine {machine.plain[0]}: busy, no answer within" in said
    assert f"without it: --engines {free}" in said
    others = machine.client[machine.plain[1:]]
    assert others.apply_sync(eval, "'mark' in dir()") == [False] * 3


def test_an_engine_that_dies_in_a_cell_fails_the_cell_and_is_told_of(here, machine) -> None:
    """From then on cells go where it is not, as under %%px."""
    victim = machine.of("second victim")
    targets = f"{machine.plain[0]},{victim}"
    cell = f"import os, signal\nif get_ipython().kernel.engine_id == {victim}:\n    os.kill(os.getpid(), signal.SIGKILL)"  # noqa: E501
    result = here.run_cell(f"%%oomguard --engines {targets} -o oom\n{cell}")
    assert f"Engine {victim} died" in str(result.error_in_exec)
    assert f"{victim} dead → it is gone" in text_of(here.user_ns["oom"])
    gpumagic.cluster.use(machine.client[machine.plain])
    assert here.run_cell("%%oomguard --engines\nmark = 1").success
    refused = str(here.run_cell(f"%%oomguard --engines {targets}\n1").error_in_exec)
    assert f"there is no engine {victim};" in refused
    assert refused.endswith("which --engines all asks")


def test_where_no_engine_answers_nothing_is_said_of_gpus(here, machine) -> None:
    report = look(here, f"gpuinfo --engines {machine.of('no gpumagic')}")
    assert text_of(report).startswith("No answer")
    assert "0 of 1 engine" in text_of(report)

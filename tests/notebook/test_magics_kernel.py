"""The four magics in a real kernel: modes end with their cell, whatever ends it.

On simulated devices, and on torch's CUDA where the tests run over the fake runtime.
"""

from __future__ import annotations

import pytest

from gpumagic import fakecuda

pytestmark = pytest.mark.versions
BACKEND = "cuda" if fakecuda.is_enabled() else "simgpu"
SETUP = f"""
%load_ext gpumagic
import torch, gpumagic
{'gpumagic.simgpu.enable(devices=2, memory="1GiB")' if BACKEND == "simgpu" else "torch.cuda.init()"}
def state():
    from torch.overrides import _get_current_function_mode_stack as modes
    return str(torch.zeros(1).device), torch.{BACKEND}.current_device(), len(modes())
"""
AS_IT_WAS = "('cpu', 0, 0)"


@pytest.fixture(scope="module")
def module_kernel(start_kernel):
    small = fakecuda.environment(devices=2, capacity="1GiB") if fakecuda.is_enabled() else {}
    kernel = start_kernel(**small)
    assert kernel.run(SETUP).status == "ok"
    return kernel


@pytest.fixture
def kernel(module_kernel):
    """Return a kernel with two devices; afterwards no mode and no other current device may be left."""
    yield module_kernel
    assert module_kernel.value("state()") == AS_IT_WAS


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("%%ondevice 1\nstate()", "ok"),
        ("import torch\n%ondevice 1\nstate()", "ok"),
        ("%%ondevice 1\n1 / 0", "error"),
        ("%%ondevice 1\nx = = 1", "error"),
        ("%%ondevice 1\nimport asyncio\nawait asyncio.sleep(0)\nstate()", "ok"),
        ("%%ondevice 1\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0", "error"),
        ("%%ondevice 1\n%%oomguard\nstate()", "ok"),
        ("%%oomguard\n%%ondevice 1\ntorch.empty(2**40)", "error"),
        (f"%%oomguard --fallback cpu\ntorch.empty(2**40, device='{BACKEND}:1')", "error"),
        ("%%ondevice 0\n%ondevice 1\nstate()", "ok"),
        ("%%time\n%%ondevice 1\nstate()", "ok"),
        ("%%timeit -n1 -r2\n%ondevice 1\ntorch.zeros(3)", "ok"),
        ("%%capture out\n%%ondevice 1\nstate()", "ok"),
        ("get_ipython().run_cell_magic('ondevice', '1', 'state()')", "ok"),
        ("get_ipython().run_cell_magic('ondevice', '1', '1 / 0')", "error"),
        ("%%ondevice 1\n%reload_ext gpumagic\nstate()", "ok"),
        ("%%ondevice 1\nimport sys\nsys.exit()", "error"),
    ],
)
def test_a_cell_on_a_device_ends_with_everything_as_it_was(kernel, cell: str, status: str) -> None:
    assert kernel.run(cell).status == status


@pytest.mark.parametrize(
    "wait",
    [
        "import time\nfor _ in range(6000): time.sleep(.01)",
        "import asyncio\nfor _ in range(600): await asyncio.sleep(.1)",
    ],
)
def test_ctrl_c_ends_the_cell_its_mode_and_run_all(kernel, wait: str) -> None:
    cell, later = kernel.interrupt(f"%%ondevice 1\nprint('ready', flush=True)\n{wait}", "later = 1")
    assert cell.status == "error"
    assert later.status != "ok"
    assert kernel.value("'later' in globals()") == "False"


def test_inside_the_cell_the_device_is_the_default_and_the_current_one(kernel) -> None:
    assert kernel.run("%%ondevice 1\nstate()").value == f"('{BACKEND}:1', 1, 1)"


def test_the_value_comes_first_then_the_report(kernel) -> None:
    cell = kernel.run("%%ondevice 1\nx = torch.ones(256).to('cpu')\nlen(x)")
    assert [kind for kind, _ in cell.seen] == ["execute_result", "display_data"]
    assert cell.value == "256"
    assert f"{BACKEND}:1 → cpu" in cell.reports[0]
    assert "x = torch.ones(256).to('cpu')" in cell.reports[0]


def test_the_report_of_an_exported_script_names_the_lines_of_the_body(kernel) -> None:
    cell = kernel.run(
        "get_ipython().run_cell_magic('ondevice', '0', 'a = 1\\ny = torch.ones(9).cpu()')"
    )
    row = next(line for line in cell.reports[0].splitlines() if "y = torch.ones(9).cpu()" in line)
    assert row.split()[0] in {"2", "3"}


def test_quiet_shows_nothing_and_o_keeps_the_report(kernel) -> None:
    assert kernel.run("%%ondevice 1 -q -o moved\ny = torch.ones(4).cpu()").seen == []
    assert kernel.value("type(moved).__name__, moved[0].nbytes") == "('TransferReport', 16)"


def test_out_of_memory_is_reported_freed_and_stops_run_all(kernel) -> None:
    before = kernel.value(f"torch.{BACKEND}.memory_allocated(0)")
    cell, later = kernel.run_all(
        f"%%oomguard\ndef fill():\n    a = torch.ones(2**27, device='{BACKEND}:0')\n    return a * 2 + a\nfill()",
        "later = 1",
    )
    assert (cell.status, cell.ename) == ("error", "OutOfMemory")
    assert later.status != "ok"
    assert len(cell.tracebacks) == 1
    assert f"Out of memory on {BACKEND}:0" in cell.reports[-1]
    assert kernel.value(f"torch.{BACKEND}.memory_allocated(0)") == before


def test_keep_going_lets_run_all_go_on(kernel) -> None:
    cell, later = kernel.run_all(
        f"%%oomguard --keep-going\ntorch.empty(2**40, device='{BACKEND}:0')", "later = 2"
    )
    assert (cell.status, later.status) == ("ok", "ok")
    assert kernel.run("del later").status == "ok"


def test_any_other_error_passes_oomguard_untouched(kernel) -> None:
    cell = kernel.run("%%oomguard\n{}['missing']")
    assert (cell.status, cell.ename, cell.reports) == ("error", "KeyError", [])


def test_line_magics_return_reports_that_can_be_kept_and_silenced(kernel) -> None:
    assert kernel.run("r = %devices").seen == []
    assert kernel.value("type(r).__name__") == "'TensorReport'"
    assert kernel.run("%devices -n 1;").seen == []
    assert f"{BACKEND}:0" in (kernel.value("%gpuinfo") or "")
    assert kernel.run("g = %gpuinfo").seen == []
    assert kernel.value("g.best") in {f"'{BACKEND}:0'", f"'{BACKEND}:1'"}


@pytest.mark.parametrize("magic", ["gpuinfo", "devices", "ondevice", "oomguard"])
def test_help_is_printed_and_the_body_does_not_run(kernel, magic: str) -> None:
    assert f"usage: %{magic}" in kernel.run(f"%{magic} --help").stdout.replace("%%", "%")
    if magic in {"ondevice", "oomguard"}:
        cell = kernel.run(f"%%{magic} --help\nran = 1")
        assert "usage" in cell.stdout
        assert kernel.value("'ran' in globals()") == "False"


@pytest.mark.parametrize("form", ["%%ondevice 1", "%%oomguard", "%%oomguard --fallback cpu"])
def test_our_errors_in_the_users_own_code_stay_exceptions_of_that_code(kernel, form: str) -> None:
    cell = kernel.run(f"{form}\nimport gpumagic\ngpumagic.ondevice('nowhere')")
    assert cell.ename == "DeviceNotFound"
    assert "gpumagic.ondevice('nowhere')" in cell.tracebacks[0]


def test_shrink_in_the_middle_of_a_cell_is_refused_because_it_needs_the_whole(kernel) -> None:
    cell = kernel.run("x = 1\n%oomguard --shrink x\ny = 2")
    assert cell.ename == "UsageError"
    assert "%%oomguard on its first line" in cell.evalue + cell.stderr

"""The soak finds what a cell leaves behind; a soak that finds nothing would else prove nothing."""

from __future__ import annotations

import json

import pytest
import torch

from tests.soak import driver


@pytest.fixture
def inside(bare_shell, two_devices):
    """Return the soak's part in the kernel, in a shell with a cell in its history."""
    from tests.soak import inside

    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch, threading, time", store_history=True)
    inside.begin("simgpu")
    yield inside
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def found(inside, text: str | None = None) -> str:
    return "\n".join(json.loads(inside.check(text, goes_on=False))["found"])


LEFT = {
    "default device was cpu, is simgpu:1": (
        "torch.set_default_device('simgpu:1')",
        "torch.set_default_device(None)",
    ),
    "gradients was True": ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    "function modes was 0": (
        "m = torch.overrides.BaseTorchFunctionMode().__enter__()",
        "m.__exit__(None, None, None)",
    ),
    "torch.zeros was": ("was = torch.zeros; torch.zeros = lambda *a: was(*a)", "torch.zeros = was"),
    "Tensor.cpu": ("torch.Tensor.cpu = lambda t: t", "del torch.Tensor.cpu"),
    "threads still run": (
        "go = threading.Event(); t = threading.Thread(target=go.wait, name='gpumagic memory'); t.start()",
        "go.set(); t.join()",
    ),
    "event post_execute": (
        "f = lambda: None; get_ipython().events.register('post_execute', f)",
        "get_ipython().events.unregister('post_execute', f)",
    ),
    "transformers": (
        "get_ipython().input_transformers_cleanup.append(list)",
        "get_ipython().input_transformers_cleanup.remove(list)",
    ),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_cell_leaves_behind_is_found(bare_shell, inside, what, monkeypatch) -> None:
    monkeypatch.setattr(inside._threads, "__defaults__", (0.0,))
    leave, undo = LEFT[what]
    assert found(inside) == ""
    assert bare_shell.run_cell(leave).success
    try:
        assert what in found(inside)
    finally:
        bare_shell.run_cell(undo)
    assert found(inside) == ""


def test_a_tensor_that_outlives_its_story_is_found(bare_shell, inside) -> None:
    inside.forget("4GiB", patience=0)
    before = torch.simgpu.memory_allocated(0)  # what other tests of this process have left
    kept = [torch.ones(1000, device="simgpu:0")]
    found = json.loads(inside.forget("4GiB", patience=0))["found"]
    assert str(before + 4096) in found[0]
    del kept
    assert str(before + 4096) not in str(json.loads(inside.forget("4GiB", patience=0))["found"])


def test_a_cell_that_is_not_in_the_history_is_found(bare_shell, inside) -> None:
    bare_shell.run_cell("x = 1", store_history=True)
    assert found(inside, "x = 1") == ""
    assert "history" in found(inside, "x = 2")


def test_a_cell_is_interrupted_at_the_line_that_was_asked_for(bare_shell, inside) -> None:
    inside.arm(0)
    bare_shell.run_cell("%gpuinfo")
    bare_shell.run_cell("1")
    assert json.loads(inside.check(None, goes_on=False))["where"].startswith("notebook/cells.py")
    inside.arm(10**6)
    assert bare_shell.run_cell("1").success
    bare_shell.run_cell("1")
    assert json.loads(inside.check(None, goes_on=False))["where"] == ""


@pytest.mark.parametrize(
    ("status", "disturbed", "is_finding"),
    [(0, "signal", False), (0, "calm", True), (-11, "signal", True)],
)
def test_a_kernel_that_died_is_a_finding_unless_ctrl_c_had_ipykernel_end_it(
    status, disturbed, is_finding
) -> None:
    session = driver.Session(0, 0, "python", driver.Told())
    session._disturbed = disturbed
    assert session._was_ended_by_ipykernel(driver.Died(status)) is not is_finding


@pytest.mark.parametrize(
    ("error", "file", "is_found"),
    [
        ("IndexError", "/gpumagic/oom/followed.py", True),
        ("IndexError", "/torch/nn/modules/module.py", False),
        ("KeyboardInterrupt", "/gpumagic/oom/followed.py", False),
        ("OutOfMemoryError", "/gpumagic/oom/followed.py", False),
    ],
)
def test_an_error_is_gpumagics_where_its_code_raised_it_unasked(error, file, is_found) -> None:
    head = f"{'-' * 75}\n{error}    Traceback (most recent call last)\nCell In[1], line 1\n----> 1 step()\n"
    trace = f"{head}File ~/lib{file}:80, in step()\n     80 old = places[0]\n\n{error}: a text\nof two lines"
    assert driver._is_of_gpumagic(trace) == is_found

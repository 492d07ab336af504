"""A cell under `%%ondevice` does what it does under `with torch.device(...)`: random cells, both ways."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from tests.stages import examples

pytestmark = pytest.mark.usefixtures("two_devices")

SETUP = """
import functools
import torch
from torch import arange, ones as ones_earlier
host = torch.ones(4)
far = torch.ones(4, device="simgpu:1")
near = torch.ones(4, device="simgpu:0")
a, b, n = near * 1, near * 2, 3
def helper(size):
    return torch.full((size,), 2.0) + ones_earlier(size)
"""
NAMES = st.sampled_from(["a", "b", "host", "far", "near"])
MADE = st.sampled_from(
    [
        "torch.zeros(4)", "torch.tensor([1.0, 2.0, 3.0, 4.0])", "ones_earlier(4)", "arange(4.0)", "helper(4)",
        "torch.ones(4, device='cpu')", "torch.full((4,), 2.0)", "torch.nn.Linear(4, 4).weight[0].detach() * 0",
        "torch.as_tensor([1.0] * 4)", "functools.partial(torch.zeros, 4)()", "torch.linspace(0, 1, 4)",
        "torch.get_default_device()", "torch.from_numpy(__import__('numpy').ones(4, 'f'))", "torch.ones_like(host)",
        "torch.vmap(lambda v: v + torch.ones(1))(torch.zeros(4)).flatten()", "torch.Tensor([1, 2, 3, 4])",
        "torch.eye(2).flatten()", "getattr(torch, 'ones')(4)", "list(map(torch.tensor, [1.0, 2.0]))[0]",
    ]
)  # fmt: skip
METHODS = st.sampled_from(
    [
        ".cpu()", ".to('simgpu:0')", ".to(host)", ".sum()", "[:2]", ".simgpu()", ".tolist()", ".sum().item()",
        ".device", ".new_zeros(2)", ".numpy()",
    ]
)  # fmt: skip
VALUES = st.one_of(
    MADE,
    NAMES,
    st.tuples(NAMES, METHODS).map("".join),
    st.tuples(NAMES, st.sampled_from([" + ", " * ", " @ ", " == "]), NAMES).map("".join),
)  # fmt: skip
SIMPLE = st.one_of(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.just(" = "), VALUES).map("".join),
    VALUES.map("print({})".format),
    NAMES.map("{}.copy_(torch.zeros(4))".format),
    st.sampled_from(
        [
            "n += int(a.sum())", "del a", "from torch import zeros", "kept = torch.zeros", "raise ValueError(str(a))",
            "assert float(b.sum()) > 0", "f'{a.sum():.2f} {b}'",
            "with torch.inference_mode(): c = torch.zeros(2)", "g = torch.Generator('cpu')",
            "w = torch.ones(4, requires_grad=True); (w * 2).sum().backward(); c = w.grad",
            "class Sub(torch.Tensor): pass", "c = torch.ones(4).as_subclass(type('Sub', (torch.Tensor,), {}))",
        ]
    ),
)  # fmt: skip
BLOCKS = st.one_of(
    SIMPLE,
    SIMPLE.map("if n > 2:\n    {}".format),
    SIMPLE.map("for i in range(2):\n    {}".format),
    SIMPLE.map("with torch.device('cpu'):\n    {}".format),
    SIMPLE.map("with torch.no_grad():\n    {}".format),
    SIMPLE.map("try:\n    {}\nexcept RuntimeError as error:\n    print(type(error))".format),
    SIMPLE.map("def made():\n    {}\n    return locals()\nmade()".format),
)
CELLS = st.lists(BLOCKS, min_size=1, max_size=6).map("\n".join)


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")
    yield shell
    shell.run_line_magic("unload_ext", "gpumagic")
    InteractiveShell.clear_instance()
    shell.reset(new_session=True)
    sys.modules[shell._orig_sys_modules_main_name] = (
        shell._orig_sys_modules_main_mod
    )  # it had put itself there
    shell.user_ns.clear()  # a shell outlives its test in cycles of IPython's, and other tests ask what is on a device
    shell.last_execution_result = shell.InteractiveTB.tb = None


def outcome(
    shell: InteractiveShell, cell: str, around: Any, capsys: pytest.CaptureFixture[str]
) -> tuple[object, ...]:
    """Return what a fresh session has after a cell: names, output, value and exception."""
    shell.reset(new_session=True, aggressive=False)
    torch.set_default_device(None)
    torch.manual_seed(0)
    shell.run_cell(SETUP)
    before = set(shell.user_ns)
    capsys.readouterr()
    with around:
        result = shell.run_cell(cell, store_history=False)
        torch.set_default_device(None)  # inside: torch's context does not forgive it later
    assert torch._C._len_torch_function_stack() == 0
    printed = capsys.readouterr().out
    names = {
        name: plain(value)
        for name, value in shell.user_ns.items()
        if name not in before and name[0] != "_"
    }
    names |= {
        name: plain(shell.user_ns.get(name)) for name in ("a", "b", "n", "host", "near", "far")
    }
    error = result.error_in_exec
    said = printed.partition("-----")[
        0
    ]  # a traceback, of the cell or of showing its value, tells its own lines
    return names, said, plain(result.result), type(error), str(error)


def plain(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.device), value.dtype, value.detach().cpu().tolist()
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if callable(value) and value is torch.zeros:
        return "torch.zeros itself"
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (int, str, torch.device)) else type(value).__name__


@settings(
    examples(few=5, deep=60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(CELLS)
@example("torch.ones(4).as_subclass(type('Sub', (torch.Tensor,), {}))")
def test_a_cell_does_what_it_does_under_torchs_own_context(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    under_torch = outcome(shell, "\n" + cell, torch.device("simgpu:0"), capsys)
    assert (
        outcome(shell, "%%ondevice simgpu:0 -q\n" + cell, contextlib.nullcontext(), capsys)
        == under_torch
    )

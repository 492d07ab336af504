# ruff: noqa: ISC004  # a cell is one string of several lines
"""What `%devices` says a line frees is what it frees: each line is run in a fork of the session, by the allocator."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.tensors.leaks_view import promises
from tests.transfers.third_party import freed_in_fork

pytestmark = [pytest.mark.usefixtures("two_devices", "few_objects")]
DEVICE = "simgpu:0"
MOST = 4
"""Of the tensors with and without a name `--why` is asked about so many, the largest."""
PRELUDE = """
import gc, functools, torch
from torch import nn
def made(n):
    return torch.ones(n, 1024, 64, device="simgpu:0")
def net():
    return nn.Linear(512, 512).to("simgpu:0")
"""
SCRIPT = """
import torch
made = torch.ones(9, 1024, 64, device="simgpu:0")
parts = {"a": [torch.ones(5, 1024, 64, device="simgpu:0")]}
net = torch.nn.Linear(512, 512).to("simgpu:0")
loss = net(torch.ones(600, 512, device="simgpu:0")).relu().sum()
def use():
    return made
"""
FAILS = "def work(n):\n    hidden = made(n)\n    raise ValueError\n"
STATES: dict[str, list[str]] = {
    "a failed call": [FAILS + "x = made(2)", "work(8)"],
    "a failed call that was given a variable": [
        "def work(x):\n    y = x * 2\n    raise ValueError\nd = made(8)", "work(d)",
    ],
    "a failed call whose error was kept": [FAILS, "try:\n    work(8)\nexcept ValueError as error:\n    kept = error"],
    "a failed call within another's handler": [FAILS, "try:\n    work(8)\nexcept ValueError:\n    work(5)"],
    "an output of a variable": ["x = made(8)\nx[0, 0, :2]", "x"],
    "an output whose variable is gone": ["x = made(8)", "x", "del x"],
    "an output in a list, and one that came after it": ["[made(4), made(5)]", "made(3)"],
    "a model in an output whose loss has a name": [
        "m = net()\nm", "loss = m(torch.ones(600, 512, device='simgpu:0')).relu().sum()", "del m",
    ],
    "losses in a list": [
        "m = net()\nopt = torch.optim.AdamW(m.parameters())\nhistory = []",
        "for _ in range(3):\n    loss = m(torch.ones(600, 512, device='simgpu:0')).relu().sum()\n"
        "    opt.zero_grad()\n    loss.backward(retain_graph=True)\n    opt.step()\n    history.append(loss)",
    ],
    "a loss before backward": ["m = net()\nloss = m(torch.ones(600, 512, device='simgpu:0')).relu().sum()"],
    "a gradient and its views": ["w = made(6).requires_grad_()\n(w * 2).sum().backward()\npart = w.grad[:1]"],
    "a ring with a graph": [
        "class Run:\n    pass\ndef run():\n    it = Run()\n    it.me, it.net = it, net()\n"
        "    it.loss = it.net(torch.ones(600, 512, device='simgpu:0')).exp().sum()\nrun()",
    ],
    "a generator and a cache": [
        "def stream():\n    hidden = made(7)\n    yield 1\n    yield 2\nit = stream()\nnext(it)",
        "@functools.lru_cache\ndef load():\n    return made(6)\nload().sum().item()",
    ],
    "a script that was run": ["%run SCRIPT"],
    "a script whose names were deleted": ["%run SCRIPT", "del made, parts, net, loss"],
    "a script whose name was shown and deleted": ["%run SCRIPT", "made", "del made"],
    "a module that was loaded again": [
        "%load_ext autoreload\n%autoreload 2\nimport sys\nsys.path.insert(0, 'FOLDER')\nimport of_mine",
        "it = of_mine.Keeper()\nof_mine.cache['k'] = made(7)",
        "file = __import__('pathlib').Path('FOLDER/of_mine.py')\nfile.write_text(file.read_text() + 'a=1')",
        "it.x = made(3)",
    ],
    "results of timing magics": ["t = %timeit -n1 -r1 -o made(4)", "%prun -r made(5)", "%time made(6)"],
    "a callback of the session": [
        "def watch():\n    x = made(8)\n    get_ipython().events.register('pre_execute', lambda: x)\nwatch()",
    ],
}  # fmt: skip
QUICK = ("a model in an output whose loss has a name", "a script whose names were deleted")


@pytest.fixture
def shell(bare_shell: Any, tmp_path: Path) -> Iterator[Any]:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell(PRELUDE)
    # The first optimizer imports torch's compiler, whose handled errors keep that optimizer until the gc runs.
    torch.optim.SGD([torch.ones(1, requires_grad=True)])
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "of_mine.py").write_text("cache = {}\nclass Keeper:\n    pass\n")
    gc.collect()
    gc.disable()
    yield bare_shell
    gc.enable()
    sys.modules.pop("of_mine", None)
    bare_shell.run_line_magic("reset", "-f")
    bare_shell._main_mod_cache.clear()
    gpumagic.free_leaks()


def promised(shell: Any) -> Iterator[tuple[str, list[str], int]]:
    """Yield where lines are offered, the lines, and the bytes that they are said to free."""
    report = gpumagic.devices(namespace=shell.user_ns)
    here = [row for row in report.leaks() if row.device == DEVICE]
    for promise in promises(here):
        yield "--leaks", promise.lines(), sum(row.nbytes or 0 for row in promise.rows)
    names = [row.name or str(row.numbers[0]) for row in report if row.device == DEVICE]
    for name in [*names[:MOST], *(str(row.numbers[0]) for row in here[:MOST])]:
        why = gpumagic.why(name, namespace=shell.user_ns)
        if why.frees is not None and why.lines():
            yield f"--why {name}", list(why.lines()), why.frees


def freed_by(lines: list[str], shell: Any) -> int | str:
    """Return the bytes that lines free as cells, in a fork."""

    def run() -> None:
        for line in lines:
            shell.run_cell(line).raise_error()

    return freed_in_fork(run, lambda: torch.simgpu.memory_allocated(0))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "state",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.deep) for each in STATES],
)
def test_each_line_frees_what_is_said(shell: Any, tmp_path: Path, state: str) -> None:
    gc.freeze()  # pytest's hooks, which are suspended meanwhile and lead to all tests
    for cell in STATES[state]:
        code = cell.replace("SCRIPT", str(tmp_path / "script.py")).replace("FOLDER", str(tmp_path))
        shell.run_cell(code, store_history=True)
    found = [
        (where, lines, nbytes, freed_by(lines, shell)) for where, lines, nbytes in promised(shell)
    ]
    assert found
    assert [each for each in found if each[2] != each[3]] == []

"""Every magic once, in a process whose torch seems to lack a private name: see `test_without_private_names.py`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell

from gpumagic import simgpu
from gpumagic._compat import private_names

simgpu.enable(devices=2, memory="256MiB")

CELLS = {
    "made": "x = torch.ones(1000, device='simgpu:0'); y = (x * 2).requires_grad_(); z = (y * 3).sum()",
    "backward": "z.backward(); model = torch.nn.Linear(4, 4, device='simgpu:0')",
    "gpuinfo": "gpus = %gpuinfo",
    "devices": "tensors = %devices",
    "diff": "changes = %devices --diff",
    "why": "why = %devices --why z",
    "leaks": "leaks = %devices --leaks",
    "ondevice": """%%ondevice simgpu:1 -o moved
a = torch.ones(1000, device='cpu')
made = torch.zeros(3)
b = a.to('simgpu:1')
c = b.sum().item()
d = torch.unique(b).tolist()""",
    "traced": """%%ondevice simgpu:1 --move a --trace -o traced
e = a + 1""",
    "oomguard": """%%oomguard -o failed
batch_size = 65536
big = torch.randn(batch_size, 4096, device='simgpu:0')""",
    "dryrun": """%%dryrun -o dry
f = torch.ones(1000, device='simgpu:0') * 2""",
}
REPORTS = ("gpus", "tensors", "changes", "why", "leaks", "moved", "traced", "failed", "dry")


def lose(path: str) -> None:
    """Have every look-up of a private name find nothing."""
    look_up = private_names.look_up
    private_names.look_up = lambda asked: private_names.MISSING if asked == path else look_up(asked)


def run(path: str, cells: Iterable[str]) -> dict[str, Any]:
    """Run some of the cells without a name, and return what JSON carries of what came of them."""
    lose(path)
    shell = InteractiveShell.instance()
    names = shell.user_ns
    names["torch"] = torch
    told: dict[str, Any] = {"errors": {}, "texts": {}, "notes": {}}
    with contextlib.redirect_stdout(io.StringIO()):
        shell.run_cell("%load_ext gpumagic\n%config GPUMagic.advice_seconds = 0")
        for name in cells:
            result = shell.run_cell(CELLS[name])
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                told["errors"][name] = f"{type(error).__name__}: {error}"
    for name in REPORTS:
        if name in names:
            told["texts"][name] = str(names[name])
            told["notes"][name] = list(getattr(names[name], "notes", ()))
    if "moved" in names:
        told["unrecorded"] = names["moved"].unrecorded
        told["moves"] = [row.cause for row in names["moved"]]
        devices = [str(names[made].device) for made in ("made", "b")]
        told["ran_on"] = [*devices, names["c"], names["d"]]
        told["moved_first"] = str(names["a"].device)
    return told

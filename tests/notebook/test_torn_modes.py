"""Ctrl-C that tears open a block of torch's which switches gradients or autocast closes it; what a cell sets stays."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from interrupts import Interrupt
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.optim import optimizer

from gpumagic.notebook import torn_modes

SWITCHING = {grad_mode.__file__, optimizer.__file__, autocast_mode.__file__}
"""The code with which torch switches the modes."""
MAGICS = ["%%ondevice simgpu:1", "%%ondevice simgpu:1 --trace", "%%oomguard"]


@pytest.fixture
def shell(bare_shell, two_devices):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("xmode", "Minimal")  # hundreds of tracebacks that nobody reads
    bare_shell.run_cell("import torch._dynamo")  # which an optimizer would import, and with it much that switches
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    torch.set_grad_enabled(True)


def gradients_after(shell, magic: str, code: str) -> dict[str, bool]:
    """Interrupt a cell at each line with which torch switches the mode; return how it was after each."""
    after = {}
    for line in count():
        interrupt = Interrupt(SWITCHING, line)
        interrupt.run(shell, f"{magic}\narm()\n{code}")
        if not interrupt.where:
            return after
        after[f"{interrupt.where}, {line}"] = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    raise AssertionError


@pytest.mark.parametrize("magic", MAGICS)
def test_a_torn_block_or_step_leaves_gradients_on(shell, magic) -> None:
    shell.run_cell("import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)")
    code = (
        "with torch.no_grad():\n    model.weight.grad = torch.ones_like(model.weight)\noptimizer.step()\n"
        "with torch.set_grad_enabled(False):\n    with torch.no_grad(): pass"
    )
    after = gradients_after(shell, magic, code)
    assert len(after) > 20
    assert [where for where, enabled in after.items() if not enabled] == []


@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize("code", ["with torch.inference_mode():\n    pass", "torch.inference_mode()(len)('ab')"])
def test_a_torn_block_of_inference_mode_ends(shell, magic, code) -> None:
    shell.run_cell("import torch")
    left_on, tried = [], 0
    for line in count():
        interrupt = Interrupt(SWITCHING, line)
        interrupt.run(shell, f"{magic}\narm()\n{code}")
        if not interrupt.where:
            break
        tried += 1
        if torch.is_inference_mode_enabled():
            left_on.append(interrupt.where)
    assert tried > 5
    assert left_on == []


@pytest.mark.parametrize("magic", MAGICS)
def test_an_interrupt_elsewhere_leaves_the_mode_that_a_statement_has_set(shell, magic) -> None:
    shell.run_cell(f"{magic}\nimport torch\ntorch.set_grad_enabled(False)\nraise KeyboardInterrupt")
    assert not torch.is_grad_enabled()


def test_a_with_block_of_the_api_repairs_it_too(shell) -> None:
    shell.run_cell("import gpumagic, torch")
    after = gradients_after(shell, "", "with gpumagic.oomguard():\n    with torch.no_grad(): pass")
    assert len(after) > 5
    assert all(after.values())


def autocast_now() -> tuple[object, ...]:
    kinds = ("cpu", "simgpu")
    of_kinds = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return *of_kinds, torch.is_autocast_cache_enabled(), torn_modes.current()


INNER = "with torch.autocast('cpu', torch.float16, cache_enabled=False): pass"


@pytest.mark.parametrize(
    ("magic", "kind", "body"), [("%%ondevice simgpu:1", "cpu", INNER), ("%%oomguard", "simgpu", "pass")]
)
def test_a_torn_autocast_is_closed_with_all_it_had_set(shell, magic, kind, body) -> None:
    shell.run_cell("import torch")
    before, tried = autocast_now(), 0
    for line in count():
        interrupt = Interrupt(SWITCHING, line)
        interrupt.run(shell, f"{magic}\narm()\nwith torch.autocast('{kind}', torch.float16):\n    {body}")
        if not interrupt.where:
            break
        tried += 1
        assert autocast_now() == before, interrupt.where
    assert tried > 20

"""Ctrl-C that tears open a block of torch's which switches gradients or autocast: a line says how to restore them."""

from __future__ import annotations

import re
from itertools import count

import pytest
import torch
from interrupts import Interrupt
from torch.amp import autocast_mode
from torch.autograd import grad_mode

from gpumagic.notebook import session

BLOCKS = {
    "gradients": (grad_mode.__file__, "with torch.no_grad(): pass"),
    "autocast": (autocast_mode.__file__, "with torch.autocast('simgpu', torch.float16): pass"),
}


@pytest.fixture
def shell(bare_shell, two_devices):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("xmode", "Minimal")
    bare_shell.run_cell("import torch")
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    torch.set_grad_enabled(True)


@pytest.mark.parametrize(("magic", "block"), [("%%oomguard", "gradients"), ("%%ondevice simgpu:1", "autocast")])
def test_what_a_torn_block_leaves_is_said_with_the_calls_that_restore_it(shell, capsys, magic, block) -> None:
    file, code = BLOCKS[block]
    before, torn = session.torch_modes(), 0
    for line in count():
        interrupt = Interrupt({file}, line)
        interrupt.run(shell, f"{magic}\narm()\n{code}")
        said = re.search("to restore them: (.*)", capsys.readouterr().out)
        assert (said is not None) == (session.torch_modes() != before)
        if said is not None:
            torn += 1
            exec(said[1])
            assert session.torch_modes() == before
        if not interrupt.where:
            break
    assert torn


def test_other_interrupts_and_other_errors_say_nothing(shell, capsys) -> None:
    shell.run_cell("%%oomguard\nraise KeyboardInterrupt")
    shell.run_cell("%%oomguard\ntorch.set_grad_enabled(False)\nraise ValueError")
    assert "restore" not in capsys.readouterr().out

"""The four magics in IPython's own terminal, over the fake runtime."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.kernels import environment, plain

pytestmark = pytest.mark.ipython

pexpect = pytest.importorskip("pexpect", reason="pexpect drives the terminal")
CTRL_C = "\x03"


class Terminal:
    """IPython's plain prompt, which ends a cell magic's cell on a second blank line."""

    def __init__(self, home: object) -> None:
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--HistoryManager.enabled=False"],
            env=environment(home, TERM="dumb"), encoding="utf-8", timeout=60, dimensions=(50, 200),
        )  # fmt: skip
        self.child.delaybeforesend = None
        self.child.expect(r"In \[1\]: ")

    def type(self, *lines: str) -> str:
        """Type a cell, and return what is shown until the next prompt."""
        for line in (*lines, "", "") if lines[0].startswith("%%") else lines:
            self.child.sendline(line)
        self.child.expect(r"In \[\d+\]: ")
        return plain(self.child.before.replace("\r\n", "\n"))


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    started = Terminal(tmp_path_factory.mktemp("home"))
    started.type("%load_ext gpumagic")
    started.type("import torch")
    yield started
    started.child.close(force=True)


def test_each_magic_reports_on_cuda(terminal: Terminal) -> None:
    assert "2 GPUs" in terminal.type("%gpuinfo")
    moved = terminal.type("%%ondevice 1", "x = torch.ones(256, device='cpu').cuda()")
    assert "cpu → cuda:1 1.0 KiB" in moved
    assert "cuda:1" in terminal.type("%devices")
    full = terminal.type(
        "%%oomguard", "big = torch.empty(2**50, dtype=torch.uint8, device='cuda:1')"
    )
    assert "Out of memory on cuda:1" in full
    assert "OutOfMemory" in full


def test_ctrl_c_ends_a_cell_on_a_device(terminal: Terminal) -> None:
    for line in (
        "%%ondevice 1",
        "print('rea' + 'dy', flush=True)",
        "while True: y = torch.ones(9)",
        "",
        "",
    ):
        terminal.child.sendline(line)
    terminal.child.expect("ready")
    terminal.child.send(CTRL_C)
    terminal.child.expect(r"In \[\d+\]: ")
    assert "KeyboardInterrupt" in plain(terminal.child.before)
    assert "device(type='cpu')" in terminal.type("torch.ones(1).device")

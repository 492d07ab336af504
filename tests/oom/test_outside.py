"""A cell that does something outside of its process is not run again to try advice, and the report says which line."""

from __future__ import annotations

import select
import socket
import sys

import pytest
import torch

from gpumagic.oom import watch
from tests.device import Accelerator

pytestmark = [pytest.mark.ipython, pytest.mark.usefixtures("few_objects")]
RUNS_OUT = "\nbatch = 64\nkept = [torch.empty(batch, total // 512, dtype=torch.uint8, device=device) for _ in range(9)]"
SPAWNS = "import multiprocessing as m; p = m.get_context('spawn').Process(target=print); p.start(); p.join()"
POSTS_LATER = "import threading; t = threading.Thread(target=post); t.start(); t.join()"
MAKES_ITS_OWN = "import os; open('my', 'w').close(); open('my', 'a').close(); os.replace('my', 'its'); os.remove('its')"
LOADS = "list(torch.utils.data.DataLoader(range(4), num_workers=1))"
HAS_EFFECTS = {
    "post()": "opens a connection to 127.0.0.1:",
    POSTS_LATER: "in a thread",
    "import subprocess; subprocess.run(['true'])": "starts a program (true) in line 2",
    "import os; os.system('true')": "starts a program (true) in line 2",
    SPAWNS: "starts a process in line 2",
    "open('theirs', 'a').close()": "writes the file theirs in line 2",
    "import os; os.remove('theirs')": "calls os.remove(theirs) in line 2",
    "import os, signal; os.kill(os.getpid(), 0)": "signals another process in line 2",
}
HAS_NONE = [
    "",
    MAKES_ITS_OWN,
    LOADS,
    "import platform; platform.processor()",
    "open('theirs').close()",
    "!true",
]


@pytest.fixture
def failed(bare_shell, device: Accelerator, warm_worker, tmp_path, monkeypatch):
    """Return a function that runs a cell which runs out of memory, and returns the report."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").write_text("x")
    bare_shell.config.GPUMagic.advice_seconds = 60.0
    bare_shell.run_line_magic("load_ext", "gpumagic")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"device": device.name, "total": device.torch.mem_get_info(0)[1]}
        post = lambda: socket.create_connection(server.getsockname()).close()  # noqa: E731
        bare_shell.user_ns.update(torch=torch, post=post, **names)

        def fail(cell: str):
            bare_shell.run_cell(f"%%oomguard -o report\n{cell}{RUNS_OUT}", store_history=True)
            return bare_shell.user_ns["report"], server

        yield fail
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert watch._watching == []


@pytest.mark.parametrize(("cell", "effect"), HAS_EFFECTS.items(), ids=HAS_EFFECTS)
def test_a_cell_that_has_effects_is_not_tried(cell, effect, failed) -> None:
    report, _ = failed(cell)
    assert effect in report.untried
    assert report.need is None
    assert report.advice
    assert all(each.trial is None or each.trial.needs is None for each in report.advice)


@pytest.mark.parametrize(
    "cell", HAS_NONE, ids=["nothing", "its own file", "a loader's workers", "uname", "reads", "!"]
)
def test_a_cell_that_has_none_is_tried(cell, failed) -> None:
    report, _ = failed(cell)
    assert report.untried == ""
    assert report.need.fits is False
    assert any(each.trial is not None and each.trial.fits for each in report.advice)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel sees what C code does")
def test_what_only_the_kernel_sees_is_not_tried_a_second_time(failed) -> None:
    connects = """
def connect():
    import ctypes, struct
    at = struct.pack("=H", 2) + struct.pack("!H", port) + bytes((127, 0, 0, 1)) + bytes(8)
    libc = ctypes.CDLL(None)
    libc.connect(libc.socket(2, 1, 0), at, 16)
connect()"""
    _, server = failed("")
    report, _ = failed(f"port = {server.getsockname()[1]}{connects}")
    server.accept()[0].close()
    assert select.select([server], [], [], 0.1)[0] == []
    assert any(
        "Not all advice was tried: the cell opens a connection" in each for each in report.notes
    )

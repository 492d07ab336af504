"""A dry run has no effect outside of it, whatever the cell does: the machine's kernel sees to that."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.dryrun import client
from tests.device import Accelerator
from tests.dryrun.attacks import ATTACKS
from tests.stages import sample, wanted

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux's kernel is asked to keep a dry run in"
)

WAYS = [
    "namespaces",
    *(pytest.param(how, marks=pytest.mark.deep) for how in ("container", "user", "old")),
]
OUTSIDE = [
    name for name in ATTACKS
    if re.match("a (connection|datagram|program|process|shell|signal)|tracing", name)
]  # fmt: skip
"""Attacks that the kernel stops, of which the report has to tell."""
NEEDS_LANDLOCK = ["a message to the kernel's log"]
"""What else the administrator's dry run could do; the report names device files then."""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return {}


@pytest.fixture
def seen(request: pytest.FixtureRequest, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What came of each attack that is wanted, by name; all are tried in one process."""
    how = request.param
    if how not in results:
        command = [sys.executable, "-m", "tests.dryrun.attacks", how, *wanted(request, "attack")]
        said = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if said.returncode == 77:
            pytest.skip("this system gives nobody namespaces of users")
        assert said.returncode == 0, said.stderr
        results[how] = json.loads(said.stdout.splitlines()[-1])
    return results[how]


@pytest.mark.parametrize("seen", WAYS, indirect=True)
@pytest.mark.parametrize("attack", sample(ATTACKS, 4))
def test_nothing_outside_is_as_the_attack_would_have_it(attack: str, seen: dict[str, Any]) -> None:
    assert seen[attack]["out"] == []
    if attack in NEEDS_LANDLOCK and "device files" in seen[attack]["assumed"]:
        return
    assert "it was done" not in seen[attack]["verdict"]
    assert "AssertionError" not in seen[attack]["verdict"]


@pytest.mark.parametrize("seen", WAYS, indirect=True)
@pytest.mark.parametrize("attack", sample(OUTSIDE, 4))
def test_the_report_tells_what_was_kept_in(attack: str, seen: dict[str, Any]) -> None:
    assert seen[attack]["effects"]


SERVER_OF_ITS_OWN = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
got = []
def serve():
    connection, _ = server.accept()
    got.append(connection.recv(9))
thread = threading.Thread(target=serve)
thread.start()
with socket.create_connection(server.getsockname()) as client:
    client.send(b"hello")
thread.join()
assert got == [b"hello"]
"""


ONE_PROCESS = """
import os, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [1.0, 1.0, 1.0]
dist.destroy_process_group()
x = torch.ones(1000, device=device)
"""


@pytest.mark.parametrize(
    "cell", [SERVER_OF_ITS_OWN, ONE_PROCESS], ids=["a server of its own", "one process of gloo"]
)
def test_a_cell_reaches_itself(cell: str, device: Accelerator) -> None:
    """Where a dry run can have a network of its own, as this test's machine lets it."""
    report = gpumagic.dry_run(cell, {"torch": torch, "device": device.name}, device=device.name)
    assert (report.verdict.split(":")[0], report.effects) == ("Fits", ())


BY_C = """
import ctypes
libc = ctypes.CDLL(None)
for name in b"kept", b"made":
    file = libc.open(folder + name, 0o101, 0o600)
    libc.write(file, b"x", 1)
libc.mkdir(folder + b"new", 0o700)
libc.unlink(folder + b"gone")
libc.adjtimex(ctypes.create_string_buffer(256))
open(folder + b"seen", "w").close()
"""


def test_the_report_tells_what_c_code_did_to_files_and_was_refused(
    tmp_path, device: Accelerator
) -> None:
    """Where the dry run can have files of its own, as this test's machine lets it."""
    for name in "kept", "gone":
        (tmp_path / name).write_text("x")
    report = gpumagic.dry_run(BY_C, {"folder": os.fsencode(tmp_path) + b"/"}, device=device.name)
    files = {f"writes the file {tmp_path / name}" for name in ("kept", "made", "new", "seen")}
    assert {*report.effects} == {*files, f"removes {tmp_path / 'gone'}", "calls clock_adjtime"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["gone", "kept"]


def test_a_cell_that_needs_somebody_else_is_not_said_to_fail(device: Accelerator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"torch": torch, "wait": timedelta(seconds=1), "port": server.getsockname()[1]}
        cell = (
            f"x = torch.ones(9, device='{device.name}')\n"
            "torch.distributed.TCPStore('127.0.0.1', port, is_master=False, timeout=wait)"
        )
        report = gpumagic.dry_run(cell, names, device=device.name)
        assert select.select([server], [], [], 0.0)[0] == []
    assert report.fits is None
    assert "waits for other processes" in report.verdict
    assert "fails" not in report.verdict


STARTS_A_PROGRAM = """import subprocess
x = torch.ones(9, device=device)
try:
    subprocess.run(["a_program"])
except OSError:
    pass
"""
REFUSED = "it starts a program (a_program), which a dry run does not do"
DENIED = "PermissionError: [Errno 1] Operation not permitted: 'a_program'"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (
            "raise ValueError('none')",
            f"The cell may fail on line 7: ValueError: none (before that {REFUSED})",
        ),
        ("subprocess.run(['a_program'])", f"The dry run stopped on line 7: {REFUSED} ({DENIED})"),
    ],
    ids=["another error", "the refusal itself"],
)
def test_a_cell_that_fails_after_a_refusal_is_told_its_error_and_what_was_refused(
    error, verdict, device
) -> None:
    names = {"torch": torch, "device": device.name}
    assert gpumagic.dry_run(STARTS_A_PROGRAM + error, names, device=device.name).verdict.startswith(
        verdict
    )


WITHOUT_FILES = """
import sys, torch
from tests.dryrun.attacks import without_namespaces
without_namespaces()
from tests.device import find
import gpumagic
device = find().name
print(gpumagic.dry_run(sys.argv[1], {"torch": torch, "x": torch.ones(9, device=device)}, device=device).verdict)
"""
IN_MEMORY = "import io\nfile = io.BytesIO()\ntorch.save(x.cpu(), file)\nfile.seek(0)\ny = torch.load(file) + 1"


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (IN_MEMORY, "Fits: "),
        (
            "torch.save(x, 'x.pt')\ntorch.load('x.pt')",
            "it writes the file x.pt, which a dry run does not do",
        ),
        (
            "torch.jit.trace(torch.nn.Linear(3, 3), torch.ones(1, 3)).save('m.pt')",
            "it writes a file, which a dry run",
        ),
    ],
    ids=["in memory", "a file", "a file by C"],
)
def test_a_cell_that_writes_is_not_said_to_fail_where_nothing_can_be_written(
    cell: str, verdict: str, tmp_path
) -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES, cell], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert verdict in said.stdout
    assert list(tmp_path.iterdir()) == []


LEAVES_A_PROCESS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
def stay():
    if libc.syscall(57 if os.uname().machine == "x86_64" else 220, 17, 0, 0, 0, 0) == 0:
        libc.prctl(15, b"left-behind", 0, 0, 0)
        os.setsid()
        while True: libc.usleep(10_000)
stay()
x = torch.ones(9, device=device)
while waits: libc.usleep(10_000)
"""


def test_no_process_that_a_cell_starts_outlives_it(device: Accelerator) -> None:
    """Not even one that would leave its group; only C can start it."""
    names = {"torch": torch, "device": device.name, "waits": False}
    assert gpumagic.dry_run(LEAVES_A_PROCESS, names, device=device.name).fits
    _wait_until_left_behind(0)


def test_no_process_that_a_cell_starts_outlives_the_worker(device: Accelerator) -> None:
    """As after Ctrl-C, which ends it."""
    names = {"torch": torch, "device": device.name, "waits": True}
    cell = threading.Thread(
        target=gpumagic.dry_run, args=(LEAVES_A_PROCESS, names), kwargs={"device": device.name}
    )
    cell.start()
    _wait_until_left_behind(1)
    client.close()
    cell.join()
    _wait_until_left_behind(0)


@pytest.mark.deep
def test_no_process_that_a_cell_starts_outlives_its_notebook() -> None:
    names = "dict(torch=torch, device='cuda:0', waits=True)"
    code = (
        f"import gpumagic, torch\ngpumagic.dry_run({LEAVES_A_PROCESS!r}, {names}, capacity='1GiB')"
    )
    notebook = subprocess.Popen([sys.executable, "-c", code])
    _wait_until_left_behind(1)
    notebook.kill()
    notebook.wait()
    _wait_until_left_behind(0)


def _wait_until_left_behind(count: int) -> None:
    until = time.monotonic() + 60
    while [_name(each) for each in Path("/proc").glob("[0-9]*")].count("left-behind") != count:
        assert time.monotonic() < until


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""  # it has ended


POSTS = """
import multiprocessing, socket
process = multiprocessing.get_context("spawn").Process(target=socket.create_connection, args=(("127.0.0.1", port),))
process.start()
process.join()
batch = 64
kept = [torch.empty(batch, total // 512, dtype=torch.uint8, device=device) for _ in range(9)]
"""


def test_a_cell_that_posts_and_runs_out_of_memory_has_posted_once(
    bare_shell, device: Accelerator, warm_worker
) -> None:
    bare_shell.config.GPUMagic.advice_seconds = 4.0
    bare_shell.run_line_magic("load_ext", "gpumagic")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "device": device.name,
            "total": device.torch.mem_get_info(0)[1],
            "port": server.getsockname()[1],
        }
        bare_shell.user_ns.update(torch=torch, **names)
        bare_shell.run_cell(f"%%oomguard -o report\n{POSTS}", store_history=True)
        connections = 0
        while select.select([server], [], [], 0.1)[0]:
            server.accept()[0].close()
            connections += 1
    report = bare_shell.user_ns["report"]
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert report.kind
    assert connections == 1
